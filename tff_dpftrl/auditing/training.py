"""What one training run of a real model gives away, measured by canaries in it.

Canaries are a few clients more, with random unit directions at the clip norm
(`canaries.Canaries`). A coin decides for each whether it takes part, and how well its part
can be told from what was released afterwards bounds ε from below:

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import guarantee as guarantee_lib
from tff_dpftrl.auditing import audit_report, judging
from tff_dpftrl.auditing import canaries as canaries_lib
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing.evidence import bounds, one_run, scores, transcripts, worst_pattern
from tff_dpftrl.execution import compiled_process
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib

_FEWEST = 20
"""Canaries: fewer than two of a kind, which no bound can do with, have chance 4e-5."""

_FEWEST_TO_LEARN = 60
"""Canaries for learned scores: half of them teach, and of either kind there must be 20."""

_CONDITION = (
    "It counts canaries as independent trials: that holds if the noise of different coordinates "
    "is independent, and real clients' updates do not follow the canaries' directions."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Watched:
    """What was seen of the canaries in one run.

    Attributes:
      moved: float64, [canaries, rounds]: how far each round moved the model along each
        canary's direction.
      present: bool, [canaries]: whether the canary took part.
      signal: [canaries, rounds]: in which rounds, with which sign, it did or would have.
      total_norm: Norm of the model's change from beginning to end.
      finite_rounds: Rounds after which the model was still finite; later ones count as 0.
    """

    moved: np.ndarray
    present: np.ndarray
    signal: np.ndarray
    total_norm: float
    finite_rounds: int


def audit_training(
    process: Any,
    *,
    canaries: canaries_lib.Canaries,
    claim: claim_lib.AnyClaim,
    schema: schema_lib.MinSep | None = None,
    cohorts: Callable[[int], Sequence[Any]] | None = None,
    strategy: strategy_lib.Strategy | None = None,
    sampling_probability: float | None = None,
    server_momentum: float = 0.0,
    most_canaries: int | None = None,
    error_rate: float = 0.05,
    seed: int | None = None,
    subject: str = "training process",
    is_ours: bool = False,
    progress: Callable[[str], None] | None = None,
) -> audit_report.AuditReport:
    """Trains a model once, with canaries among its clients, and bounds ε from below.

    Each canary takes part with probability 1/2, then in the rounds of the pattern that the
    schema allows and the noise hides least; if not, in none. What is scored is how far the
    model moved along its direction: in all (the final model), and in every round (all
    iterates). If the server's optimizer is SGD, with `server_momentum` or without, rounds
    give the released sums, and the likelihood ratio of `strategy` orders them best. Another
    optimizer hides some of it, so that bounds are weaker, never wrong.

    Example:
      ```
      canaries = tff_dpftrl.auditing.canaries.Canaries(model, number=200)
      process = build_unweighted_fed_avg(canaries.model, ..., model_aggregator=aggregator)
      report = tff_dpftrl.audit_training(
          process, canaries=canaries, claim=aggregator.guarantee(schema, delta),
          cohorts=lambda t: [client_data(i) for i in sampler.cohort(t)],
          strategy=aggregator.private_round.strategy,
      )
      ```

    Args:
      process: The learning process, built of `canaries.model`, or a compiled one. TFF runs it
        if it cannot be compiled.
      canaries: The canaries.
      claim: What is claimed: a guarantee, a statement or a `Claim`.
      schema: Who may take part how often; as many rounds are trained. A guarantee has one.
      cohorts: From a round to the datasets of its real clients, for the model that was
        wrapped; no real clients if None.
      strategy: The strategy C that the claim says makes the noise; if None, it is not
        used, and the rounds count equally.
      sampling_probability: With which each client joins each round, if the claim is
        amplified by it: canaries are then sampled in the same way.
      server_momentum: Momentum of the server's SGD.
      most_canaries: Canaries in a round at most, if there is such a limit, as for secure
        sums: patterns are then begun in different rounds.
      error_rate: Chance that a correct mechanism is called violated, at most.
      seed: Of the coins, for tests; the operating system's if None.
      subject: What is audited, in words.
      is_ours: Whether it is this package's own code.
      progress: Callback for progress lines.

    Returns:
      The report.

    Raises:
      ValueError: If an argument is out of range, or nothing says who may take part how often.
    """
    found_claim = claim_lib.Claim.of(claim)
    if schema is None:
        if not isinstance(claim, guarantee_lib.Guarantee):
            raise validation.UsageError(
                f"schema must be given with a claim that is a {type(claim).__name__}: it says how "
                "many rounds there are, and how often a client takes part."
            )
        schema = claim.schema
    if strategy is not None:
        strategy_lib.check_strategy(strategy)
    error_rate = validation.number("error_rate", error_rate, above=0, below=1)
    validation.number("server_momentum", server_momentum, at_least=0, below=1)
    if most_canaries is not None:
        validation.integer("most_canaries", most_canaries, minimum=1)
    rng = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
    covariance = None
    if strategy is not None:
        covariance = worst_pattern.noise_covariance(strategy, schema.num_rounds)
    if canaries.number < _FEWEST:
        raise validation.UsageError(
            f"canaries must be at least {_FEWEST}, got {canaries.number}: fewer prove nothing."
        )
    present = rng.integers(0, 2, canaries.number).astype(bool)
    if sampling_probability is None:
        signal = _patterns(schema, covariance, present, most_canaries, rng)
    else:
        probability = validation.probability("sampling_probability", sampling_probability)
        shape = (canaries.number, schema.num_rounds)
        signal = (rng.random(shape) < probability).astype(float)
    with _runnable(process) as runnable:
        watched = watch(
            runnable, canaries, signal, present, cohorts, progress or (lambda sentence: None)
        )
    findings, trade_off = judge(
        watched,
        found_claim,
        covariance=covariance if sampling_probability is None else None,
        server_momentum=server_momentum,
        error_rate=error_rate,
        seed=int(rng.integers(2**31)),
    )
    return audit_report.AuditReport(
        subject=f"{subject}, {schema.num_rounds} rounds with {canaries.number} canaries",
        claim=found_claim,
        findings=tuple(findings),
        is_ours=is_ours,
        trade_off=trade_off,
    )


def watch(
    process: Any,
    canaries: canaries_lib.Canaries,
    signal: np.ndarray,
    present: np.ndarray,
    cohorts: Callable[[int], Sequence[Any]] | None,
    progress: Callable[[str], None],
) -> Watched:
    """Trains, and watches how the model moves along the canaries' directions.

    Args:
      process: What has `initialize`, `next` and `get_model_weights`.
      canaries: The canaries.
      signal: [canaries, rounds]: 1 or −1 where a canary would take part, else 0.
      present: bool, [canaries]: whether it does.
      cohorts: As for `audit_training`.
      progress: Callback for progress lines.

    Returns:
      What was seen.
    """
    num_rounds = finite_rounds = signal.shape[1]
    moved = np.zeros(signal.shape)
    state = process.initialize()
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
    return Watched(moved, present, signal, total_norm, finite_rounds)


def judge(
    watched: Watched,
    claim: claim_lib.Claim,
    *,
    covariance: np.ndarray | None = None,
    server_momentum: float = 0.0,
    error_rate: float = 0.05,
    seed: int = 0,
) -> tuple[list[audit_report.Finding], audit_report.TradeOff | None]:
    """What a run proves about its claim.

    Args:
      watched: What was seen of the canaries.
      claim: The claim.
      covariance: Claimed covariance of the released sums' noise over the rounds, in any
        unit, [rounds, rounds]; None if it is not known.
      server_momentum: Momentum of the server's SGD, to be taken out.
      error_rate: Chance that any finding is wrongly "violated".
      seed: Of what is chosen at random: the trials that choose thresholds.

    Returns:
      Findings, and the trade-off curve of the strongest score; None if nothing was seen.
    """
    if watched.finite_rounds == 0:
        says = "The model was not finite after the first round, so that no canary could be seen."
        return [audit_report.Finding("canaries in a training run", "not tested", says)], None
    present = watched.present
    final = watched.moved.sum(axis=1) / max(watched.total_norm, np.finfo(float).tiny)
    released = watched.moved.copy()
    released[:, 1:] -= server_momentum * watched.moved[:, :-1]
    of_all: dict[str, tuple[np.ndarray, np.ndarray]] = {"final model": (final, present)}
    if covariance is not None:
        of_all["all iterates, likelihood ratio"] = (
            _likelihood_ratios(released, watched, covariance),
            present,
        )
    rng = np.random.default_rng(seed)
    half = _teaching_half(present, rng)
    if half is not None and np.all(watched.signal == watched.signal[:1]):
        seen, unseen = (
            transcripts.Transcripts(released[part], present[part]) for part in (half, ~half)
        )
        of_all["all iterates, learned score"] = scores.learned_scores(seen, unseen), present[~half]
    strongest = list(of_all)[1 if covariance is not None else 0]
    each = error_rate / (1 + len(of_all))
    about = ""
    if watched.finite_rounds < watched.moved.shape[1]:
        about = f" Only {watched.finite_rounds} rounds are judged: then the model was not finite."
    findings = [
        judging.one_run_bound(
            f"one-run bound, {strongest}",
            *of_all[strongest],
            claim,
            error_rate=each,
            about=about,
        )
    ]
    findings += [
        _independent(name, *of_canaries, claim, each, int(rng.integers(2**31)), about)
        for name, of_canaries in of_all.items()
    ]
    findings += [
        _estimate(name, values, of_canaries, claim)
        for name, (values, of_canaries) in of_all.items()
        if min(np.ptp(values[of_canaries]), np.ptp(values[~of_canaries])) > 0.0
    ]
    return findings, bounds.trade_off(*of_all[strongest])


def _independent(
    name: str,
    values: np.ndarray,
    present: np.ndarray,
    claim: claim_lib.Claim,
    error_rate: float,
    seed: int,
    about: str,
) -> audit_report.Finding:
    """The larger bounds, if canaries are independent trials."""
    bound = bounds.for_claim(values, present, claim, error_rate=error_rate, seed=seed)
    is_above = claim.is_refuted_by(bound.mu_at_least, bound.epsilon_at_least)
    can_refute, power = True, ""
    if claim.mu is None:
        can_refute, power = judging.at_best(present, claim, error_rate=error_rate, seed=seed)
        about += "" if can_refute else judging.TOO_FEW
    return audit_report.Finding(
        f"canaries as trials, {name}",
        "violated" if is_above else "consistent" if can_refute else "not tested",
        f"At least μ = {bound.mu_at_least:.4g}, ε = {bound.epsilon_at_least:.4g} at δ = "
        f"{claim.delta:g} ({bound.method}); claimed is {claim}. {_CONDITION}{about}",
        error_rate,
        trials=bound.trials,
        mu_at_least=bound.mu_at_least,
        epsilon_at_least=bound.epsilon_at_least,
        power=power,
    )


def _estimate(
    name: str, values: np.ndarray, present: np.ndarray, claim: claim_lib.Claim
) -> audit_report.Finding:
    """What is likely, without confidence."""
    found = one_run.estimate(values[present], values[~present], delta=claim.delta)
    return audit_report.Finding(
        f"estimate, {name}",
        "estimate",
        f"About μ = {found.mu:.4g}, ε = {found.epsilon:.4g} at δ = {claim.delta:g} "
        f"({found.method}; Andrew et al. 2023). An estimate may be above or below the truth, and "
        "decides nothing.",
        trials=len(present),
    )


def _difference(after: Sequence[np.ndarray], before: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(x, float) - y for x, y in zip(after, before, strict=True)]


@contextlib.contextmanager
def _runnable(process: Any) -> Iterator[Any]:
    """The process compiled, or itself if it cannot be or needs not."""
    if isinstance(process, compiled_process.CompiledProcess) or not hasattr(
        getattr(process, "next", None), "type_signature"
    ):
        yield process
        return
    try:
        compiled = compiled_process.compile_process(process)
    except compiled_process.NotCompilableError:
        yield process
        return
    try:
        yield compiled
    finally:
        compiled.close()


def _patterns(
    schema: schema_lib.MinSep,
    covariance: np.ndarray | None,
    present: np.ndarray,
    most_canaries: int | None,
    rng: np.random.Generator,
) -> np.ndarray:
    """In which rounds each canary takes part, [canaries, rounds]: the pattern, or it moved."""
    if covariance is None:
        pattern = worst_pattern.worst_pattern(identity.Identity(), schema)
    else:
        pattern = worst_pattern.strongest_pattern(covariance, schema)
    signal = pattern.signal(schema.num_rounds)
    if most_canaries is None:
        return np.tile(signal, (len(present), 1))
    # Moved by less than the least stride, patterns of different groups share no round.
    room = int(np.min(np.diff(pattern.rounds), initial=schema.num_rounds))
    groups = -(-len(present) // most_canaries)
    if groups > room:
        raise validation.UsageError(
            f"most_canaries={most_canaries} leaves room for {most_canaries * room} canaries in a "
            f"run of this schema, got {len(present)}: take fewer canaries."
        )
    signals = np.zeros((groups, schema.num_rounds))
    for offset in range(groups):
        moved = np.array(pattern.rounds) - pattern.rounds[0] + offset
        within = moved < schema.num_rounds
        signals[offset, moved[within]] = np.array(pattern.signs)[within]
    return signals[rng.permutation(np.arange(len(present)) % groups)]


def _likelihood_ratios(
    released: np.ndarray, watched: Watched, covariance: np.ndarray
) -> np.ndarray:
    """Scores of each canary for its own pattern, in one unit for all."""
    found = np.zeros(len(released))
    for signal in np.unique(watched.signal, axis=0):
        own = np.all(watched.signal == signal, axis=1)
        found[own] = scores.likelihood_ratio_scores(
            transcripts.Transcripts(released[own], watched.present[own]), signal, covariance
        )
    return found


def _teaching_half(present: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """Half of the canaries at random; None if there are too few."""
    half = np.zeros(len(present), bool)
    half[rng.permutation(len(present))[: len(present) // 2]] = True
    fewest = min(
        int(np.sum(present[part] == kind)) for part in (half, ~half) for kind in (True, False)
    )
    return half if len(present) >= _FEWEST_TO_LEARN and fewest >= 20 else None
