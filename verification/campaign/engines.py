"""What a campaign needs of whoever runs the server, in one process or in many."""

from __future__ import annotations

import abc
import contextlib
import os
import random
import signal
from collections.abc import Callable


class Engines(abc.ABC):
    """The processes of a server, and who looks after them."""

    def __init__(self):
        """Nothing is stopped."""
        self._stopped: set[int] = set()

    @property
    @abc.abstractmethod
    def targets(self) -> tuple[Callable[[], str], ...]:
        """For each address that devices have: says host and port of the moment, or nothing."""

    @abc.abstractmethod
    async def begin(self) -> None:
        """Starts."""

    @abc.abstractmethod
    async def end(self) -> None:
        """Ends everything."""

    @abc.abstractmethod
    async def keep(self) -> None:
        """Starts what whoever looks after processes would start now; called often."""

    @abc.abstractmethod
    def victim(self, generator: random.Random) -> int | None:
        """Process id of a part that a fault may happen to at any moment; None if there is none."""

    @abc.abstractmethod
    async def lose_one(self, point: str) -> None:
        """Kills what has to be gone for a point of a start to be reached."""

    @abc.abstractmethod
    def hides(self, pid: int) -> tuple[str, ...]:
        """Returns the tasks whose devices' vectors a process must not have in its memory."""

    def bystanders(self) -> tuple[int, ...]:
        """Returns ids of the processes that run the server, and have nothing to do with devices."""
        return ()

    @abc.abstractmethod
    async def retire(self) -> None:
        """Ends what has come back and is of no use any more."""

    @abc.abstractmethod
    async def start_anew(self) -> None:
        """Ends everything and starts again, where there was no progress."""

    async def lose_node(self) -> None:
        """Kills a whole node, and gives another one later."""
        raise NotImplementedError

    def note_stopped(self, pid: int) -> None:
        """Notes that a process was stopped."""
        self._stopped.add(pid)

    def go_on(self) -> None:
        """Has all that is stopped go on."""
        for pid in self._stopped:
            send(pid, signal.SIGCONT)
        self._stopped.clear()


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal; nothing happens if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
