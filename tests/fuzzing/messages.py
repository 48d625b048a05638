"""Kinds of messages of the runtime's protocols, read by the functions that read them."""

from __future__ import annotations

import asyncio
import collections
import functools
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np

from tests.fuzzing import judging, mutations
from tests.runtime.plans import secure_plans
from tests.secure_sums import conversations
from tff_dpftrl import validation
from tff_dpftrl.runtime import participation_histograms, signing_keys
from tff_dpftrl.runtime.device import secure_upload, session
from tff_dpftrl.runtime.plans import plan_pb2, rounded_updates, secure_report, tensor_values
from tff_dpftrl.runtime.protocol import attestation, session_stream, wire_pb2
from tff_dpftrl.runtime.server import received, summaries
from tff_dpftrl.runtime.server.errors import Refused
from tff_dpftrl.runtime.tasks import task_state
from tff_dpftrl.secure_sums import group, parameters, refusals, secure_sum_pb2, vectors

_NOW = 1_700_000_000.0
_LAYOUT = (vectors.Segment(1, 2**32), vectors.Segment(3, 1000), vectors.Segment(2, 2**40))
_MOST_BYTES = 5000
_NUM_DEVICES = 4

Content = Callable[[], Sequence[bytes]]


def kind(
    name: str,
    valid: Content,
    read: Callable[[bytes], Any],
    *,
    mutate: mutations.Mutation = mutations.protobuf,
    refusals: tuple[type[Exception], ...] = (validation.UsageError, OSError),
) -> judging.Kind:
    """A kind of message, which is bytes.

    Args:
      name: Its name.
      valid: Makes valid ones.
      read: Reads one.
      mutate: How to change one.
      refusals: What the reader is documented to raise.

    Returns:
      The kind.
    """

    def prepare(folder: pathlib.Path) -> Callable[[random.Random], judging.Case]:
        del folder
        corpus = valid()

        def make(drawn: random.Random) -> judging.Case:
            content = mutate(drawn.choice(corpus), drawn.choice(corpus), drawn)
            return judging.Case(functools.partial(read, content))

        return make

    return judging.Kind(name, prepare, refusals, read)


# What a device sends.


def _check_in() -> wire_pb2.CheckIn:
    return wire_pb2.CheckIn(
        population="toys", protocol_version=1, runtime_version=2, token=bytes(range(120))
    )


def _noise_party() -> wire_pb2.NoiseParty:
    return wire_pb2.NoiseParty(key=bytes(32), task="t", next_round=3, signature=bytes(64))


def from_device() -> list[bytes]:
    update = tensor_values.to_bytes([np.arange(4, dtype=np.int32), np.int64(5)])
    report = wire_pb2.Report(attempt="a", update=update, strides=[1, 0, 0, 0], times=[1, 0, 0])
    return [
        wire_pb2.FromDevice(**fields).SerializeToString()
        for fields in (
            {"check_in": _check_in()},
            {"check_in": wire_pb2.CheckIn(population="toys", noise_party=_noise_party())},
            {"report": report},
            {"update_part": bytes(1024)},
            {"plan_wanted": {}},
            {"secure_sum": secure_sum_pb2.ToServer(masked_vector={"content": b"v" * 20})
             .SerializeToString()},
        )
    ]  # fmt: skip


def _read_from_device(content: bytes) -> None:
    received.is_plan_wanted(content)
    for kinds in (("check_in",), ("report", "update_part"), ("secure_sum", "report")):
        try:
            received.parse(content, kinds, _MOST_BYTES)
        except Refused as refused:
            last = refused
        else:
            return
    raise last


class _Context:
    """A stream of a device that has sent all that it will."""

    def __init__(self, contents: Sequence[bytes]):
        self._left = collections.deque(contents)

    async def read(self) -> Any:
        return self._left.popleft() if self._left else grpc.aio.EOF


_ROUNDED = plan_pb2.ServerPlan(
    update=[
        plan_pb2.Tensor(label="1", dtype="float64", shape=[40]),
        plan_pb2.Tensor(label="2", dtype="float32", shape=[]),
    ],
    rounded=[0, 1],
)


def _rounded_reports() -> list[bytes]:
    update = [np.linspace(-1, 1, 40), np.array(0.1, np.float32)]
    sent, scales = rounded_updates.rounded(update, _ROUNDED.rounded)
    rounded = wire_pb2.Report(attempt="a", update=tensor_values.to_bytes(sent), scales=scales)
    whole = wire_pb2.Report(attempt="a", update=tensor_values.to_bytes(update))
    return [rounded.SerializeToString(), whole.SerializeToString()]


def _read_rounded(content: bytes) -> None:
    report = wire_pb2.Report.FromString(content)
    arrays = rounded_updates.read(report.update, report.scales, _ROUNDED)
    found = [(array.dtype.name, list(array.shape)) for array in arrays]
    assert found == [(tensor.dtype, list(tensor.shape)) for tensor in _ROUNDED.update]


def _read_plan(content: bytes) -> None:
    assert len(session_stream.inflated_plan(content, 100)) <= 100


def _parts_kind() -> judging.Kind:
    """Updates in parts, of which one message or more are changed."""

    def prepare(folder: pathlib.Path) -> Callable[[random.Random], judging.Case]:
        del folder
        report = wire_pb2.Report(attempt="a", update=b"u" * 4000, strides=[1], times=[1])
        parts = [report.update[i : i + 1024] for i in range(0, 4000, 1024)]
        report.ClearField("update")
        valid = [wire_pb2.FromDevice(update_part=part).SerializeToString() for part in parts]
        valid.append(wire_pb2.FromDevice(report=report).SerializeToString())

        def make(drawn: random.Random) -> judging.Case:
            sent = list(valid)
            for _ in range(drawn.choice((1, 1, 2))):
                at = drawn.randrange(len(sent))
                match drawn.randrange(4):
                    case 0:
                        sent.insert(at, drawn.choice(valid))
                    case 1 if len(sent) > 1:
                        del sent[at]
                    case _:
                        sent[at] = mutations.protobuf(sent[at], drawn.choice(valid), drawn)

            async def read() -> None:
                context = _Context(sent)
                first = received.parse(await context.read(), ("update_part",), _MOST_BYTES)
                await received.read_parts(context, first.update_part, _MOST_BYTES, "report")

            return judging.Case(lambda: asyncio.run(read()))

        return make

    return judging.Kind("update in parts", prepare, (Refused,))


def summaries_of_devices() -> list[bytes]:
    return [
        wire_pb2.SessionSummary(
            population="toys",
            shape="-v[]+^",
            seconds=12.0,
            peak_memory_bytes=10**8,
            versions={"python": "3.11", "tff_dpftrl": "1.0"},
        ).SerializeToString()
    ]


_ISSUER = attestation.TokenIssuer(
    signing_keys.ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32))), clock=lambda: _NOW
)
_NONCE = bytes(range(32))


def _read_token(content: bytes) -> str:
    key = signing_keys.ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    tokens = attestation.SignedTokens([key.public_key()], clock=lambda: _NOW)
    return tokens.verify(content, _NONCE).value


# Secure sums, in which one message of one is changed.


def _secure_kind(name: str, changes_server: bool) -> judging.Kind:
    def prepare(folder: pathlib.Path) -> Callable[[random.Random], judging.Case]:
        del folder
        seen: list[bytes] = []

        def make(drawn: random.Random) -> judging.Case:
            model = drawn.choice((conversations.HONEST, conversations.ACTIVE))
            demanded = parameters.Parameters(_LAYOUT, model, 3)
            last = 4 if model is conversations.ACTIVE else 3
            step = drawn.randrange(0 if not changes_server else 1, last + 1)

            def changed(message: Any) -> Any:
                content = message.SerializeToString()
                other = drawn.choice(seen) if seen else content
                seen[:] = [*seen[-20:], content]
                return type(message).FromString(mutations.protobuf(content, other, drawn))

            return judging.Case(lambda: _converse(demanded, step, changes_server, changed))

        return make

    allowed = (
        refusals.ProtocolRefusedError,
        group.MessageRefusedError,
        group.GroupLostError,
        unreadable(),
    )
    return judging.Kind(name, prepare, allowed)


def unreadable() -> type[Exception]:
    """What protobuf raises, and whoever reads messages turns into a refusal."""
    from google.protobuf import message

    return message.DecodeError


def _converse(
    demanded: parameters.Parameters, step: int, changes_server: bool, changed: Callable[[Any], Any]
) -> None:
    """A whole group; what its first device, or the server to that, says in one step is changed."""
    session_name = parameters.new_session()
    verify = conversations.Identity().verify
    is_active = demanded.threat_model is conversations.ACTIVE
    server = group.Group(demanded, session_name, verify_proof=verify if is_active else None)
    rng = np.random.default_rng(0)
    devices = {
        index: conversations.make_participant(
            demanded, session_name, conversations.random_vector(_LAYOUT, rng)
        )
        for index in range(_NUM_DEVICES)
    }
    asked: dict[int, Any] = {}
    for now in range(6):
        if server.phase in (group.Phase.DONE, group.Phase.LOST):
            return
        refused = None
        for index, device in devices.items():
            if now and index not in asked:
                continue
            message = asked.get(index)
            if changes_server and now == step and index == 0:
                message = changed(message)
            answer = device.answer(message) if now else device.advertise()
            if not changes_server and now == step and index == 0:
                try:
                    answer = changed(answer)
                    server.receive(index, answer)
                except (group.MessageRefusedError, unreadable()) as error:
                    server.drop(index)
                    refused = error
            else:
                server.receive(index, answer)
        asked = server.advance()
        if refused is not None:
            judging.one_line(str(refused))


# What a server sends.


def _values() -> list[bytes]:
    return [
        tensor_values.to_bytes([np.arange(4, dtype=np.int32) * i, np.int64(i)]) for i in range(3)
    ]


def _read_values(content: bytes) -> None:
    arrays = tensor_values.from_bytes(content, secure_plans.TENSORS)
    assert [array.shape for array in arrays] == [(4,), ()]


class _Answers:
    """A stream whose server has sent some messages before it ends."""

    def __init__(self, contents: Sequence[bytes]):
        self._left = collections.deque(contents)

    def send(self, message: wire_pb2.FromDevice) -> None:
        message.SerializeToString()

    def receive(self, keep_going: Any, *, seconds: float, wanted: str) -> wire_pb2.FromServer:
        if not self._left:
            raise session.StepFailed(f"The server ended the session without the {wanted}.")
        return wire_pb2.FromServer.FromString(self._left.popleft())


def _to_device() -> list[bytes]:
    keys = secure_sum_pb2.KeyAdvertisement(encryption_key=b"e" * 32, mask_key=b"m" * 32)
    directory = secure_sum_pb2.Directory(
        index=1, num_devices=3, threshold=2, members=[{"index": i, "keys": keys} for i in range(3)]
    )
    asked = secure_sum_pb2.ToDevice(directory=directory).SerializeToString()
    return [
        wire_pb2.FromServer(secure_sum=asked).SerializeToString(),
        wire_pb2.FromServer(report_answer={"accepted": True, "turns": [5.0]}).SerializeToString(),
    ]


def _read_to_device(content: bytes) -> None:
    upload = secure_upload.SecureUpload(
        secure_plans.device(), b"s" * 32, context=b"", attester=None, issuers=(), clock=None
    )
    try:
        upload.run(
            _Answers([content]),
            secure_plans.update(),
            secure_plans.NEVER_BEFORE,
            lambda: None,
            seconds=1.0,
        )
    except unreadable() as error:  # Of the message around it, which gRPC reads.
        raise session.StepFailed("unreadable") from error


# What a store holds.


def _states() -> list[bytes]:
    seen = participation_histograms.ObservedRounds(3, 2, 2, 1)
    return [task_state.TaskState("f" * 64, seen, b"tensors").to_bytes()]


def _read_state(content: bytes) -> None:
    found = task_state.TaskState.from_bytes(content, "f" * 64)
    found.observed.with_unknown_round().participation()
    task_state.observed(content, "f" * 64)


def _change_state(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    magic, head, tensors = content.split(b"\n", 2)
    if drawn.random() < 0.3:
        return mutations.scattered(content, other, drawn)
    return b"\n".join((magic, mutations.json_text(head, head, drawn), tensors))


def _plans_with_sums() -> list[bytes]:
    return [secure_plans.device().SerializeToString(), secure_plans.server().SerializeToString()]


def _read_sums(content: bytes) -> None:
    for plan in (plan_pb2.DevicePlan, plan_pb2.ServerPlan):
        try:
            found = plan.FromString(content)
        except unreadable():
            raise validation.UsageError("unreadable") from None
        secure_report.parameters_of(found)


KINDS = (
    kind("message of a device", from_device, _read_from_device, refusals=(Refused,)),
    _parts_kind(),
    kind(
        "rounded report",
        _rounded_reports,
        _read_rounded,
        refusals=(validation.UsageError, unreadable()),
    ),
    kind(
        "deflated plan",
        lambda: [session_stream.deflated_plan(bytes(size)) for size in (0, 100, 101, 10**6)],
        _read_plan,
        mutate=mutations.scattered,
    ),
    kind(
        "summary",
        summaries_of_devices,
        lambda content: summaries.parse(content, ("toys",)),
        refusals=(Refused,),
    ),
    kind(
        "token",
        lambda: [_ISSUER.issue(_NONCE), _ISSUER.issue(bytes(32))],
        _read_token,
        mutate=mutations.scattered,
        refusals=(),
    ),
    _secure_kind("secure sum, to the server", changes_server=False),
    _secure_kind("secure sum, to a device", changes_server=True),
    kind("secure sum, over the wire", _to_device, _read_to_device, refusals=(session.StepFailed,)),
    kind("tensors", _values, _read_values, refusals=(tensor_values.ValuesError,)),
    kind("state of a task", _states, _read_state, mutate=_change_state),
    kind("rules of secure sums", _plans_with_sums, _read_sums),
)
"""All of them."""
