"""What devices send in a session: read, and refused in one line where it cannot be."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import message as protobuf_message

from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.server.session import Refused


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
    context: grpc.aio.ServicerContext, first: bytes, most_bytes: int
) -> tuple[wire_pb2.Report, int]:
    """Reads the rest of an update, and the report that ends it; returns it and its size.

    Raises:
      Refused: If it is too large, or something else comes.
    """
    parts = [first]
    num_bytes, num_small = len(first), 0
    while True:
        message = read(await context.read(), ("report", "update_part"), most_bytes - num_bytes)
        if message.WhichOneof("message") == "report":
            report = message.report
            report.update = b"".join(parts)
            return report, num_bytes
        if len(message.update_part) < session_stream.FIRST_PART_BYTES:
            num_small += 1
            if num_small > 1:  # Millions of them would take more room for themselves than it.
                raise Refused(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"only the last part may have less than {session_stream.FIRST_PART_BYTES} "
                    "bytes",
                    "unexpected message",
                )
        parts.append(message.update_part)
        num_bytes += len(parts[-1])
