import asyncio

import grpc
import pytest

from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.server import received
from tff_dpftrl.runtime.server.errors import Refused

REPORT = wire_pb2.FromDevice(report=wire_pb2.Report(attempt="a")).SerializeToString()


class Sent:
    """What a device has sent, as a context of gRPC gives it."""

    def __init__(self, *messages):
        self._messages = list(messages)

    async def read(self):
        return self._messages.pop(0) if self._messages else grpc.aio.EOF


def part(content):
    return wire_pb2.FromDevice(update_part=content).SerializeToString()


def read_parts(*messages, most_bytes=10**7):
    """The report, and what came in parts before it."""
    read = received.read_parts(Sent(*messages), b"first", most_bytes, "report")
    last, content = asyncio.run(read)
    return last.report, content


@pytest.mark.parametrize("size", [1024, 16_383, 16_384, 300_000, 2**20, 2**21, 3_000_000])
def test_parts_are_put_together_whatever_their_size(size):
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    report, update = read_parts(part(content), part(content), part(b"end"), REPORT)
    assert update == b"first" + 2 * content + b"end" and report.attempt == "a"


def test_what_is_not_just_a_part_is_read_as_any_message():
    content = bytes(2000)
    # The last one of a oneof counts: of two parts, and of a part and a report.
    assert read_parts(part(b"x" * 2000) + part(content), REPORT)[1] == b"first" + content
    assert read_parts(part(content) + REPORT)[1] == b"first"
    # A length in more bytes than it needs; and of more than there is.
    padded = b"\x1a\xd0\x8f\x80\x00" + content
    assert read_parts(padded, REPORT)[1] == b"first" + content
    with pytest.raises(Refused, match="cannot be read"):
        read_parts(part(content)[:-1], REPORT)
    with pytest.raises(Refused, match="cannot be read"):
        read_parts(b"\x1a" + b"\xff" * 20, REPORT)
    with pytest.raises(Refused, match="too large"):
        read_parts(part(content), REPORT, most_bytes=2000)
    with pytest.raises(Refused, match="ended without a report"):
        read_parts(part(content))
