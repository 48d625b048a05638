"""Secure sums with dishonest ends: every message of the protocol, changed field by field.

What is changed keeps to the message's types, so that it reaches the checks behind the parser: a
field or an element is left out, doubled or exchanged, lengths change by one, numbers are extreme,
and whole messages are repeated, out of order, or of another device.
"""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from google.protobuf import descriptor
from google.protobuf import message as protobuf_message

from tests.fuzzing import judging, mutations
from tests.runtime.plans import secure_plans
from tests.runtime.server import example_secure_task
from tests.secure_sums import conversations
from tff_dpftrl.runtime.actors import actor, messages, roles, secure_aggregator
from tff_dpftrl.runtime.device import secure_upload, session
from tff_dpftrl.runtime.plans import plan_pb2, secure_report
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.secure_sums import group, parameters, refusals, secure_sum_pb2, vectors

_LAYOUT = (vectors.Segment(1, 2**32), vectors.Segment(3, 1000), vectors.Segment(2, 2**40))
_NUM_DEVICES = 4
_NUMBERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1)
_MOST_KEPT = 40
_MODELS = (conversations.HONEST, conversations.ACTIVE)
_STEPS = 6  # More than any group has.

# Changes to messages.


def _fields_of(message: Any) -> Iterator[tuple[Any, descriptor.FieldDescriptor]]:
    """Set fields at any depth, each with the message that it is a field of."""
    for field, value in message.ListFields():
        yield message, field
        if field.message_type is not None:
            for inner in value if _is_repeated(field) else (value,):
                yield from _fields_of(inner)


def _is_repeated(field: descriptor.FieldDescriptor) -> bool:
    if hasattr(field, "is_repeated"):  # Since protobuf 6; `label` is gone since 7.
        return field.is_repeated
    return field.label == field.LABEL_REPEATED


def _bytes(value: bytes, others: list[bytes], drawn: random.Random) -> bytes:
    match drawn.randrange(10):
        case 0:
            return b""
        case 1:
            return value[:-1]
        case 2:
            return value + drawn.choice((b"\0", b"\1", b"\xff"))
        case 3:
            return bytes(len(value))
        case 4:
            return b"\xff" * len(value)
        case 5:
            return drawn.randbytes(len(value))
        case 6:
            return value * drawn.choice((2, 100))
        case 7 | 8:
            return drawn.choice(others)
        case _:
            changed = bytearray(value or b"\0")
            changed[drawn.randrange(len(changed))] ^= 1 << drawn.randrange(8)
            return bytes(changed)


def _value(value: Any, others: list[bytes], drawn: random.Random) -> Any:
    if isinstance(value, bytes):
        return _bytes(value, others, drawn)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return drawn.choice((*_NUMBERS, value + 1, max(value - 1, 0)))
    return value


def _change_list(values: Any, others: list[bytes], drawn: random.Random) -> None:
    """Changes the elements of a repeated field, or which there are, and in what order."""
    kept = list(values)
    at, other = (drawn.randrange(len(kept)) for _ in range(2))
    match drawn.randrange(6):
        case 0:
            del kept[at]
        case 1:
            kept.insert(other, kept[at])
        case 2:
            kept[at], kept[other] = kept[other], kept[at]
        case 3:
            kept = kept[:at]
        case 4:
            kept += kept * drawn.choice((1, 30))
        case _ if not isinstance(kept[at], protobuf_message.Message):
            kept[at] = _value(kept[at], others, drawn)
        case _:  # One with a field of another one.
            changed = type(kept[at])()
            changed.MergeFrom(kept[other])
            fields = kept[at].ListFields()
            if fields:
                field, value = drawn.choice(fields)
                changed.ClearField(field.name)
                if field.message_type is None and not _is_repeated(field):
                    setattr(changed, field.name, value)
            kept[at] = changed
    # Elements are copied before the field is emptied, which they are part of.
    copies = [value if not hasattr(value, "MergeFrom") else _copy(value) for value in kept]
    del values[:]
    with contextlib.suppress(ValueError):  # Of a number that their type does not hold.
        values.extend(copies)


def _copy(message: Any) -> Any:
    copied = type(message)()
    copied.CopyFrom(message)
    return copied


def changed(message: Any, other: Any, drawn: random.Random) -> Any:
    """Changes some fields of a message.

    Args:
      message: The message, which stays as it is.
      other: Another message, whose values may be put in the place of values.
      drawn: Generator of random numbers.

    Returns:
      The changed message, of the same type.
    """
    found = _copy(message)
    if drawn.random() < 0.15:
        try:
            content = mutations.protobuf(
                message.SerializeToString(), other.SerializeToString(), drawn
            )
            return type(message).FromString(content)
        except protobuf_message.DecodeError:
            return type(message)()
    others = [
        value
        for parent, field in (*_fields_of(message), *_fields_of(other))
        if field.type == field.TYPE_BYTES and not _is_repeated(field)
        for value in (getattr(parent, field.name),)
    ] or [b"other"]
    for _ in range(drawn.choice((1, 1, 1, 2, 4))):
        places = list(_fields_of(found))
        if not places:
            break
        parent, field = drawn.choice(places)
        if _is_repeated(field):
            _change_list(getattr(parent, field.name), others, drawn)
        elif field.message_type is not None or drawn.random() < 0.1:
            if drawn.random() < 0.3:
                parent.ClearField(field.name)
        else:
            value = _value(getattr(parent, field.name), others, drawn)
            with contextlib.suppress(ValueError):  # Of a number that its type does not hold.
                setattr(parent, field.name, value)
    return found


class _Changes:
    """Messages that were sent, and changed ones in their place."""

    def __init__(self, drawn: random.Random, share: float):
        self._drawn = drawn
        self._share = share
        self._seen: list[Any] = []

    def keep(self, message: Any) -> None:
        """Keeps a message in mind, to be sent in the place of another one."""
        self._seen = [*self._seen[-_MOST_KEPT:], message]

    def __call__(self, message: Any) -> Any:
        """Keeps a message in mind; returns it, or, often enough, another one in its place."""
        self.keep(message)
        if self._drawn.random() >= self._share:
            return message
        other = self._drawn.choice(self._seen)
        if self._drawn.random() < 0.15:
            return other  # It is repeated, out of order, or of another device.
        return changed(message, other, self._drawn)


# What a server's group takes from devices.


class _Conversation:
    """A group and its devices, in one of the two models, of all neighbours or some."""

    def __init__(self, drawn: random.Random):
        model = drawn.choice(_MODELS)
        is_active = model is conversations.ACTIVE
        least = 4 if not is_active and drawn.random() < 0.3 else None
        self.demanded = parameters.Parameters(_LAYOUT, model, 3, least)
        name, rng = parameters.new_session(), np.random.default_rng(0)
        self.group = group.Group(
            self.demanded,
            name,
            num_neighbours=least,
            verify_proof=conversations.Identity().verify if is_active else None,
        )
        num_devices = _NUM_DEVICES if least is None else least + 2
        self.summands = [conversations.random_vector(_LAYOUT, rng) for _ in range(num_devices)]
        self.devices = [
            conversations.make_participant(self.demanded, name, summand)
            for summand in self.summands
        ]

    def rounds(self) -> Iterator[dict[int, Any]]:
        """Yields what each device is told, until the group is done; first nothing."""
        asked: dict[int, Any] = dict.fromkeys(range(len(self.devices)))
        while self.group.phase is not group.Phase.DONE:
            yield asked
            asked = self.group.advance()

    def answer(self, index: int, message: Any) -> Any:
        """A device's answer; first, its keys."""
        device = self.devices[index]
        return device.advertise() if message is None else device.answer(message)


def _run_group(drawn: random.Random) -> str:
    """Runs a group of which some devices send what they like; returns what became of it."""
    told = _Conversation(drawn)
    server, everybody = told.group, range(len(told.devices))
    hostile = set(drawn.sample(everybody, drawn.choice((1, 1, 1, 2))))
    changes = _Changes(drawn, drawn.choice((0.3, 1.0)))
    try:
        for asked in told.rounds():
            for index, message in asked.items():
                try:
                    answer = told.answer(index, message)
                except refusals.ProtocolRefusedError:  # Keys in its place that it has not sent.
                    server.drop(index)
                    continue
                for sent in _sent(answer, index in hostile, changes, drawn):
                    _receive(server, index, sent, index in hostile)
    except group.GroupLostError as error:
        judging.one_line(str(error))
        return "lost"
    if not hostile & set(server.survivors):
        summands = [told.summands[index] for index in server.survivors]
        expected = conversations.plain_sum(_LAYOUT, summands)
        for found, wanted in zip(server.total(), expected, strict=True):
            if not np.array_equal(found, wanted):
                raise judging.Violation("the sum is not that of the survivors")
    return "summed"


def _receive(server: group.Group, index: int, sent: Any, is_hostile: bool) -> None:
    try:
        server.receive(index, sent)
    except group.MessageRefusedError as error:
        judging.one_line(str(error))
        if not is_hostile:
            raise judging.Violation(f"an honest device is refused: {error}") from None


def _sent(answer: Any, is_hostile: bool, changes: _Changes, drawn: random.Random) -> list[Any]:
    """What a device sends in the place of its answer: mostly one message."""
    if not is_hostile:
        return [answer]
    return [changes(answer) for _ in range(drawn.choice((0, 1, 1, 1, 1, 1, 1, 2)))]


# The actor around it.

_ROLE = roles.AggregatorRole("attempt", "sum", 5, b"the model", tuple("abcd"), parent="attempt")
_ATTEMPTS = ("attempt",) * 9 + ("other",)


class _Aggregator:
    """An Aggregator and its devices, of which some are hostile."""

    def __init__(self, drawn: random.Random):
        task = example_secure_task.task(
            4, threat_model=drawn.choice((example_secure_task.HONEST, example_secure_task.ACTIVE))
        )
        self._drawn, self._demanded = drawn, task.secure_sum
        verify = None
        if self._demanded.threat_model is example_secure_task.ACTIVE:
            trusting = example_secure_task.Trusting()
            verify = lambda name, key, proof: trusting.verify(key, proof)  # noqa: E731
        self._actor = secure_aggregator.SecureAggregator(
            "sums", task, _ROLE, random.Random(0), lambda *_: (7.0, 9.0), verify
        )
        self._hostile = set(drawn.sample(_ROLE.devices, drawn.choice((1, 1, 2))))
        self._changes = _Changes(drawn, drawn.choice((0.3, 1.0)))
        self._mail: collections.deque[Any] = collections.deque()
        self._timers: list[Any] = []
        self._devices: dict[str, Any] = {}
        self._steps: collections.Counter[str] = collections.Counter()
        self._ends: dict[str, Any] = {}
        self._parts: list[Any] = []

    def run(self) -> str:
        """Runs the group to its end, however that comes; returns what became of it."""
        self._hear(self._actor.start(0.0))
        self._deliver()
        self._step(messages.CloseReporting())
        self._deliver()
        for _ in range(3 * _STEPS):
            if self._parts:
                break
            self._step(self._timers[-1])
            self._deliver()
        if len(self._parts) != 1:
            raise judging.Violation(f"the group has ended {len(self._parts)} times")
        total = self._parts[0].total
        for device in set(_ROLE.devices) - self._hostile:
            if device not in self._ends:
                raise judging.Violation(f"the honest device {device} was told nothing")
        return "lost" if total is None else "summed"

    def _step(self, message: Any) -> None:
        self._hear(self._actor.step(1.0, message))

    def _deliver(self) -> None:
        while self._mail:
            at = self._drawn.randrange(min(3, len(self._mail)))
            self._mail.rotate(-at)
            self._step(self._mail.popleft())

    def _hear(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case actor.After():
                    self._timers.append(effect.message)
                case actor.Send(to=to, message=messages.Configure() as told):
                    made = example_secure_task.participant(told, (1, 2, 3), self._demanded)
                    self._devices[to] = made
                    self._answer(to, made.advertise())
                case actor.Send(to=to, message=messages.SecureSumAnswer() as told):
                    asked = secure_sum_pb2.ToDevice.FromString(told.content)
                    try:
                        self._answer(to, self._devices[to].answer(asked))
                    except refusals.ProtocolRefusedError:
                        self._mail.append(messages.DeviceGone(to))
                        if to not in self._hostile:
                            self._ends.setdefault(to, "gone")
                case actor.Send(
                    to=to, message=messages.ReportAccepted() | messages.ReportRefused() as end
                ):
                    self._ends.setdefault(to, end)
                    if isinstance(end, messages.ReportRefused):
                        judging.one_line(end.reason or "no reason")
                case actor.Send(message=messages.PartialSum() as part):
                    self._parts.append(part)

    def _answer(self, device: str, answer: Any) -> None:
        drawn, is_hostile = self._drawn, device in self._hostile
        for sent in _sent(answer, is_hostile, self._changes, drawn):
            step, attempt, vector = self._steps[device], "attempt", b""
            content = sent.SerializeToString()
            if is_hostile and drawn.random() < 0.3:
                step = max(0, step + drawn.choice((-1, 0, 1, 2**40)))
                attempt = drawn.choice(_ATTEMPTS)
                if drawn.random() < 0.3:
                    vector = sent.masked_vector.content or drawn.randbytes(8)
                    sent.masked_vector.ClearField("content")
                    content = drawn.choice((content, sent.SerializeToString()))
                if drawn.random() < 0.3:
                    content = mutations.scattered(content, content, drawn)
            self._mail.append(messages.SecureSumMessage(device, attempt, step, content, vector))
            if is_hostile and drawn.random() < 0.05:
                self._mail.append(
                    drawn.choice(
                        (
                            messages.DeviceGone(device),
                            messages.Report(device, attempt, wire_pb2.Report()),
                            messages.SecureSumMessage("stranger", attempt, step, content),
                        )
                    )
                )
        self._steps[device] += 1


# What a device takes from a server.


def _run_device(drawn: random.Random) -> None:
    """Runs a group whose server sends one device what it likes."""
    told = _Conversation(drawn)
    changes = _Changes(drawn, drawn.choice((0.3, 1.0)))
    for asked in told.rounds():
        for index, message in asked.items():
            if message is None:
                answer = told.answer(index, None)
            elif index:
                changes.keep(message)  # It may be sent to the first device.
                answer = told.answer(index, message)
            else:
                answer = _answer_of(told.devices[0], changes(message))
            try:
                told.group.receive(index, answer)
            except group.MessageRefusedError:  # It was told of another group.
                return


def _answer_of(device: Any, message: Any) -> Any:
    try:
        answer = device.answer(message)
    except refusals.ProtocolRefusedError:
        with contextlib.suppress(refusals.ProtocolRefusedError):
            device.answer(message)
            raise judging.Violation("a device goes on after a refusal") from None
        raise
    revealed = answer.revealed_shares
    owners = [{share.index for share in shares} for shares in
              (revealed.of_self_masks, revealed.of_mask_keys)]  # fmt: skip
    if owners[0] & owners[1]:
        raise judging.Violation("a device reveals both kinds of shares of one device")
    return answer


class _LyingStream:
    """A device's stream to a group of two others, whose server changes what it sends."""

    def __init__(self, plan: plan_pb2.DevicePlan, name: bytes, drawn: random.Random):
        demanded = secure_report.parameters_of(plan)
        self._server = group.Group(demanded, name)
        self._others = {
            index: conversations.make_participant(
                demanded,
                name,
                secure_report.vector_of(
                    plan, secure_plans.update(index), secure_plans.NEVER_BEFORE
                ),
            )
            for index in (1, 2)
        }
        self._to_first: Any = None
        self._asked: dict[int, Any] = {}
        self._changes = _Changes(drawn, drawn.choice((0.3, 1.0)))
        self._drawn = drawn

    def send(self, message: wire_pb2.FromDevice) -> None:
        """Takes the device's message, and has the others answer theirs."""
        try:
            self._server.receive(0, secure_sum_pb2.ToServer.FromString(message.secure_sum))
        except group.MessageRefusedError:
            self._server.drop(0)
        is_first = self._server.phase is group.Phase.ADVERTISING
        try:
            for index, other in self._others.items():
                if is_first:
                    self._server.receive(index, other.advertise())
                elif index in self._asked:
                    self._server.receive(index, other.answer(self._asked[index]))
            self._asked = self._server.advance()
        except (group.GroupLostError, refusals.ProtocolRefusedError):
            self._asked = {}

    def receive(self, keep_going: Any, *, seconds: float, wanted: str) -> wire_pb2.FromServer:
        """The next message to the device, as a lying server sends it."""
        del keep_going, seconds
        if 0 not in self._asked:
            if self._server.phase is group.Phase.DONE:
                return wire_pb2.FromServer(report_answer={"accepted": True})
            raise session.StepFailed(f"The server ended the session without the {wanted}.")
        inner = self._changes(self._asked[0]).SerializeToString()
        if self._drawn.random() < 0.1:
            inner = mutations.scattered(inner, inner, self._drawn)
        outer = wire_pb2.FromServer(secure_sum=inner)
        return changed(outer, outer, self._drawn) if self._drawn.random() < 0.1 else outer


def _upload(drawn: random.Random) -> None:
    plan, name = secure_plans.device(), parameters.new_session()
    upload = secure_upload.SecureUpload(
        plan, name, context=b"", attester=None, issuers=(), clock=None
    )
    upload.run(
        _LyingStream(plan, name, drawn),
        secure_plans.update(),
        secure_plans.NEVER_BEFORE,
        lambda: None,
        seconds=1.0,
    )


def _kind(
    name: str, run: Callable[[random.Random], Any], allowed: tuple[type[Exception], ...]
) -> judging.Kind:
    def prepare(folder: Any) -> Callable[[random.Random], judging.Case]:
        del folder
        return lambda drawn: judging.Case(lambda: run(drawn))

    return judging.Kind(name, prepare, allowed)


KINDS = (
    _kind("devices of a group", _run_group, ()),
    _kind("devices of an Aggregator", lambda drawn: _Aggregator(drawn).run(), ()),
    _kind("server of a device", _run_device, (refusals.ProtocolRefusedError, group.GroupLostError)),
    _kind("server of an upload", _upload, (session.StepFailed,)),
)
"""All of them."""
