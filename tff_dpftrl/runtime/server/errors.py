"""Errors that end a device's session."""

from __future__ import annotations

import grpc


class Refused(Exception):
    """The server refuses to go on with a session.

    It ends with the gRPC status `code` and the line `text` for the device. The observer gets
    `reason`, one of a fixed set.
    """

    def __init__(self, code: grpc.StatusCode, text: str, reason: str):
        """Stores the status, the device's message and the observer's reason."""
        super().__init__(text)
        self.code = code
        self.text = text
        self.reason = reason


class TimeIsOver(Exception):
    """The session has taken longer than it may in its phase."""
