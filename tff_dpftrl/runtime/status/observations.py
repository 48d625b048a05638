"""Observations of a server since its start: counters in memory of a fixed size.

No counter is about a single device. The number of labels is bounded whatever devices send: a
device's text becomes a label only if it is plain and one of the first.
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
from tff_dpftrl.runtime.status import counters, session_table, task_figures

LEVELS = ("connected", "waiting", "participating")
"""Numbers of devices by state."""

COUNTERS = (
    "sessions",  # Opened sessions.
    "refused_sessions",
    "sent_away",
    "configured",  # Devices that began to take part.
    "dropped_connecting",
    "dropped_waiting",
    "dropped_participating",
    "reports",  # Accepted reports.
    "refused_reports",
    "committed",  # Committed rounds.
    "abandoned",  # Abandoned attempts at rounds.
    "bytes_sent",
    "bytes_received",
    "told_sessions",
    "told_errors",
    "store_failures",
)
"""Counters of `Observations.series`."""

_DROPPED = {
    "connecting": "dropped_connecting",
    "waiting": "dropped_waiting",
    "training": "dropped_participating",
}
# Reason that the service gives for a device that dropped out, which is no refusal.
_GONE = "ended early"
_VERSIONS = ("tff_dpftrl", "tensorflow", "python", "system")
_VERSION = re.compile(r"[A-Za-z0-9.+_-]{1,24}")
_OTHER_VERSIONS = 12
_OTHER_REASONS = 24
_GIBIBYTE = 2**30


class Observations(observer.Observer):
    """Observer that counts events and sessions; for one thread.

    Attributes:
      served: Population that is served.
      started_at: Time of the start, in seconds since 1970.
      epoch: Epoch of the lease; 0 while no Coordinator leads.
      leaders: Number of Coordinators that have led.
      last_store_failure_at: Time of the store's last failure in seconds since 1970; None if it
        has not failed.
      selection: Progress of the selection, as the Coordinator last sent it; None before that.
      population_size: Approximate number of devices, as the operator gave it; None if not given.
      tasks: Figures of the tasks by name.
      series: Counters `COUNTERS`, with their recent steps, and levels `LEVELS`.
      refused_sessions: Numbers of refused sessions by reason.
      sent_away_reasons: Numbers of devices that were asked to come back, by reason.
      session_table: Shapes of the sessions of the last weeks, as devices reported them.
      reported_shapes: Shapes of the sessions since the start, as devices reported them.
      session_seconds: Durations of sessions that received a plan, as devices reported them.
      peak_memory: Peak memory of devices in bytes, as they reported it.
      versions: Versions of the devices' components, as they reported them, by component.
    """

    def __init__(
        self,
        served: population.Population,
        *,
        population_size: float | None = None,
        clock: Callable[[], float] = time.time,
    ):
        """Starts all counters at zero.

        Args:
          served: Population that is served, with its tasks.
          population_size: Approximate number of devices that are available at a time; None if it
            is not known.
          clock: Clock that returns seconds since 1970.
        """
        self.served = served
        self._clock = clock
        now = clock()
        self.started_at = now
        self.epoch = 0
        self.leaders = 0
        self.last_store_failure_at: float | None = None
        self.selection: events.SelectionProgress | None = None
        self.population_size = population_size
        self.tasks = {task.name: task_figures.TaskFigures(task) for task in served.tasks}
        self.series = counters.Totals(COUNTERS, LEVELS, now)
        verdicts = {verdict.value for verdict in attestation.Verdict}
        self.refused_sessions = counters.BoundedCounts(verdicts, room=_OTHER_REASONS)
        self.sent_away_reasons = counters.BoundedCounts(room=_OTHER_REASONS)
        self.session_table = session_table.SessionTable(clock=clock)
        self.reported_shapes = counters.BoundedCounts(session_shape.SHAPES)
        self.session_seconds = task_figures.seconds_distribution()
        self.peak_memory = counters.Distribution(_GIBIBYTE / 64, 64 * _GIBIBYTE)
        self.versions = {name: counters.BoundedCounts(room=_OTHER_VERSIONS) for name in _VERSIONS}

    def now(self) -> float:
        """Advances the counters to the present time, and returns it."""
        return self.series.advance(self._clock())

    def save_counts(self, path: str | os.PathLike[str]) -> None:
        """Writes `session_table`, which outlasts a restart, to a file."""
        self.session_table.save(path)

    def load_counts(self, path: str | os.PathLike[str]) -> None:
        """Reads a file of `save_counts`; starts with an empty table if there is none."""
        self.session_table = session_table.SessionTable.load(path, clock=self._clock)

    # Callbacks of an observer.

    @override
    def on_event(self, now: float, event: Any) -> None:
        now = self.series.advance(now)
        match event:
            case events.Leading():
                self._lead(event.epoch)
            case events.SelectionProgress():
                self.selection = event
            case events.StoreFailed():
                self.last_store_failure_at = now
                self.series.add("store_failures")
            case _:
                task = self.tasks.get(getattr(event, "task", ""))
                if task is not None:
                    self._on_task_event(task, now, event)

    def _lead(self, epoch: int) -> None:
        self.epoch = epoch
        self.leaders += 1
        self.selection = None
        for task in self.tasks.values():
            if task.attempt is not None:
                task.lost(task.attempt.name, "its Coordinator is lost", {})
                self.series.add("abandoned")

    def _on_task_event(self, task: task_figures.TaskFigures, now: float, event: Any) -> None:
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
                task.too_few = event
            case events.PartyAway():
                task.party_away = event if event.away or event.to_skip else None

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
        self.sent(task, num_bytes)

    @override
    def sent(self, task: str, num_bytes: int) -> None:
        self.now()
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
        self.reported_shapes.add(shape)
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
                counts.add(version if is_plain else counters.OTHER)
