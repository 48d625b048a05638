"""The server's sums of a task's reports, as its plan says."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.runtime.actors import population as population_lib
from tff_dpftrl.runtime.plans import (
    report_bounds,
    rounded_updates,
    secure_report,
    server_work,
)
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.secure_sums import vectors


@dataclasses.dataclass
class Total:
    """The sum of some reports; it can be pickled."""

    sums: server_work.Sums  # Sums of the updates' tensors.
    strides: np.ndarray  # Sum of the first participation vectors, int64.
    times: np.ndarray  # Sum of the second participation vectors, int64.


class PlanSummation(population_lib.Summation):
    """Sum of `wire_pb2.Report`s: updates as the plan says, participation vectors beside them."""

    def __init__(self, work: server_work.ServerWork, most_reports: int):
        """Takes the server's part of a task."""
        self._work = work
        plan = work.plan
        rounded_updates.check_places(plan.rounded, plan.update, len(plan.secure_sums))
        self._bounds = report_bounds.ReportBounds(plan, most_reports)
        self._buckets = secure_report.buckets_of(work.plan.participation)
        self._too_soon = self._buckets.below(work.plan.participation.min_sep_rounds)

    @override
    def zero(self) -> Total:
        strides, times = (np.zeros(shape, np.int64) for shape in self._buckets.shapes)
        return Total(self._work.zero(), strides, times)

    @override
    def for_round(self, model: bytes) -> PlanSummation:
        """Makes a summation for the clip norm that a model holds, if it is learned."""
        made = copy.copy(self)
        made._bounds = self._bounds.for_round(model)
        return made

    @override
    def accumulate(self, total: Total, payload: wire_pb2.Report) -> Total:
        try:
            strides, times = (
                np.array(values, np.int64) for values in (payload.strides, payload.times)
            )
            self._buckets.check_one_hot(strides, times)
            self._check_stride(strides)
            update = rounded_updates.read(payload.update, payload.scales, self._work.plan)
            self._work.check_update(update)
            self._bounds.check(update)
            total.sums = self._work.add(total.sums, update, keeps_sums=False)
        except ValueError as error:  # Another shape, not finite, out of bounds, or not one-hot.
            raise population_lib.UnusableReport(str(error)) from None
        total.strides += strides
        total.times += times
        return total

    def _check_stride(self, strides: np.ndarray) -> None:
        """Refuses a stride below the declared one, which no device with a working timer has."""
        if strides[1 : 1 + self._too_soon].any():
            raise validation.UsageError(
                "strides says that the device has not rested as the plan asks."
            )

    @override
    def merge(self, total: Total, other: Total) -> Total:
        total.sums = self._work.merge(total.sums, other.sums, keeps_one=False)
        total.strides += other.strides
        total.times += other.times
        return total


class SecureSummation(population_lib.Summation):
    """Sum of groups' sums, whose devices have summed their reports securely; it sees no report."""

    def __init__(self, work: server_work.ServerWork):
        """Takes the server's part of a task whose plan asks for secure aggregation."""
        self._work = work
        most_devices = work.plan.secure_aggregation.most_devices
        self._bounds = report_bounds.ReportBounds(work.plan, most_devices)
        self._shapes = secure_report.buckets_of(work.plan.participation).shapes

    @override
    def zero(self) -> Total:
        strides, times = (np.zeros(shape, np.int64) for shape in self._shapes)
        return Total(self._work.zero(), strides, times)

    @override
    def accumulate(self, total: Total, payload: object) -> Total:
        """Refuses a single report, which is not the sum of a group."""
        del total, payload
        raise population_lib.UnusableReport("reports of this task are summed by their devices")

    @override
    def decode_group(self, vector: vectors.Vector, num_devices: int) -> Total:
        """Takes the sum of a group apart, and refuses one that honest devices cannot have made."""
        try:
            read = secure_report.read_total(self._work.plan, vector, num_devices)
            self._bounds.check_sum(read.sums, num_devices)
        except (secure_report.TotalRefusedError, report_bounds.OutOfBoundsError) as error:
            raise population_lib.UnusableReport(str(error)) from None
        return Total(list(read.sums), read.strides, read.times)

    @override
    def merge(self, total: Total, other: Total) -> Total:
        # The sum of groups' sums modulo M is again modulo M.
        summed = self._work.merge(total.sums, other.sums, keeps_one=False)
        total.sums = [
            tensor % rule.modulus if rule.HasField("modulus") else tensor
            for tensor, rule in zip(summed, self._work.plan.secure_sums, strict=True)
        ]
        total.strides += other.strides
        total.times += other.times
        return total
