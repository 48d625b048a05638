"""A watchdog that ends a session's blocking calls on interruption and on timeout."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable

from tff_dpftrl.runtime.device import session


class Watcher:
    """Watchdog of any number of sessions in one thread, which ends while nothing is watched.

    A call that waits for the server, or trains, cannot check whether to go on. The watcher
    checks instead, and ends the call.
    """

    def __init__(self, *, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic):
        """Creates a watcher without a thread, which checks every `interval_s` seconds."""
        self._interval_s, self._clock = interval_s, clock
        self._changed = threading.Condition()
        self._watched: set[_Watched] = set()
        self._has_thread = False

    def watching(
        self,
        keep_going: session.KeepGoing,
        end: Callable[[], object],
        *,
        seconds: float = math.inf,
        too_long: str = "",
    ) -> contextlib.AbstractContextManager[None]:
        """Watches the block of a `with` statement for at most `seconds`.

        `keep_going` is called from another thread; it raises to end the block. Then, or when the
        time is over, `end` is called from that thread, repeatedly until the block has ended. The
        context raises the exception of `keep_going`, or a `StepFailed` with `too_long`, in place of
        the exception that the block raises because it was ended.
        """
        return _Watched(self, keep_going, end, self._clock() + seconds, too_long)

    def add(self, watched: _Watched) -> None:
        """Begins to watch a block."""
        with self._changed:
            self._watched.add(watched)
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._watch, name="watcher", daemon=True).start()

    def discard(self, watched: _Watched) -> None:
        """Ends watching a block."""
        with self._changed:
            self._watched.discard(watched)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._interval_s)
                if not self._watched:
                    self._has_thread = False
                    return
                watched = list(self._watched)
            now = self._clock()
            for one in watched:
                one.check(now)


class _Watched(contextlib.AbstractContextManager[None]):
    """One watched block.

    No object of the session may reference an error, whose traceback references the session: such a
    cycle is freed late, and a model is large. A generator as context would be in one.
    """

    def __init__(
        self,
        watcher: Watcher,
        keep_going: session.KeepGoing,
        end: Callable[[], object],
        deadline: float,
        too_long: str,
    ):
        self.error: Exception | None = None
        self._watcher = watcher
        self._keep_going, self._end = keep_going, end
        self._deadline, self._too_long = deadline, too_long
        self._lock = threading.Lock()
        self._has_stopped = False

    def __enter__(self) -> None:
        self._watcher.add(self)

    def __exit__(self, kind: object, raised: BaseException | None, traceback: object) -> None:
        self.stop()
        self._watcher.discard(self)
        error, self.error = self.error, None
        if error is None or not isinstance(raised, Exception):
            return
        try:
            raise error from None
        finally:
            del error

    def check(self, now: float) -> None:
        with self._lock:
            if self._has_stopped:
                return
            if self.error is None:
                try:
                    self._keep_going()
                except Exception as error:
                    self.error = error
            if self.error is None and now >= self._deadline:
                self.error = session.StepFailed(self._too_long)
            if self.error is not None:
                self._end()

    def stop(self) -> None:
        """Makes sure that no callback runs from now on."""
        with self._lock:
            self._has_stopped = True
