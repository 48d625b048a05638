"""Names of the holders of leases, which tell a process on the same machine whether one has ended.

A holder's name has the process and the start of its process, and a digest of the machine: of its
name, its boot, and the namespaces in which process ids and times are counted. A process of another
machine or container, or a name without these facts, counts as living.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import re

_PROC = pathlib.Path("/proc")  # Of Linux.
_START = 19  # Index of the time of the start among the fields of `stat` after the name.
_NAME = re.compile(r"(.*), process (\d+) since tick (\d+) on ([0-9a-f]{32})", re.DOTALL)


@functools.lru_cache(maxsize=1)  # The name must stay the same; the machine's may change.
def _suffix_of(pid: int) -> str:
    try:
        host, start = host_digest(), start_tick(pid)
    except OSError:
        return ""
    return f", process {pid} since tick {start} on {host}" if host else ""


def name_of(owner: str) -> str:
    """Returns the name under which a Coordinator of this process holds a lease."""
    return owner + _suffix_of(os.getpid())


def owner_of(name: str) -> str:
    """Returns the address of the Coordinator that holds a lease under a name."""
    known = _NAME.fullmatch(name)
    return known[1] if known else name


def is_gone(name: str) -> bool:
    """Returns whether the holder of a lease has certainly ended; False if that is not known."""
    known = _NAME.fullmatch(name)
    if known is None or known[4] != host_digest():
        return False
    try:
        return start_tick(int(known[2])) != int(known[3])
    except OSError:
        return False


def host_digest() -> str:
    """Returns the digest of what has common process ids; empty if that is not known."""
    try:
        # Process ids of another namespace may be shown here.
        if os.readlink(_PROC / "self") != str(os.getpid()):
            return ""
        kinds = (_PROC / "self/ns" / kind for kind in ("pid", "time"))
        spaces = [os.readlink(kind) for kind in kinds if os.path.lexists(kind)]
        boot = (_PROC / "sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""
    facts = (os.uname().nodename, boot, *spaces)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def start_tick(pid: int) -> int | None:
    """Returns when a process started, in ticks since the boot; None if there is no such process."""
    try:
        os.kill(pid, 0)  # Unlike /proc, this shows processes of other users always.
    except ProcessLookupError:
        return None
    except (PermissionError, OverflowError):
        pass
    return int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[_START])
