"""Audits of aggregators: distinguishing games, probes of single rounds, tests of the noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tff_dpftrl import packages, validation
from tff_dpftrl.accounting import display, gaussian
from tff_dpftrl.accounting import guarantee as guarantee_lib
from tff_dpftrl.auditing import audit_report, defaults, games, judging, playing, probes
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing import mechanism as mechanism_lib
from tff_dpftrl.auditing.evidence import run_noise, worst_pattern
from tff_dpftrl.mechanisms import identity, noise_split
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import aggregation as aggregation_lib
from tff_dpftrl.private_round import sampled_gaussian

_RANKS = (1, 2)  # Of an update's tensors, if nothing says which it has.
_DELTA = 1e-6  # Of the guarantee that is tested where no claim is given.
_MOST_CANARIES = 500
_MOST_NUMBERS = 250_000_000  # Largest number of floats that a round's clients send: 1 GB.
_FEWEST_RUNS = 4
_FEWEST_ROUNDS = 3
_FEWEST_COORDINATES = 64  # Smallest tensor of the audit: a fifth of it shows the noise.
_FEWEST_TRIALS = 200
_QUIET_RUNS = 4
_PARTS = 8  # The run without clients has one of so many parts of the error rate.
_ROUNDING = 1e-6

MOST_ROUNDS_WITHOUT_CLIENTS = 2000
"""Largest number of rounds without clients, which take 1 to 5 ms each."""


@dataclasses.dataclass(frozen=True)
class GameBudget:
    """Number and length of an audit's games, and how often the audit may be wrong.

    Attributes:
      trials: Least number of games.
      rounds: Rounds of each game, at least 3; all of the schema if None. With fewer, a
        Gaussian claim is reduced to what it says about these rounds. One run goes on to the
        schema's last round, or to round 2000, without clients.
      canaries_per_run: Largest number of trials in one run of the process; as many as there is
        room for, up to 500, if None. With 1, every trial takes a run.
      error_rate: Largest chance that a correct mechanism is called violated.
      seed: Seed of the audit's random choices; the noise is seeded elsewhere. Drawn if None.
    """

    trials: int = defaults.TRIALS
    rounds: int | None = None
    canaries_per_run: int | None = None
    error_rate: float = defaults.ERROR_RATE
    seed: int | None = None

    def __post_init__(self) -> None:
        validation.integer("trials", self.trials, minimum=_FEWEST_TRIALS)
        validation.number("error_rate", self.error_rate, above=0, below=1)


def audit_aggregator(
    aggregator_or_process: Any,
    *,
    schema: schema_lib.MinSep,
    claim: claim_lib.AnyClaim | None = None,
    mechanism: mechanism_lib.Mechanism | None = None,
    value_type: Any = None,
    budget: GameBudget | None = None,
    resume: bool | playing.Resume = True,
    progress: Callable[[str], None] | None = None,
) -> audit_report.AuditReport:
    """Tests whether what an aggregator releases is as private as it claims.

    The audit runs the aggregator's code on made-up clients. Canaries take part, or are zeroed
    out, in the rounds of the pattern that `schema` allows and that the noise hides least. The
    likelihood ratio of the claimed mechanism, and a classifier that knows nothing of it, then
    decide from the releases which canaries took part. Their success rates bound μ and ε from
    below. Besides, single rounds from saved states are compared bit by bit, and the noise is
    compared with its claimed distribution (see `games`, `probes`, `evidence`).

    "VIOLATED" is wrong at most as often as `error_rate`, if the noise of different coordinates
    is independent: a run has many trials, which rest on it. Without `mechanism` this is not
    taken for granted. There a one-run bound decides, which holds for every mechanism and mostly
    proves less (Steinke et al. 2023; Mahloujifar et al. 2024), or, with one canary a run,
    trials that have a run each. "Consistent" means that nothing was found, no more.

    10,000 trials of 100 rounds of a BLT take 11 seconds of one core, compilation included. With
    8,000 trials the bound is at least 0.9 of μ in most audits, if μ is 1 or more and the
    mechanism is known. With adaptive clipping the games are about the updates; for the bits, the
    audit tests how far one client moves them, and how much noise they get. Where a
    `ClippedDenominator` divides by the observed weight, a run has no more canaries than the
    smallest divisor, and there are more runs.

    Args:
      aggregator_or_process: A `private_round.aggregation.Aggregation`; or a TFF aggregation
        factory, unweighted or weighted, or an aggregation process. A client that is zeroed out has
        weight 0.
      schema: Participation schema: how often, and how far apart, a client takes part.
      claim: Claim to test: a guarantee, a statement or a `Claim`. If None, the guarantee of a
        DP-FTRL factory of this package under `schema` at δ = 1e-6; for `SampledGaussianFactory`
        the guarantee against an adversary that knows who was sampled.
      mechanism: Numbers of the mechanism. If None, they are taken from this package's
        factories; for others only the tests that need no numbers are done.
      value_type: Type of an update, or shapes of float32 tensors. If None, a vector and a matrix
        with room for the canaries, or for a secure sum's encoding. It must be None for a process.
        Canaries share no coordinate, so small tensors have room for few of them; tensors of
        millions take long.
      budget: Number and length of the games, and the error rate; the defaults if None.
      resume: Whether runs are saved in the middle, as NumPy arrays, and resumed in a new
        process. A function from the saved state to the state to resume from tests how a program
        saves and loads it.
      progress: Callback for progress lines.

    Returns:
      The report.

    Raises:
      ValueError: If an argument is out of range or of another type, if there is no claim, if
        the aggregator is of another kind, a learning process for example, or if its noise has a
        seed that was given.
    """
    budget = GameBudget() if budget is None else budget
    _refuse(aggregator_or_process)
    if hasattr(aggregator_or_process, "for_updates"):
        from tff_dpftrl.auditing import tff_aggregators

        # The grid of the mechanism may follow from the updates.
        shapes = value_type or shapes_of(_RANKS, _coordinates(_MOST_CANARIES))
        aggregator_or_process = aggregator_or_process.for_updates(tff_aggregators.type_of(shapes))
        _refuse(aggregator_or_process)
    rounds = _num_rounds(schema, budget.rounds)
    if not (isinstance(resume, bool) or callable(resume)):
        raise validation.UsageError(
            f"resume must be True, False or a function of a state, got {resume!r}."
        )
    if mechanism is None:
        mechanism = mechanism_lib.Mechanism.of(aggregator_or_process)
    tested_claim = _claim(aggregator_or_process, claim, schema, mechanism)
    rng = np.random.default_rng(budget.seed)
    progress = progress or (lambda line: None)
    num_canaries = _num_canaries(mechanism, budget.trials, budget.canaries_per_run)
    make = _maker(aggregator_or_process, mechanism, value_type, num_canaries)
    weight = 1.0 if mechanism is None else mechanism.client_weight
    player = playing.Player(make(), weight)
    resumed = playing.Player(make(), weight, player.entropy) if resume else player
    audit = _Audit(
        player,
        resumed,
        resume if callable(resume) else (lambda state: state),
        bool(resume),
        mechanism,
        tested_claim,
        schema,
        dataclasses.replace(schema, num_rounds=rounds),
        rng,
        progress,
    )
    findings, trade_off = audit.findings(budget.trials, num_canaries, budget.error_rate)
    return audit_report.AuditReport(
        subject=_subject(aggregator_or_process, mechanism),
        claim=tested_claim,
        findings=tuple(findings),
        is_ours=mechanism_lib.is_ours(aggregator_or_process),
        trade_off=trade_off,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Audit:
    """Inputs that all parts of an audit share; `schema` covers the rounds that are played."""

    player: playing.Player
    resumed: playing.Player
    resume: playing.Resume
    resumes: bool
    mechanism: mechanism_lib.Mechanism | None
    claim: claim_lib.Claim
    declared: schema_lib.MinSep
    schema: schema_lib.MinSep
    rng: np.random.Generator
    progress: Callable[[str], None]
    saved_states: list[probes.SavedState] = dataclasses.field(default_factory=list)
    history: list[playing.Played] = dataclasses.field(default_factory=list)

    def findings(
        self, trials: int, num_canaries: int, error_rate: float
    ) -> tuple[list[audit_report.Finding], audit_report.TradeOff | None]:
        """Runs all tests; the error rate is split evenly over those that may err."""
        without_clients, late = self._without_clients(error_rate / _PARTS)
        probing = self._probes(late)
        is_replayable = probing.is_replayable()
        covariance, pattern = self._covariance(self.schema.num_rounds), self._pattern()
        known = self.mechanism is not None
        counted = known and bool(self.mechanism.count_stddev)
        # Zero updates, NaN and contributions are statistical where nothing can be replayed.
        parts = 1 + known * 2 + counted + (0 if is_replayable else 3)
        each = error_rate * (1.0 - known / _PARTS) / parts
        findings = []
        if known:
            findings.append(self._arithmetic())
        saved = [one.round_index for one in self.saved_states]
        looked = saved if is_replayable else saved[:1]
        findings += self._covering(saved, probing.round_executed_again())
        if self.resumes:
            findings += self._covering(saved, probing.resumed_round(self.resumed, self.resume))
        findings += self._covering(
            looked,
            probing.zero_update(each),
            probing.not_finite(each),
            probing.contribution(self._allowed(), self._count_weight(), each),
        )
        findings += self._covering(saved[:1], probing.stays_finite())
        findings += self._covering([0], probing.measurements())
        findings.append(probing.seed_bits())
        if counted:
            rounds = range(len(self.history))
            findings += self._covering(rounds, self._published_clip_norm())
        canaries = games.Canaries.over(
            self.player.sizes,
            min(num_canaries, max(1, _MOST_NUMBERS // self.player.dim)),
            int(self.rng.integers(2**31)),
        )
        signal = None
        if known and is_replayable:
            first = self.saved_states[0].state
            signal = games.measured_signal(self.player, first, canaries, self.mechanism)
        played, quiet = self._play(canaries, pattern, trials)
        judge = judging.Judge(self._played_claim(), each, int(self.rng.integers(2**31)), signal)
        trade_off, rounds = None, range(self.schema.num_rounds)
        if known:
            finding, trade_off = judge.likelihood_ratio(played.transcripts, pattern, covariance)
            findings += self._covering(rounds, finding)
        are_independent = known or canaries.number == 1
        finding, learned_trade_off = judge.learned(played.transcripts, are_independent)
        findings += self._covering(rounds, finding)
        if known:
            unit = covariance / self.mechanism.noise_stddev**2
            of_noise = judge.noise(quiet, self.mechanism.noise_stddev, unit)
            tensors = judging.tensors_with_noise(quiet)
            findings += self._covering(rounds, *of_noise, tensors=tensors)
            findings += without_clients
        if counted:
            findings += self._covering(rounds, judge.counts(quiet.counts, unit))
        return findings, trade_off or learned_trade_off

    def _covering(
        self,
        rounds: Iterable[int],
        *findings: audit_report.Finding,
        tensors: Iterable[int] | None = None,
    ) -> list[audit_report.Finding]:
        """Adds to findings the rounds and the tensors that they are about; all tensors if None."""
        number = len(self.player.sizes)
        covers = (
            audit_report.Covered.of("rounds", rounds, self.declared.num_rounds),
            audit_report.Covered.of(
                "tensors", range(number) if tensors is None else tensors, number
            ),
        )
        return [dataclasses.replace(one, covers=covers) for one in findings]

    def _without_clients(
        self, error_rate: float
    ) -> tuple[Sequence[audit_report.Finding], probes.SavedState | None]:
        """Tests the noise of a run without clients, to the last round if there are not too many.

        Besides, it returns a late state of the run if the games do not come to it. Of an unknown
        mechanism there is neither.
        """
        if self.mechanism is None:
            return (), None
        played, last = self.schema.num_rounds, self.declared.num_rounds
        if self.player.is_compiled:
            last = min(last, max(played, MOST_ROUNDS_WITHOUT_CLIENTS))
        else:
            last = played
        self.progress(f"A run of {last} rounds without clients.")
        noise = run_noise.RunNoise(
            self.player.sizes,
            self._covariance(last),
            most_vectors=last,
            error_rate=error_rate,
        )
        scale, late, before = games.Scale(self.mechanism), None, None
        state = self.player.initialize()
        for t in range(last):
            if t == last - 3 and last > played:  # Two rounds follow a saved state.
                late = probes.SavedState(t, state, scale.largest_norm(before))
            self.player.entropy.renew()
            before = self.player.next(state, [])
            state = before.state
            noise.add(t, scale.sums(before))
        name = "noise of a run without clients"
        return noise.findings(name, "round", self.declared.num_rounds), late

    def _played_claim(self) -> claim_lib.Claim:
        """Returns the claim for the rounds that are played; only a Gaussian one is reduced."""
        if self.mechanism is None or self.claim.mu is None or self.schema == self.declared:
            return self.claim
        played, declared = (
            self.mechanism.strategy.sensitivity(schema).value
            for schema in (self.schema, self.declared)
        )
        return claim_lib.Claim.gaussian(self.claim.mu * played / declared, self.claim.delta)

    def _probes(self, late: probes.SavedState | None) -> probes.Probes:
        last = self.schema.num_rounds - 3  # Two rounds follow each of them.
        starts = self.mechanism.starts if self.mechanism is not None else (0,)
        restarts = [t for start in starts[1:2] for t in (start - 1, start)]
        rounds = sorted({t for t in (0, 1, last // 2, *restarts) if 0 <= t <= last})
        saved, history = probes.saved_states(self.player, self.mechanism, rounds)
        saved += [] if late is None else [late]
        self.saved_states.extend(saved)
        self.history.extend(history)
        norm = max(state.largest_norm for state in saved)
        return probes.Probes(
            self.player,
            self.mechanism,
            saved,
            canary_norm=games.canary_norm(self.player, norm) / norm,
            seed=int(self.rng.integers(2**31)),
        )

    def _covariance(self, num_rounds: int) -> np.ndarray | None:
        """Returns the covariance of the noise over the first rounds, in clip norms."""
        if self.mechanism is None:
            return None
        unit = worst_pattern.noise_covariance(self.mechanism.strategy, num_rounds)
        return self.mechanism.noise_stddev**2 * unit

    def _pattern(self) -> worst_pattern.Pattern:
        """Returns the canaries' rounds that the noise hides least."""
        if self.mechanism is None:
            return worst_pattern.worst_pattern(identity.Identity(), self.schema)
        return worst_pattern.strongest_pattern(
            self._covariance(self.schema.num_rounds), self.schema
        )

    def _play(
        self, canaries: games.Canaries, pattern: worst_pattern.Pattern, trials: int
    ) -> tuple[games.Games, games.Games]:
        """Plays the games, and records noise alone."""
        num_rounds = self.schema.num_rounds
        starts = () if self.mechanism is None else self.mechanism.starts
        middle = num_rounds // 2 + (num_rounds // 2 in starts)
        plan = games.GamePlan(
            signal=pattern.signal(num_rounds),
            canaries=canaries,
            num_runs=max(_FEWEST_RUNS, -(-trials // canaries.number)),
            resume_at=middle if self.resumes else None,
        )
        played = self._run(plan)
        if self.mechanism is None or self.mechanism.encoding is None:
            return played, played
        # Rounding reaches all coordinates of a round with clients.
        silent = dataclasses.replace(
            plan, signal=np.zeros(num_rounds), num_runs=min(plan.num_runs, _QUIET_RUNS)
        )
        return played, self._run(silent)

    def _run(self, plan: games.GamePlan) -> games.Games:
        return games.play(
            self.player,
            plan,
            self.mechanism,
            resumed=self.resumed,
            resume=self.resume,
            seed=int(self.rng.integers(2**31)),
            progress=self.progress,
        )

    def _count_weight(self) -> float:
        """Returns the clip norms that a count of one standard deviation of its noise is worth."""
        has_counts = self.mechanism is not None and self.mechanism.count_stddev
        return self.mechanism.noise_stddev if has_counts else 0.0

    def _stated_contribution(self) -> float:
        """Returns the mechanism's norm of a contribution with its bit, in clip norms."""
        bit = 0.0
        if self.mechanism.count_stddev:
            bit = noise_split.COUNT_SENSITIVITY / self.mechanism.count_stddev
        return math.hypot(self.mechanism.contribution, self._count_weight() * bit)

    def _allowed(self) -> float:
        """Returns the norm of a contribution that noise and claim cover, in clip norms."""
        if self.mechanism is None:
            return math.inf
        stated = self._stated_contribution()
        if self.claim.mu is None:
            return stated
        sensitivity = self.mechanism.strategy.sensitivity(self.declared).value
        return max(stated, self.claim.mu * self.mechanism.noise_stddev / sensitivity)

    def _arithmetic(self) -> audit_report.Finding:
        """Checks that the claim follows from the numbers of the mechanism."""
        test = "the claim from the mechanism's numbers"
        sensitivity = self.mechanism.strategy.sensitivity(self.declared).value
        mu = sensitivity * self._stated_contribution() / self.mechanism.noise_stddev
        epsilon = gaussian.epsilon(mu, self.claim.delta)
        is_less = epsilon > self.claim.epsilon * (1 + _ROUNDING) + _ROUNDING
        return audit_report.Finding(
            test,
            "violated" if is_less else "consistent",
            f"Its sensitivity under the schema and its noise give μ = {display.round_up(mu)}, "
            f"{display.epsilon_at(epsilon, self.claim.delta)}; claimed is ε = "
            f"{display.round_up(self.claim.epsilon)}.",
        )

    def _published_clip_norm(self) -> audit_report.Finding:
        """Checks that the published clip norm moves only where a block of noise begins."""
        test = "the published clip norm within a block of noise"
        norms = [played.measurements["clip_norm"] for played in self.history]
        moved = [
            t
            for t in range(1, len(norms))
            if norms[t] != norms[t - 1] and t not in self.mechanism.starts
        ]
        if moved:
            return audit_report.Finding(
                test,
                "violated",
                f"It moves in round {moved[0] + 1}, "
                "where no block begins: noise that was drawn for another norm is taken back.",
            )
        return audit_report.Finding(
            test, "consistent", f"It does not move in {len(norms)} rounds but where one begins."
        )


def _refuse(aggregator: Any) -> None:
    """Raises UsageError for what cannot be audited here."""
    if hasattr(aggregator, "get_model_weights"):
        raise validation.UsageError(
            "aggregator_or_process must be an aggregator, got a learning process: give it to "
            "audit_training, or its model_aggregator to audit_aggregator."
        )
    if not isinstance(aggregator, aggregation_lib.Aggregation):
        packages.require("An audit of a TFF aggregator", "tensorflow_federated")
        from tff_dpftrl.auditing import tff_aggregators

        tff_aggregators.check(aggregator)
    if hasattr(aggregator, "for_updates"):
        return  # Its mechanism may depend on the updates.
    seeded = (aggregator, getattr(aggregator, "private_round", None))
    if any(getattr(one, "deterministic_seed", None) is not None for one in seeded):
        raise validation.UsageError(
            "aggregator_or_process has a deterministic_seed: whoever knows it can take the noise "
            "out, so there is no promise to audit. Build it with deterministic_seed=None."
        )


def _claim(
    aggregator: Any,
    claim: claim_lib.AnyClaim | None,
    schema: schema_lib.MinSep,
    mechanism: mechanism_lib.Mechanism | None,
) -> claim_lib.Claim:
    if claim is not None:
        return claim_lib.Claim.of(claim)
    if hasattr(aggregator, "guarantee"):
        return claim_lib.Claim.of(aggregator.guarantee(schema, _DELTA))
    private_round = getattr(aggregator, "private_round", None)
    is_native = isinstance(aggregator, aggregation_lib.Aggregation)
    if is_native and not isinstance(private_round, sampled_gaussian.SampledGaussianRound):
        return claim_lib.Claim.of(guarantee_lib.of_round(private_round, schema, _DELTA))
    if mechanism is None:
        raise validation.UsageError(
            "claim must be given for an aggregator that is not this package's: "
            "auditing.claim.Claim.gaussian(mu, delta), Claim(epsilon, delta), a Guarantee or a "
            "PrivacyStatement."
        )
    return claim_lib.Claim.gaussian(mechanism.mu(schema), _DELTA)


def _num_canaries(
    mechanism: mechanism_lib.Mechanism | None, trials: int, at_most: int | None
) -> int:
    """Returns the canaries of a run: as many as a round has room for, in several runs at least."""
    if at_most is None:
        at_most = _MOST_CANARIES
    validation.integer("canaries_per_run", at_most, minimum=1)
    rooms = [min(at_most, -(-trials // _FEWEST_RUNS))]
    if mechanism is not None and mechanism.encoding is not None:
        # With adaptive clipping another client comes with each canary.
        rooms.append(mechanism.encoding.max_clients // (2 if mechanism.count_stddev else 1))
    if mechanism is not None and mechanism.most_clients is not None:
        rooms.append(mechanism.most_clients)
    return max(1, min(rooms))


def _num_rounds(schema: schema_lib.MinSep, rounds: int | None) -> int:
    """Returns the number of rounds that are played."""
    validation.integer(
        "schema.num_rounds",
        schema.num_rounds,
        minimum=_FEWEST_ROUNDS,
        remedy="A saved state is followed by two rounds: audit under a schema of more rounds.",
    )
    if rounds is None:
        return schema.num_rounds
    rounds = validation.integer(
        "rounds", rounds, minimum=_FEWEST_ROUNDS, remedy="None plays all rounds of the schema."
    )
    return min(rounds, schema.num_rounds)


def _maker(
    aggregator: Any,
    mechanism: mechanism_lib.Mechanism | None,
    value_type: Any,
    num_canaries: int,
) -> Callable[[], playing.Playable]:
    """Returns a function that makes the aggregation anew, as a program does that starts again."""
    is_native = isinstance(aggregator, aggregation_lib.Aggregation)
    if not is_native:
        from tff_dpftrl.auditing import tff_aggregators

        if tff_aggregators.is_process(aggregator):
            if value_type is not None:
                raise validation.UsageError(
                    "value_type must be None for a process, which has a type."
                )
            return tff_aggregators.maker(aggregator, None)
    if value_type is None:
        value_type = shapes_of(_RANKS, _coordinates(num_canaries))
        if mechanism is not None and mechanism.encoding is not None:
            dim = mechanism.encoding.dim
            value_type = [_shape(1, dim - dim // 2), _shape(2, dim // 2)] if dim > 1 else [[1]]
    if is_native:
        return lambda: playing.of_aggregation(aggregator, value_type)
    return tff_aggregators.maker(aggregator, value_type)


def _coordinates(num_canaries: int) -> int:
    """Returns the size of each of two tensors: part of both is quiet, a canary has one in both."""
    return max(_FEWEST_COORDINATES, num_canaries * 4 // 3 + 4) // 2 * 2


def shapes_of(ranks: Iterable[int], size: int) -> list[list[int]]:
    """Returns a shape of each rank, with so many coordinates; a scalar has one."""
    return [_shape(rank, size) for rank in ranks]


def _shape(rank: int, size: int) -> list[int]:
    if rank < 2:
        return [size] * rank
    first = 2 if size % 2 == 0 else 1
    return [first, *_shape(rank - 1, size // first)]


def _subject(aggregator: Any, mechanism: mechanism_lib.Mechanism | None) -> str:
    name = type(aggregator).__name__
    return name if mechanism is None else f"{name}, {mechanism.strategy.name}"
