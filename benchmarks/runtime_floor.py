"""What the messages of an empty session cost a server that does nothing with them.

    PYTHONPATH=. python benchmarks/runtime_floor.py [--num-devices 2000] [--repetitions 9]

The server's processor time for each session, in two ways over TLS on loopback, which take turns:

- "stream": a stream of grpc.aio for each session, as our protocol has it, over four connections;
- "frames": the same messages, each behind its length and the number of its session, over four
  connections, as a gateway could send them that collects devices. That is a design: there is no
  such server. Each is written, and encrypted, by itself: together they would cost less.

What our server takes beyond the stream is in `runtime_sessions.py empty`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import resource
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile

import grpc

from tff_dpftrl.runtime import tls

_SIZES_DOWN, _SIZES_UP = (60, 120, 20), (0, 60, 60)
"""Bytes of challenge, configuration and answer; of opening, check-in and report."""

_DOWN = [bytes(size) for size in _SIZES_DOWN]
_UP = [bytes(size) for size in _SIZES_UP]
_HEAD = struct.Struct("<II")
_NUM_CONNECTIONS = 4
_METHOD = "/floor/Session"


class _Frames(asyncio.Protocol):
    """Either end of a connection of frames: answers what comes with the next message."""

    def __init__(self, messages: list[bytes], is_ended=lambda: None):
        self._messages, self._is_ended = messages, is_ended
        self._next: dict[int, int] = {}
        self._left = b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        data = self._left + data
        begin = 0
        while begin + _HEAD.size <= len(data):
            size, session = _HEAD.unpack_from(data, begin)
            if begin + _HEAD.size + size > len(data):
                break
            begin += _HEAD.size + size
            self._answer(session)
        self._left = data[begin:]

    def open(self, sessions: range) -> None:
        """Sends the first message of each."""
        for session in sessions:
            self._answer(session)

    def _answer(self, session: int) -> None:
        place = self._next.pop(session, 0)
        if place == len(self._messages):
            self._is_ended()
            return
        if place + 1 < len(self._messages) or self._messages is _UP:
            self._next[session] = place + 1
        message = self._messages[place]
        self.transport.write(_HEAD.pack(len(message), session) + message)


class _Streams(grpc.GenericRpcHandler):
    def service(self, handler_call_details):
        async def session(request, context):
            for message in _DOWN[:-1]:
                await context.write(message)
                await context.read()
            await context.write(_DOWN[-1])

        return grpc.stream_stream_rpc_method_handler(session)


async def _serve(folder: pathlib.Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    loop = asyncio.get_running_loop()
    frames = await loop.create_server(lambda: _Frames(_DOWN), "127.0.0.1", 0, ssl=context)
    streams = grpc.aio.server(handlers=[_Streams()])
    pair = ((folder / "server.key").read_bytes(), (folder / "server.pem").read_bytes())
    port = streams.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await streams.start()
    print(json.dumps([frames.sockets[0].getsockname()[1], port]), flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(used.ru_utime + used.ru_stime, flush=True)
    await streams.stop(0)


async def _run_frames(port: int, folder: pathlib.Path, num_devices: int) -> None:
    context = ssl.create_default_context(cafile=folder / "server.pem")
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    left = num_devices

    def is_ended():
        nonlocal left
        left -= 1
        if not left:
            ended.set()

    connections = [
        (
            await loop.create_connection(
                lambda: _Frames(_UP, is_ended), "127.0.0.1", port, ssl=context
            )
        )
        for _ in range(_NUM_CONNECTIONS)
    ]
    for i, (_, frames) in enumerate(connections):
        frames.open(range(i, num_devices, _NUM_CONNECTIONS))
    await ended.wait()
    for transport, _ in connections:
        transport.close()


async def _run_streams(port: int, folder: pathlib.Path, num_devices: int) -> None:
    credentials = grpc.ssl_channel_credentials((folder / "server.pem").read_bytes())
    channels = [
        grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, [("number", i)])
        for i in range(_NUM_CONNECTIONS)
    ]
    methods = [channel.stream_stream(_METHOD) for channel in channels]

    async def device(method):
        call = method()
        for message in _UP[1:]:
            await call.read()
            await call.write(message)
        await call.read()
        if await call.read() is not grpc.aio.EOF:
            raise RuntimeError("a session does not end")

    await asyncio.gather(*(device(methods[i % len(methods)]) for i in range(num_devices)))
    for channel in channels:
        await channel.close()


def _measure(folder: pathlib.Path, num_devices: int, repetitions: int) -> None:
    tls.create_self_signed(folder / "server.pem", folder / "server.key", ["127.0.0.1"])
    server = subprocess.Popen(
        [sys.executable, __file__, f"--serve={folder}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    ports = json.loads(server.stdout.readline())

    def used() -> float:
        server.stdin.write("\n")
        server.stdin.flush()
        return float(server.stdout.readline())

    milliseconds = {"frames": [], "stream": []}
    for _ in range(repetitions + 1):
        for (name, own), port in zip(milliseconds.items(), ports, strict=True):
            run = {"frames": _run_frames, "stream": _run_streams}[name]
            before = used()
            asyncio.run(run(port, folder, num_devices))
            own.append(1e3 * (used() - before) / num_devices)
    server.communicate()
    for name, (_, *own) in milliseconds.items():
        low, median, high = (f(own) for f in (min, statistics.median, max))
        print(f"{name}: {median:.3f} ms of the server for each, from {low:.3f} to {high:.3f}")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-devices", type=int, default=2000)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(_serve(pathlib.Path(given.serve)))
        return
    with tempfile.TemporaryDirectory() as folder:
        _measure(pathlib.Path(folder), given.num_devices, given.repetitions)


if __name__ == "__main__":
    main()
