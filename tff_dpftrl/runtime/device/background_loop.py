"""An asyncio event loop in a thread, for gRPC: a blocked session costs one sleeping thread.

Each blocking call of gRPC wakes up ten times a second. A device that waits for an hour pays for
that, and a process with a thousand devices cannot afford it.
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
    """Event loop in a daemon thread; thread-safe."""

    def __init__(self):
        """Starts the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="background loop", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Starts a coroutine; the coroutines of one thread start in their order.

        It raises RuntimeError if the loop is closed.
        """
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise

    def call(self, function: Callable[[], object]) -> None:
        """Schedules a call on the loop; does nothing if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            pass

    def close(self) -> None:
        """Cancels all running coroutines and ends the thread."""
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
    # In a process with several loops, such as one with a server, gRPC wakes up all of them for
    # an event of one. The others get this exception, which is no error.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
