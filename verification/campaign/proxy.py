"""A TCP proxy on loopback between devices and a server, which loses connections when told to."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

_CHUNK = 1 << 16


class _Link:
    """One connection, in both directions."""

    def __init__(self, *writers: asyncio.StreamWriter):
        self._writers = writers
        self.flows = asyncio.Event()
        self.flows.set()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self.flows.wait()
                writer.write(data)
                await writer.drain()
        self.cut()


class Proxy:
    """Listens on a port of its own; each new connection goes to the server of the moment."""

    def __init__(self, target: Callable[[], str]):
        """Does nothing before `start`.

        Args:
          target: Host and port of the server of the moment; empty if there is none.
        """
        self._target = target
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """Host and port that devices connect to."""
        return f"localhost:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        """Begins to listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        """Cuts everything."""
        self._server.close()
        self.cut(1.0, random.Random(0))
        await self._server.wait_closed()

    def cut(self, share: float, generator: random.Random) -> None:
        """Ends connections at once.

        Args:
          share: Each with this probability.
          generator: Source of randomness.
        """
        for link in list(self._links):
            if generator.random() < share:
                link.cut()

    async def stall(self, share: float, seconds: float, generator: random.Random) -> None:
        """Lets nothing pass for some time; what was sent meanwhile passes later.

        Args:
          share: On each connection with this probability.
          seconds: How long.
          generator: Source of randomness.
        """
        chosen = [link for link in self._links if generator.random() < share]
        for link in chosen:
            link.flows.clear()
        await asyncio.sleep(seconds)
        for link in chosen:
            link.flows.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = (self._target() or "").rpartition(":")
        try:
            if not port:
                raise OSError
            to_reader, to_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        link = _Link(writer, to_writer)
        self._links.add(link)
        try:
            await asyncio.gather(link.pump(reader, to_writer), link.pump(to_reader, writer))
        finally:
            self._links.discard(link)
