"""Audits of one training run of a real model, with canaries among its clients.

Canaries are additional clients with random unit directions at the clip norm
(`canaries.Canaries`). A coin decides for each whether it takes part. How well the coins can be
guessed from what was released afterwards bounds ε from below:

- The one-run bound (Steinke, Nasr & Jagielski 2023; of a Gaussian claim Mahloujifar, Melis &
  Chaudhuri 2024) holds for every mechanism. It rests on the coins only, and cannot prove a
  large ε with few canaries.
- Bounds that count canaries as independent trials prove more. They hold if the noise of
  different coordinates is independent, as it is said to be, and real clients' updates do not
  follow the canaries' directions, which were drawn without them.
- Estimates (Andrew et al. 2023) come without confidence, and decide nothing.

All are about these canaries, these real clients and this run: a bound that is below the claim
proves nothing for others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import display
from tff_dpftrl.accounting import guarantee as guarantee_lib
from tff_dpftrl.auditing import audit_report, defaults, judging
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing.evidence import bounds, one_run, scores, transcripts, worst_pattern
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import sampling as sampling_lib
from tff_dpftrl.participation import schema as schema_lib

if TYPE_CHECKING:
    from tff_dpftrl.auditing import canaries as canaries_lib

_FEWEST = 20
"""Least number of canaries. With 20, fewer than two of a kind, too few for a bound, have chance
4e-5."""

_FEWEST_TO_LEARN = 60
"""Least number of canaries for learned scores: half of them teach, with 20 of either kind."""

_CONDITION = (
    "It counts canaries as independent trials: that holds if the noise of different coordinates "
    "is independent, and real clients' updates do not follow the canaries' directions."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Movements:
    """Movements of a model along its canaries' directions in one run.

    Attributes:
      moved: Distance that each round moved the model along each canary's direction, float64,
        shape [canaries, rounds].
      present: Whether each canary took part, bool, shape [canaries].
      signal: Sign of each canary's contribution to each round, had it taken part, or 0; shape
        [canaries, rounds].
      total_norm: Norm of the model's change from beginning to end.
      finite_rounds: Number of rounds after which the model was still finite; later ones count as 0.
    """

    moved: np.ndarray
    present: np.ndarray
    signal: np.ndarray
    total_norm: float
    finite_rounds: int


@dataclasses.dataclass(frozen=True)
class CanaryGame:
    """Participation of canaries in a training, and how often its audit may be wrong.

    Attributes:
      sampling_probability: Probability of each client to join each round, if it amplifies the
        claim. Canaries are then sampled in the same way. None for `sampling`, or for the pattern
        that the schema allows and that the noise hides least.
      sampling: Sampling that amplifies the claim beside correlated noise. Canaries are then drawn
        by its sampler, with a seed of their own.
      most_canaries: Largest number of canaries in a round, for example where a secure sum has
        room for so many; patterns then begin in different rounds. No limit if None.
      error_rate: Largest chance that a correct mechanism is called violated.
      seed: Seed of the canaries' coins, for tests; drawn from the operating system if None.
    """

    sampling_probability: float | None = None
    most_canaries: int | None = None
    error_rate: float = defaults.ERROR_RATE
    seed: int | None = None
    sampling: sampling_lib.Sampling | None = None

    def __post_init__(self) -> None:
        validation.number("error_rate", self.error_rate, above=0, below=1)
        if self.most_canaries is not None:
            validation.integer("most_canaries", self.most_canaries, minimum=1)
        if self.sampling_probability is not None:
            validation.probability("sampling_probability", self.sampling_probability)


def audit_training(
    process: Any,
    *,
    canaries: canaries_lib.Canaries,
    claim: claim_lib.AnyClaim,
    schema: schema_lib.MinSep | None = None,
    cohorts: Callable[[int], Sequence[Any]] | None = None,
    strategy: strategy_lib.Strategy | None = None,
    server_momentum: float = 0.0,
    game: CanaryGame | None = None,
    progress: Callable[[str], None] | None = None,
) -> audit_report.AuditReport:
    """Trains a model once, with canaries among its clients, and bounds ε from below.

    Each canary takes part with probability 1/2: then in the rounds of the pattern that the
    schema allows and that the noise hides least, else in none. Its score is how far the model
    moved along its direction: in total (the final model), and in every round (all iterates). If
    the server's optimizer is SGD, with `server_momentum` or without, rounds give the released
    sums, and the likelihood ratio of `strategy` orders them best. Another optimizer hides some
    of it, so that bounds are weaker, never wrong.

    Example:
      ```
      canaries = tff_dpftrl.auditing.canaries.Canaries(model, number=200)
      process = tff.learning.algorithms.build_unweighted_fed_avg(
          canaries.model,
          client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
          model_aggregator=aggregator,
      )
      report = tff_dpftrl.audit_training(
          process, canaries=canaries, claim=aggregator.guarantee(schema, delta),
          cohorts=lambda t: [client_data(i) for i in sampler.cohort(t)],
          strategy=aggregator.private_round.strategy,
      )
      ```

    Args:
      process: Learning process, built with `canaries.model`, a compiled one, or a
        `FederatedRound`. TFF runs a process of its own that cannot be compiled.
      canaries: Canaries of the process's model.
      claim: Claim to test: a guarantee, a statement or a `Claim`.
      schema: Participation schema: how many rounds are trained, and how often a client takes
        part. If None, that of the guarantee.
      cohorts: Function from a round to the datasets of its real clients, for the model that was
        wrapped; no real clients if None.
      strategy: Strategy C of the claimed noise. If None, rounds count equally.
      server_momentum: Momentum of the server's SGD.
      game: Participation of the canaries, and the error rate; the defaults if None.
      progress: Callback for progress lines.

    Returns:
      The report. It does not vouch for the code as this package's.

    Raises:
      ValueError: If an argument is out of range, or nothing says who may take part how often.
    """
    game = CanaryGame() if game is None else game
    tested_claim = claim_lib.Claim.of(claim)
    if schema is None:
        if not isinstance(claim, guarantee_lib.Guarantee):
            raise validation.UsageError(
                f"schema must be given with a claim that is a {type(claim).__name__}: it says how "
                "many rounds there are, and how often a client takes part."
            )
        schema = claim.schema
    if strategy is not None:
        strategy_lib.check_strategy(strategy)
    validation.number("server_momentum", server_momentum, at_least=0, below=1)
    rng = np.random.default_rng(secrets.randbits(128) if game.seed is None else game.seed)
    covariance = None
    if strategy is not None:
        covariance = worst_pattern.noise_covariance(strategy, schema.num_rounds)
    if canaries.number < _FEWEST:
        raise validation.UsageError(
            f"canaries must be at least {_FEWEST}, got {canaries.number}: fewer prove nothing."
        )
    present = rng.integers(0, 2, canaries.number).astype(bool)
    if game.sampling is not None:
        signal = _sampled(game.sampling, canaries.number, schema.num_rounds, rng)
    elif game.sampling_probability is None:
        signal = _patterns(schema, covariance, present, game.most_canaries, rng)
    else:
        shape = (canaries.number, schema.num_rounds)
        signal = (rng.random(shape) < game.sampling_probability).astype(float)
    looked = np.flatnonzero(np.any(signal != 0, axis=0))
    with runnable(process) as runs:
        movements = train_with_canaries(
            runs, canaries, signal, present, cohorts, progress or (lambda line: None)
        )
    if game.sampling is not None:  # Nobody knows in which rounds a canary is.
        share = np.full_like(signal, game.sampling.share_per_round)
        movements = dataclasses.replace(movements, signal=share)
    findings, trade_off = judge(
        movements,
        tested_claim,
        covariance=covariance if game.sampling_probability is None else None,
        server_momentum=server_momentum,
        error_rate=game.error_rate,
        seed=int(rng.integers(2**31)),
    )
    looked = looked[looked < movements.finite_rounds]
    covers = _covers(map(int, looked), schema.num_rounds, canaries)
    return audit_report.AuditReport(
        subject=f"training process, {schema.num_rounds} rounds with {canaries.number} canaries",
        claim=tested_claim,
        findings=tuple(dataclasses.replace(one, covers=covers) for one in findings),
        is_ours=False,
        trade_off=trade_off,
    )


def audit_single_rounds(
    process: Any,
    rounds: Collection[int],
    *,
    canaries: canaries_lib.Canaries,
    claim: claim_lib.Claim,
    cohorts: Callable[[int], Sequence[Any]],
    server_momentum: float,
    server_restarts: Collection[int],
    game: CanaryGame,
    progress: Callable[[str], None],
) -> tuple[audit_report.Finding, ...]:
    """Plays single rounds with canaries, each from a state that was advanced without clients.

    Half of the canaries take part in such a round; the scores are how far it moved the model along
    their directions. Faults may show that begin after the rounds of `audit_training`. The claim is
    for one participation that everybody knows of. The server's momentum begins anew in
    `server_restarts`. The finding is that of the round with the largest bound; there is none
    without rounds.
    """
    if not rounds:
        return ()
    name = "single rounds"
    test = f"canaries as trials, {name}"
    number = min(canaries.number, game.most_canaries or canaries.number)
    if number < _FEWEST:
        says = f"A round has room for {number} canaries, and {_FEWEST} are needed."
        return (audit_report.Finding(test, "not tested", says),)
    rng = np.random.default_rng(secrets.randbits(128) if game.seed is None else game.seed)
    signal = np.zeros((canaries.number, 2))
    signal[:number, 1] = 1.0  # The round before shows the movement that momentum keeps.
    found: dict[int, audit_report.Finding] = {}
    state = process.initialize()
    for t in range(1, max(rounds) + 1):
        if t in rounds:
            present = np.zeros(canaries.number, bool)
            present[rng.permutation(number)[: number // 2]] = True
            first = t - 1
            moved = train_with_canaries(
                process,
                canaries,
                signal,
                present,
                lambda offset, first=first: cohorts(first + offset),
                lambda line: None,
                state,
            )
            if moved.finite_rounds < 2:
                progress(f"The model is not finite after round {t + 1}: no more rounds are played.")
                break
            kept = 0.0 if t in server_restarts else server_momentum
            values = (moved.moved[:, 1] - kept * moved.moved[:, 0])[:number]
            each = game.error_rate / len(rounds)
            seed = int(rng.integers(2**31))
            found[t] = _independent(name, values, present[:number], claim, each, seed, "")
            progress(f"Round {t + 1} alone, after {t - 1} rounds without clients.")
        state = process.next(state, []).state
    if not found:
        return (audit_report.Finding(test, "not tested", "The model was not finite."),)
    worst = max(found, key=lambda t: (found[t].outcome == "violated", found[t].mu_at_least or 0.0))
    finding = dataclasses.replace(
        found[worst],
        says=f"Of {len(found)} rounds played alone, round {worst + 1}: {found[worst].says}",
        error_rate=game.error_rate,
        trials=number * len(found),
        covers=_covers(found, max(rounds) + 1, canaries),
    )
    return (finding,)


def _covers(
    rounds: Iterable[int], total: int, canaries: canaries_lib.Canaries
) -> tuple[audit_report.Covered, ...]:
    """Returns the rounds that canaries might take part in, and the tensors: all have some."""
    tensors = len(canaries.directions.shapes)
    return (
        audit_report.Covered.of("rounds", rounds, total),
        audit_report.Covered.of("tensors", range(tensors), tensors),
    )


def train_with_canaries(
    process: Any,
    canaries: canaries_lib.Canaries,
    signal: np.ndarray,
    present: np.ndarray,
    cohorts: Callable[[int], Sequence[Any]] | None,
    progress: Callable[[str], None],
    state: Any = None,
) -> Movements:
    """Trains, and records how the model moves along the canaries' directions.

    `signal` is 1 or −1 in the rounds of each canary's pattern, else 0; shape [canaries, rounds].
    """
    num_rounds = finite_rounds = signal.shape[1]
    moved = np.zeros(signal.shape)
    state = process.initialize() if state is None else state
    first = before = canaries.weights(process.get_model_weights(state))
    for t in range(num_rounds):
        clients = [] if cohorts is None else [canaries.real(data) for data in cohorts(t)]
        clients += [
            canaries.client(int(canary), int(signal[canary, t]))
            for canary in np.flatnonzero(present & (signal[:, t] != 0))
        ]
        state = process.next(state, clients).state
        after = canaries.weights(process.get_model_weights(state))
        if not all(np.all(np.isfinite(weight)) for weight in after):
            progress(f"The model is not finite after round {t + 1}: the audit ends here.")
            finite_rounds = t
            break
        moved[:, t] = canaries.directions.project(_difference(after, before))
        before = after
        progress(f"Round {t + 1} of {num_rounds}, {len(clients)} clients.")
    total_norm = math.sqrt(sum(float(np.sum(x**2)) for x in _difference(before, first)))
    return Movements(moved, present, signal, total_norm, finite_rounds)


def judge(
    movements: Movements,
    claim: claim_lib.Claim,
    *,
    covariance: np.ndarray | None = None,
    server_momentum: float = 0.0,
    error_rate: float = defaults.ERROR_RATE,
    seed: int = 0,
) -> tuple[list[audit_report.Finding], audit_report.TradeOff | None]:
    """Computes what a run proves about its claim.

    The covariance is the claimed one of the released sums' noise over the rounds, in any unit. The
    trade-off curve is that of the strongest score, and None if the model was not finite after the
    first round.
    """
    if movements.finite_rounds == 0:
        says = "The model was not finite after the first round, so that no canary could be seen."
        return [audit_report.Finding("canaries in a training run", "not tested", says)], None
    present = movements.present
    final = movements.moved.sum(axis=1) / max(movements.total_norm, np.finfo(float).tiny)
    released = movements.moved.copy()
    released[:, 1:] -= server_momentum * movements.moved[:, :-1]
    scored: dict[str, tuple[np.ndarray, np.ndarray]] = {"final model": (final, present)}
    if covariance is not None:
        scored["all iterates, likelihood ratio"] = (
            _likelihood_ratios(released, movements, covariance),
            present,
        )
    rng = np.random.default_rng(seed)
    half = _teaching_half(present, rng)
    if half is not None and np.all(movements.signal == movements.signal[:1]):
        seen, unseen = (
            transcripts.Transcripts(released[part], present[part]) for part in (half, ~half)
        )
        scored["all iterates, learned score"] = scores.learned_scores(seen, unseen), present[~half]
    strongest = list(scored)[1 if covariance is not None else 0]
    each = error_rate / (1 + len(scored))
    about = ""
    if movements.finite_rounds < movements.moved.shape[1]:
        about = f" Only {movements.finite_rounds} rounds are judged: then the model was not finite."
    findings = [
        judging.one_run_bound(
            f"one-run bound, {strongest}",
            *scored[strongest],
            claim,
            error_rate=each,
            about=about,
        )
    ]
    findings += [
        _independent(name, values, took_part, claim, each, int(rng.integers(2**31)), about)
        for name, (values, took_part) in scored.items()
    ]
    findings += [
        _estimate(name, values, took_part, claim)
        for name, (values, took_part) in scored.items()
        if min(np.ptp(values[took_part]), np.ptp(values[~took_part])) > 0.0
    ]
    return findings, bounds.trade_off(*scored[strongest])


def _independent(
    name: str,
    values: np.ndarray,
    present: np.ndarray,
    claim: claim_lib.Claim,
    error_rate: float,
    seed: int,
    about: str,
) -> audit_report.Finding:
    """Returns the finding of the larger bounds, which need canaries as independent trials."""
    bound = bounds.for_claim(values, present, claim, error_rate=error_rate, seed=seed)
    is_above = claim.is_refuted_by(bound.mu_at_least, bound.epsilon_at_least)
    can_refute, power = True, ""
    if claim.mu is None:
        can_refute, power = judging.at_best(present, claim, error_rate=error_rate, seed=seed)
        about += "" if can_refute else judging.TOO_FEW
    return audit_report.Finding(
        f"canaries as trials, {name}",
        "violated" if is_above else "consistent" if can_refute else "not tested",
        f"At least {bound} at δ = {display.round_down(claim.delta, 6)} ({bound.method}); claimed "
        f"is {claim}. {_CONDITION}{about}",
        error_rate,
        trials=bound.trials,
        mu_at_least=bound.mu_at_least,
        epsilon_at_least=bound.epsilon_at_least,
        power=power,
    )


def _estimate(
    name: str, values: np.ndarray, present: np.ndarray, claim: claim_lib.Claim
) -> audit_report.Finding:
    """Returns the finding of the estimate, which has no confidence."""
    estimate = one_run.estimate(values[present], values[~present], delta=claim.delta)
    return audit_report.Finding(
        f"estimate, {name}",
        "estimate",
        f"About μ = {estimate.mu:.4g}, ε = {estimate.epsilon:.4g} at δ = {claim.delta:g} "
        f"({estimate.method}; Andrew et al. 2023). An estimate may be above or below the truth, "
        "and decides nothing.",
        trials=len(present),
    )


def _difference(after: Sequence[np.ndarray], before: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(x, float) - y for x, y in zip(after, before, strict=True)]


@contextlib.contextmanager
def runnable(process: Any) -> Iterator[Any]:
    """Yields the compiled process, or the process itself if it cannot or need not be compiled."""
    from tff_dpftrl.execution import compiled_process, federated_round

    compiled = None
    if isinstance(process, federated_round.FederatedRound):
        compiled = compiled_process.CompiledProcess(process)
    elif hasattr(getattr(process, "next", None), "type_signature"):  # It is of TFF.
        with contextlib.suppress(compiled_process.NotCompilableError):
            compiled = compiled_process.compile_process(process)
    if compiled is None:
        yield process
        return
    with contextlib.closing(compiled):
        yield compiled


def _sampled(
    sampling: sampling_lib.Sampling, number: int, num_rounds: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns the canaries' signals, [canaries, rounds]: drawn as clients are."""
    sampler, signal = (
        sampling.sampler(number, int(rng.integers(2**62))),
        np.zeros((number, num_rounds)),
    )
    for t in range(num_rounds):
        signal[sampler.cohort(t), t] = 1.0
    return signal


def _patterns(
    schema: schema_lib.MinSep,
    covariance: np.ndarray | None,
    present: np.ndarray,
    most_canaries: int | None,
    rng: np.random.Generator,
) -> np.ndarray:
    """Returns the canaries' signals, [canaries, rounds]: the pattern, shifted if need be."""
    if covariance is None:
        pattern = worst_pattern.worst_pattern(identity.Identity(), schema)
    else:
        pattern = worst_pattern.strongest_pattern(covariance, schema)
    signal = pattern.signal(schema.num_rounds)
    if most_canaries is None:
        return np.tile(signal, (len(present), 1))
    # Shifted by less than the least stride, patterns of different groups share no round.
    room = int(np.min(np.diff(pattern.rounds), initial=schema.num_rounds))
    groups = -(-len(present) // most_canaries)
    if groups > room:
        raise validation.UsageError(
            f"most_canaries={most_canaries} leaves room for {most_canaries * room} canaries in a "
            f"run of this schema, got {len(present)}: take fewer canaries."
        )
    signals = np.zeros((groups, schema.num_rounds))
    for offset in range(groups):
        shifted = np.array(pattern.rounds) - pattern.rounds[0] + offset
        within = shifted < schema.num_rounds
        signals[offset, shifted[within]] = np.array(pattern.signs)[within]
    return signals[rng.permutation(np.arange(len(present)) % groups)]


def _likelihood_ratios(
    released: np.ndarray, movements: Movements, covariance: np.ndarray
) -> np.ndarray:
    """Returns the score of each canary for its pattern, in one unit for all."""
    ratios = np.zeros(len(released))
    for signal in np.unique(movements.signal, axis=0):
        same = np.all(movements.signal == signal, axis=1)
        ratios[same] = scores.likelihood_ratio_scores(
            transcripts.Transcripts(released[same], movements.present[same]), signal, covariance
        )
    return ratios


def _teaching_half(present: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """Draws half of the canaries; None if there are too few."""
    half = np.zeros(len(present), bool)
    half[rng.permutation(len(present))[: len(present) // 2]] = True
    fewest = min(
        int(np.sum(present[part] == kind)) for part in (half, ~half) for kind in (True, False)
    )
    return half if len(present) >= _FEWEST_TO_LEARN and fewest >= 20 else None
