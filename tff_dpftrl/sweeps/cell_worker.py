"""A process that runs cells one after another, so that it imports TensorFlow once.

It reads one line of JSON for each cell: the command line of a Python program, and the file for the
program's output. It answers with a line that has the exit status. It ends with its input, after a
program that failed, and when it has become large.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence

from tff_dpftrl.sweeps import child

_MOST_CELLS = 16
_SECONDS_TO_END = 30.0
_MOST_BYTES = 2**31  # Graphs and functions of earlier cells stay in TensorFlow's memory.


class CellWorker:
    """The sweep's handle of the process."""

    def __init__(self, lock: int, log: pathlib.Path):
        """Starts the process."""
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                # -u: a log has outputs and errors in order, also those of a cell that is killed.
                child.command(
                    [sys.executable, "-u", "-m", __name__, str(_MOST_CELLS), str(_MOST_BYTES)]
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=[lock],
                start_new_session=True,  # Ctrl-C is for the sweep, which then ends the others.
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._answers.fileno(), False)
        self._answer = b""

    def begin(self, command: Sequence[str], log: pathlib.Path) -> None:
        """Starts a program in the process, given as `python -m MODULE …` or `python FILE …`."""
        self._answer = b""
        line = json.dumps({"command": list(command), "log": str(log)}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # It has ended, as `status` will say.
            self._stdin.write(line.encode())
            self._stdin.flush()

    def status(self) -> int | None:
        """Returns the exit status of the program that it runs; None while it runs.

        A negative one is the signal that ended the process.
        """
        ended = self._process.poll()  # Before the answer is read: it cannot come afterwards.
        if not self._answer.endswith(b"\n"):
            self._answer += self._answers.read() or b""
        if self._answer.endswith(b"\n"):
            return int(self._answer.split()[0])
        return ended

    @property
    def can_run_another(self) -> bool:
        """Whether the program that it ran has ended, and the process goes on."""
        return self._answer.endswith(b"more\n") and self._process.poll() is None

    def close(self) -> None:
        """Ends the process, which runs nothing."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.kill()
        self._answers.close()

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Sends SIGKILL, and waits for the end."""
        self._process.kill()
        self._process.wait()


def _run(command: Sequence[str]) -> int:
    """Runs a Python program in this process; returns its exit status."""
    arguments = list(command[1:])
    while arguments[0] in ("-I", "-S"):  # Options of an interpreter of its own.
        del arguments[0]
    sys.argv = arguments
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=False)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _resident_bytes() -> int:
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # Not on every system.
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _main(most_cells: int, most_bytes: int) -> None:
    tasks, answers = os.fdopen(os.dup(0)), os.dup(1)  # Which programs do not inherit.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, line in enumerate(tasks, start=1):
        task = json.loads(line)
        log = os.open(task["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        status = _run(task["command"])
        for signum, handler in handlers.items():  # That of a cell would speak in the name of it.
            signal.signal(signum, handler)
        sys.stdout.flush()
        sys.stderr.flush()
        goes_on = not status and number < most_cells and _resident_bytes() < most_bytes
        os.write(answers, f"{status} {'more' if goes_on else 'last'}\n".encode())
        if not goes_on:
            return


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
