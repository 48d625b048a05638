"""Processes of servers: one leads, one or two wait to be started, and some come back as zombies."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import sys
from collections.abc import Callable, Sequence

from typing_extensions import override

from verification.campaign import engines, stage, tiny_tasks

_LOOK_SECONDS = 0.02
_SPARES = 2
_ZOMBIE_SECONDS = 0.5


@dataclasses.dataclass
class Server:
    """A process.

    Attributes:
      name: Its name.
      process: It.
      is_started: Whether it was told to serve.
      is_stopped: Whether it was sent SIGSTOP.
      address: Host and port that it serves at; None before.
      epochs: Last epoch that a Coordinator of its has led under, by population.
      events_read: Bytes of its events that were read.
    """

    name: str
    process: asyncio.subprocess.Process
    is_started: bool = False
    is_stopped: bool = False
    address: str | None = None
    epochs: dict[str, int] = dataclasses.field(default_factory=dict)
    events_read: int = 0

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.returncode is None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid


async def _kill(server: Server) -> None:
    if server.is_alive:
        server.process.kill()
        await server.process.wait()


class Servers(engines.Engines):
    """All processes of a campaign on asyncio."""

    def __init__(self, place: stage.Stage, *, options: Sequence[str] = ()):
        """Starts nothing.

        Args:
          place: The folder.
          options: Further arguments of `server_process`.
        """
        super().__init__()
        self._place, self._options = place, tuple(options)
        self._all: list[Server] = []
        self._waiting: list[asyncio.Future[Server]] = []
        self._following: asyncio.Future | None = None
        self._numbers = itertools.count(1)

    @property
    def _alive(self) -> list[Server]:
        """Those that serve, will, or are stopped."""
        return [server for server in self._all if server.is_started and server.is_alive]

    @property
    def _leader(self) -> Server | None:
        """The one that has led last, if it lives.

        Whoever leads the first population is left the others, too.
        """
        first = min(self._place.populations)
        serving = [server for server in self._alive if server.address is not None]
        return max(serving, key=lambda server: server.epochs.get(first, 0), default=None)

    @property
    def targets(self) -> tuple[Callable[[], str], ...]:
        """See the base class; the one that has led last is where devices are sent."""
        return (lambda: "" if self._leader is None else self._leader.address,)

    @override
    async def begin(self) -> None:
        for _ in range(_SPARES):
            self._waiting.append(asyncio.ensure_future(self._spawn()))
        self._following = asyncio.ensure_future(self._follow())
        await self.keep()

    async def keep(self) -> None:
        """Starts a server where all are gone, or stopped."""
        if all(server.is_stopped for server in self._alive):
            self._waiting.append(asyncio.ensure_future(self._spawn()))
            server = await self._waiting.pop(0)
            server.is_started = True
            self._all.append(server)
            server.process.stdin.write(b"\n")

    @override
    def victim(self, generator: random.Random) -> int | None:
        del generator  # There is one that leads.
        return None if self._leader is None else self._leader.pid

    @override
    async def lose_one(self, point: str) -> None:
        del point  # All of it starts together.
        if self._leader is not None:
            await _kill(self._leader)

    @override
    def note_stopped(self, pid: int) -> None:
        super().note_stopped(pid)
        for server in self._alive:
            if server.pid == pid:
                server.is_stopped = True

    @override
    def go_on(self) -> None:
        super().go_on()
        for server in self._all:
            server.is_stopped = False

    def hides(self, pid: int) -> tuple[str, ...]:
        """Returns the secure task: the server sums the other one in the clear."""
        del pid
        return (tiny_tasks.SECURE,)

    async def retire(self) -> None:
        """Ends zombies, once they have had time to do harm."""
        if len(self._alive) > 1:
            await asyncio.sleep(_ZOMBIE_SECONDS)
            leader = self._leader
            for server in self._alive:
                if server is not leader:
                    await _kill(server)

    @override
    async def start_anew(self) -> None:
        for server in self._alive:
            await _kill(server)
        await self.keep()

    @override
    async def end(self) -> None:
        if self._following is not None:
            self._following.cancel()
        waiting = await asyncio.gather(*self._waiting, return_exceptions=True)
        for server in [*self._all, *waiting]:
            if isinstance(server, Server):
                await _kill(server)

    async def _spawn(self) -> Server:
        name = f"server-{next(self._numbers)}"
        with open(self._place.logs / f"{name}.log", "wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "verification.campaign.server_process"),
                *(str(self._place.folder), name, *self._options),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        line = await process.stdout.readline()
        if line != b"ready\n":
            raise RuntimeError(f"{name} does not start: see {self._place.logs}.")
        return Server(name, process)

    async def _follow(self) -> None:
        while True:
            for server in self._alive:
                self._read_events(server)
            await asyncio.sleep(_LOOK_SECONDS)

    def _read_events(self, server: Server) -> None:
        path = self._place.events / f"{server.name}.jsonl"
        with open(path, "rb") as file:
            file.seek(server.events_read)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        server.events_read += len(whole)
        for event in map(json.loads, whole.splitlines()):
            if event["kind"] == "leading":
                server.epochs[event["population"]] = event["epoch"]
            elif event["kind"] == "serves":
                server.address = event["address"]
