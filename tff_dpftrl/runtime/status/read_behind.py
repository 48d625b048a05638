"""A cache of values that take long to read: it refreshes them on a thread, and never blocks."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

_logger = logging.getLogger(__name__)

# Pause before the next refresh: this number of seconds for each second of processor time that
# the last one took, or this number of seconds after an error.
_PAUSE = 5.0


@dataclasses.dataclass
class _Kept:
    """Cache entry of one key."""

    value: Any = None
    error: str = ""
    version: Any = None
    read: Any = None  # Version that is being read, or was read last, in a tuple.
    not_before: float = 0.0
    task: asyncio.Task | None = None


class ReadBehind:
    """Cache of values by key, each of which changes only with its version."""

    def __init__(
        self,
        read: Callable[[str], Any],
        executor: futures.Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        cost: Callable[[], float] = time.thread_time,
    ):
        """Creates an empty cache of `read`, which the executor's one thread calls.

        `cost` returns the processor time of that thread in seconds.
        """
        self._read = read
        self._executor = executor
        self._clock = clock
        self._cost = cost
        self._kept: dict[str, _Kept] = {}

    def get(self, key: str, version: Any) -> tuple[Any, str, Any]:
        """Returns the cached value of a key, and starts a refresh if its version has changed.

        The value is None before the first read. With it come the error of the last read, empty if
        there was none, and the value's version. Keys must be few.
        """
        kept = self._kept.setdefault(key, _Kept())
        is_idle = kept.task is None or kept.task.done()
        if is_idle and kept.read != (version,) and self._clock() >= kept.not_before:
            kept.read = (version,)
            kept.task = asyncio.get_running_loop().create_task(self._refresh(key, version))
        return kept.value, kept.error, kept.version

    async def _refresh(self, key: str, version: Any) -> None:
        kept = self._kept[key]
        try:
            value, cost = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._timed, key
            )
        except Exception as error:
            _logger.warning("The status page cannot read %r: %s", key, error)
            kept.error = f"cannot be read ({type(error).__name__}): see the server's log"
            kept.read = None  # Allows another try after the pause.
            kept.not_before = self._clock() + _PAUSE
        else:
            kept.value, kept.error, kept.version = value, "", version
            kept.not_before = self._clock() + _PAUSE * cost

    def _timed(self, key: str) -> tuple[Any, float]:
        began = self._cost()
        value = self._read(key)
        return value, self._cost() - began

    async def settle(self) -> None:
        """Waits until all refreshes have ended."""
        running = [kept.task for kept in self._kept.values() if kept.task is not None]
        await asyncio.gather(*running)
