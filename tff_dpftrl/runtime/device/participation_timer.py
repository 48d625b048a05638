"""The participation timer: the device enforces the participation schema on itself.

The guarantee of DP-FTRL rests on a participation schema. The server keeps no list of devices,
so each device enforces the schema on itself. It refuses a round that comes fewer than `min_sep`
rounds (a stride, j - i) or fewer than `min_hours` hours after its last one. It also refuses a
round that would exceed `max_participations`. The accounting needs rounds; hours hold even where
a server's round counter is not reliable (Xu et al. 2023, section 2.2, use a timer of 24 hours
and more).

A participation is durable before the report can leave: `record` returns the vectors that
complete the report (`participation_histograms`) only after it has written the round to disk. A
crash, a lost connection or a late report thus counts as a participation. The device may count
more participations than took place, never fewer.

The assumptions, which a statement must name: the device is honest, its file is not deleted or
restored from a backup (uninstalling the software deletes it), the server sends the true index
of the round, and the clock does not run ahead. If the clock was set back, the device waits until
it has caught up, however long: the last participation may have been a moment ago. The file never
leaves the device. It holds, for each task, the last round, its time, and the number of
participations.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import os
import sqlite3
from collections.abc import Callable

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.runtime import participation_histograms as histograms
from tff_dpftrl.runtime.device import private_database

_HOUR_S = 3600.0
LARGEST_ROUND = 2**31 - 1
"""Largest index of a round in which a device takes part."""
_KIND = private_database.Kind(
    name="a participation timer",
    application_id=0x44505054,  # "DPPT"
    version=1,
    tables="""CREATE TABLE participations (
  population TEXT NOT NULL,
  task TEXT NOT NULL,
  last_round INTEGER NOT NULL,
  last_time REAL NOT NULL,             -- seconds since 1970, by the clock of that moment
  times INTEGER NOT NULL,
  PRIMARY KEY (population, task)
) WITHOUT ROWID""",
    if_damaged="This device no longer knows when it took part; who removes the file gives up the "
    "protection of what it took part in.",
)


class TimerRefusal(validation.UsageError):
    """The device must not take part in this round; the message names the reason.

    `wait_s` is the time in seconds until the device may take part again: exact for hours, and for
    rounds an estimate from their rate since the last participation. None if it never may.
    """

    def __init__(self, message: str, wait_s: float | None):
        super().__init__(message)
        self.wait_s = wait_s


@dataclasses.dataclass(frozen=True)
class ParticipationRule:
    """The participation limits of a plan."""

    min_sep: int  # Smallest allowed stride between two rounds of one device.
    max_participations: int  # Largest number of rounds of one device.
    min_hours: float = 0.0  # Smallest number of hours between two participations of one device.

    def __post_init__(self):
        for name in ("min_sep", "max_participations"):
            value = validation.integer(name, getattr(self, name), minimum=1)
            object.__setattr__(self, name, value)
        hours = validation.number("min_hours", self.min_hours, at_least=0)
        object.__setattr__(self, "min_hours", hours)


class Timer(abc.ABC):
    """Interface of a participation timer."""

    @abc.abstractmethod
    def check(self, population: str, task: str, round_index: int, rule: ParticipationRule) -> None:
        """Refuses a round that breaks the rule; call it before the device trains.

        Args:
          population: Name of the population.
          task: Name of the task. All rounds of a task share one privacy statement.
          round_index: Index of the round, from 0; all attempts at a round share it.
          rule: Participation limits of the plan.

        Raises:
          TimerRefusal: If the device must not take part.
          ValueError: If the timer's file is damaged.
          OSError: If the timer's file cannot be used.
        """

    @abc.abstractmethod
    def record(
        self,
        population: str,
        task: str,
        round_index: int,
        rule: ParticipationRule,
        buckets: histograms.ParticipationBuckets,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Records a participation durably; call it before the report leaves the device.

        Args:
          population: Name of the population.
          task: Name of the task.
          round_index: Index of the round, from 0.
          rule: Participation limits of the plan.
          buckets: Histogram buckets that the plan declares.

        Returns:
          The two histogram vectors of the report (`ParticipationBuckets.encode`). When they are
          returned, the participation survives a crash of the device.

        Raises:
          TimerRefusal: If the device must not take part, for instance because another of its
            processes has just taken part. Then nothing is recorded.
          ValueError: If the buckets have no place for this number of participations, or the
            timer's file is damaged.
          OSError: If the file cannot be written; then the report must not leave the device.
        """


class MemoryTimer(Timer):
    """Timer of a simulated device, in memory."""

    def __init__(self, clock: Callable[[], float]):
        """Creates a timer without participations; the clock is in seconds."""
        self._clock = clock
        self._last: dict[tuple[str, str], tuple[int, float, int]] = {}

    @override
    def check(self, population: str, task: str, round_index: int, rule: ParticipationRule) -> None:
        self._next_times(population, task, round_index, rule)

    @override
    def record(
        self,
        population: str,
        task: str,
        round_index: int,
        rule: ParticipationRule,
        buckets: histograms.ParticipationBuckets,
    ) -> tuple[np.ndarray, np.ndarray]:
        stride, times = self._next_times(population, task, round_index, rule)
        vectors = buckets.encode(stride, times)
        _, last_time, _ = self._last.get((population, task), (0, -math.inf, 0))
        moment = max(last_time, self._clock())
        self._last[population, task] = (round_index, moment, times)
        return vectors

    def _next_times(
        self, population: str, task: str, round_index: int, rule: ParticipationRule
    ) -> tuple[int | None, int]:
        rows = [self._last[key]] if (key := (population, task)) in self._last else []
        return _next_times(rows, round_index, rule, self._clock(), f"{population}/{task}")


class ParticipationTimer(Timer):
    """Timer of one device in a file, for all its populations and tasks.

    Processes and threads may share the file.
    """

    def __init__(self, database: private_database.PrivateDatabase, clock: Callable[[], float]):
        """Internal; use `ParticipationTimer.open`."""
        self._database = database
        self._clock = clock

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, clock: Callable[[], float]
    ) -> ParticipationTimer:
        """Opens a timer, or creates one without participations; the folder must exist.

        A damaged file raises ValueError and is not replaced: a device that does not know its last
        participation must not take part. `clock` returns seconds since 1970.
        """
        database = private_database.PrivateDatabase.open(path, _KIND)
        try:
            database.check()  # With a row lost, the device would seem to have never taken part.
        except BaseException:
            database.close()
            raise
        return cls(database, clock)

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    @override
    def check(self, population: str, task: str, round_index: int, rule: ParticipationRule) -> None:
        rows = self._sound(self._database.read(_SELECT, population, task))
        _next_times(rows, round_index, rule, self._now(), f"{population}/{task}")

    @override
    def record(
        self,
        population: str,
        task: str,
        round_index: int,
        rule: ParticipationRule,
        buckets: histograms.ParticipationBuckets,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Records a participation; once it returns, the record survives a loss of power."""
        with self._database.transaction() as connection:
            rows = self._sound(connection.execute(_SELECT, (population, task)).fetchall())
            now = self._now()
            stride, times = _next_times(rows, round_index, rule, now, f"{population}/{task}")
            vectors = buckets.encode(stride, times)
            _write(connection, population, task, round_index, now, times)
        return vectors

    def _sound(self, rows: list[tuple]) -> list[tuple]:
        """Checks the types and ranges of rows: SQLite stores any type in any column."""
        for last_round, last_time, times in rows:
            if not (
                (type(last_round), type(last_time), type(times)) == (int, float, int)
                and 0 <= last_round <= LARGEST_ROUND
                and math.isfinite(last_time)
                and times >= 1
            ):
                raise self._database.damaged("a row is none of a participation timer")
        return rows

    def _now(self) -> float:
        return validation.number("clock()", self._clock())


_SELECT = "SELECT last_round, last_time, times FROM participations WHERE population=? AND task=?"


def _next_times(
    rows: list[tuple], round_index: int, rule: ParticipationRule, now: float, name: str
) -> tuple[int | None, int]:
    """Returns stride and number of participations if the device takes part now, or refuses."""
    if validation.integer("round_index", round_index, minimum=0) > LARGEST_ROUND:
        raise validation.UsageError(f"round_index={round_index} is above {LARGEST_ROUND}.")
    if not rows:
        return None, 1
    [(last_round, last_time, times)] = rows
    stride, seconds = round_index - last_round, now - last_time
    if times >= rule.max_participations:
        raise TimerRefusal(
            f"{name}: this device took part {times} times, and "
            f"max_participations={rule.max_participations}.",
            wait_s=None,
        )
    hours_s = max(rule.min_hours * _HOUR_S - seconds, 0.0) if rule.min_hours else 0.0
    if stride < rule.min_sep:
        raise TimerRefusal(
            f"{name}: round {round_index} is {stride} after the last one of this device, "
            f"{last_round}, and min_sep={rule.min_sep}.",
            wait_s=max((rule.min_sep - stride) * max(seconds, 0.0) / max(stride, 1), hours_s),
        )
    if rule.min_hours and seconds < 0:
        raise TimerRefusal(
            f"{name}: the clock is {math.ceil(-seconds)} s behind the last participation of this "
            "device. It waits until the clock has caught up; set the clock if it is wrong.",
            wait_s=hours_s,
        )
    if rule.min_hours and seconds < rule.min_hours * _HOUR_S:
        raise TimerRefusal(
            f"{name}: this device took part {seconds / _HOUR_S:.1f} hours ago, and "
            f"min_hours={rule.min_hours:g}.",
            wait_s=hours_s,
        )
    return stride, times + 1


def _write(
    connection: sqlite3.Connection,
    population: str,
    task: str,
    round_index: int,
    now: float,
    times: int,
) -> None:
    connection.execute(
        "INSERT INTO participations VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
        "last_round = excluded.last_round, last_time = max(last_time, excluded.last_time), "
        "times = excluded.times",
        (population, task, round_index, now, times),
    )
