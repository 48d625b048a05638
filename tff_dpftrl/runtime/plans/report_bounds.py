"""Refuses reports, and sums of groups' reports, that no honest devices can have made.

A server's plan bounds every tensor of a report (`plan_pb2.ReportBound`): each entry by an interval,
or the L2 norm of some tensors together. The bound of the sum of n reports is n times as large: for
entries by addition, for norms by the triangle inequality. A histogram, in which each device counts
once, is one-hot in a report and adds up to n in a sum. The parts of a sum that noise parties add to
are not checked: with the noise they can be anything.

**No honest report is refused.** Devices cut metrics to their intervals inside the plan's graph, and
intervals end at numbers of the tensor's dtype. A clipped update has a norm of at most C (1 -
`clipping.CLIP_MARGIN`) (1 + 2e-7), by the proof in `private_round.summation`. That margin of 1e-5
is far above the error of the norm that is computed here. An encoded update is a vector r of
integers plus a shift c in each entry. The device has tested ‖r‖² ≤ R² exactly. From a sum of n such
vectors n c is subtracted, and the rest has a norm of at most n R. Encoding rotates an update before
it rounds it, so the norm needs no decoding.

**Rounding.** The norm of d numbers, computed in float64, has a relative error of at most (d + 2)
2⁻⁵⁴, which is below `_ROUNDING` for d ≤ 10⁹. Integers of a sum are below 2³¹, exact.

Needs NumPy, and no TensorFlow.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.runtime.plans import plan_pb2, tensor_values

_ROUNDING = 1e-7
_ENTRIES_AT_ONCE = 1 << 17  # Entries of an array that are float64 at a time.


class OutOfBoundsError(ValueError):
    """Raised for a report, or a sum of reports, that honest devices cannot have made."""


class ReportBounds:
    """The bounds of reports in a server's plan, for one round where they follow the clip norm."""

    def __init__(self, plan: plan_pb2.ServerPlan, most_reports: int):
        """Checks that the plan bounds all of a report, and that the largest sum has room."""
        self._plan = plan
        self._scales: Mapping[str, float] = {"": 1.0}
        places = sorted(place for bound in plan.report_bounds for place in bound.tensors)
        if places != list(range(len(plan.update))):
            raise validation.UsageError(
                f"The plan of the task {plan.task!r} does not bound every tensor of a report: an "
                "older version has made it, and one device could spoil its sums. Make the task "
                "anew (tff-dpftrl task new), or end it with the version that made it."
            )
        self._check_room(most_reports)

    def for_round(self, model: bytes) -> ReportBounds:
        """Returns the bounds of devices that begin with a model, in bytes.

        They are these if none depends on the clip norm that the model holds.
        """
        wanted = {bound.norm.times for bound in self._plan.report_bounds} - {""}
        if not wanted:
            return self
        tensors = self._plan.prepare.outputs
        values = tensor_values.from_bytes(model, tensors, "model")
        made = copy.copy(self)
        made._scales = {
            **self._scales,
            **{
                tensor.label: float(value)
                for tensor, value in zip(tensors, values, strict=True)
                if tensor.label in wanted
            },
        }
        return made

    def check(self, update: Sequence[np.ndarray], num_devices: int = 1) -> None:
        """Refuses a report, or a sum of reports, that no honest devices can have made."""
        self._check(update, num_devices, self._plan.report_bounds)

    def check_sum(self, sums: Sequence[np.ndarray], num_devices: int) -> None:
        """Refuses a group's sum like `check`, except the parts that noise parties have added to."""
        self._check(sums, num_devices, [b for b in self._plan.report_bounds if not b.noised])

    def _check(
        self,
        update: Sequence[np.ndarray],
        num_devices: int,
        bounds: Iterable[plan_pb2.ReportBound],
    ) -> None:
        for bound in bounds:
            tensors = [update[place] for place in bound.tensors]
            if bound.HasField("entries"):
                for place, array in zip(bound.tensors, tensors, strict=True):
                    self._check_entries(place, array, bound.entries, num_devices)
            if bound.HasField("norm"):
                self._check_norm(tensors, bound.norm, num_devices)
            if bound.counts_once:
                self._check_counts(bound.tensors[0], tensors[0], num_devices)

    def _check_entries(
        self,
        place: int,
        array: np.ndarray,
        entries: plan_pb2.ReportBound.Entries,
        num_devices: int,
    ) -> None:
        least, largest = num_devices * entries.least, num_devices * entries.largest
        if array.size and not least <= array.min().item() <= array.max().item() <= largest:
            raise OutOfBoundsError(
                f"update, {self._plan.update[place].label}, has entries outside "
                f"[{least:.17g}, {largest:.17g}], the most that {_devices(num_devices)} can report."
            )

    def _check_counts(self, place: int, array: np.ndarray, num_devices: int) -> None:
        total = int(array.sum())
        if total != num_devices:
            raise OutOfBoundsError(
                f"update, {self._plan.update[place].label}, counts {total} devices: "
                f"{_devices(num_devices)} can only count {num_devices} in a histogram."
            )

    def _check_norm(
        self, tensors: Sequence[np.ndarray], norm: plan_pb2.ReportBound.Norm, num_devices: int
    ) -> None:
        largest = num_devices * norm.largest * self._scales[norm.times]
        squared = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            for array in tensors:
                flat = array.reshape(-1)
                for begin in range(0, len(flat), _ENTRIES_AT_ONCE):
                    part = flat[begin : begin + _ENTRIES_AT_ONCE].astype(np.float64, copy=False)
                    if norm.centre:
                        part = part - num_devices * norm.centre
                    squared += float(part @ part)
        if not math.sqrt(squared) <= largest * (1 + _ROUNDING):
            raise OutOfBoundsError(
                f"update is not clipped to the norm {largest:g}, the most that "
                f"{_devices(num_devices)} can report."
            )

    def _check_room(self, most_reports: int) -> None:
        plan = self._plan
        num_added = len(plan.update) - len(plan.secure_sums)
        for bound in plan.report_bounds:
            if not bound.HasField("entries"):
                continue
            largest = max(-bound.entries.least, bound.entries.largest) * most_reports
            for place in bound.tensors:
                tensor = plan.update[place]
                room = float(most_of(tensor.dtype))
                rule = plan.secure_sums[place - num_added] if place >= num_added else None
                if rule is not None and rule.HasField("modulus"):
                    room = rule.modulus - 1
                if not largest <= room:
                    raise validation.UsageError(
                        f"The sum of {tensor.label} over {most_reports} reports can be "
                        f"{largest:g}, and there is room for {room:g}: lower goal_count or "
                        "over_selection, or bound the metric more closely."
                    )


def most_of(dtype: str) -> float | int:
    """Returns the largest number of a dtype."""
    if np.dtype(dtype).kind in "iu":
        return np.iinfo(dtype).max
    return float(np.finfo(dtype).max)


def _devices(number: int) -> str:
    return "an honest device" if number == 1 else f"{number} honest devices"
