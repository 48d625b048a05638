"""Prevents core files of a process whose memory holds devices' reports and the noise's seed."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys

_PR_SET_DUMPABLE = 4  # linux/prctl.h


def forbid() -> None:
    """Forbids core files from now on, so that a crash leaves nothing of the memory behind.

    On Linux the process is also marked as not dumpable, since a program that receives core files
    (systemd-coredump) need not keep to the limit of their size. Other programs of the same user
    can then not look into the memory either.
    """
    with contextlib.suppress(ValueError, OSError):  # A limit that is 0 already is enough.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
