"""Runs the sessions of many devices, each at its turn, on a bounded number of threads."""

from __future__ import annotations

import concurrent.futures
import heapq
import logging
import threading
from collections.abc import Callable, Sequence

from tff_dpftrl import validation
from tff_dpftrl.runtime.device import backoff, scheduler, session
from tff_dpftrl.runtime.fleet import simulated_device, tally

_logger = logging.getLogger(__name__)
_POLL_S = 0.25


class Runner:
    """Scheduler of many devices of one population."""

    def __init__(
        self,
        population: str,
        devices: Sequence[simulated_device.SimulatedDevice],
        *,
        on_session_end: Callable[[tally.SessionEnd], None],
        stop: threading.Event,
        clock: Callable[[], float],
        waits: backoff.Waits,
        max_sessions: int,
    ):
        """Schedules the first session of each device.

        `on_session_end` is called from many threads, unless `stop` ended the session. Devices above
        `max_sessions` are late.
        """
        self._population, self._devices = population, devices
        self._on_session_end, self._stop, self._clock = on_session_end, stop, clock
        self._max_sessions = validation.integer("max_sessions", max_sessions, minimum=1)
        self._schedules = [
            scheduler.Schedule([population], clock=clock, generator=device.generator, waits=waits)
            for device in devices
        ]
        self._changed = threading.Condition()
        self._num_running = 0
        self._due: list[tuple[float, int]] = []
        for index in range(len(devices)):
            self._push_next(index)

    def run(self) -> None:
        """Runs sessions until `stop` is set and all sessions have ended."""
        with concurrent.futures.ThreadPoolExecutor(
            self._max_sessions, thread_name_prefix="session"
        ) as threads:
            while not self._stop.is_set():
                index = self._next()
                if index is None:
                    continue
                if self._devices[index].eligibility.unmet():
                    self._schedules[index].missed(self._population)
                    self._push_next(index)
                    continue
                with self._changed:
                    self._num_running += 1
                threads.submit(self._run_session, index)

    def _next(self) -> int | None:
        """Returns a device that is due, or None after a short wait."""
        with self._changed:
            if self._due and self._num_running < self._max_sessions:
                due, index = self._due[0]
                left = due - self._clock()
                if left <= 0:
                    heapq.heappop(self._due)
                    return index
                self._changed.wait(min(left, _POLL_S))
            else:
                self._changed.wait(_POLL_S)
            return None

    def _run_session(self, index: int) -> None:
        try:
            ended = self._devices[index].run_session(self._population)
            result = ended.result
            # A device that the fleet's end interrupts has not dropped out.
            if not (self._stop.is_set() and result.outcome is session.SessionOutcome.INTERRUPTED):
                self._on_session_end(tally.SessionEnd.of(ended))
            self._schedules[index].finished(self._population, result)
        except Exception:  # A bug of the simulation; the device is lost.
            _logger.exception("a simulated device is lost")
            return
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify()
        self._push_next(index)

    def _push_next(self, index: int) -> None:
        seconds = self._schedules[index].next_job().seconds
        with self._changed:
            heapq.heappush(self._due, (self._clock() + seconds, index))
            self._changed.notify()
