"""A program that turns into a command which ends when its parent process does.

It is started as `python child.py PARENT COMMAND …`. Linux then sends SIGTERM when the parent
ends, even by SIGKILL; elsewhere a parent that is killed leaves its children behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def command(command: Sequence[str]) -> list[str]:
    """Returns the command line that runs a command so that it ends with this process.

    Start it in the main thread: on Linux the command ends with the thread that started it.
    """
    # -I -S: neither the user's site packages nor the environment slow its start.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _become(parent: int, command: Sequence[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # It ended before it was asked for.
            sys.exit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
