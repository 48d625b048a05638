"""Exact probes of the steps of fine-tuning: a step is taken with and without a unit.

Both steps read the same bits instead of the operating system's, so their noise is the same.
`audit_steps` looks only at what a step releases: the weights after a step of plain SGD, from the
same weights each time. So it works for every way to sum clipped gradients, `ghost` included.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.auditing import audit_report, defaults
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing.evidence import run_noise, worst_pattern
from tff_dpftrl.execution import entropy as entropy_lib
from tff_dpftrl.finetuning import clipped_sums, private_steps, run_privacy
from tff_dpftrl.models import keras_versions
from tff_dpftrl.private_round import seeds
from tff_dpftrl.runs import mechanism_plan

Build = Callable[[keras_versions.Optimizer], private_steps.PrivateSteps]
"""Function from an optimizer to the steps that are audited, without averaging of models."""

_MOST_UNITS = 64
_FIRST_AND_LAST = 3
_ROUNDING = 2.0**-23  # Of a weight in float32, before and after a step.


@dataclasses.dataclass(frozen=True)
class _Batch:
    rows: clipped_sums.Rows
    row_splits: np.ndarray

    @property
    def num_units(self) -> int:
        return len(self.row_splits) - 1

    def read(self, begin: int, end: int) -> clipped_sums.Rows:
        return tf.nest.map_structure(lambda x: x[begin:end], self.rows)

    def of(self, units: Sequence[int]) -> _Batch:
        """Returns the batch of some of the units, in order."""
        sizes = np.diff(self.row_splits)
        taken = np.isin(np.arange(self.num_units), units)
        of_rows = np.repeat(taken, sizes)
        rows = tf.nest.map_structure(lambda x: np.asarray(x)[of_rows], self.rows)
        return _Batch(rows, np.concatenate([[0], np.cumsum(sizes[taken])]))


class _Stepper:
    """Steps of one run, all from the initial weights, in units of what a unit may add at most."""

    def __init__(self, steps: private_steps.PrivateSteps, unit: float):
        self._steps = steps
        self._state = steps.initial_state()
        self._weights = self._state["global_model_weights"]["trainable"]
        self._unit = unit

    @property
    def rounding(self) -> np.ndarray:
        """Largest rounding of each weight, before and after a step."""
        return 2.0 * _ROUNDING * np.abs(_flat(self._weights)) / self._unit

    @property
    def sizes(self) -> list[int]:
        """Numbers of weights of the tensors."""
        return [weight.size for weight in self._weights]

    def release(self, batch: _Batch) -> np.ndarray:
        """Returns what a step would move the weights by; the run stays where it is."""
        return self._step(batch)[1]

    def go_on(self, batch: _Batch) -> np.ndarray:
        """Takes a step, but for the weights, and returns what it would have moved them by."""
        state, moved = self._step(batch)
        self._state = {**self._state, "aggregator": state["aggregator"]}
        return moved

    def _step(self, batch: _Batch) -> tuple[dict[str, Any], np.ndarray]:
        state, _ = self._steps.step(self._state, batch.row_splits, batch.read)
        after = state["global_model_weights"]["trainable"]
        return state, (_flat(self._weights) - _flat(after)) / self._unit


def _flat(tensors: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(tensor).astype(np.float64) for tensor in tensors])


def audit_steps(
    build: Build,
    rows: clipped_sums.Rows,
    row_splits: Sequence[int] | np.ndarray,
    *,
    plan: mechanism_plan.MechanismPlan,
    normalised: bool = True,
    error_rate: float = defaults.ERROR_RATE,
    progress: Callable[[str], None] = lambda line: None,
) -> audit_report.AuditReport:
    """Audits the steps of a fine-tuning run by what they release.

    The contribution of a unit is the difference of a step with and without it, from the same state
    and with the same noise. Noise is the difference of the same step of two runs with the same
    sums. The first and the last steps are taken with units, too; those in between only without.
    `rows` are of more units than are summed at once, some with gradients above the clip norm.
    `build` gets plain SGD and makes steps whose graphs are traced here. The claim is the plan's ε.
    """
    batch = _Batch(tf.nest.map_structure(np.asarray, rows), np.asarray(row_splits, np.int64))
    if batch.num_units < 1:
        raise validation.UsageError("row_splits must have one unit at least, got none.")
    if plan.noise_multiplier <= 0.0:
        raise validation.UsageError("plan has no noise: there is no claim to audit.")
    steps = build(keras_versions.SGD(1.0))
    unit = (1.0 if normalised else plan.clip_norm) / plan.clients_per_round
    runs = _Stepper(steps, unit), _Stepper(steps, unit)
    looked = sorted(
        {*range(min(_FIRST_AND_LAST, plan.num_rounds))}
        | {*range(max(0, plan.num_rounds - _FIRST_AND_LAST), plan.num_rounds)}
    )
    progress(f"Steps {', '.join(str(step + 1) for step in looked)} of {plan.num_rounds} ...")
    noise = run_noise.RunNoise(
        runs[0].sizes,
        plan.noise_multiplier**2
        * worst_pattern.noise_covariance(run_privacy.strategy_of(plan), plan.num_rounds),
        most_vectors=plan.num_rounds + len(looked),
        error_rate=error_rate,
        rounding=runs[0].rounding,
    )

    def add(step: int, kind: str, one: np.ndarray, two: np.ndarray) -> None:
        noise.add(step, (one - two) / math.sqrt(2.0), kind)

    empty, added, replayed, repeated = batch.of([]), {}, [], []
    bits = entropy_lib.Repeated()
    with seeds.reading(bits.path):
        for step in range(plan.num_rounds):
            bits.renew()
            if step not in looked:
                add(step, " without units", *(run.go_on(empty) for run in runs))
                continue
            released = runs[0].release(batch)
            replayed.append(bool(np.array_equal(released, runs[0].release(batch))))
            if step in (looked[0], looked[-1]):
                added[step] = _added(runs[0], batch, released)
            add(step, " without units", *(run.release(empty) for run in runs))
            bits.renew()
            one, two = (run.go_on(batch) for run in runs)
            repeated.append(_has_same_tensor(released, one, runs[0].sizes))
            add(step, " with units", one, two)
    rounding = 4.0 * float(np.linalg.norm(runs[0].rounding))
    covers = audit_report.Covered.of("non-empty steps", looked, plan.num_rounds)
    findings = (
        dataclasses.replace(_executed_again(repeated), covers=(covers,)),
        _adds(added, replayed, rounding, plan.num_rounds),
        *noise.findings("noise", "step", plan.num_rounds),
    )
    return audit_report.AuditReport(
        subject=f"{plan.num_rounds} steps of fine-tuning",
        claim=claim_lib.Claim(plan.epsilon_after(plan.num_rounds) or math.inf, plan.delta),
        findings=findings,
        is_ours=type(steps) is private_steps.PrivateSteps,
    )


def _added(run: _Stepper, batch: _Batch, released: np.ndarray) -> list[float]:
    """Returns the norms of what units add to the batch, and to nothing."""
    every = np.arange(batch.num_units)
    most = min(_MOST_UNITS, len(every))
    nothing, norms = run.release(batch.of([])), []
    for unit in np.unique(np.linspace(0, len(every) - 1, most).round().astype(int)):
        without = run.release(batch.of(every[every != unit]))
        alone = run.release(batch.of([unit]))
        norms += [float(np.linalg.norm(x)) for x in (released - without, alone - nothing)]
    return norms


def _has_same_tensor(one: np.ndarray, two: np.ndarray, sizes: Sequence[int]) -> bool:
    """Checks whether any tensor was moved alike; a single weight may be so by chance."""
    moved = (np.split(x, np.cumsum(sizes)[:-1]) for x in (one, two))
    return any(np.array_equal(x, y) for x, y in zip(*moved, strict=True) if x.size > 1)


def _executed_again(repeated: Sequence[bool]) -> audit_report.Finding:
    test = "a step executed again from its state"
    if not any(repeated):
        says = f"{len(repeated)} steps had other noise in every tensor."
        return audit_report.Finding(test, "consistent", says)
    says = (
        f"{repeated.count(True)} of {len(repeated)} steps had a tensor with the same noise, or "
        "none. Whoever goes on from a backup with other batches publishes the exact difference of "
        "two sums."
    )
    return audit_report.Finding(test, "violated", says)


def _adds(
    added: dict[int, list[float]], replayed: Sequence[bool], rounding: float, num_steps: int
) -> audit_report.Finding:
    test = "what one unit adds"
    if not all(replayed):
        says = (
            f"{replayed.count(False)} of {len(replayed)} steps had other noise when they read the "
            "same bits: nobody could see what a unit adds, so that the sensitivity is not known."
        )
        of_units = audit_report.Covered.of("steps for the sensitivity", added, num_steps)
        return audit_report.Finding(test, "not tested", says, covers=(of_units,))
    worst, step = max((max(norms), step) for step, norms in added.items())
    count = sum(map(len, added.values()))
    says = (
        f"At most {worst:.6g} of the clip norm, in {count} differences with and without a unit "
        f"(the largest one in step {step + 1}); rounding explains {rounding:.2g}."
    )
    outcome = "violated" if worst > 1.0 + rounding else "consistent"
    covers = audit_report.Covered.of("non-empty steps", added, num_steps)
    return audit_report.Finding(test, outcome, says, trials=count, covers=(covers,))
