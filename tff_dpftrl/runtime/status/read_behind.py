"""Values that take long to read: read on a thread, shown as they last were."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

_logger = logging.getLogger(__name__)

# A value that took a second of computing is not read again for so many; one that could not be
# read, not for so many seconds.
_REST = 5.0


@dataclasses.dataclass
class _Kept:
    """What is known of one key."""

    value: Any = None
    error: str = ""
    version: Any = None
    read: Any = None  # The version that is being read, or was read last.
    not_before: float = 0.0
    task: asyncio.Task | None = None


class ReadBehind:
    """Reads on one thread what changes with a version, and remembers it."""

    def __init__(
        self,
        read: Callable[[str], Any],
        executor: futures.Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        cost: Callable[[], float] = time.thread_time,
    ):
        """Reads nothing yet.

        Args:
          read: Given a key, reads its value.
          executor: Where it runs.
          clock: Seconds.
          cost: Seconds that the thread has computed for.
        """
        self._read = read
        self._executor = executor
        self._clock = clock
        self._cost = cost
        self._kept: dict[str, _Kept] = {}

    def get(self, key: str, version: Any) -> tuple[Any, str, Any]:
        """What is known; has it read anew if the version is another one.

        Args:
          key: What to read; one of few.
          version: Changes when the value may have changed.

        Returns:
          The value (None if it was never read), why the last reading failed (empty if it did
          not), and the version that the value is of.
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
            kept.read = None  # Once more, after a rest.
            kept.not_before = self._clock() + _REST
        else:
            kept.value, kept.error, kept.version = value, "", version
            kept.not_before = self._clock() + _REST * cost

    def _timed(self, key: str) -> tuple[Any, float]:
        began = self._cost()
        value = self._read(key)
        return value, self._cost() - began

    async def settle(self) -> None:
        """Waits until nothing is being read."""
        running = [kept.task for kept in self._kept.values() if kept.task is not None]
        await asyncio.gather(*running)
