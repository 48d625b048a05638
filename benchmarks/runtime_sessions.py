"""What a session of a device costs the server, for empty updates and for those of a model.

    PYTHONPATH=. python benchmarks/runtime_sessions.py [empty] [connections] [model] [memory]
        [--num-devices 10000] [--parameters 1350000] [--model-devices 48] [--attested] [--uvloop]

Server and load each have a process of their own; they speak the real protocol over gRPC with
TLS on loopback, a stream for each device, over `--channels` connections.

- "empty": one round of devices whose updates are empty, from the first connection to the
  last answer; all of them wait until the last one has checked in. Besides devices a second
  there is processor time for each device, on the server and in the load, which a busy machine
  disturbs less.
- "connections": rounds of a thousand empty updates in which each device has a connection of its
  own, made for the session (TCP, TLS 1.3 with a P-256 certificate, HTTP/2) and closed after it,
  beside rounds over those that are there; the difference is that of neighbours.
- "model": rounds whose model and updates have so many float64 parameters, summed with NumPy,
  beside an echo: a gRPC method of the same server process that sends back the bytes of an
  update, over as many connections, with as many calls at a time as there are devices in a
  round. MB are those of both directions; the ratio is the median of the ratios of neighbours.
- "memory": peak memory of a new server for rounds of more and more devices, in MB; 128 MiB of
  models and as many of updates may be on their way at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

from tff_dpftrl.runtime import signing_keys, tls
from tff_dpftrl.runtime.actors import events, population
from tff_dpftrl.runtime.protocol import attestation, session_stream, wire_pb2
from tff_dpftrl.runtime.server import garbage, limits, observer, served_task, server
from verification import memory_store

_POPULATION, _TASK = "measured", "sum"
_ECHO = "/measured/Echo"
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_ROOM = 1 << 27  # Bytes on their way at a time, in each direction.
_REPETITIONS = 5  # Of a comparison.
_CONNECTIONS = 1000  # That are new in a round.


class _Sum(population.Summation):
    """Sums arrays of float64; empty ones too."""

    def __init__(self, parameters: int):
        self._parameters = parameters

    def zero(self):
        return np.zeros(self._parameters)

    def accumulate(self, total, payload):
        total += np.frombuffer(payload.update)
        return total

    def merge(self, total, other):
        total += other
        return total


class _Step(population.ServerStep):
    """Adds the mean, without noise."""

    def apply(self, total, num_reports, model, state):
        new = np.frombuffer(model) + total / num_reports
        return population.StepResult(new.tobytes(), state, {"num_reports": num_reports})

    def skip(self, model, state):
        return population.StepResult(model, state, {population.SKIPPED: True})


class _Rounds(observer.Observer):
    """Times rounds, from the choice of their devices until they are committed."""

    def __init__(self):
        self._began: dict[str, float] = {}
        self._latencies: list[float] = []

    def on_event(self, now, event):
        if isinstance(event, events.RoundBegan):
            self._began[event.attempt] = time.perf_counter()
        elif isinstance(event, events.RoundReleased):
            self._latencies.append(time.perf_counter() - self._began.pop(event.attempt))

    async def latencies(self) -> list[float]:
        """Seconds of the rounds since the last call, when none is under way."""
        while self._began:
            await asyncio.sleep(0.001)
        latencies, self._latencies = self._latencies, []
        return latencies


def _usage() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1024}


class _Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details):
        async def echo(request, context):
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


async def _serve(given: argparse.Namespace, folder: pathlib.Path) -> None:
    """Serves a population and an echo; says its usage whenever it is asked to."""
    rounds = population.RoundSettings(
        goal_count=given.goal, over_selection=1.0, reporting_timeout=3600.0
    )
    task = population.Task(_TASK, rounds, _Sum(given.parameters), _Step())
    num_bytes = given.parameters * 8
    store = memory_store.MemoryStore()
    store.add_task(_POPULATION, _TASK, model=bytes(num_bytes), state=b"")
    tokens = attestation.SignedTokens(
        [signing_keys.load_public(folder / "issuer.pub")], clock=time.time
    )
    rounds_seen = _Rounds()
    made = server.Server.of(
        population.Population(_POPULATION, (task,)),
        {_TASK: served_task.ServedTask(task, lambda version: b"a plan", num_bytes + 1000)},
        store,
        endpoint=server.Endpoint(
            folder / "server.pem",
            folder / "server.key",
            attestation=tokens if given.attested else None,
            limits=limits.Limits(sending_bytes=_ROOM, receiving_bytes=_ROOM),
        ),
        pace=lambda now, randomness: (600.0,) * 8,
        observer=rounds_seen,
    )
    await made.start()
    pair = ((folder / "server.key").read_bytes(), (folder / "server.pem").read_bytes())
    echo = grpc.aio.server(handlers=[_Echo()], options=_UNLIMITED)
    port = echo.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await echo.start()
    garbage.settle()
    print(json.dumps({"devices": made.address, "echo": f"127.0.0.1:{port}"}), flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        answer = {"latencies": await rounds_seen.latencies(), **_usage()}
        print(json.dumps(answer), flush=True)
    await echo.stop(0)
    await made.stop()


class _Load:
    """Many devices, and callers of an echo, over a few connections."""

    def __init__(self, given: argparse.Namespace, folder: pathlib.Path):
        credentials = grpc.ssl_channel_credentials((folder / "server.pem").read_bytes())
        self._issuer = attestation.TokenIssuer(
            signing_keys.load_private(folder / "issuer"), clock=time.time
        )
        self._given = given
        self._credentials = credentials
        self._attempt = ""
        self._messages: list[bytes] = []
        self._update = np.full(given.parameters, 1e-3).tobytes()

        # Connections are shared by channels of the same options: these have a number.
        self._numbers = itertools.count()

        def connect(address: str) -> list[grpc.aio.Channel]:
            return [self._connect(address) for _ in range(given.channels)]

        self._echoes = [c.unary_unary(_ECHO) for c in connect(given.echo)]
        self._sessions = [
            c.stream_stream(session_stream.SESSION_METHOD) for c in connect(given.devices)
        ]

    def _connect(self, address: str) -> grpc.aio.Channel:
        options = [*_UNLIMITED, ("number", next(self._numbers))]
        return grpc.aio.secure_channel(address, self._credentials, options)

    async def rounds(self, count: int) -> float:
        """Has devices take part, a round's worth at a time; returns seconds."""
        sessions = self._sessions
        begin = time.perf_counter()
        for _ in range(count):
            await asyncio.gather(
                *(self._device(sessions[i % len(sessions)]) for i in range(self._given.goal))
            )
        return time.perf_counter() - begin

    async def connections(self, count: int) -> float:
        """The same, each device with a connection that is made for it."""

        async def connect() -> None:
            async with self._connect(self._given.devices) as channel:
                await self._device(channel.stream_stream(session_stream.SESSION_METHOD))

        begin = time.perf_counter()
        for _ in range(count):
            await asyncio.gather(*(connect() for _ in range(self._given.goal)))
        return time.perf_counter() - begin

    def _report(self, attempt: str) -> list[bytes]:
        """The same for all devices of a round, which would make it on as many machines."""
        if attempt != self._attempt:
            report = wire_pb2.Report(attempt=attempt, update=self._update)
            messages = session_stream.report_messages(report)
            self._attempt = attempt
            self._messages = [message.SerializeToString() for message in messages]
        return self._messages

    async def _device(self, session: grpc.aio.StreamStreamMultiCallable) -> None:
        call = session()
        challenge = wire_pb2.FromServer.FromString(await call.read()).challenge
        message = wire_pb2.FromDevice()
        message.check_in.population = _POPULATION
        message.check_in.protocol_version = challenge.protocol_versions[0]
        message.check_in.runtime_version = 1
        if self._given.attested:
            nonce = session_stream.attested_nonce(challenge.challenge, "127.0.0.1", _POPULATION)
            message.check_in.token = self._issuer.issue(nonce)
        await call.write(message.SerializeToString())
        configuration = wire_pb2.FromServer.FromString(await call.read()).configuration
        for message in self._report(configuration.attempt):
            await call.write(message)
        answer = wire_pb2.FromServer.FromString(await call.read()).report_answer
        if not answer.accepted or await call.read() is not grpc.aio.EOF:
            raise RuntimeError(f"the report was not accepted: {answer.reason}")

    async def echoes(self, count: int) -> float:
        """Has as many calls echoed, a round's worth at a time; returns seconds."""

        async def call(i: int) -> None:
            answer = await self._echoes[i % len(self._echoes)](self._update)
            if len(answer) != len(self._update):
                raise RuntimeError("the echo is not what was sent")

        begin = time.perf_counter()
        for _ in range(count):
            await asyncio.gather(*(call(i) for i in range(self._given.goal)))
        return time.perf_counter() - begin


async def _put_load(given: argparse.Namespace, folder: pathlib.Path) -> None:
    """Does what lines of the standard input say: "rounds 3", "connections 3", "echoes 3"."""
    load = _Load(given, folder)
    loop = asyncio.get_running_loop()
    garbage.settle()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        what, count = line.split()
        seconds = await getattr(load, what)(int(count))
        print(json.dumps({"seconds": seconds, **_usage()}), flush=True)


class Pair:
    """A server's process and the load's."""

    def __init__(
        self,
        folder: pathlib.Path,
        goal: int,
        parameters: int,
        channels: int,
        attested: bool,
        uvloop: bool,
    ):
        """See `started`."""
        self.goal = goal
        self.parameters = parameters
        self._options = [
            *(f"--goal={goal}", f"--parameters={parameters}", f"--channels={channels}"),
            *(["--attested"] if attested else []),
            *(["--uvloop"] if uvloop else []),
            f"--folder={folder}",
        ]
        self._server = self._run("serve")
        addresses = json.loads(self._server.stdout.readline())
        self._load = self._run("load", *(f"--{name}={a}" for name, a in addresses.items()))

    def _run(self, role: str, *options: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, __file__, f"--role={role}", *self._options, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """Ends them."""
        for process in (self._load, self._server):
            process.communicate()

    def _ask(self, process: subprocess.Popen, line: str) -> dict[str, Any]:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def measure(self, what: str, count: int) -> dict[str, Any]:
        """Seconds, and processor seconds of both for each call, of so many rounds of calls.

        Of rounds also the latencies, and the seconds until the last one was committed.
        """
        before = self._ask(self._server, "usage")
        load_before = self._ask(self._load, "rounds 0")
        begin = time.perf_counter()
        done = self._ask(self._load, f"{what} {count}")
        after = self._ask(self._server, "usage")
        until_committed = time.perf_counter() - begin
        calls = count * self.goal
        return {
            "seconds": done["seconds"],
            "until_committed": until_committed,
            "latencies": after["latencies"],
            "per_second": calls / done["seconds"],
            "server_us": (after["cpu_s"] - before["cpu_s"]) / calls * 1e6,
            "load_us": (done["cpu_s"] - load_before["cpu_s"]) / calls * 1e6,
            "peak_mb": after["peak_mb"],
            "mb_per_second": 2 * calls * self.parameters * 8e-6 / done["seconds"],
        }


@contextlib.contextmanager
def started(
    goal: int,
    parameters: int,
    *,
    channels: int = 4,
    attested: bool = False,
    uvloop: bool = False,
) -> Iterator[Pair]:
    """Starts a server and a load, and ends them.

    Args:
      goal: Devices in a round.
      parameters: Of the model and of an update.
      channels: Connections of the load.
      attested: Whether devices have tokens.
      uvloop: Whether both run on uvloop.

    Yields:
      Both.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tls.create_self_signed(folder / "server.pem", folder / "server.key", ["127.0.0.1"])
        signing_keys.create(folder / "issuer")
        pair = Pair(folder, goal, parameters, channels, attested, uvloop)
        try:
            yield pair
        finally:
            pair.close()


def _show(title: str, measured: dict[str, Any]) -> None:
    print(
        f"{title:28s} {measured['per_second']:8.1f}/s  {measured['mb_per_second']:8.1f} MB/s  "
        f"server {measured['server_us']:8.0f} us, load {measured['load_us']:8.0f} us each, "
        f"server's peak {measured['peak_mb']:6.0f} MB"
    )


def _options(given: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(given, name) for name in ("channels", "attested", "uvloop")}


def _empty(given: argparse.Namespace) -> None:
    with started(given.num_devices, 0, **_options(given)) as pair:
        for i in range(3):
            _show(f"{given.num_devices} empty, round {i}", pair.measure("rounds", 1))


def _connections(given: argparse.Namespace) -> None:
    with started(min(given.num_devices, _CONNECTIONS), 0, **_options(given)) as pair:
        pair.measure("rounds", 1)
        pair.measure("connections", 1)
        differences = []
        for _ in range(_REPETITIONS):
            old, new = pair.measure("rounds", 1), pair.measure("connections", 1)
            _show(f"{pair.goal} over few", old)
            _show(f"{pair.goal} over their own", new)
            differences.append(new["server_us"] - old["server_us"])
        print(
            f"a new connection: {statistics.median(differences):.0f} us of the server's processor "
            f"time, from {min(differences):.0f} to {max(differences):.0f}"
        )


def _model(given: argparse.Namespace) -> None:
    with started(given.model_devices, given.parameters, **_options(given)) as pair:
        pair.measure("rounds", 1)
        pair.measure("echoes", 1)
        ratios = []
        for _ in range(_REPETITIONS):
            rounds, echoes = pair.measure("rounds", 2), pair.measure("echoes", 2)
            _show(f"{pair.goal} updates", rounds)
            _show(f"{pair.goal} echoes", echoes)
            ratios.append(rounds["mb_per_second"] / echoes["mb_per_second"])
        print(f"ratio {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


def _memory(given: argparse.Namespace) -> None:
    for parameters, goals in ((0, (1000, 3000, 10_000)), (given.parameters, (12, 48, 192))):
        for goal in goals:
            with started(goal, parameters, **_options(given)) as pair:
                _show(f"{goal} x {parameters}", pair.measure("rounds", 1))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="empty|connections|model|memory")
    parser.add_argument("--num-devices", type=int, default=10_000)
    parser.add_argument("--parameters", type=int, default=1_350_000)
    parser.add_argument("--model-devices", type=int, default=48)
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--attested", action="store_true", help="with signed tokens")
    parser.add_argument("--uvloop", action="store_true", help="on uvloop, which is to be installed")
    for name in ("role", "folder", "devices", "echo"):  # Of the processes that this one starts.
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    parser.add_argument("--goal", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    roles = {"serve": _serve, "load": _put_load}
    if given.role:
        run = asyncio.run
        if given.uvloop:
            import uvloop

            run = uvloop.run
        run(roles[given.role](given, pathlib.Path(given.folder)))
        return
    parts = {"empty": _empty, "connections": _connections, "model": _model, "memory": _memory}
    for name in given.parts or parts:
        parts[name](given)


if __name__ == "__main__":
    main()
