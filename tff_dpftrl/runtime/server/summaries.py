"""Summaries that devices send of their sessions: parsed, range-checked, and bounded in number.

A summary names neither device nor session, and comes without a token. So anybody may send a summary
of a session that never was. But no more summaries are counted than there were sessions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container

import grpc
from google.protobuf import message as protobuf_message

from tff_dpftrl.runtime.device import session_shape
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.server import limits
from tff_dpftrl.runtime.server.errors import Refused
from tff_dpftrl.runtime.status import session_table

OTHER = "other"
"""Name under which shapes that are not in `session_shape.SHAPES` are counted."""

_LONGEST_SECONDS = 7 * 86_400.0
_MOST_MEMORY = 1 << 44
_MOST_VERSIONS = 8
_NAME = re.compile(r"[\w.+-]{1,32}", re.ASCII)


def parse(raw: bytes, populations: Container[str]) -> wire_pb2.SessionSummary:
    """Parses an untrusted summary; its shape is one of `session_shape.SHAPES`, or `OTHER`.

    It raises `Refused` if the summary is too large, unreadable, of another population or out of
    range.
    """
    if len(raw) > limits.SUMMARY_BYTES:
        raise Refused(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "the summary is too large", "message too large"
        )
    try:
        summary = wire_pb2.SessionSummary.FromString(raw)
    except protobuf_message.DecodeError:
        raise _refused("the summary cannot be read") from None
    if summary.population not in populations:
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


class Share:
    """Bound on the number of summaries by the number of sessions, without a link between them.

    Each session makes room for one summary, whoever sends it. Room that is not used, as after
    drop-outs, is forgotten in time.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]):
        """Begins without room; room is kept for at least `seconds`, and less than twice as long.

        The clock returns seconds and never goes back.
        """
        self._seconds = seconds
        self._clock = clock
        self._since = clock()
        self._former = self._present = 0

    def add(self) -> None:
        """Makes room for the summary of one more session."""
        self._forget()
        self._present += 1

    def take(self) -> bool:
        """Takes the room of a summary; returns whether there was any."""
        self._forget()
        if self._former:
            self._former -= 1
        elif self._present:
            self._present -= 1
        else:
            return False
        return True

    def _forget(self) -> None:
        passed = self._clock() - self._since
        if passed >= self._seconds:
            self._former = self._present if passed < 2 * self._seconds else 0
            self._present = 0
            self._since += passed


class Shares:
    """Bounds on summaries, separately for sessions that got a plan and for all others."""

    def __init__(self, seconds: float, clock: Callable[[], float]):
        """Begins without room; a summary comes at most `seconds` after its session began."""
        self._opened, self._configured = Share(seconds, clock), Share(seconds, clock)

    def session_opened(self) -> None:
        """Makes room for a summary without a plan: the session may end before it has one."""
        self._opened.add()

    def session_configured(self) -> None:
        """Makes room for a summary of a session with a plan."""
        self._configured.add()

    def check(self, summary: wire_pb2.SessionSummary) -> None:
        """Takes the room of a parsed summary; raises `Refused` if its kind has none left."""
        has_plan = session_table.got_plan(summary.shape)
        if not (self._configured if has_plan else self._opened).take():
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "there was a summary of every session: do not try again",
                "too many summaries",
            )


def _refused(text: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, text, "unreadable message")
