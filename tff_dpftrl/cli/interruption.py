"""Ctrl-C and SIGTERM on the command line: one message and the usual exit status, at any moment.

Importing TensorFlow takes seconds in C++ and in callbacks that lose a KeyboardInterrupt
or show it as a traceback. So the handler raises nothing: it prints what is left and ends
the process there and then. That is no more than SIGKILL does, which runs are made to
survive: what the ledger has committed is on the disk.
"""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Callable


class Interruption:
    """Message and exit status for a process that the user stops, like "tff-dpftrl train".

    `what_is_left`, which is called then, returns what the files hold and how to go on. It is None
    for commands that leave no files behind.
    """

    def __init__(self, command: str):
        self.command = command
        self.what_is_left: Callable[[], str] | None = None

    def install(self) -> None:
        """Ends the process on SIGINT and SIGTERM from now on; not for a caller's process.

        A signal that the process was started to ignore stays ignored.
        """
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._end)

    def message(self, reason: str = "interrupted") -> str:
        """Returns the message for a reason; it ends with a line break."""
        left = "" if self.what_is_left is None else " " + self.what_is_left()
        return f"\n{self.command}: {reason.removesuffix('.')}.{left}\n"

    def _end(self, signum: int, frame: types.FrameType | None) -> None:
        del frame
        try:
            # `print` is not used, since the signal may have come within a print.
            os.write(2, self.message().encode())
        finally:
            os._exit(128 + signum)
