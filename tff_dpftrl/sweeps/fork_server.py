"""A process that loads TensorFlow and TFF once, and forks into a process for each cell.

Loading them is a large part of a short cell's time. Each cell still has a process of its own, in
which TensorFlow begins to work anew: a cell that crashes harms no other one, and computes what it
would in a process that is started for it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tff_dpftrl.sweeps import child

_PROGRAM = ("-m", "tff_dpftrl.cli.main")


class ForkServer:
    """The parent's side. Use `start` and the methods of `Cell` in one thread."""

    def __init__(self, lock: int):
        """Starts nothing yet.

        Args:
          lock: File descriptor that the cells inherit.
        """
        self._lock = lock
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], log: str) -> Cell | None:
        """Runs a command line of this package in a new process.

        Args:
          command: Command line, as for `subprocess.Popen`.
          log: File that standard output and error are appended to.

        Returns:
          The cell; None if the command is of another program, or the server has ended.
        """
        if tuple(command[:3]) != (sys.executable, *_PROGRAM):
            return None
        if self._process is None:
            self._process = subprocess.Popen(
                child.command([sys.executable, "-m", __name__]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[self._lock],
                start_new_session=True,
            )
        pid = self.ask({"arguments": list(command[3:]), "log": log})
        return None if pid is None else Cell(self, pid)

    def ask(self, request: dict[str, Any]) -> Any:
        """Sends a request and returns the answer; None if the server has ended."""
        assert self._process and self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            return None
        return json.loads(answer) if answer else None

    def close(self) -> None:
        """Ends the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Cell:
    """Process of a cell, with those methods of `subprocess.Popen` that a sweep needs.

    Attributes:
      returncode: Exit status, or the negated number of the signal that ended it; None if it runs.
    """

    def __init__(self, server: ForkServer, pid: int):
        """Stores the process.

        Args:
          server: Server that forked it. It reaps the process when it is asked, so that no other
            process gets its number before.
          pid: Number of the process.
        """
        self._server, self._pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns `returncode` after a look at the process."""
        if self.returncode is None:
            answer = self._server.ask({"pid": self._pid})
            # A server that was killed has taken its cells with it.
            self.returncode = -signal.SIGKILL if answer is None else answer["status"]
        return self.returncode

    def wait(self) -> int | None:
        """Waits for the end of the process, and returns `returncode`."""
        if self.returncode is None:
            answer = self._server.ask({"pid": self._pid, "wait": True})
            self.returncode = -signal.SIGKILL if answer is None else answer["status"]
        return self.returncode

    def terminate(self) -> None:
        """Sends SIGTERM to a process that runs."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to a process that runs."""
        self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self._pid, signum)


def _load() -> Any:
    """Imports what cells need, and returns the module of the command."""
    command = importlib.import_module(_PROGRAM[1])
    for name in ("training.opening", "training.run"):
        importlib.import_module(f"tff_dpftrl.{name}")
    return command


def _serve(command: Any) -> None:
    """Answers requests until standard input ends. In a forked process, runs the cell."""
    answers = os.dup(1)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "log" in request:
            server = os.getpid()
            pid = os.fork()
            if not pid:
                os.close(answers)
                _become_cell(command, server, request)
            answer: Any = pid
        else:
            pid, status = os.waitpid(request["pid"], 0 if request.get("wait") else os.WNOHANG)
            answer = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _become_cell(command: Any, server: int, request: dict[str, Any]) -> None:
    """Runs the cell in this process, which ends with it."""
    os.setsid()
    child.end_with(server)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    # TFF has made its default context at the import, with a thread that no fork copies.
    native = importlib.import_module("tensorflow_federated").backends.native
    native.set_sync_local_cpp_execution_context()
    sys.argv[1:] = request["arguments"]
    sys.exit(command.main())


if __name__ == "__main__":
    _serve(_load())
