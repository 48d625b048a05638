"""One simulated device: the sessions of a real one, with examples and timer in memory."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import threading
import time
from typing import Any

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.data import user_text
from tff_dpftrl.runtime.device import attester as attester_lib
from tff_dpftrl.runtime.device import (
    device_runtime,
    example_store,
    named_tensors,
    secure_upload,
    server_connection,
    session,
    text_examples,
    wire_session,
)
from tff_dpftrl.runtime.fleet import behaviour as behaviour_lib
from tff_dpftrl.runtime.plans import plan_pb2
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.store import contents
from tff_dpftrl.secure_sums import secure_sum_pb2

_POLL_S = 0.5


class UserTexts(example_store.ExampleStore):
    """Example store with the texts or examples of one user of a corpus, in any collection."""

    def __init__(self, corpus: user_text.UserText | named_tensors.UserExamples, user_id: str):
        """Wraps a corpus of texts, or of serialized examples, by user."""
        self._corpus, self._user_id = corpus, user_id

    @override
    def select(
        self, collection: str, *, max_examples: int, recorded_since: float | None = None
    ) -> list[bytes]:
        del collection, recorded_since  # Texts of a corpus have no age; the last is the newest.
        limit = validation.integer("max_examples", max_examples, minimum=1)
        texts = self._corpus.examples(self._user_id)[-limit:]
        return [
            one if isinstance(one, bytes) else text_examples.encode_text(one)
            for one in reversed(texts)
        ]


class SpentToken:
    """The last token that a device of the fleet used, for replay attacks."""

    def __init__(self):
        """Starts without a token."""
        self.token: bytes | None = None


class _RecordingAttester(attester_lib.Attester):
    """Attester that keeps its last token for replay by other devices."""

    def __init__(self, attester: attester_lib.Attester, spent: SpentToken):
        self._attester, self._spent = attester, spent

    @override
    def token(self, nonce: bytes) -> bytes | None:
        token = self._attester.token(nonce)
        self._spent.token = token
        return token


class _ReplayingAttester(attester_lib.Attester):
    """Attester that replays a token; without one, it uses a token for another nonce."""

    def __init__(self, attester: attester_lib.Attester, spent: SpentToken):
        self._attester, self._spent = attester, spent

    @override
    def token(self, nonce: bytes) -> bytes | None:
        return self._spent.token or self._attester.token(bytes(len(nonce)))


class SimulatedUpload(secure_upload.SecureUpload):
    """Secure upload with injected faults."""

    def __init__(self, *args: Any, behaviour: behaviour_lib.Behaviour, **options: Any):
        """Prepares an upload with faults; the other arguments are those of `SecureUpload`."""
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
    """Applies an attack to a secure sum's message, in place, if it is on messages of its kind."""
    kind = message.WhichOneof("message")
    if attack is behaviour_lib.Attack.NAN and kind == "key_advertisement":
        message.key_advertisement.mask_key = bytes(32)
    if attack is behaviour_lib.Attack.SHAPE and kind == "masked_vector":
        message.masked_vector.content += bytes(4)
    return message


class SimulatedSession(wire_session.WireSession):
    """Session with injected faults."""

    def __init__(
        self,
        *args: Any,
        behaviour: behaviour_lib.Behaviour,
        stop: threading.Event,
        **options: Any,
    ):
        """Prepares a session with faults; the other arguments are those of `WireSession`.

        `stop` ends delays.
        """
        super().__init__(*args, **options)
        self._behaviour, self._stop = behaviour, stop

    @override
    def fetch(self, keep_going: session.KeepGoing) -> session.Work:
        work = super().fetch(keep_going)
        self._drop_out(behaviour_lib.DropOut.BEFORE_TRAINING)
        return work

    @override
    def train(
        self, work: session.Work, keep_going: session.KeepGoing
    ) -> contents.Content | list[np.ndarray]:
        self._drop_out(behaviour_lib.DropOut.TRAINING)
        update = super().train(work, keep_going)
        end = time.monotonic() + self._behaviour.delay_s
        while (left := end - time.monotonic()) > 0:
            keep_going()
            self._stop.wait(min(left, _POLL_S))
        return update

    @override
    def secure_upload(self, *args: Any, **options: Any) -> SimulatedUpload:
        return SimulatedUpload(*args, behaviour=self._behaviour, **options)

    @override
    def upload(
        self,
        update: contents.Content | list[np.ndarray],
        participation: tuple[np.ndarray, np.ndarray] | None,
        keep_going: session.KeepGoing,
    ) -> session.UploadAnswer:
        if isinstance(update, list):  # `SimulatedUpload` injects the faults.
            return super().upload(update, participation, keep_going)
        self._drop_out(behaviour_lib.DropOut.UPLOAD)
        attack = self._behaviour.attack
        if attack is behaviour_lib.Attack.ATTEMPT:
            self._attempt += " of others"
        elif attack is not None:
            update = contents.InMemory([attacked(bytes(update), attack)])
        return super().upload(update, participation, keep_going)

    def _drop_out(self, moment: behaviour_lib.DropOut) -> None:
        if self._behaviour.drop_out is moment:
            raise session.Interrupted(f"The device went away {moment.value}.")


def attacked(update: bytes, attack: behaviour_lib.Attack) -> bytes:
    """Applies an attack to a serialized update (`plan_pb2.Values`), if it is on updates."""
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
    """Device whose sessions have injected faults.

    Attributes:
      rates: Probabilities of faults.
      is_malicious: Whether the device attacks.
      spent: Last token of the fleet.
      seed: Seed of training. With task and round, it decides the order of the examples.
      stop: Event that ends delays.
    """

    rates: behaviour_lib.Rates = dataclasses.field(kw_only=True)
    is_malicious: bool = dataclasses.field(kw_only=True)
    spent: SpentToken = dataclasses.field(kw_only=True)
    seed: int = dataclasses.field(kw_only=True)
    stop: threading.Event = dataclasses.field(kw_only=True)

    @override
    def steps(self, population: str) -> wire_session.WireSession:
        behaviour = self.rates.draw(self.generator, is_malicious=self.is_malicious)
        is_replay = behaviour.attack is behaviour_lib.Attack.TOKEN
        attester_type = _ReplayingAttester if is_replay else _RecordingAttester
        return SimulatedSession(
            self.connection,
            population,
            attester=attester_type(self.attester, self.spent),
            plans=self.plans,
            examples=self.examples,
            clock=self.clock,
            check_rest=self.check_rest,
            seed_for=self._seed_for,
            behaviour=behaviour,
            stop=self.stop,
            issuers=self.issuers,
            generator=self.generator,
            known=self.known_plans,
        )

    def _seed_for(self, task: str, round_index: int) -> tuple[int, int]:
        text = f"{self.seed} {round_index} {task}"
        return struct.unpack("<qq", hashlib.sha256(text.encode()).digest()[:16])
