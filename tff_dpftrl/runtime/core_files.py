"""No core files of a process in whose memory are reports of devices, and the seed of the noise."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys

_PR_SET_DUMPABLE = 4  # linux/prctl.h


def forbid() -> None:
    """Leaves nothing of the memory behind if the process crashes, from here on to its end.

    On Linux the process is marked as well, since a program that receives core files
    (systemd-coredump) does not have to keep to the limit of their size; other programs of
    the same user can then not look into the memory either.
    """
    with contextlib.suppress(ValueError, OSError):  # A limit that is 0 already is enough.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
