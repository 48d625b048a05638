"""Events of a population, which actors send to the observer: counts and released metrics only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

OBSERVER = "observer"
"""Address of the observer."""


@dataclasses.dataclass(frozen=True)
class Leading:
    """A Coordinator leads the population, and has read what is committed."""

    population: str
    epoch: int


@dataclasses.dataclass(frozen=True)
class SelectionOpened:
    """The selection of devices for a round is open.

    Attributes:
      task: Name of the task; empty if no task may have another round.
      round_index: Index of the round, from 0, provided that the running attempt succeeds.
    """

    task: str
    round_index: int


@dataclasses.dataclass(frozen=True)
class SelectionProgress:
    """State of the selection at a heartbeat of the Coordinator, sent when it has changed.

    Attributes:
      task: Name of the task; empty if no task may have another round.
      waiting: Number of waiting devices.
      wanted: Number of devices with which the round begins at once.
      resting: Number of check-ins, since the last attempt ended, of devices that have to rest.
      min_sep_is_over: Whether no device has to rest for `min_sep` any more: other limits hold.
      selectors: Number of Selectors.
      silent_selectors: Number of Selectors that have not answered for `silence_seconds`.
      not_stored: Number of attempts since the last commit that were not stored.
      pause_seconds: Seconds until another attempt may begin after one that was not stored.
      is_reading: Whether the store has not answered yet what is committed.
    """

    task: str
    waiting: int
    wanted: int
    resting: int = 0
    min_sep_is_over: bool = False
    selectors: int = 1
    silent_selectors: int = 0
    not_stored: int = 0
    pause_seconds: int = 0
    is_reading: bool = False


@dataclasses.dataclass(frozen=True)
class RoundBegan:
    """Devices were chosen for a round.

    Attributes:
      task: Name of the task.
      round_index: Index of the round, from 0.
      attempt: Name of the attempt.
      devices: Number of devices that were chosen.
    """

    task: str
    round_index: int
    attempt: str
    devices: int


@dataclasses.dataclass(frozen=True)
class RoundReleased:
    """A round is committed; its metrics may be shown.

    A new Coordinator repeats the event of the last round. If a Coordinator dies between commit and
    release, the event may be missing. The store's history has every round.

    Attributes:
      task: Name of the task.
      round_index: Index of the round, from 0.
      attempt: Name of the attempt.
      metrics: Metrics of the round.
    """

    task: str
    round_index: int
    attempt: str
    metrics: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RoundSkipped:
    """A round is committed as skipped: nothing of it is released, and the next one follows.

    A new Coordinator repeats the event of the last round.

    Attributes:
      task: Name of the task.
      round_index: Index of the round, from 0.
      attempt: Address of the Master Aggregator that committed the skip.
    """

    task: str
    round_index: int
    attempt: str


@dataclasses.dataclass(frozen=True)
class RoundLost:
    """A round's attempt was abandoned.

    Attributes:
      task: Name of the task.
      round_index: Index of the round, from 0.
      attempt: Name of the attempt.
      reason: Reason in a few words.
      counts: Numbers of devices by outcome, as far as they are known.
    """

    task: str
    round_index: int
    attempt: str
    reason: str
    counts: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class TooFewDevices:
    """Too few devices have come to a selection, which goes on, perhaps for a later round.

    Attributes:
      task: Name of the task.
      waiting: Number of waiting devices.
      least: Smallest number of devices for a round.
      resting: Number of check-ins, since the last attempt ended, of devices that have to rest.
      min_sep_is_over: Whether no device has to rest for `min_sep` any more: other limits hold.
      rounds_done: Number of committed rounds.
    """

    task: str
    waiting: int
    least: int
    resting: int = 0
    min_sep_is_over: bool = False
    rounds_done: int = 0


@dataclasses.dataclass(frozen=True)
class PartyAway:
    """Noise parties of the open task are away, or, with `away` 0, all are back.

    Attributes:
      task: Name of the task, whose next round waits.
      away: Number of promised parties that are not connected.
      promised: Number of parties that the task's plan names.
      to_skip: Number of next rounds that are skipped since a party has given their noise before.
    """

    task: str
    away: int
    promised: int
    to_skip: int = 0


@dataclasses.dataclass(frozen=True)
class StoreFailed:
    """The store cannot be read or written, or lacks a task."""

    reason: str
