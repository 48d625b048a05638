"""A task as a server has it: what its actors do, and what its devices get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tff_dpftrl.runtime.actors import population


@dataclasses.dataclass(frozen=True)
class ServedTask:
    """A task of a server.

    Attributes:
      task: For the actors. Its summation takes a `wire_pb2.Report` as payload, or sums of
        groups, and its model is what `wire_pb2.Configuration.broadcast` holds.
      plan_for: Given a device's runtime version, its serialized `plan_pb2.SignedPlan`; None
        if the version is too old.
      largest_report_bytes: Size of a serialized `wire_pb2.Report`, or of the packed vector
        that takes its place in a secure sum, at most.
      digest: Tells it from others of the same name: processes of one server have the same.
    """

    task: population.Task
    plan_for: Callable[[int], bytes | None]
    largest_report_bytes: int
    digest: str = ""
