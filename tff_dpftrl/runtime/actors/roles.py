"""What an actor is spawned with: data, so that it can be built on another machine."""

from __future__ import annotations

import dataclasses

from tff_dpftrl.runtime.store import interface


@dataclasses.dataclass(frozen=True)
class CoordinatorRole:
    """Leads the population if it gets the lease."""


@dataclasses.dataclass(frozen=True)
class MasterAggregatorRole:
    """Makes one attempt at a round, or skips it.

    Attributes:
      coordinator: Who hears of the outcome.
      epoch: Under which it commits.
      commit: The commit of the task that it continues from; secret.
      model: The committed model that devices begin with.
      expected: Selectors that forward devices.
      skips: Whether the round is skipped: no device takes part, and nothing is released.
      half_seconds: Seconds in which half of the goal's reports came in earlier rounds; 0 if that
        is not known.
    """

    coordinator: str
    epoch: int
    commit: interface.Commit
    model: bytes = dataclasses.field(repr=False)
    expected: frozenset[str]
    skips: bool = False
    half_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class AggregatorRole:
    """Sums the reports of some devices of an attempt.

    Attributes:
      attempt: The Master Aggregator.
      task: The task.
      round_index: The round, from 0.
      model: The committed model that devices begin with.
      devices: Their connections.
      most_reports: Largest number of reports in its sum; that of its devices if None. Where more
        devices were chosen than a sum has room for, later reports are refused.
    """

    attempt: str
    task: str
    round_index: int
    model: bytes = dataclasses.field(repr=False)
    devices: tuple[str, ...]
    most_reports: int | None = None
