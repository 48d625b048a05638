"""What was seen of a server since it started: counts in memory, of a size that does not grow.

Nothing here is about a single device, and no text that comes from one becomes a label: how
many labels there are is bounded, whatever devices say.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from tff_dpftrl.runtime.actors import events, population
from tff_dpftrl.runtime.device import session_shape
from tff_dpftrl.runtime.protocol import attestation, wire_pb2
from tff_dpftrl.runtime.server import observer
from tff_dpftrl.runtime.status import (
    bounded_counts,
    distribution,
    session_table,
    task_figures,
    time_series,
)

LEVELS = ("connected", "waiting", "participating")
"""Devices, as time series."""

COUNTERS = (
    "sessions",  # That were opened.
    "refused_sessions",
    "sent_away",
    "configured",  # Devices that began to take part.
    "dropped_connecting",
    "dropped_waiting",
    "dropped_participating",
    "reports",  # That count.
    "refused_reports",
    "committed",  # Rounds.
    "abandoned",  # Attempts at rounds.
    "bytes_sent",
    "bytes_received",
    "told_sessions",
    "told_errors",
    "store_failures",
)
"""What is counted over time."""

_DROPPED = {
    "connecting": "dropped_connecting",
    "waiting": "dropped_waiting",
    "training": "dropped_participating",
}
# What the service says of a device that goes away in the middle: nobody has refused it.
_GONE = "ended early"
_VERSIONS = ("tff_dpftrl", "tensorflow", "python", "system")
_VERSION = re.compile(r"[A-Za-z0-9.+_-]{1,24}")
_OTHER_VERSIONS = 12
_OTHER_REASONS = 24
_GIBIBYTE = 2**30


class Observations(observer.Observer):
    """Counts what it hears; to be called on one thread.

    Attributes:
      served: The population.
      started_at: When it began, in seconds since 1970.
      epoch: Epoch of the lease; 0 while nobody leads.
      leaders: How many Coordinators have led.
      last_store_failure_at: When the store last failed; None if it has not.
      tasks: By name.
      series: `LEVELS` and `COUNTERS` over time.
      refused_sessions: By reason.
      sent_away_reasons: Devices told to come back, by reason.
      session_table: Shapes of the sessions of the last weeks, as devices told them.
      told_shapes: The same since the server started.
      session_seconds: How long sessions that got a plan took, as devices told.
      peak_memory: Of devices, in bytes, as they told.
      versions: What devices run, as they told, by the name of the component.
    """

    def __init__(
        self,
        served: population.Population,
        *,
        clock: Callable[[], float] = time.time,
    ):
        """Starts with nothing seen.

        Args:
          served: The population, with the tasks that are told of.
          clock: Seconds since 1970.
        """
        self.served = served
        self._clock = clock
        now = clock()
        self.started_at = now
        self.epoch = 0
        self.leaders = 0
        self.last_store_failure_at: float | None = None
        self.tasks = {task.name: task_figures.TaskFigures(task) for task in served.tasks}
        self.series = time_series.TimeSeries(COUNTERS, LEVELS, now)
        verdicts = {verdict.value for verdict in attestation.Verdict}
        self.refused_sessions = bounded_counts.BoundedCounts(verdicts, room=_OTHER_REASONS)
        self.sent_away_reasons = bounded_counts.BoundedCounts(room=_OTHER_REASONS)
        self.session_table = session_table.SessionTable(clock=clock)
        self.told_shapes = bounded_counts.BoundedCounts(session_shape.SHAPES)
        self.session_seconds = task_figures.seconds_distribution()
        self.peak_memory = distribution.Distribution(_GIBIBYTE / 64, 64 * _GIBIBYTE)
        self.versions = {
            name: bounded_counts.BoundedCounts(room=_OTHER_VERSIONS) for name in _VERSIONS
        }

    def now(self) -> float:
        """Brings the time series up to now; returns the time."""
        return self.series.advance(self._clock())

    def save_counts(self, path: str | os.PathLike[str]) -> None:
        """Writes what is to last over a restart: `session_table`.

        Raises:
          OSError: If it cannot be written.
        """
        self.session_table.save(path)

    def load_counts(self, path: str | os.PathLike[str]) -> None:
        """Goes on from what `save_counts` wrote; from nothing, if there is no file.

        Raises:
          OSError: If it cannot be read.
          ValueError: If the file holds something else.
        """
        self.session_table = session_table.SessionTable.load(path, clock=self._clock)

    # What an observer hears.

    @override
    def on_event(self, now: float, event: Any) -> None:
        now = self.series.advance(now)
        match event:
            case events.Leading():
                self._lead(event.epoch)
            case events.StoreFailed():
                self.last_store_failure_at = now
                self.series.add("store_failures")
            case _:
                task = self.tasks.get(getattr(event, "task", ""))
                if task is not None:
                    self._hear_of_task(task, now, event)

    def _lead(self, epoch: int) -> None:
        self.epoch = epoch
        self.leaders += 1
        for task in self.tasks.values():
            if task.attempt is not None:
                task.lost(task.attempt.name, "its Coordinator is lost", {})
                self.series.add("abandoned")

    def _hear_of_task(self, task: task_figures.TaskFigures, now: float, event: Any) -> None:
        match event:
            case events.RoundBegan():
                task.began(event, now)
            case events.RoundReleased():
                if task.released(event, now):
                    self.series.add("committed")
            case events.RoundSkipped():
                task.was_skipped(event)
            case events.RoundLost():
                task.lost(event.attempt, event.reason, event.counts)
                self.series.add("abandoned")
            case events.TooFewDevices():
                task.too_few = event.waiting

    @override
    def session_opened(self) -> None:
        self.now()
        self.series.add("sessions")
        self.series.shift("connected", 1)

    @override
    def session_refused(self, reason: str) -> None:
        if reason == _GONE:
            return
        self.now()
        self.series.add("refused_sessions")
        self.refused_sessions.add(reason)

    @override
    def waiting(self) -> None:
        self.now()
        self.series.shift("waiting", 1)

    @override
    def sent_away(self, reason: str, has_waited: bool) -> None:
        self.now()
        self.series.add("sent_away")
        if has_waited:
            self.series.shift("waiting", -1)
        self.sent_away_reasons.add(reason)

    @override
    def configured(self, task: str, num_bytes: int) -> None:
        self.now()
        self.series.add("configured")
        self.series.shift("waiting", -1)
        self.series.shift("participating", 1)
        self.series.add("bytes_sent", num_bytes)
        if task in self.tasks:
            self.tasks[task].bytes_sent += num_bytes

    @override
    def reported(self, task: str, refusal: str, num_bytes: int) -> None:
        now = self.now()
        self.series.shift("participating", -1)
        self.series.add("bytes_received", num_bytes)
        self.series.add("refused_reports" if refusal else "reports")
        if task in self.tasks:
            self.tasks[task].reported(refusal, num_bytes, now)

    @override
    def session_closed(self, phase: str) -> None:
        self.now()
        self.series.shift("connected", -1)
        if phase == "waiting":
            self.series.shift("waiting", -1)
        elif phase == "training":
            self.series.shift("participating", -1)
        if phase in _DROPPED:
            self.series.add(_DROPPED[phase])

    @override
    def session_summarized(self, summary: wire_pb2.SessionSummary) -> None:
        self.now()
        self.series.add("told_sessions")
        shape = self.session_table.add(summary.shape)
        self.told_shapes.add(shape)
        if session_table.is_error(shape):
            self.series.add("told_errors")
        if session_table.got_plan(shape):
            self.session_seconds.add(summary.seconds)
        if summary.peak_memory_bytes:
            self.peak_memory.add(summary.peak_memory_bytes)
        for name, counts in self.versions.items():
            version = summary.versions.get(name, "")
            if version:
                is_plain = _VERSION.fullmatch(version) is not None
                counts.add(version if is_plain else bounded_counts.OTHER)
