"""Runs the sessions of many devices, each at its turn, on a bounded number of threads."""

from __future__ import annotations

import concurrent.futures
import heapq
import logging
import threading
from collections.abc import Callable, Sequence

from tff_dpftrl import validation
from tff_dpftrl.runtime.device import scheduler, session
from tff_dpftrl.runtime.fleet import simulated_device, tally

_logger = logging.getLogger(__name__)
_LOOK_S = 0.25


class Runner:
    """The schedules of many devices, of one population."""

    def __init__(
        self,
        population: str,
        devices: Sequence[simulated_device.SimulatedDevice],
        *,
        hear: Callable[[tally.SessionEnd], None],
        stop: threading.Event,
        clock: Callable[[], float],
        waits: scheduler.Waits,
        max_sessions: int,
    ):
        """Makes the first appointments.

        Args:
          population: Name of the population.
          devices: The devices.
          hear: Told of every session that ended by itself; called from many threads.
          stop: Ends everything.
          clock: Seconds, never going back.
          waits: How long devices wait if the server does not say.
          max_sessions: Sessions at a time; further devices come later than they should.

        Raises:
          ValueError: If `max_sessions` is below 1.
        """
        self._population, self._devices = population, devices
        self._hear, self._stop, self._clock = hear, stop, clock
        self._max_sessions = validation.integer("max_sessions", max_sessions, minimum=1)
        self._schedules = [
            scheduler.Schedule([population], clock=clock, generator=device.generator, waits=waits)
            for device in devices
        ]
        self._changed = threading.Condition()
        self._num_running = 0
        self._due: list[tuple[float, int]] = []
        for index in range(len(devices)):
            self._make_appointment(index)

    def run(self) -> None:
        """Runs until `stop` is set, and the sessions that it ends have ended."""
        with concurrent.futures.ThreadPoolExecutor(
            self._max_sessions, thread_name_prefix="session"
        ) as threads:
            while not self._stop.is_set():
                index = self._next()
                if index is None:
                    continue
                if self._devices[index].eligibility.unmet():
                    self._schedules[index].missed(self._population)
                    self._make_appointment(index)
                    continue
                with self._changed:
                    self._num_running += 1
                threads.submit(self._run_session, index)

    def _next(self) -> int | None:
        """A device whose turn has come, or None after a short wait."""
        with self._changed:
            if self._due and self._num_running < self._max_sessions:
                due, index = self._due[0]
                left = due - self._clock()
                if left <= 0:
                    heapq.heappop(self._due)
                    return index
                self._changed.wait(min(left, _LOOK_S))
            else:
                self._changed.wait(_LOOK_S)
            return None

    def _run_session(self, index: int) -> None:
        try:
            ended = self._devices[index].run_session(self._population)
            result = ended.result
            # Who is interrupted by the fleet's end has not dropped out.
            if not (self._stop.is_set() and result.outcome is session.Outcome.INTERRUPTED):
                self._hear(tally.SessionEnd.of(ended))
            self._schedules[index].finished(self._population, result)
        except Exception:  # Of the simulation itself; the device is lost.
            _logger.exception("a simulated device is lost")
            return
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify()
        self._make_appointment(index)

    def _make_appointment(self, index: int) -> None:
        seconds = self._schedules[index].next_job().seconds
        with self._changed:
            heapq.heappush(self._due, (self._clock() + seconds, index))
            self._changed.notify()
