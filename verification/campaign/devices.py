"""Devices that speak the real protocol and keep the least separation.

They keep a record of what they were told and have sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.runtime import tls
from tff_dpftrl.runtime.device import attester as attester_lib
from tff_dpftrl.runtime.device import secure_upload
from tff_dpftrl.runtime.protocol import attestation, session_stream, wire_pb2
from tff_dpftrl.secure_sums import device as participant_lib
from tff_dpftrl.secure_sums import parameters, refusals, secure_sum_pb2, vectors
from verification.campaign import tiny_tasks

TOLD, SENT, ACCEPTED = "told", "sent", "accepted"
LONGEST_PATIENCE = 8.0
_LEAST_PATIENCE = 1.5
_LONGEST_PAUSE = 0.4  # Seconds before a device that has lost its connection comes back.
_DROP_OUTS = 0.02
_VECTOR_STEP = 2
_SERVER_NAME = "localhost"


@dataclasses.dataclass(frozen=True)
class Record:
    """Knowledge of a device at one moment.

    Attributes:
      what: `TOLD`: it was given a model; `SENT`: its report is on its way; `ACCEPTED`: it was
        told that its report is in the sum.
      device: Its number.
      task: The task.
      round_index: The round, from 0.
      attempt: The attempt.
      number: Number of the device's report; 0 where it was given a model.
      model: SHA-256 of the model.
    """

    what: str
    device: int
    task: str
    round_index: int
    attempt: str
    number: int
    model: str


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings that all devices have in common.

    Attributes:
      addresses: HOST:PORT that they connect to, any of them.
      certificate: The server's certificate, in PEM.
      issuer: The key of who vouches for them.
      seed: Seed of the devices' vectors.
    """

    addresses: tuple[str, ...]
    certificate: bytes
    issuer: ed25519.Ed25519PrivateKey = dataclasses.field(repr=False)
    seed: int


class Ended(Exception):
    """The session is over before its time."""


_ENDS = (
    Ended,
    grpc.RpcError,
    asyncio.TimeoutError,
    asyncio.InvalidStateError,  # What is written to was ended by the other side.
    refusals.ProtocolRefusedError,
)


class SharedState:
    """State of a device that is the same in all of its populations.

    Attributes:
      reports: Number of its reports.
      turn: Its turn to train.
    """

    def __init__(self):
        """Begins without reports."""
        self.reports = 0
        self.turn = asyncio.Lock()


class Device:
    """One device in one population, over a connection of its own."""

    def __init__(
        self,
        number: int,
        setting: Setting,
        note: Callable[[Record], None],
        population: str = tiny_tasks.POPULATION,
        shared: SharedState | None = None,
    ):
        """Does nothing before `run`.

        Args:
          number: Its number, from 0.
          setting: Options that all devices share.
          note: Takes its records.
          population: Name of the population.
          shared: State of the device in all of its populations; None if it is in one.
        """
        self._number, self._setting, self._note = number, setting, note
        self._population, self._shared = population, shared or SharedState()
        self._random = random.Random(f"{setting.seed} device {number}")
        self._vectors = {
            name: tiny_tasks.sentinel(setting.seed, name, number) for name in tiny_tasks.TASKS
        }
        self._attester = attester_lib.IssuingAttester(
            attestation.TokenIssuer(setting.issuer, clock=time.time)
        )
        self._last_rounds: dict[str, int] = {}  # The device's timer: its last round, by task.

    async def run(self) -> None:
        """Takes part again and again, until it is cancelled."""
        while True:
            channel = self._connect()
            try:
                while True:
                    await asyncio.sleep(await self._session(channel))
            except _ENDS:
                await channel.close()
                await asyncio.sleep(self._pause())
            except BaseException:
                await channel.close()
                raise

    def _connect(self) -> grpc.aio.Channel:
        credentials = tls.channel_credentials(self._setting.certificate)
        # Not the connection of another device of this process.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        address = self._random.choice(self._setting.addresses)
        return grpc.aio.secure_channel(address, credentials, options)

    async def _session(self, channel: grpc.aio.Channel) -> float:
        """Takes part once; returns in how many seconds it is to come back."""
        patience = self._random.uniform(_LEAST_PATIENCE, LONGEST_PATIENCE)
        named = (session_stream.POPULATION_KEY, self._population.encode())
        call = channel.stream_stream(session_stream.SESSION_METHOD)(metadata=(named,))
        try:
            return await self._converse(self._stream(call, patience))
        finally:
            call.cancel()

    def _stream(self, call: grpc.aio.StreamStreamCall, patience: float) -> Stream:
        return Stream(call, patience)

    def _has_to_rest(self, task: str, round_index: int) -> bool:
        last = self._last_rounds.get(task)
        return last is not None and round_index - last < tiny_tasks.MIN_SEP

    def _pause(self) -> float:
        return self._random.uniform(0.05, _LONGEST_PAUSE)

    def _vector(self, task: str) -> vectors.Vector:
        return tiny_tasks.vector(self._vectors[task], self._number, self._shared.reports)

    def _packed(self, vector: vectors.Vector) -> bytes:
        return tiny_tasks.packed(vector)

    async def _converse(self, stream: Stream) -> float:
        challenge = await stream.receive("challenge")
        if challenge.task and self._has_to_rest(challenge.task, challenge.round_index):
            await stream.leave()
            return self._pause()
        nonce = session_stream.attested_nonce(challenge.challenge, _SERVER_NAME, self._population)
        check_in = tiny_tasks.check_in(
            max(challenge.protocol_versions), self._attester.token(nonce), self._population
        )
        await stream.send(wire_pb2.FromDevice(check_in=check_in))
        told = await stream.receive("configuration", "come_back")
        if isinstance(told, wire_pb2.ComeBack):
            return told.turns[0]
        record = Record(
            TOLD,
            self._number,
            told.task,
            told.round_index,
            told.attempt,
            0,
            hashlib.sha256(told.broadcast).hexdigest(),
        )
        self._note(record)
        async with self._shared.turn:
            await asyncio.sleep(self._random.uniform(0.0, 0.05))
        has_to_rest = self._has_to_rest(told.task, told.round_index)
        if has_to_rest or self._random.random() < _DROP_OUTS:
            raise Ended
        self._last_rounds[told.task] = told.round_index  # Before anything of it leaves.
        self._shared.reports += 1
        record = dataclasses.replace(record, what=SENT, number=self._shared.reports)
        vector = self._vector(told.task)
        if bool(told.secure_sum_session) != (told.task == tiny_tasks.SECURE):
            raise Ended  # As a plan would have it.
        if told.secure_sum_session:
            answer = await self._sum_securely(stream, told, vector, record)
        else:
            self._note(record)
            report = wire_pb2.Report(attempt=told.attempt, update=self._packed(vector))
            await stream.send(wire_pb2.FromDevice(report=report))
            answer = await stream.receive("report_answer")
        if answer.accepted:
            self._note(dataclasses.replace(record, what=ACCEPTED))
        return answer.turns[0]

    async def _sum_securely(
        self, stream: Stream, told: wire_pb2.Configuration, vector: vectors.Vector, record: Record
    ) -> wire_pb2.ReportAnswer:
        participant = participant_lib.Participant(
            tiny_tasks.SECURE_SUM.parameters,
            parameters.check_session(told.secure_sum_session),
            vector,
            identity=secure_upload.AttestedIdentity(
                self._population,
                told.secure_sum_session,
                self._attester,
                [self._setting.issuer.public_key()],
                time.time,
            ),
            context=session_stream.secure_sum_context(told.task, told.round_index, told.broadcast),
        )
        try:
            message, step = participant.advertise(), 0
            while True:
                if step == _VECTOR_STEP:
                    self._note(record)
                for part in session_stream.secure_sum_messages(message):
                    await stream.send(part)
                answer = await stream.receive("secure_sum", "report_answer")
                if isinstance(answer, wire_pb2.ReportAnswer):
                    return answer
                message = participant.answer(secure_sum_pb2.ToDevice.FromString(answer))
                step += 1
        finally:
            participant.forget()


class Stream:
    """A session's stream, with patience."""

    def __init__(self, call: grpc.aio.StreamStreamCall, patience: float):
        """Takes a call.

        Args:
          call: The call of the session.
          patience: Seconds that the device waits for anything.
        """
        self._call, self._patience = call, patience

    async def send(self, message: wire_pb2.FromDevice) -> None:
        """Sends a message."""
        await self.send_bytes(message.SerializeToString())

    async def send_bytes(self, content: bytes) -> None:
        """Sends bytes in place of a message."""
        await asyncio.wait_for(self._call.write(content), self._patience)

    async def leave(self) -> None:
        """Closes the device's side, and lets the server end the session."""
        await asyncio.wait_for(self._call.done_writing(), self._patience)
        await asyncio.wait_for(self._call.read(), self._patience)

    async def receive(self, *kinds: str) -> Any:
        """Returns the next message, which must be of one of these kinds."""
        raw = await asyncio.wait_for(self._call.read(), self._patience)
        if raw is grpc.aio.EOF:
            raise Ended
        message = wire_pb2.FromServer.FromString(raw)
        kind = message.WhichOneof("message")
        if kind not in kinds:
            raise Ended
        return getattr(message, kind)


@contextlib.asynccontextmanager
async def fleet(made: Iterable[Device]) -> Any:
    """Runs devices as long as the context lasts."""
    tasks = [asyncio.ensure_future(device.run()) for device in made]
    try:
        yield tasks
    finally:
        while not all(task.done() for task in tasks):
            for task in tasks:
                task.cancel()  # `wait_for` may swallow it where the answer comes just then.
            await asyncio.wait(tasks, timeout=1.0)
