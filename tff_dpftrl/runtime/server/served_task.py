"""A task of a server: what its actors compute, and what its devices get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tff_dpftrl.runtime.actors import population


@dataclasses.dataclass(frozen=True)
class ServedTask:
    """Task of a server."""

    # Task for the actors. Its summation takes a `wire_pb2.Report` as payload, or sums of groups.
    # Its model is the content of `wire_pb2.Configuration.broadcast`.
    task: population.Task
    # Function of a device's runtime version that returns the serialised `plan_pb2.SignedPlan`, or
    # None if the version is too old.
    plan_for: Callable[[int], bytes | None]
    # Largest size of a serialised `wire_pb2.Report`, or of the packed vector that takes its place
    # in a secure sum, in bytes.
    largest_report_bytes: int
    digest: str = ""  # Digest of the task's terms, the same in all processes of one server.
