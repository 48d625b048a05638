"""Devices with valid tokens that do not do as the protocol says.

None of them keeps a timer. What they send may cost the round, or the group, that they are in. It
must not be in a sum as somebody else's report, and must not keep the other devices from rounds.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.secure_sums import vectors
from verification.campaign import devices, tiny_tasks

_CHURN_SECONDS = 0.01
_NUM_MESSAGES = 5  # Of a device in a secure sum.
_REPLAYS = 0.5  # Share of repeated messages in whose place an old one is sent.
_MOST_KEPT = 50


class Kind(str, enum.Enum):
    """Behaviour of a hostile device."""

    SILENT = "says nothing any more after some message"
    GARBAGE = "sends bytes that nobody can read"
    HUGE = "reports a vector of random words, or one that counts for three"
    DUPLICATE = "sends its messages twice, and those of former sessions again"
    CLAIMS_REST = "opens and closes sessions all the time, as if it had to rest"


def draw(seed: int, number: int) -> dict[int, Kind]:
    """Draws hostile devices; seeds that follow one another have all kinds in turn.

    Args:
      seed: Seed of the campaign.
      number: Number of hostile devices, at most `tiny_tasks.NUM_DEVICES`.

    Returns:
      Their kinds, by the numbers of the devices.
    """
    chosen = random.Random(f"{seed} hostile").sample(range(tiny_tasks.NUM_DEVICES), number)
    kinds = list(Kind)
    return {device: kinds[(seed + i) % len(kinds)] for i, device in enumerate(chosen)}


class HostileDevice(devices.Device):
    """A hostile device."""

    def __init__(
        self,
        number: int,
        setting: devices.Setting,
        note: Callable[[devices.Record], None],
        *options: Any,
        kind: Kind,
    ):
        """Does nothing before `run`.

        Args:
          number: Number of the device, from 0.
          setting: What all devices have in common.
          note: Callback for the device's records.
          *options: Further arguments of `devices.Device`.
          kind: What it does.
        """
        super().__init__(number, setting, note, *options)
        self._kind = kind
        self._sent: list[bytes] = []  # Serialized messages, for replays.

    def _stream(self, call: grpc.aio.StreamStreamCall, patience: float) -> devices.Stream:
        return _HostileStream(call, patience, self._kind, self._random, self._sent)

    def _has_to_rest(self, task: str, round_index: int) -> bool:
        return self._kind is Kind.CLAIMS_REST

    def _pause(self) -> float:
        return _CHURN_SECONDS if self._kind is Kind.CLAIMS_REST else super()._pause()

    def _vector(self, task: str) -> vectors.Vector:
        """Returns the report of a task.

        Random content in a secure sum is noticed by the count only, which is therefore wrong
        here: of a group whose count fits nobody could tell, so that the sum would be off by
        design (`Law.EXACT_SUM`).
        """
        made = super()._vector(task)
        if self._kind is Kind.HUGE:
            made[0][0] = 3
            made[2][:] = (
                np.frombuffer(self._random.randbytes(2 * tiny_tasks.SIZE), "<u2")
                % tiny_tasks.MODULUS
            )
        return made

    def _packed(self, vector: vectors.Vector) -> bytes:
        honest = super()._packed(vector)
        if self._kind is not Kind.HUGE:
            return honest
        length = len(honest)
        return self._random.choice(
            (honest, self._random.randbytes(length), b"\xff" * length, 2 * honest)
        )


class _HostileStream(devices.Stream):
    """A stream that does something else from the message after the check-in on."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall,
        patience: float,
        kind: Kind,
        generator: random.Random,
        sent: list[bytes],
    ):
        super().__init__(call, patience)
        self._kind, self._random, self._sent = kind, generator, sent
        self._left = generator.randrange(_NUM_MESSAGES)  # Messages before it strikes.

    async def send(self, message: wire_pb2.FromDevice) -> None:
        if message.HasField("check_in"):
            await super().send(message)
            return
        is_turn = not self._left or message.HasField("report")
        self._left -= 1
        if self._kind is Kind.SILENT and is_turn:
            await asyncio.sleep(devices.LONGEST_PATIENCE)
            raise devices.Ended
        if self._kind is Kind.GARBAGE and is_turn:
            await self.send_bytes(self._garbage(message))
        elif self._kind is Kind.DUPLICATE and is_turn:
            await self._send_again(message)
        else:
            self._keep(message)
            await super().send(message)

    def _garbage(self, message: wire_pb2.FromDevice) -> bytes:
        noise = self._random.randbytes(self._random.randrange(1, 300))
        if self._random.random() < 0.3:
            return noise
        if message.HasField("report"):
            message.report.update = noise
        else:
            message.secure_sum = noise
        return message.SerializeToString()

    async def _send_again(self, message: wire_pb2.FromDevice) -> None:
        content = message.SerializeToString()
        is_replay = self._sent and self._random.random() < _REPLAYS
        await self.send_bytes(self._random.choice(self._sent) if is_replay else content)
        self._keep(message)
        await self.send_bytes(content)

    def _keep(self, message: wire_pb2.FromDevice) -> None:
        if self._kind is Kind.DUPLICATE:
            self._sent.append(message.SerializeToString())
            del self._sent[:-_MOST_KEPT]
