"""Expectations of an engineer on the simulated rounds of a task, beside the built-in tests.

    wanted = (
        loss_below(6.5),
        metric_above("accuracy", 0.1),
        update_norm_between(1e-3, 10.0),
        same_in_every_run(),
        expect("the loss falls by a half", lambda trial: trial.metric("loss")[-1] < 3.0),
    )

Bonawitz et al. 2019, section 7.1: tasks are validated against test data and expectations of the
engineer, similar to unit tests. Needs neither TensorFlow nor protocol buffers to be imported.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.runtime.device import text_examples

if TYPE_CHECKING:
    from tff_dpftrl.runtime.plans import plan_pb2

UPDATE = "update"
"""Name of the norm of an update, in texts of expectations."""

_COMPARISON = re.compile(r"\s*([^\s<>=,]+)\s*([<>])\s*([^\s<>=,]+)\s*")
_UNKNOWN_FEATURE = "a feature that no plan knows"
_SMALL_NORM = 1e-3  # Differences of tensors with a smaller norm are relative to this one.


class CannotEvaluateError(validation.UsageError):
    """Raised if an expectation cannot be evaluated; the message says why."""


class Outcome(NamedTuple):
    """Result of an expectation.

    Attributes:
      holds: Whether the expectation is met.
      measured: Measured numbers, for the reader of the result.
    """

    holds: bool
    measured: str


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """Simulated rounds of one variant of a device plan on proxy data, without noise.

    Attributes:
      plan: Variant of the device plan.
      proxies: Serialized `tf.train.Example`s of each simulated device.
      metrics: Metrics of each round, by label.
      changes: L2 norm by which the proxies' updates changed the model in each round.
      update_of: Function from serialized examples to the tensors of a device's update of the first
        model, in the order of `plan.graph.outputs`. Examples are shuffled with the same seed in
        every call.
    """

    plan: plan_pb2.DevicePlan
    proxies: Sequence[Sequence[bytes]]
    metrics: Sequence[Mapping[str, np.ndarray]]
    changes: Sequence[float]
    update_of: Callable[[Sequence[bytes]], Sequence[np.ndarray]]

    def metric(self, name: str) -> tuple[float, ...]:
        """Returns a metric of each round.

        Args:
          name: Label of the metric, or its last parts: "client_work/train/loss", "train/loss" or
            "loss".
        """
        known = list(self.metrics[0])
        labels = [label for label in known if f"/{label}".endswith(f"/{name}")]
        labels = [name] if name in labels else labels
        if len(labels) != 1:
            problem = f"several metrics {name!r}: {labels}" if labels else f"no metric {name!r}"
            raise CannotEvaluateError(f"there is {problem}; the task has {known}")
        (label,) = labels
        values = [np.asarray(metrics[label]) for metrics in self.metrics]
        if values[0].size != 1 or values[0].dtype.kind not in "biuf":
            raise CannotEvaluateError(
                f"the metric {label!r} has shape {list(values[0].shape)} and dtype "
                f"{values[0].dtype}, and is no single number"
            )
        return tuple(float(value.item()) for value in values)

    def summary(self) -> str:
        """Returns all metrics that are single numbers, and the changes, of all rounds."""
        parts = []
        for label in self.metrics[0]:
            try:
                parts.append(f"{label} {_listed(self.metric(label))}")
            except CannotEvaluateError:
                continue
        return "; ".join([*parts, f"{UPDATE} {_listed(self.changes)}"])


Check: TypeAlias = Callable[[Trial], "bool | Outcome"]
"""Function that tells whether an expectation is met."""


@dataclasses.dataclass(frozen=True)
class Expectation:
    """Expectation of an engineer on a task; `check` tells whether it is met."""

    description: str
    check: Check

    def __post_init__(self):
        if not isinstance(self.description, str) or not self.description.strip():
            raise validation.UsageError(
                f"description must be words that say what is expected, got {self.description!r}."
            )
        if not callable(self.check):
            raise validation.UsageError(
                f"The check of the expectation {self.description!r} must be a function of a "
                f"trial, got {self.check!r}."
            )

    def outcome(self, trial: Trial) -> Outcome:
        """Evaluates the expectation."""
        try:
            result = self.check(trial)
        except CannotEvaluateError:
            raise
        except Exception as error:  # The engineer's own code may raise anything.
            raise CannotEvaluateError(f"it raises {validation.one_line(error)}") from error
        outcome = result if isinstance(result, Outcome) else Outcome(result, "")
        if not isinstance(outcome.holds, (bool, np.bool_)):
            raise CannotEvaluateError(
                f"it must return True or False, got {outcome.holds!r:.100} "
                f"({type(outcome.holds).__name__})"
            )
        return Outcome(bool(outcome.holds), outcome.measured or trial.summary())


def expect(description: str, check: Check) -> Expectation:
    """Makes an expectation of a function.

    Args:
      description: Description in a few words.
      check: Function from a `Trial` to True, False, or an `Outcome` with the numbers to show. A
        failure shows all metrics otherwise.

    Returns:
      The expectation.

    Raises:
      ValueError: If the description is empty, or `check` is no function.
    """
    return Expectation(description, check)


def loss_below(largest: float, name: str = "loss") -> Expectation:
    """Expects a loss below a number in the last simulated round.

    Args:
      largest: Number that the loss must stay below.
      name: Label of the loss, or its last parts.
    """
    return metric_below(name, largest)


def metric_below(name: str, largest: float) -> Expectation:
    """Expects a metric below a number in the last simulated round.

    Args:
      name: Label of the metric, or its last parts.
      largest: Number that the metric must stay below.
    """
    return _compared(name, "<", validation.number("largest", largest))


def metric_above(name: str, least: float) -> Expectation:
    """Expects a metric above a number in the last simulated round.

    Args:
      name: Label of the metric, or its last parts.
      least: Number that the metric must exceed.
    """
    return _compared(name, ">", validation.number("least", least))


def update_norm_between(least: float, largest: float) -> Expectation:
    """Expects that the updates change the model by an L2 norm in a range, in every simulated round.

    Args:
      least: Smallest L2 norm by which the proxies' updates change the model in a round.
      largest: Largest such norm.
    """
    least = validation.number("least", least, at_least=0)
    largest = validation.number("largest", largest, above=least)

    def check(trial: Trial) -> Outcome:
        holds = all(least <= change <= largest for change in trial.changes)
        return Outcome(holds, f"{UPDATE} {_listed(trial.changes)}")

    return Expectation(f"{least:g} <= {UPDATE} <= {largest:g}", check)


def same_in_every_run(within: float = 0.0) -> Expectation:
    """Expects that a device's examples and seed give the same update whenever it computes it.

    Args:
      within: Largest relative difference of two updates; 0 for the same bits.
    """
    return _unchanged("the update is the same in every run", lambda examples: examples, within)


def order_of_examples_is_ignored(within: float = 1e-5) -> Expectation:
    """Expects that a device's update does not depend on the order of its examples.

    It cannot be evaluated if the plan shuffles examples.

    Args:
      within: Largest relative difference of two updates, as sums in another order have.
    """

    def reversed_examples(examples: Sequence[bytes]) -> Sequence[bytes]:
        return list(reversed(examples))

    unshuffled = _unchanged("the order of examples is ignored", reversed_examples, within)

    def check(trial: Trial) -> bool | Outcome:
        from tff_dpftrl.runtime.plans import plan_pb2

        if trial.plan.seed_policy == plan_pb2.DEVICE_DRAWS:
            raise CannotEvaluateError(
                "the plan shuffles a device's examples: make it without shuffling"
            )
        return unshuffled.check(trial)

    return Expectation(unshuffled.description, check)


def unknown_features_are_ignored() -> Expectation:
    """Expects that features of examples that the plan does not name do not change an update."""
    # The bytes of two messages in a row are those of both merged.
    extra = text_examples.encode({_UNKNOWN_FEATURE: ["anything"]})
    return _unchanged(
        "unknown features are ignored", lambda examples: [one + extra for one in examples], 0.0
    )


def from_text(text: str) -> tuple[Expectation, ...]:
    """Reads expectations such as "loss < 6.5, top1_in_vocab > 0.1, update < 10".

    A metric, by its label or the last parts of it, is that of the last simulated round. "update",
    the L2 norm by which the proxies' updates change the model, is that of every round.
    """
    return tuple(_of_comparison(part) for part in text.split(","))


def _of_comparison(text: str) -> Expectation:
    found = _COMPARISON.fullmatch(text)
    problem = validation.UsageError(
        f"expect must be comparisons such as 'loss < 6.5, top1_in_vocab > 0.1, {UPDATE} < 10', got "
        f"{text.strip()!r}: give the name of a metric, < or >, and a number."
    )
    if found is None:
        raise problem
    name, sign, number = found.groups()
    try:
        limit = validation.number("expect", float(number))
    except ValueError:
        raise problem from None
    return _compared(name, sign, limit)


def _compared(name: str, sign: str, limit: float) -> Expectation:
    """Compares a metric of the last round, or updates of all rounds, with a limit."""
    holds = operator.lt if sign == "<" else operator.gt

    def check(trial: Trial) -> Outcome:
        values = trial.changes if name == UPDATE else trial.metric(name)
        compared = values if name == UPDATE else values[-1:]
        return Outcome(all(holds(value, limit) for value in compared), f"{name} {_listed(values)}")

    return Expectation(f"{name} {sign} {limit:g}", check)


def _unchanged(
    description: str, change: Callable[[Sequence[bytes]], Sequence[bytes]], within: float
) -> Expectation:
    """Expects the same update of each proxy after a change of its examples."""
    within = validation.number("within", within, at_least=0)

    def check(trial: Trial) -> Outcome:
        apart = [
            largest_difference(
                trial.update_of(examples), trial.update_of(change(examples)), trial.plan
            )
            for examples in trial.proxies
        ]
        measured = f"relative difference of two updates {max(apart):.3g}, at most {within:g} wanted"
        return Outcome(max(apart) <= within, measured)

    return Expectation(description, check)


def largest_difference(
    one: Sequence[np.ndarray],
    other: Sequence[np.ndarray],
    plan: plan_pb2.DevicePlan,
    *,
    steps: int = 0,
) -> float:
    """Returns the largest relative difference of a tensor of two updates.

    It is the ratio of a difference's L2 norm to that of the tensor in `one`, or to 0.001 if that is
    larger; infinity if an entry is not finite in one of the updates only. Differences of tensors
    that are summed with a modulus are taken modulo it, and `steps` by which rounding may move an
    entry count as no difference.
    """
    rules: Iterable[plan_pb2.SecureSum | None] = [
        *[None] * (len(one) - len(plan.secure_sums)),
        *plan.secure_sums,
    ]
    return max(
        (_difference(a, b, rule, steps) for a, b, rule in zip(one, other, rules, strict=True)),
        default=0.0,
    )


def _difference(
    one: np.ndarray, other: np.ndarray, rule: plan_pb2.SecureSum | None, steps: int
) -> float:
    if np.array_equal(one, other, equal_nan=one.dtype.kind == "f"):
        return 0.0
    if one.shape != other.shape:
        return float("inf")
    if rule is not None and rule.modulus:
        half = rule.modulus // 2
        size = (one.astype(np.int64) + half) % rule.modulus - half
        apart = (other.astype(np.int64) - one.astype(np.int64) + half) % rule.modulus - half
        apart = np.maximum(np.abs(apart) - steps, 0)
    else:
        size, apart = one.astype(float), other.astype(float) - one.astype(float)
    apart, size = (float(np.linalg.norm(array.astype(float))) for array in (apart, size))
    ratio = apart / max(size, _SMALL_NORM)
    return ratio if np.isfinite(ratio) else float("inf")


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
