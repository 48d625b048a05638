"""One simulated device: a real one's sessions, with its store and timer in memory."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import threading
import time

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.data import user_text
from tff_dpftrl.runtime.device import attester as attester_lib
from tff_dpftrl.runtime.device import (
    device_runtime,
    example_store,
    secure_upload,
    server_connection,
    session,
    text_examples,
    wire_session,
)
from tff_dpftrl.runtime.fleet import behaviour as behaviour_lib
from tff_dpftrl.runtime.plans import plan_pb2
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.secure_sums import secure_sum_pb2

_LOOK_S = 0.5


class UserTexts(example_store.ExampleStore):
    """The texts of one user of a corpus, in any collection; the last one is the newest."""

    def __init__(self, corpus: user_text.UserText, user_id: str):
        """Reads nothing yet.

        Args:
          corpus: The corpus.
          user_id: One of its users.
        """
        self._corpus, self._user_id = corpus, user_id

    def select(
        self, collection: str, *, max_examples: int, recorded_since: float | None = None
    ) -> list[bytes]:
        """See the base class; texts of a corpus have no age, and are never too old."""
        del collection, recorded_since
        limit = validation.integer("max_examples", max_examples, minimum=1)
        texts = self._corpus.examples(self._user_id)[-limit:]
        return [text_examples.encode_text(text) for text in reversed(texts)]


class SpentToken:
    """The last token that was used by anybody of a fleet, for those who use it again."""

    def __init__(self):
        """Has none yet."""
        self.token: bytes | None = None


class _KeepingAttester(attester_lib.Attester):
    def __init__(self, own: attester_lib.Attester, spent: SpentToken):
        self._own, self._spent = own, spent

    def token(self, nonce: bytes) -> bytes | None:
        token = self._own.token(nonce)
        self._spent.token = token
        return token


class _ReplayingAttester(attester_lib.Attester):
    def __init__(self, own: attester_lib.Attester, spent: SpentToken):
        self._own, self._spent = own, spent

    def token(self, nonce: bytes) -> bytes | None:
        return self._spent.token or self._own.token(bytes(len(nonce)))


class SimulatedUpload(secure_upload.SecureUpload):
    """A secure sum in which happens what was drawn for the session."""

    def __init__(self, *args: object, behaviour: behaviour_lib.Behaviour, **options: object):
        """As in the base class.

        Args:
          *args: Of the base class.
          behaviour: What happens.
          **options: Of the base class.
        """
        super().__init__(*args, **options)
        self._behaviour = behaviour

    @override
    def send(
        self, stream: server_connection.Stream, step: int, message: secure_sum_pb2.ToServer
    ) -> None:
        behaviour = self._behaviour
        last = int(behaviour.drop_out_at * self.num_messages)
        if behaviour.drop_out is behaviour_lib.DropOut.UPLOAD and step == last:
            raise session.Interrupted(
                f"The device went away before its {message.WhichOneof('message')}."
            )
        attack = behaviour.attack
        if attack is behaviour_lib.Attack.ATTEMPT:
            report = wire_pb2.Report(attempt="of others", update=b"in the clear")
            stream.send(wire_pb2.FromDevice(report=report))
        elif attack is behaviour_lib.Attack.GARBAGE:
            stream.send(wire_pb2.FromDevice(secure_sum=b"\xff" * 100))
        else:
            super().send(stream, step, attacked_message(message, attack))


def attacked_message(
    message: secure_sum_pb2.ToServer, attack: behaviour_lib.Attack | None
) -> secure_sum_pb2.ToServer:
    """What a malicious device sends in place of a message of a secure sum.

    Args:
      message: The message.
      attack: What it does.

    Returns:
      The message, changed if the attack is in one of its kind.
    """
    kind = message.WhichOneof("message")
    if attack is behaviour_lib.Attack.NAN and kind == "key_advertisement":
        message.key_advertisement.mask_key = bytes(32)
    if attack is behaviour_lib.Attack.SHAPE and kind == "masked_vector":
        message.masked_vector.content += bytes(4)
    return message


class SimulatedSession(wire_session.WireSession):
    """A session in which happens what was drawn for it."""

    def __init__(
        self,
        *args: object,
        behaviour: behaviour_lib.Behaviour,
        stop: threading.Event,
        **options: object,
    ):
        """As in the base class.

        Args:
          *args: Of the base class.
          behaviour: What happens.
          stop: Ends delays.
          **options: Of the base class.
        """
        super().__init__(*args, **options)
        self._behaviour, self._stop = behaviour, stop

    @override
    def fetch(self, keep_going: session.KeepGoing) -> session.Work:
        work = super().fetch(keep_going)
        self._drop_out(behaviour_lib.DropOut.BEFORE_TRAINING)
        return work

    @override
    def train(self, work: session.Work, keep_going: session.KeepGoing) -> bytes:
        self._drop_out(behaviour_lib.DropOut.TRAINING)
        update = super().train(work, keep_going)
        end = time.monotonic() + self._behaviour.delay_s
        while (left := end - time.monotonic()) > 0:
            keep_going()
            self._stop.wait(min(left, _LOOK_S))
        return update

    @override
    def secure_upload(self, *args: object, **options: object) -> SimulatedUpload:
        return SimulatedUpload(*args, behaviour=self._behaviour, **options)

    @override
    def upload(
        self,
        update: bytes | list[np.ndarray],
        participation: tuple[np.ndarray, np.ndarray] | None,
        keep_going: session.KeepGoing,
    ) -> session.UploadAnswer:
        if not isinstance(update, bytes):  # What happens is in `SimulatedUpload`.
            return super().upload(update, participation, keep_going)
        self._drop_out(behaviour_lib.DropOut.UPLOAD)
        attack = self._behaviour.attack
        if attack is behaviour_lib.Attack.ATTEMPT:
            self._attempt += " of others"
        elif attack is not None:
            update = attacked(update, attack)
        return super().upload(update, participation, keep_going)

    def _drop_out(self, moment: behaviour_lib.DropOut) -> None:
        if self._behaviour.drop_out is moment:
            raise session.Interrupted(f"The device went away {moment.value}.")


def attacked(update: bytes, attack: behaviour_lib.Attack) -> bytes:
    """What a malicious device sends in place of an update.

    Args:
      update: A serialized `plan_pb2.Values`.
      attack: What it does.

    Returns:
      The bytes; those of the update if the attack is not in them.
    """
    values = plan_pb2.Values.FromString(update)
    if attack is behaviour_lib.Attack.GARBAGE:
        return b"\xff" * len(update)
    if attack is behaviour_lib.Attack.SHAPE and values.values:
        values.values[0].shape.append(1)
    if attack is behaviour_lib.Attack.NAN:
        for value in values.values:
            dtype = np.dtype(value.dtype)
            if dtype.kind == "f":
                count = len(value.content) // dtype.itemsize
                value.content = np.full(count, np.nan, dtype.newbyteorder("<")).tobytes()
    return values.SerializeToString(deterministic=True)


@dataclasses.dataclass(frozen=True)
class SimulatedDevice(device_runtime.DeviceRuntime):
    """A device whose sessions go as drawn.

    Attributes:
      rates: How often what goes wrong.
      is_malicious: Whether it attacks.
      spent: Tokens of the fleet.
      seed: Seed of its training: with task and round, it decides the order of its examples.
      stop: Ends delays.
    """

    rates: behaviour_lib.Rates = dataclasses.field(kw_only=True)
    is_malicious: bool = dataclasses.field(kw_only=True)
    spent: SpentToken = dataclasses.field(kw_only=True)
    seed: int = dataclasses.field(kw_only=True)
    stop: threading.Event = dataclasses.field(kw_only=True)

    @override
    def steps(self, population: str) -> wire_session.WireSession:
        behaviour = self.rates.draw(self.generator, is_malicious=self.is_malicious)
        attester = _KeepingAttester
        if behaviour.attack is behaviour_lib.Attack.TOKEN:
            attester = _ReplayingAttester
        return SimulatedSession(
            self.connection,
            population,
            attester=attester(self.attester, self.spent),
            plans=self.plans,
            examples=self.examples,
            clock=self.clock,
            check_rest=self.check_rest,
            seed_for=self._seed_for,
            behaviour=behaviour,
            stop=self.stop,
            issuers=self.issuers,
            generator=self.generator,
        )

    def _seed_for(self, task: str, round_index: int) -> tuple[int, int]:
        text = f"{self.seed} {round_index} {task}"
        return struct.unpack("<qq", hashlib.sha256(text.encode()).digest()[:16])
