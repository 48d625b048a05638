"""Devices that speak the real protocol, and keep a record of what they were told and have sent."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import random
import time
from collections.abc import Callable
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.runtime.campaign import toys
from tff_dpftrl.runtime.device import attester as attester_lib
from tff_dpftrl.runtime.device import secure_upload
from tff_dpftrl.runtime.protocol import attestation, session_stream, wire_pb2
from tff_dpftrl.secure_sums import device as participant_lib
from tff_dpftrl.secure_sums import parameters, refusals, secure_sum_pb2

TOLD, SENT, ACCEPTED = "told", "sent", "accepted"
LONGEST_PATIENCE = 8.0
_LEAST_PATIENCE = 1.5
_LONGEST_PAUSE = 0.4  # Seconds before a device that has lost its connection comes back.
_DROP_OUTS = 0.02
_VECTOR_STEP = 2
_SERVER_NAME = "localhost"


@dataclasses.dataclass(frozen=True)
class Record:
    """What a device knows of one moment.

    Attributes:
      what: `TOLD`: it was given a model; `SENT`: its report is on its way; `ACCEPTED`: it was
        told that its report is in the sum.
      device: Its number.
      task: The task.
      round_index: The round, from 0.
      attempt: The attempt.
      number: Of its report; 0 where it was given a model.
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
    """What all devices have in common.

    Attributes:
      addresses: HOST:PORT that they connect to, any of them.
      certificate: The server's certificate, in PEM.
      issuer: The key of who vouches for them.
      seed: Of their vectors.
    """

    addresses: tuple[str, ...]
    certificate: bytes
    issuer: ed25519.Ed25519PrivateKey = dataclasses.field(repr=False)
    seed: int


class _Ended(Exception):
    """The session is over before its time."""


_ENDS = (
    _Ended,
    grpc.RpcError,
    asyncio.TimeoutError,
    asyncio.InvalidStateError,  # What is written to was ended by the other side.
    refusals.ProtocolRefusedError,
)


class Device:
    """One device, over a connection of its own."""

    def __init__(self, number: int, setting: Setting, note: Callable[[Record], None]):
        """Does nothing before `run`.

        Args:
          number: Its number, from 0.
          setting: See `Setting`.
          note: Takes its records.
        """
        self._number, self._setting, self._note = number, setting, note
        self._random = random.Random(f"{setting.seed} device {number}")
        self._vectors = {name: toys.sentinel(setting.seed, name, number) for name in toys.TASKS}
        self._attester = attester_lib.IssuingAttester(
            attestation.TokenIssuer(setting.issuer, clock=time.time)
        )
        self._reports = 0

    async def run(self) -> None:
        """Takes part again and again, until it is cancelled."""
        while True:
            channel = self._connect()
            try:
                while True:
                    await asyncio.sleep(await self._session(channel))
            except _ENDS:
                await channel.close()
                await asyncio.sleep(self._random.uniform(0.05, _LONGEST_PAUSE))
            except BaseException:
                await channel.close()
                raise

    def _connect(self) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(self._setting.certificate)
        # Not the connection of another device of this process.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        address = self._random.choice(self._setting.addresses)
        return grpc.aio.secure_channel(address, credentials, options)

    async def _session(self, channel: grpc.aio.Channel) -> float:
        """Takes part once; returns in how many seconds it is to come back."""
        patience = self._random.uniform(_LEAST_PATIENCE, LONGEST_PATIENCE)
        call = channel.stream_stream(session_stream.SESSION_METHOD)()
        try:
            stream = _Stream(call, patience)
            return await self._converse(stream)
        finally:
            call.cancel()

    async def _converse(self, stream: _Stream) -> float:
        challenge = await stream.receive("challenge")
        nonce = session_stream.attested_nonce(challenge.challenge, _SERVER_NAME, toys.POPULATION)
        check_in = toys.check_in(max(challenge.protocol_versions), self._attester.token(nonce))
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
        await asyncio.sleep(self._random.uniform(0.0, 0.05))
        if self._random.random() < _DROP_OUTS:
            raise _Ended
        self._reports += 1
        record = dataclasses.replace(record, what=SENT, number=self._reports)
        vector = toys.vector(self._vectors[told.task], self._number, self._reports)
        if bool(told.secure_sum_session) != (told.task == toys.SECURE):
            raise _Ended  # As a plan would have it.
        if told.secure_sum_session:
            answer = await self._sum_securely(stream, told, vector, record)
        else:
            self._note(record)
            packed = toys.packed(vector)
            report = wire_pb2.Report(attempt=told.attempt, update=packed)
            await stream.send(wire_pb2.FromDevice(report=report))
            answer = await stream.receive("report_answer")
        if answer.accepted:
            self._note(dataclasses.replace(record, what=ACCEPTED))
        return answer.turns[0]

    async def _sum_securely(
        self, stream: _Stream, told: wire_pb2.Configuration, vector: Any, record: Record
    ) -> wire_pb2.ReportAnswer:
        participant = participant_lib.Participant(
            toys.SECURE_SUM.parameters,
            parameters.check_session(told.secure_sum_session),
            vector,
            identity=secure_upload.AttestedIdentity(
                toys.POPULATION,
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


class _Stream:
    """A session's stream, with patience."""

    def __init__(self, call: grpc.aio.StreamStreamCall, patience: float):
        self._call, self._patience = call, patience

    async def send(self, message: wire_pb2.FromDevice) -> None:
        await asyncio.wait_for(self._call.write(message.SerializeToString()), self._patience)

    async def receive(self, *kinds: str) -> Any:
        raw = await asyncio.wait_for(self._call.read(), self._patience)
        if raw is grpc.aio.EOF:
            raise _Ended
        message = wire_pb2.FromServer.FromString(raw)
        kind = message.WhichOneof("message")
        if kind not in kinds:
            raise _Ended
        return getattr(message, kind)


@contextlib.asynccontextmanager
async def fleet(setting: Setting, note: Callable[[Record], None]) -> Any:
    """All devices, as long as the context lasts."""
    tasks = [
        asyncio.ensure_future(Device(number, setting, note).run())
        for number in range(toys.NUM_DEVICES)
    ]
    try:
        yield tasks
    finally:
        while not all(task.done() for task in tasks):
            for task in tasks:
                task.cancel()  # `wait_for` may swallow it where the answer comes just then.
            await asyncio.wait(tasks, timeout=1.0)
