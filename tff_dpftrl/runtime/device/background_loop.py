"""An event loop in a thread, for gRPC: blocked sessions cost a thread that sleeps, and no more.

gRPC's blocking calls wake up ten times a second each to look around, which a device that waits
for an hour pays for, and a process with a thousand of them cannot afford.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_END_S = 5.0


class BackgroundLoop:
    """The loop; any thread may use it."""

    def __init__(self):
        """Starts the thread, which does not keep the process alive."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="background loop", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Begins a coroutine; those of one thread begin in their order.

        Args:
          coroutine: The coroutine.

        Returns:
          Its result.

        Raises:
          RuntimeError: If the loop was closed.
        """
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise

    def call(self, function: Callable[[], object]) -> None:
        """Calls a function soon, unless the loop was closed."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            pass

    def close(self) -> None:
        """Ends what still runs, and the thread."""
        self.call(self._loop.stop)
        self._thread.join(_END_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(_handle)
        try:
            self._loop.run_forever()
            running = asyncio.all_tasks(self._loop)
            for task in running:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
        finally:
            self._loop.close()


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # Where a process has several loops, as one with a server has, all of them are woken up for
    # what gRPC has for one, and it tells the others so in this way.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
