"""Finds client values that reach the server of a TFF process without a private release.

`model_aggregator=` of a learning process covers the model update and nothing else.
Other aggregates (training metrics, weights of clients, gradients for the client work,
the estimates of a wrapper) reach the state or the metrics exactly, however large the
noise. `check_process` walks the compiled process and names them.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.aggregators.process_check import dataflow
from tff_dpftrl.aggregators.process_check import labels as labels_lib
from tff_dpftrl.execution import tff_names

_MAX_TYPE_LENGTH = 80


class LeakKind(enum.Enum):
    """Form in which client values reach the server; the value describes it."""

    EXACT = "aggregated without noise"
    METRICS = "metrics: exact, not covered"
    OTHER_NOISE = "randomised on the way, but by nothing that this package vouches for"
    NOT_PRIVATE = "released by this package, but not privately"
    COHORT_SIZE = "the number of clients, exact"
    NOT_KEPT = "aggregated without noise, though no output depends on it"


_REMEDIES = {
    LeakKind.METRICS: (
        "Show metrics to the operator only and allow this path, or pass a metrics_aggregator "
        "or measurements that leave it out."
    ),
    LeakKind.OTHER_NOISE: (
        "If it is another private mechanism, account for it by its own means and allow this path."
    ),
    LeakKind.NOT_PRIVATE: "Build the aggregator with noise and without deterministic_seed.",
    LeakKind.COHORT_SIZE: (
        "Allow this path where the number of clients is public, as it is for DP-FTRL with fixed "
        "cohorts; never where privacy comes from sampling."
    ),
    LeakKind.NOT_KEPT: "Aggregate only what is used, or allow the path '' if it may be seen.",
}
_REMEDY_BY_PATH = (
    (
        "state.client_work",
        "The client work has an aggregator of its own: pass one of this package's for it too "
        "(full_gradient_aggregator of Mime Lite) and account for both. An evaluation's metrics "
        "stay exact.",
    ),
    (
        "state.aggregator",
        "Something in or around the aggregator keeps exact client values, as an estimate of their "
        "norms does: clip or zero with fixed norms, or use build_adaptive_dp_ftrl_aggregator.",
    ),
)
_REMEDY = "Pass one of this package's aggregators for it, or leave it out."


@dataclasses.dataclass(frozen=True)
class Leak:
    """Client values, of one client's `value_type`, that reach the server without a private release.

    `kind` is the form of the values, `how` the name of the aggregation, such as "federated_sum".
    `paths` are the places of the values in the result of the process's `next`, such as
    "state.client_work"; () if no output depends on them. `remedy` is advice on what to change.
    """

    kind: LeakKind
    paths: tuple[str, ...]
    value_type: tff_names.Type
    how: str
    remedy: str

    def __str__(self) -> str:
        described = self.value_type.compact_representation()
        if len(described) > _MAX_TYPE_LENGTH:
            described = described[: _MAX_TYPE_LENGTH - 3] + "..."
        where = ", ".join(self.paths) or "no output"
        return f"{where}: {self.kind.value} ({self.how} of {described}). {self.remedy}"


@dataclasses.dataclass(frozen=True)
class ProcessCheck:
    """Leaks that no release of this package covers, and the private releases of one round.

    Each release is a separate mechanism: a guarantee for the process has to account for all of
    them.
    """

    leaks: tuple[Leak, ...]
    releases: tuple[dataflow.PrivateRelease, ...]

    def not_allowed(self, allow: Collection[str] = ()) -> tuple[Leak, ...]:
        """Returns the leaks that reach other places than the paths in `allow`.

        These paths of the result may hold exact client values, because only the operator sees them:
        `["metrics.client_work"]` allows all below it. "" allows aggregates that no output depends
        on.
        """
        return tuple(
            leak
            for leak in self.leaks
            if not all(_is_below(path, allow) for path in leak.paths or ("",))
            # Such a leak has no path: it is in the results of both releases.
            or (not leak.paths and leak.kind is not LeakKind.NOT_KEPT)
        )

    def raise_if_any(self, allow: Collection[str] = ()) -> None:
        """Refuses a process with leaks that `not_allowed` returns; the error has their remedies."""
        leaks = self.not_allowed(allow)
        if leaks:
            raise validation.UsageError(
                "Client values reach the server other than through a private release:\n"
                + "\n".join(f"- {leak}" for leak in leaks)
            )

    def __str__(self) -> str:
        lines = [f"{len(self.releases)} private release(s) in a round"]
        lines += [f"  noise multiplier {release.noise_multiplier:g}" for release in self.releases]
        lines += [f"{len(self.leaks)} leak(s)"]
        return "\n".join(lines + [f"  {leak}" for leak in self.leaks])


def check_process(process: Any) -> ProcessCheck:
    """Names every client value that reaches the server other than through a private release.

    It follows the clients' values through the compiled computation `process.next`. A sum
    counts as private only if each client's part comes from the clipping of one of this
    package's aggregators, and nothing but the release of the same aggregator depends on
    it; both are recognised by their exact TensorFlow graphs. Cases that the check cannot
    decide are reported. So are sums to which TFF's `DifferentiallyPrivateFactory` adds
    noise, as `LeakKind.OTHER_NOISE`.

    The aggregators must have been built in this Python process; one that was loaded from
    a file is reported as if it were not private. No leak does not mean that a guarantee
    holds. It means that the guarantees of the releases found are all that is needed. The
    check does not cover side effects of a computation, such as printing. Of a private
    aggregator's `sum_factory` it follows the results only. It cannot see whether the
    state that an aggregator returns is kept for the next round; if not, every round is the
    first one, and the noise is not that of the strategy. Two releases of one round with the
    same state are named.

    Args:
      process: Process with a computation `next`, such as a
        `tff.learning.templates.LearningProcess` or an aggregation process; or a
        `tff.Computation`. Arguments placed at the clients are their data.

    Returns:
      The leaks and the private releases.

    Raises:
      ValueError: If `process` is neither a process nor a computation.
    """
    computation = getattr(process, "next", process)
    if not isinstance(computation, tff_names.ConcreteComputation):
        raise validation.UsageError(
            f"process must have a computation next, or be a tff.Computation, got {process!r}: "
            "of a factory, check the process that its create returns, or the learning process."
        )
    trace = dataflow.trace(computation)
    reached: dict[Any, set[tuple[str | int, ...]]] = collections.defaultdict(set)
    labels_of: dict[Any, set[labels_lib.Label]] = collections.defaultdict(set)
    for path, labels in trace.outputs.items():
        for label in labels:
            source = _source(label)
            reached[source].add(path)
            labels_of[source].add(label)
    leaks = [_leak(labels_of[source], reached[source], trace) for source in reached]
    leaks += _unseen(trace, reached)
    order = list(LeakKind)
    leaks.sort(key=lambda leak: (order.index(leak.kind), leak.paths))
    return ProcessCheck(tuple(leaks), tuple(trace.releases))


def _source(label: labels_lib.Label) -> tuple[Any, ...]:
    """Returns the key that the labels of one leak have in common."""
    match label:
        case labels_lib.Aggregate():
            return "aggregation", label.aggregation, label.depends_on_data
        case labels_lib.Total():
            return "total", label.call
    return ("client",)


def _leak(
    labels: Collection[labels_lib.Label],
    paths: Collection[tuple[str | int, ...]],
    trace: dataflow.Trace,
) -> Leak:
    """Describes the leak of one source of labels."""
    only_metrics = all(_is_metric(path) for path in paths)
    kind = LeakKind.METRICS if only_metrics else LeakKind.EXACT
    label, reason = next(iter(labels)), None
    how, value_type = "a value at the clients", tff_names.StructType([])
    if isinstance(label, labels_lib.Total):
        how, value_type = "sum of clipped values", trace.contributions[label.call]
        reasons = {x.not_private_because for x in labels if isinstance(x, labels_lib.Total)}
        if None not in reasons:
            kind, reason = LeakKind.NOT_PRIVATE, " and ".join(sorted(filter(None, reasons)))
    elif isinstance(label, labels_lib.Aggregate):
        aggregation = trace.aggregations[label.aggregation]
        how, value_type = aggregation.intrinsic, aggregation.value_type
        if not label.depends_on_data:
            kind = LeakKind.COHORT_SIZE
        elif not only_metrics and _has_only_noised(label.aggregation, trace):
            kind = LeakKind.OTHER_NOISE
    shown = tuple(_shown(paths, trace.outputs))
    remedy = _REMEDIES.get(kind) or _remedy(shown)
    if reason is not None:
        remedy = f"Here {reason}. {remedy}"
    return Leak(kind, shown, value_type, how, remedy)


def _has_only_noised(aggregation: int, trace: dataflow.Trace) -> bool:
    """Checks whether random numbers came in on every way into an output that is no metric."""
    return all(
        label.is_randomised
        for path, labels in trace.outputs.items()
        for label in labels
        if isinstance(label, labels_lib.Aggregate)
        and label.aggregation == aggregation
        and label.depends_on_data
        and not _is_metric(path)
    )


def _unseen(trace: dataflow.Trace, reached: Collection[tuple[Any, ...]]) -> Iterator[Leak]:
    """Yields the leaks that show in no output's labels."""
    remedy = _REMEDIES[LeakKind.NOT_KEPT]
    for number, aggregation in enumerate(trace.aggregations):
        if aggregation.has_data and ("aggregation", number, True) not in reached:
            how, value_type = aggregation.intrinsic, aggregation.value_type
            yield Leak(LeakKind.NOT_KEPT, (), value_type, how, remedy)
    for call in sorted(trace.released_twice):
        how = "one sum of clipped values for two releases"
        yield Leak(LeakKind.EXACT, (), trace.contributions[call], how, _REMEDY)
    for call in sorted(trace.shares_state - trace.released_twice):
        how = "two releases from the same state, of which the accounting has one"
        remedy = "Give every aggregation a state of its own."
        yield Leak(LeakKind.EXACT, (), trace.contributions[call], how, remedy)


def _remedy(paths: Sequence[str]) -> str:
    for prefix, remedy in _REMEDY_BY_PATH:
        if any(_is_below(path, [prefix]) for path in paths):
            return remedy
    return _REMEDY


def _shown(
    paths: Collection[tuple[str | int, ...]], all_paths: Collection[tuple[str | int, ...]]
) -> Iterator[str]:
    """Writes paths with dots; a part of the state stands for all paths below it."""
    paths = set(paths)

    def visit(prefix: tuple[str | int, ...]) -> Iterator[str]:
        below = [path for path in all_paths if path[: len(prefix)] == prefix]
        meant = paths.intersection(below)
        if not meant:
            return
        is_part = len(prefix) > (1 if prefix[:1] == ("state",) else 0) and not _is_metric(prefix)
        if (is_part and len(meant) == len(below)) or below == [prefix]:
            yield _dotted(prefix)
            return
        for part in dict.fromkeys(path[len(prefix)] for path in below):
            yield from visit((*prefix, part))

    return visit(())


def _dotted(path: tuple[str | int, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "result"


def _is_metric(path: tuple[str | int, ...]) -> bool:
    return bool(path) and path[0] in ("metrics", "measurements")


def _is_below(path: str, prefixes: Collection[str]) -> bool:
    return any(
        path == prefix or (prefix and path.startswith((prefix + ".", prefix + "[")))
        for prefix in prefixes
    )
