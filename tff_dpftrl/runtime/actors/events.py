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
    """The selection of devices for a round is open."""

    task: str  # Name of the task; empty if no task may have another round.
    round_index: int  # Index of the round, from 0, provided that the running attempt succeeds.


@dataclasses.dataclass(frozen=True)
class SelectionProgress:
    """State of the selection at a heartbeat of the Coordinator, sent when it has changed."""

    task: str  # Name of the task; empty if no task may have another round.
    waiting: int
    wanted: int  # Number of devices with which the round begins at once.
    resting: int = 0  # Number of check-ins of resting devices since the last attempt ended.
    min_sep_is_over: bool = False  # Whether devices rest only for other limits than `min_sep`.
    selectors: int = 1
    silent_selectors: int = 0  # Number of Selectors that have not answered for `silence_seconds`.
    not_stored: int = 0  # Number of attempts since the last commit that were not stored.
    pause_seconds: int = 0  # Seconds until another attempt may begin after one that was not stored.
    is_reading: bool = False  # Whether the store has not answered yet what is committed.


@dataclasses.dataclass(frozen=True)
class RoundBegan:
    """Devices were chosen for a round."""

    task: str
    round_index: int
    attempt: str
    devices: int


@dataclasses.dataclass(frozen=True)
class RoundReleased:
    """A round is committed; its metrics may be shown.

    A new Coordinator repeats the event of the last round. If a Coordinator dies between commit and
    release, the event may be missing. The store's history has every round.
    """

    task: str
    round_index: int
    attempt: str
    metrics: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RoundSkipped:
    """A round is committed as skipped: nothing of it is released, and the next one follows.

    A new Coordinator repeats the event of the last round.
    """

    task: str
    round_index: int
    attempt: str  # Address of the Master Aggregator that committed the skip.


@dataclasses.dataclass(frozen=True)
class RoundLost:
    """A round's attempt was abandoned."""

    task: str
    round_index: int
    attempt: str
    reason: str
    counts: Mapping[str, int]  # Numbers of devices by outcome, as far as they are known.


@dataclasses.dataclass(frozen=True)
class TooFewDevices:
    """Too few devices have come to a selection, which goes on, perhaps for a later round."""

    task: str
    waiting: int
    least: int  # Smallest number of devices for a round.
    resting: int = 0  # Number of check-ins of resting devices since the last attempt ended.
    min_sep_is_over: bool = False  # Whether devices rest only for other limits than `min_sep`.
    rounds_done: int = 0


@dataclasses.dataclass(frozen=True)
class PartyAway:
    """Noise parties of the open task are away, or, with `away` 0, all are back."""

    task: str  # Name of the task, whose next round waits.
    away: int  # Number of promised parties that are not connected.
    promised: int  # Number of parties that the task's plan names.
    to_skip: int = 0  # Number of next rounds to skip: a party gave their noise before.


@dataclasses.dataclass(frozen=True)
class StoreFailed:
    """The store cannot be read or written, or lacks a task."""

    reason: str
