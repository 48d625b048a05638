"""Errors that end a device's session."""

from __future__ import annotations

import grpc


class Refused(Exception):
    """The server refuses to go on with a session.

    Attributes:
      code: gRPC status with which the session ends.
      text: Message for the device, one line.
      reason: Reason for the observer, one of a fixed set.
    """

    def __init__(self, code: grpc.StatusCode, text: str, reason: str):
        """Stores the status, the device's message and the observer's reason."""
        super().__init__(text)
        self.code = code
        self.text = text
        self.reason = reason


class TimeIsOver(Exception):
    """The session has taken longer than it may in its phase."""
