"""Watchdog that kills TFF's worker processes once the training process is gone.

TFF's runtime is a child process, `worker_binary`. It outlives a parent that ends
without Python's clean-up (SIGTERM, SIGKILL, a crash) and keeps its terminal or pipe
open. The watchdog is a small process in a separate session: it records the workers of
its parent, and kills them once the pipe to the parent closes, which the kernel does for
every kind of death.

A program that never starts the watchdog, because it leaves TFF's context as it is, has
`end_workers_at_exit` instead. TFF ends a worker in a destructor, which comes too late where
the interpreter exits first.
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import signal
import subprocess
import sys
import time

_WORKER = "worker_binary"
_PROGRAM = os.path.join("tensorflow_federated", "data", _WORKER)
_POLL_SECONDS = 0.2
_POLL_SECONDS_ONCE_FOUND = 2.0
_watchdogs: dict[int, subprocess.Popen[bytes]] = {}  # By the process they watch: forks have none.


def start() -> subprocess.Popen[bytes]:
    """Starts the watchdog of this process, unless it has one that runs.

    Call it in the main thread, before the first TFF computation runs. It needs
    Linux's /proc; where there is none it runs, but finds no workers.

    If Ctrl-C is ignored, as in a script's background job, Python's default is restored. A
    worker would inherit that setting, and TFF ends a worker with the same signal when the
    execution context is replaced: it would wait for the worker forever.

    Returns:
      The watchdog's process. It ends by itself after this one.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    pid = os.getpid()
    if pid in _watchdogs and _watchdogs[pid].poll() is None:
        return _watchdogs[pid]
    # -I -S: neither the user's site packages nor the environment slow its start.
    _watchdogs[pid] = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return _watchdogs[pid]


@functools.cache
def end_workers_at_exit() -> None:
    """Ends the workers that TFF started in this process when the interpreter exits.

    Else a worker holds the program's standard output open: a pipe never ends. Workers of
    other processes, forks of this one included, are left alone. It needs Linux's /proc.
    """
    atexit.register(_end_workers)


def _end_workers() -> None:
    for pid in _workers(os.getpid()):
        try:
            program = os.readlink(f"/proc/{pid}/exe")
        except OSError:  # Ended by itself.
            continue
        if program.endswith(_PROGRAM):
            os.kill(pid, signal.SIGKILL)  # Not reaped: TFF's destructor waits for it.


def _parent_and_start_time(pid: int) -> tuple[int, str] | None:
    """Returns parent's id and start time of a process named like TFF's worker, else None."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    return (int(fields[1]), fields[19]) if name == _WORKER else None


def _workers(parent: int) -> dict[int, str]:
    """Returns ids and start times of the workers whose parent is `parent`."""
    start_times = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        facts = _parent_and_start_time(int(entry)) if entry.isdigit() else None
        if facts is not None and facts[0] == parent:
            start_times[int(entry)] = facts[1]
    return start_times


def _watch(parent: int) -> None:
    workers: dict[int, str] = {}
    timeout = _POLL_SECONDS
    while not select.select([sys.stdin], [], [], timeout)[0]:
        workers = _workers(parent) or workers
        timeout = _POLL_SECONDS_ONCE_FOUND if workers else _POLL_SECONDS
    time.sleep(0.1)  # A parent that ends cleanly ends its worker by itself.
    for pid, start_time in workers.items():
        facts = _parent_and_start_time(pid)
        if facts is not None and facts[1] == start_time:  # Not another process with the same id.
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
