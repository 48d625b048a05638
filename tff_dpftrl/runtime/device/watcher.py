"""Ends what blocks a session when the device may not go on, or when it takes too long."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

from tff_dpftrl.runtime.device import session


class Watcher:
    """One thread for any number of sessions; there is none while nothing is watched.

    A call that waits for the server, or trains, cannot ask by itself whether to go on. The
    watcher asks for it, and calls what ends it.
    """

    def __init__(self, *, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic):
        """Watches nothing yet.

        Args:
          interval_s: How often to ask, in seconds.
          clock: Seconds, never going back.
        """
        self._interval_s, self._clock = interval_s, clock
        self._changed = threading.Condition()
        self._watched: set[_Watched] = set()
        self._has_thread = False

    @contextlib.contextmanager
    def watching(
        self,
        keep_going: session.KeepGoing,
        end: Callable[[], object],
        *,
        seconds: float = math.inf,
        too_long: str = "",
    ) -> Iterator[None]:
        """Watches over the block.

        Args:
          keep_going: Asked now and then, from another thread.
          end: Called once `keep_going` raises or the time is over, again and again until
            the block has ended; from another thread. The block should raise then.
          seconds: How long the block may take.
          too_long: What to say of a block that took longer.

        Yields:
          Nothing.

        Raises:
          Exception: What `keep_going` raised, or a `StepFailed` that says `too_long`, in
            place of whatever the block raises because it was ended.
        """
        watched = _Watched(keep_going, end, self._clock() + seconds, too_long)
        self._add(watched)
        try:
            yield
        except Exception:
            watched.stop()
            # Nothing may hold an error that holds, by its traceback, all of the session: what
            # such a circle holds is freed late, and a model is large.
            error, watched.error = watched.error, None
            if error is None:
                raise
            try:
                raise error from None
            finally:
                del error
        finally:
            watched.stop()
            with self._changed:
                self._watched.discard(watched)

    def _add(self, watched: _Watched) -> None:
        with self._changed:
            self._watched.add(watched)
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._watch, name="watcher", daemon=True).start()

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
                one.look(now)


class _Watched:
    """One block."""

    def __init__(
        self,
        keep_going: session.KeepGoing,
        end: Callable[[], object],
        deadline: float,
        too_long: str,
    ):
        self.error: Exception | None = None
        self._keep_going, self._end = keep_going, end
        self._deadline, self._too_long = deadline, too_long
        self._lock = threading.Lock()
        self._has_stopped = False

    def look(self, now: float) -> None:
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
        """From now on nothing of it is called."""
        with self._lock:
            self._has_stopped = True
