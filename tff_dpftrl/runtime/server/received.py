"""Parsing of devices' messages in a session; unusable ones are refused in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import message as protobuf_message

from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.server.errors import Refused

END: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
"""Result of reading from a stream that the device has ended."""

_PART_TAG = wire_pb2.FromDevice.UPDATE_PART_FIELD_NUMBER << 3 | 2  # Tag of a field of bytes.
_MOST_QUESTION = 64  # Bytes of a question for the plan.
_LEAST_PART = 16  # Bytes of the smallest message that is parsed without a copy.


@dataclasses.dataclass(frozen=True)
class LargeReport:
    """A report whose untrusted update came in parts, in place of a `wire_pb2.Report`.

    A message of Protocol Buffers would copy the update once more, and again whenever it is read.
    """

    update: bytearray = dataclasses.field(repr=False)
    strides: Sequence[int] = dataclasses.field(repr=False)
    times: Sequence[int] = dataclasses.field(repr=False)
    scales: Sequence[float] = dataclasses.field(default=(), repr=False)

    def ByteSize(self) -> int:  # noqa: N802
        """Returns the number of bytes of the update, nearly all of the report."""
        return len(self.update)


def parse(raw: Any, kinds: tuple[str, ...], most_bytes: int) -> wire_pb2.FromDevice:
    """Parses untrusted bytes of a device, or `END`; raises `Refused` if they are no such message.

    One of the fields `kinds` of `wire_pb2.FromDevice` must be set; error messages call it by the
    first one. It may have `most_bytes` bytes.
    """
    name = kinds[0].replace("_", "-")
    if raw is END:
        raise Refused(
            grpc.StatusCode.INVALID_ARGUMENT, f"the stream ended without a {name}", "ended early"
        )
    if len(raw) > most_bytes:
        raise too_large(name, most_bytes)
    try:
        message = wire_pb2.FromDevice.FromString(raw)
    except protobuf_message.DecodeError:
        raise Refused(
            grpc.StatusCode.INVALID_ARGUMENT, f"the {name} cannot be read", "unreadable message"
        ) from None
    if message.WhichOneof("message") not in kinds:
        raise Refused(
            grpc.StatusCode.INVALID_ARGUMENT, f"a {name} was expected", "unexpected message"
        )
    return message


def is_plan_wanted(raw: Any) -> bool:
    """Returns whether an untrusted message of a device, or `END`, asks for the plan."""
    if raw is END or len(raw) > _MOST_QUESTION:
        return False
    try:
        message = wire_pb2.FromDevice.FromString(raw)
    except protobuf_message.DecodeError:
        return False
    return message.WhichOneof("message") == "plan_wanted"


def too_large(name: str, most_bytes: int) -> Refused:
    """Makes the error for a message that is larger than allowed."""
    return Refused(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"a {name} of more than {most_bytes} bytes is too large",
        "message too large",
    )


async def read_parts(
    context: grpc.aio.ServicerContext, first: bytes, most_bytes: int, last: str
) -> tuple[wire_pb2.FromDevice, bytearray]:
    """Reads the parts of a large update; returns the message that ends them, and the parts joined.

    They may have `most_bytes` bytes together. It raises `Refused` if they are too large, or the
    device sends something else.
    """
    parts, num_small = bytearray(first), 0  # The array grows in place.
    while True:
        raw = await context.read()
        part = _part(raw, most_bytes - len(parts))
        if part is None:
            message = parse(raw, (last, "update_part"), most_bytes - len(parts))
            if message.WhichOneof("message") == last:
                return message, parts
            part = message.update_part
        if len(part) < session_stream.FIRST_PART_BYTES:
            num_small += 1
            if num_small > 1:  # The overhead of millions of small parts would exceed the limit.
                raise Refused(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"only the last part may have less than {session_stream.FIRST_PART_BYTES} "
                    "bytes",
                    "unexpected message",
                )
        parts += part


def _part(raw: Any, most_bytes: int) -> memoryview | None:
    """Returns the part in a message without a copy; None unless the message is just that part."""
    if raw is END or not _LEAST_PART < len(raw) <= most_bytes or raw[0] != _PART_TAG:
        return None
    length = at = 0
    for at in range(1, 6):
        length |= (raw[at] & 0x7F) << 7 * (at - 1)
        if raw[at] < 0x80:
            break
    return memoryview(raw)[at + 1 :] if length == len(raw) - at - 1 else None
