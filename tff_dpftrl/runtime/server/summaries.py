"""What devices tell of their sessions: read, held to ranges, and cut to what may be shown."""

from __future__ import annotations

import math
import re

import grpc
from google.protobuf import message as protobuf_message

from tff_dpftrl.runtime.device import session_shape
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.server import limits
from tff_dpftrl.runtime.server.session import Refused

OTHER = "other"
"""What a shape that is not in `session_shape.SHAPES` is counted as."""

_LONGEST_SECONDS = 7 * 86_400.0
_MOST_MEMORY = 1 << 44
_MOST_VERSIONS = 8
_NAME = re.compile(r"[\w.+-]{1,32}", re.ASCII)


def read(raw: bytes, population: str) -> wire_pb2.SessionSummary:
    """Reads a summary.

    Args:
      raw: What a device sent.
      population: The population that is served.

    Returns:
      The summary; its shape is one of `session_shape.SHAPES`, or `OTHER`.

    Raises:
      Refused: If it is too large, unreadable, of another population or out of range.
    """
    if len(raw) > limits.SUMMARY_BYTES:
        raise Refused(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "the summary is too large", "message too large"
        )
    try:
        summary = wire_pb2.SessionSummary.FromString(raw)
    except protobuf_message.DecodeError:
        raise _refused("the summary cannot be read") from None
    if summary.population != population:
        raise Refused(
            grpc.StatusCode.NOT_FOUND, "there is no such population here", "unknown population"
        )
    if not (math.isfinite(summary.seconds) and 0 <= summary.seconds <= _LONGEST_SECONDS):
        raise _refused("seconds is out of range")
    if summary.peak_memory_bytes > _MOST_MEMORY:
        raise _refused("peak_memory_bytes is out of range")
    if len(summary.versions) > _MOST_VERSIONS:
        raise _refused("there are too many versions")
    for name, version in summary.versions.items():
        if not (_NAME.fullmatch(name) and _NAME.fullmatch(version)):
            raise _refused("a version is not a short name")
    if summary.shape not in session_shape.SHAPES:
        summary.shape = OTHER
    return summary


def _refused(text: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, text, "unreadable message")
