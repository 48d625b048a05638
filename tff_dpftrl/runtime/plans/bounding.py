"""Derives the bounds of a report from what the maker of a task knows of its process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.discretization import grid
from tff_dpftrl.models import metric_grid
from tff_dpftrl.runtime.plans import plan_pb2, report_bounds

LARGEST_METRIC = 2.0**40
"""Absolute value that a device's metric is cut to where `ReportLimits` does not name it."""

# Last parts of the labels of secure sums.
_COUNT = "count"  # Label in every encoding: 1 for each device.
DOUBLED = "doubled"
"""Name of the count of `private_round.secure_sums.HalfBitSum`: 0, 1 or 2."""
VECTOR = "vector"
"""Name of the vector of `private_round.secure_sums.VectorSum`."""

# Labels of what the rounds of `learning.rounds` sum in the clear. TFF's begin with a number.
_OWN = "plain/"
_CONTRIBUTION = "plain/update/"
_UPDATE = "plain/update/update/"
_SCALARS = {
    "bit": (-0.5, 0.5),  # Bit of adaptive clipping.
    "weight": (0.0, 1.0),
    "clients": (0.0, 1.0),
    "non_finite_clients": (0.0, 1.0),
}
"""Least and largest value of what clients send beside the update, by name."""


@dataclasses.dataclass(frozen=True)
class ReportLimits:
    """Upper limits of what an honest device of a task reports."""

    # L2 norm that the update is clipped to. For a norm that the process learns, the name of the
    # broadcast scalar that holds it. None if the update is not clipped.
    clip_norm: float | str | None = None
    encoding: grid.GridEncoding | None = None  # Encoding for secure sums; None if there is none.
    # Largest value of each metric in one report, by the last parts of its label; such a metric is
    # never negative. Where metrics are summed securely, the largest integer that encodes it. Other
    # metrics are cut to `LARGEST_METRIC`, or less where the sum of `most_reports` has no room for
    # that.
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    names_all_metrics: bool = False  # Whether a metric that is not in `metrics` is refused instead.
    most_reports: int = 100_000  # Largest number of reports in one sum.
    grids: Mapping[str, metric_grid.MetricGrid] = dataclasses.field(default_factory=dict)

    @property
    def histograms(self) -> dict[str, metric_grid.MetricGrid]:
        """Grids of the histograms, by the last part of their labels."""
        return {name + metric_grid.SUFFIX: grid for name, grid in self.grids.items()}

    def of_metric(self, label: str) -> float | None:
        """Returns the largest value of a metric by its label; None if there is none."""
        parts = label.split("/")
        ends = ("/".join(parts[first:]) for first in range(len(parts)))
        known = next((self.metrics[end] for end in ends if end in self.metrics), None)
        if known is None and self.names_all_metrics:
            raise UnboundedError(
                f"devices report {label!r}, which is no metric of the model and no part of its "
                "update: leave it out, or let it be a metric with a bound."
            )
        return known


class UnboundedError(validation.UsageError):
    """Raised for a process whose reports have no known bounds; the message says why."""


def bound_reports(
    server: plan_pb2.ServerPlan, kind: plan_pb2.TaskKind, limits: ReportLimits
) -> None:
    """Adds the bounds of a report to a server's plan, and lowers `largest_entry` of secure sums."""
    num_added = len(server.update) - len(server.secure_sums)
    bounds = list(_bounds_in_the_clear(server, num_added, kind, limits))
    for place in range(num_added, len(server.update)):
        rule = server.secure_sums[place - num_added]
        bounds.append(_secure_bound(server.update[place], place, rule, limits))
    server.report_bounds.extend(bounds)
    _declare_histograms(server, limits.histograms)


def _declare_histograms(
    server: plan_pb2.ServerPlan, by_name: Mapping[str, metric_grid.MetricGrid]
) -> None:
    """Adds the histograms among the metrics of a round, and that reports count a device once."""
    for bound in server.report_bounds:
        names = [_name(server.update[place]) for place in bound.tensors]
        bound.counts_once = len(names) == 1 and names[0] in by_name
    for tensor in server.finish.outputs[len(server.prepare.inputs) :]:
        if _name(tensor) in by_name:
            edges = by_name[_name(tensor)].edges
            server.histograms.add(label=tensor.label, edges=edges)


def _name(tensor: plan_pb2.Tensor) -> str:
    """Returns the last part of a tensor's label."""
    return tensor.label.rpartition("/")[2]


def _bounds_in_the_clear(
    server: plan_pb2.ServerPlan, num_added: int, kind: plan_pb2.TaskKind, limits: ReportLimits
) -> Iterator[plan_pb2.ReportBound]:
    tensors = server.update[:num_added]
    update = range(0)
    if kind != plan_pb2.EVALUATION and limits.encoding is None:
        update = _update_in(tensors, server.get_weights.outputs, limits)
    if update:
        norm = _largest_norm(server, tensors[update[0]].dtype, limits)
        yield plan_pb2.ReportBound(tensors=update, norm=norm)
    for place, tensor in enumerate(tensors):
        if place not in update:
            yield _metric(tensor, place, limits)


def _update_in(
    tensors: Sequence[plan_pb2.Tensor],
    weights: Sequence[plan_pb2.Tensor],
    limits: ReportLimits,
) -> range:
    """Finds the update, which has the shapes of the model's trainable weights.

    Rounds of this package name it. In rounds of TFF, it is the last group of tensors with these
    shapes.
    """
    shapes = [list(w.shape) for w in weights if w.label.partition("/")[0] == "trainable"]
    dtypes = ("float64",) if limits.clip_norm is not None else ("float32", "float64")
    is_own = any(tensor.label.startswith(_OWN) for tensor in tensors)
    firsts = range(len(tensors) - len(shapes), -1, -1)
    if is_own:
        named = [place for place, t in enumerate(tensors) if t.label.startswith(_UPDATE)]
        firsts = range(named[0], named[0] + 1) if len(named) == len(shapes) else range(0)
    for first in firsts:
        candidates = tensors[first : first + len(shapes)]
        same_shapes = [list(t.shape) for t in candidates] == shapes
        if same_shapes and all(t.dtype in dtypes for t in candidates):
            return range(first, first + len(shapes))
    half = sorted({t.dtype for t in tensors} & {"float16", "bfloat16"})
    if half and limits.clip_norm is None:
        raise UnboundedError(
            f"its update has tensors of {' and '.join(half)}, whose sum over many devices would "
            "overflow: make the model's weights float32, or train with a mechanism, whose sums are "
            "float64."
        )
    if limits.clip_norm is None and not is_own:
        return range(0)
    raise UnboundedError(
        f"none of its {len(tensors)} tensors in the clear are float64 of the shapes of the model's "
        "trainable weights; leave out report_limits.clip_norm if the process does not clip, or "
        "give report_limits.encoding if it encodes."
    )


def _largest_norm(
    server: plan_pb2.ServerPlan, dtype: str, limits: ReportLimits
) -> plan_pb2.ReportBound.Norm:
    if limits.clip_norm is None:  # Sums must stay finite, and nothing else.
        largest = float(report_bounds.most_of(dtype)) / (2 * limits.most_reports)
        return plan_pb2.ReportBound.Norm(largest=largest)
    if not isinstance(limits.clip_norm, str):
        return plan_pb2.ReportBound.Norm(largest=limits.clip_norm)
    labels = [
        tensor.label
        for tensor in server.prepare.outputs
        if _name(tensor) == limits.clip_norm and not tensor.shape
    ]
    if len(labels) != 1:
        raise UnboundedError(
            f"report_limits.clip_norm is {limits.clip_norm!r}, and devices get {len(labels)} "
            "scalars of that name."
        )
    return plan_pb2.ReportBound.Norm(largest=1.0, times=labels[0])


def _metric(tensor: plan_pb2.Tensor, place: int, limits: ReportLimits) -> plan_pb2.ReportBound:
    if tensor.label.startswith(_CONTRIBUTION):
        if (name := tensor.label.removeprefix(_CONTRIBUTION)) not in _SCALARS or tensor.shape:
            raise UnboundedError(f"{tensor.label} is summed in the clear, and nothing bounds it.")
        least, largest = _SCALARS[name]
    elif _name(tensor) in limits.histograms:
        least, largest = 0.0, 1.0
    elif tensor.label.replace("/", "").isdigit() and not tensor.shape:
        # A metric would have a name. The bit of adaptive clipping is ±1/2; other tensors without
        # a name are weights of clients and counts of devices.
        is_bit = tensor.dtype == "float64" and isinstance(limits.clip_norm, str)
        least, largest = (-0.5, 0.5) if is_bit else (0.0, 1.0)
    elif (known := limits.of_metric(tensor.label)) is not None:
        least, largest = 0.0, known
    else:
        largest = LARGEST_METRIC
        least = 0.0 if tensor.dtype.startswith("uint") else -largest
    room = report_bounds.most_of(tensor.dtype) / limits.most_reports
    largest = _rounded_down(min(largest, room), tensor.dtype)
    return _entries(place, max(least, -largest), largest)


def _secure_bound(
    tensor: plan_pb2.Tensor, place: int, rule: plan_pb2.SecureSum, limits: ReportLimits
) -> plan_pb2.ReportBound:
    name, encoding = _name(tensor), limits.encoding
    if rule.HasField("largest_entry"):
        is_histogram = _name(tensor) in limits.histograms
        known = None if is_histogram else limits.of_metric(tensor.label)
        largest = rule.largest_entry if known is None else min(known, rule.largest_entry)
        if known is not None:
            rule.largest_entry = int(largest)
        return _entries(place, 0.0, _rounded_down(largest, tensor.dtype))
    if encoding is not None and name == VECTOR:
        if (list(tensor.shape), rule.modulus) != ([encoding.padded_dim], encoding.sum_modulus):
            raise UnboundedError(f"report_limits.encoding is not that of {tensor.label}.")
        bound = _entries(place, 0.0, 2.0 * encoding.max_coordinate)
        bound.norm.largest = math.sqrt(encoding.max_squared_norm)
        bound.norm.centre = encoding.max_coordinate
        bound.noised = encoding.noise_ratio > 0
        return bound
    if encoding is not None and name in (_COUNT, DOUBLED):
        bound = _entries(place, *((1.0, 1.0) if name == _COUNT else (0.0, 2.0)))
        bound.noised = encoding.noise_ratio > 0 and name == DOUBLED
        return bound
    raise UnboundedError(
        f"{tensor.label} is summed modulo {rule.modulus}, and nothing bounds what a device may "
        "send: give report_limits.encoding, the encoding of its updates."
    )


def _entries(place: int, least: float, largest: float) -> plan_pb2.ReportBound:
    entries = plan_pb2.ReportBound.Entries(least=least, largest=largest)
    return plan_pb2.ReportBound(tensors=[place], entries=entries)


def _rounded_down(value: float, dtype: str) -> float:
    """Rounds a positive value down to a number of a dtype that float64 has, too."""
    if np.dtype(dtype).kind in "iu":
        value = math.floor(value)
        rounded = float(value)
        return rounded if rounded <= value else math.nextafter(rounded, 0.0)
    rounded = np.dtype(dtype).type(value)
    # As float: NumPy 2 compares a float32 with a number of Python by rounding the number.
    is_below = float(rounded) <= value
    return float(rounded if is_below else np.nextafter(rounded, np.dtype(dtype).type(0)))
