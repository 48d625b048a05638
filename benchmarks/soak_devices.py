"""A fleet process of `runtime_soak.py`: thousands of devices on one event loop.

They speak the real protocol, a stream for each session, over a few connections, and do as
`fleet.behaviour` draws: drop out, straggle, attack. What they report was computed once: there
is no TensorFlow here, which thousands of devices would have on machines of their own. Started
with its settings as one line of JSON on the standard input, it writes a line now and then of
what it has seen, and ends when the input does.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import os
import pathlib
import random
import sys
import time

import grpc

from tff_dpftrl.runtime import participation_histograms, signing_keys
from tff_dpftrl.runtime.device import participation_timer
from tff_dpftrl.runtime.fleet import behaviour, simulated_device
from tff_dpftrl.runtime.plans import allowed_ops, plan_pb2
from tff_dpftrl.runtime.protocol import attestation, session_stream, wire_pb2
from tff_dpftrl.runtime.server import garbage, server_folder

_HOST = "127.0.0.1"
_AFTER_FAILURE_S = 5.0
_REPORT_EVERY_S = 5.0
LATENCIES = {
    "challenge": "stream opened to challenge",
    "sent_away": "check-in to being sent away (some have waited)",
    "configured": "check-in to plan and model (with the wait for a round)",
    "report": "report to acknowledgement",
}
"""What a device waits for, in words."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a fleet process is told.

    Attributes:
      server_folder: Folder of the server.
      sample: Folder of `update`, a report's, and `participation`, of the plan.
      population: Name of the population.
      devices: Number of devices.
      connections: Over which they come.
      seed: Of how they behave.
      within_s: Seconds in which they come for the first time.
      train_s: Seconds that each trains.
      usual_wait_s: Seconds between sessions if the server does not say.
      rates: What goes wrong, as `behaviour.Rates` takes it.
    """

    server_folder: str
    sample: str
    population: str
    devices: int
    connections: int
    seed: int
    within_s: float
    train_s: float
    usual_wait_s: float
    rates: dict[str, float]


class _GoneError(Exception):
    """The device goes away; the shape of its session is in the arguments."""


class _Device:
    """What a device keeps between sessions."""

    def __init__(self, seed: str, rates: behaviour.Rates):
        self.generator = random.Random(seed)
        self.is_malicious = rates.draw_malicious(self.generator)
        self.timer = participation_timer.MemoryTimer(time.time)


class Devices:
    """The devices of a process, and what they see."""

    def __init__(self, settings: Settings):
        """Connects to the server.

        Args:
          settings: What there is to do.
        """
        self._settings = settings
        self._rates = behaviour.Rates(**settings.rates)
        folder = server_folder.of(settings.server_folder)
        self._issuer = attestation.TokenIssuer(
            signing_keys.load_private(folder.issuer), clock=time.time
        )
        credentials = grpc.ssl_channel_credentials(folder.certificate.read_bytes())
        # Connections are shared by channels of the same options: these have a number.
        channels = [
            grpc.aio.secure_channel(folder.address(), credentials, [("number", i)])
            for i in range(settings.connections)
        ]
        self._open = [c.stream_stream(session_stream.SESSION_METHOD) for c in channels]
        self._tell = [c.unary_unary(session_stream.TELL_METHOD) for c in channels]
        sample = pathlib.Path(settings.sample)
        self._update = (sample / "update").read_bytes()
        asked = plan_pb2.Participation.FromString((sample / "participation").read_bytes())
        self._buckets = participation_histograms.ParticipationBuckets(
            tuple(asked.stride_edges), tuple(asked.times_edges)
        )
        self._rule = participation_timer.ParticipationRule(
            asked.min_sep_rounds, asked.times_edges[-1], asked.min_sep_hours
        )
        self._spent_token = b""
        self._num_open = 0
        self._latencies: dict[str, list[float]] = {name: [] for name in LATENCIES}
        self._shapes: collections.Counter[str] = collections.Counter()
        self._refusals: collections.Counter[str] = collections.Counter()
        self._failures: collections.Counter[str] = collections.Counter()

    async def run(self) -> None:
        """Has all devices come and go until the standard input ends."""
        made = [asyncio.create_task(self._live(number)) for number in range(self._settings.devices)]
        telling = asyncio.create_task(self._say_again_and_again())
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        for task in (*made, telling):
            task.cancel()
        await asyncio.gather(*made, telling, return_exceptions=True)
        self._progress()

    async def _say_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            self._progress()

    def _progress(self) -> None:
        """Writes what was seen since the last time."""
        seen = {
            "at": time.time(),
            "open": self._num_open,
            "latencies": self._latencies,
            "shapes": self._shapes,
            "refusals": self._refusals,
            "failures": self._failures,
        }
        print(json.dumps(seen), flush=True)
        self._latencies = {name: [] for name in LATENCIES}
        for counter in (self._shapes, self._refusals, self._failures):
            counter.clear()

    async def _live(self, number: int) -> None:
        device = _Device(f"{self._settings.seed} device {number}", self._rates)
        wait = device.generator.uniform(0, self._settings.within_s)
        while True:
            await asyncio.sleep(wait)
            wait = await self._visit(device, number % len(self._open))

    async def _visit(self, device: _Device, connection: int) -> float:
        """One session, and what it tells the server; returns seconds until the next one."""
        begin = time.monotonic()
        self._num_open += 1
        call = self._open[connection]()
        wait = self._settings.usual_wait_s * (0.5 + device.generator.random())
        try:
            shape, turns = await self._session(device, call)
            wait = turns[0] if turns else wait
        except _GoneError as gone:
            (shape,) = gone.args
        except grpc.aio.AioRpcError as error:
            shape, wait = "-*", _AFTER_FAILURE_S
            self._failures[f"{error.code().name}: {error.details()}"[:100]] += 1
        finally:
            self._num_open -= 1
            call.cancel()  # Nothing happens to one that has ended.
        self._shapes[shape] += 1
        told = wire_pb2.SessionSummary(
            population=self._settings.population,
            shape=shape,
            seconds=time.monotonic() - begin,
            versions={"python": "{}.{}".format(*sys.version_info)},
        )
        try:
            await self._tell[connection](told.SerializeToString())
        except grpc.aio.AioRpcError as error:
            self._failures[f"told: {error.code().name}: {error.details()}"[:100]] += 1
        return wait

    async def _session(
        self, device: _Device, call: grpc.aio.StreamStreamCall
    ) -> tuple[str, tuple[float, ...]]:
        """Returns the session's shape, and the turns that the server has told.

        Raises:
          _GoneError: If the device has gone away, or has to rest.
          grpc.aio.AioRpcError: If the server has ended the session.
        """
        happens = self._rates.draw(device.generator, is_malicious=device.is_malicious)
        begin = time.monotonic()
        challenge = (await self._read(call, "challenge", begin)).challenge
        if challenge.task:
            self._check_rest(device, challenge.task, challenge.round_index, "-!")
        message = wire_pb2.FromDevice()
        message.check_in.population = self._settings.population
        message.check_in.protocol_version = challenge.protocol_versions[0]
        message.check_in.runtime_version = allowed_ops.RUNTIME_VERSION
        message.check_in.token = self._token(challenge.challenge, happens)
        begin = time.monotonic()
        await self._write(call, message)
        answer = await self._read(call, "", begin)
        if answer.WhichOneof("message") == "come_back":
            self._note("sent_away", begin)
            return "-#", tuple(answer.come_back.turns)
        self._note("configured", begin)
        asked = answer.configuration
        self._check_rest(device, asked.task, asked.round_index, "-v!")
        if happens.drop_out is behaviour.DropOut.BEFORE_TRAINING:
            raise _GoneError("-v!")
        await asyncio.sleep(
            self._settings.train_s * (0.5 + device.generator.random()) + happens.delay_s
        )
        if happens.drop_out is behaviour.DropOut.TRAINING:
            raise _GoneError("-v[!")
        messages = self._report(device, asked, happens)
        begin = time.monotonic()
        for message in messages[:-1]:
            await self._write(call, message)
        if happens.drop_out is behaviour.DropOut.UPLOAD:
            raise _GoneError("-v[]+!")
        await self._write(call, messages[-1])
        answer = (await self._read(call, "report", begin)).report_answer
        if not answer.accepted:
            self._refusals[answer.reason[:100]] += 1
        return "-v[]+^" if answer.accepted else "-v[]+#", tuple(answer.turns)

    async def _write(self, call: grpc.aio.StreamStreamCall, message: wire_pb2.FromDevice) -> None:
        try:
            await call.write(message.SerializeToString())
        except asyncio.InvalidStateError:  # The session has ended: what is read next says why.
            pass

    async def _read(
        self, call: grpc.aio.StreamStreamCall, name: str, begin: float
    ) -> wire_pb2.FromServer:
        raw = await call.read()
        if raw is grpc.aio.EOF:  # The server has ended the session: why is in its status.
            raise grpc.aio.AioRpcError(
                await call.code(),
                await call.initial_metadata(),
                await call.trailing_metadata(),
                await call.details(),
            )
        if name:
            self._note(name, begin)
        return wire_pb2.FromServer.FromString(raw)

    def _note(self, name: str, begin: float) -> None:
        self._latencies[name].append(round(time.monotonic() - begin, 6))

    def _check_rest(self, device: _Device, task: str, round_index: int, shape: str) -> None:
        try:
            device.timer.check(self._settings.population, task, round_index, self._rule)
        except participation_timer.TimerRefusal:
            raise _GoneError(shape) from None

    def _token(self, challenge: bytes, happens: behaviour.Behaviour) -> bytes:
        if happens.attack is behaviour.Attack.TOKEN and self._spent_token:
            return self._spent_token
        nonce = session_stream.attested_nonce(challenge, _HOST, self._settings.population)
        self._spent_token = self._issuer.issue(nonce)
        return self._spent_token

    def _report(
        self, device: _Device, asked: wire_pb2.Configuration, happens: behaviour.Behaviour
    ) -> list[wire_pb2.FromDevice]:
        strides, times = device.timer.record(
            self._settings.population, asked.task, asked.round_index, self._rule, self._buckets
        )
        is_of_others = happens.attack is behaviour.Attack.ATTEMPT
        update = self._update
        if happens.attack is not None:
            update = simulated_device.attacked(update, happens.attack)
        report = wire_pb2.Report(
            attempt=asked.attempt + is_of_others * " of others",
            update=update,
            strides=strides.tolist(),
            times=times.tolist(),
        )
        return list(session_stream.report_messages(report))


async def _main() -> None:
    settings = Settings(**json.loads(sys.stdin.readline()))
    garbage.settle()
    await Devices(settings).run()
    os._exit(0)  # gRPC can take minutes to clear up after thousands of streams.


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    asyncio.run(_main())
