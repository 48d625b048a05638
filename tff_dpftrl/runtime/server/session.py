"""One session of a device, as the server sees it: a stream, from its opening to its end."""

from __future__ import annotations

import asyncio
import collections
import enum
from typing import Any

import grpc


class Phase(str, enum.Enum):
    """Where a session is, or where it has ended; the value is what the observer is told."""

    REFUSED = "refused"
    CONNECTING = "connecting"
    WAITING = "waiting"
    SENT_AWAY = "sent away"
    TRAINING = "training"
    REPORTED = "reported"


class Refused(Exception):
    """The session cannot go on.

    Attributes:
      code: The gRPC status it ends with.
      text: One line for the device.
      reason: A few words for the observer, one of few.
    """

    def __init__(self, code: grpc.StatusCode, text: str, reason: str):
        """Says with which status, what the device is told, and what is counted."""
        super().__init__(text)
        self.code = code
        self.text = text
        self.reason = reason


class TimeIsOver(Exception):
    """The session has taken longer than it may in its phase."""


class Session:
    """The state of a session, and its mailbox.

    Attributes:
      address: Where actors send what is for this device.
      phase: Where it is.
      report_to: The Aggregator that hears when it ends; empty if there is none.
    """

    __slots__ = (
        "address",
        "phase",
        "report_to",
        "_task",
        "_inbox",
        "_waiter",
        "_timer",
        "_ending",
    )

    def __init__(self, address: str):
        """A session of the running asyncio task.

        Args:
          address: Its address; new.
        """
        self.address = address
        self.phase = Phase.CONNECTING
        self.report_to = ""
        self._task = asyncio.current_task()
        self._inbox: collections.deque[Any] = collections.deque()
        self._waiter: asyncio.Future | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ending: Exception | None = None

    def receive(self, message: Any) -> None:
        """Takes a message for the device."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(message)
        else:
            self._inbox.append(message)

    async def next_message(self) -> Any:
        """The next message for the device."""
        if self._inbox:
            return self._inbox.popleft()
        self._waiter = self._task.get_loop().create_future()
        message = await self._waiter
        self._waiter = None
        return message

    def allow(self, seconds: float) -> None:
        """Lets the session's task go on for so long from now; then it gets `TimeIsOver`."""
        self.allow_for_ever()
        self._timer = self._task.get_loop().call_later(seconds, self.interrupt, TimeIsOver())

    def allow_for_ever(self) -> None:
        """Takes back what `allow` has said."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def interrupt(self, error: Exception) -> None:
        """Ends what the session's task waits for, with an error that is not its peer's."""
        if self._ending is None:
            self._ending = error
            self._task.cancel()

    def interruption(self) -> Exception | None:
        """Once, the error of `interrupt`; None if the task was cancelled by its peer's end."""
        error, self._ending = self._ending, None
        return error
