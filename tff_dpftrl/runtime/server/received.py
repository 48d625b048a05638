"""What devices send in a session: read, and refused in one line where it cannot be."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import message as protobuf_message

from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.server.session import Refused

_PART_TAG = wire_pb2.FromDevice.UPDATE_PART_FIELD_NUMBER << 3 | 2  # Of bytes; one byte long.
_LEAST_PART = 16  # Bytes of a message for which a look at its beginning is worth it.


def read(raw: Any, kinds: tuple[str, ...], most_bytes: int) -> wire_pb2.FromDevice:
    """What a device sent, which must be of some kinds.

    Raises:
      Refused: If it is too large, another one, or cannot be read.
    """
    name = kinds[0].replace("_", "-")
    if raw is grpc.aio.EOF:
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


def too_large(name: str, most_bytes: int) -> Refused:
    """What to raise for something larger than allowed."""
    return Refused(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"a {name} of more than {most_bytes} bytes is too large",
        "message too large",
    )


async def read_parts(
    context: grpc.aio.ServicerContext, first: bytes, most_bytes: int, last: str
) -> tuple[wire_pb2.FromDevice, bytes]:
    """Reads what comes in parts.

    Args:
      context: Of the session.
      first: The first part.
      most_bytes: Size of all parts together, and of the message that ends them.
      last: Kind of that message.

    Returns:
      The message that ends the parts, and what they make together.

    Raises:
      Refused: If it is too large, or something else comes.
    """
    parts: list[bytes | memoryview] = [first]
    num_bytes, num_small = len(first), 0
    while True:
        raw = await context.read()
        part = _part(raw, most_bytes - num_bytes)
        if part is None:
            message = read(raw, (last, "update_part"), most_bytes - num_bytes)
            if message.WhichOneof("message") == last:
                return message, b"".join(parts)
            part = message.update_part
        if len(part) < session_stream.FIRST_PART_BYTES:
            num_small += 1
            if num_small > 1:  # Millions of them would take more room for themselves than it.
                raise Refused(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"only the last part may have less than {session_stream.FIRST_PART_BYTES} "
                    "bytes",
                    "unexpected message",
                )
        parts.append(part)
        num_bytes += len(part)


def _part(raw: Any, most_bytes: int) -> memoryview | None:
    """The part that is all of a message, without a copy of it; None if it is not that simple."""
    if raw is grpc.aio.EOF or not _LEAST_PART < len(raw) <= most_bytes or raw[0] != _PART_TAG:
        return None
    length = at = 0
    for at in range(1, 6):
        length |= (raw[at] & 0x7F) << 7 * (at - 1)
        if raw[at] < 0x80:
            break
    return memoryview(raw)[at + 1 :] if length == len(raw) - at - 1 else None
