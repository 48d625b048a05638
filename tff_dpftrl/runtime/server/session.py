"""One session of a device, as the server sees it: a stream, from its opening to its end."""

from __future__ import annotations

import asyncio
import collections
import enum
from typing import TYPE_CHECKING, Any

import grpc

from tff_dpftrl.runtime.actors import messages

if TYPE_CHECKING:
    from tff_dpftrl.runtime.server import peers


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
      deadline: When its phase is over at the latest, by the event loop's clock.
      report_to: The Aggregator that hears when it ends; empty if there is none.
      task: Name of the task that it takes part in; empty before.
      is_in_secure_sum: Whether its report is summed securely.
      is_writing: Whether something is on its way to the device, and nothing else can be.
      peer: Where it comes from, under a name of this start; None before it is counted.
    """

    __slots__ = (
        "address",
        "phase",
        "deadline",
        "report_to",
        "task",
        "is_in_secure_sum",
        "is_writing",
        "peer",
        "_coroutine",
        "_inbox",
        "_waiter",
        "_ending",
    )

    def __init__(self, address: str, deadline: float):
        """A session of the running asyncio task.

        Args:
          address: Its address; new.
          deadline: See the class.
        """
        self.address = address
        self.phase = Phase.CONNECTING
        self.deadline = deadline
        self.report_to = ""
        self.task = ""
        self.is_in_secure_sum = False
        self.is_writing = False
        self.peer: peers.Peer | None = None
        self._coroutine = asyncio.current_task()
        self._inbox: collections.deque[Any] | None = None
        self._waiter: asyncio.Future | None = None
        self._ending: Exception | None = None

    def receive(self, message: Any) -> None:
        """Takes a message for the device."""
        if type(message) is messages.Configure:
            # From now on it is waited for, whether or not the coroutine comes to know.
            self.report_to = message.report_to
            self.is_in_secure_sum = bool(message.secure_sum_session)
        elif self.report_to and type(message) is messages.ComeBack:
            return  # Who sends it away does not know that it takes part.
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(message)
        elif self._inbox is None:
            self._inbox = collections.deque([message])
        else:
            self._inbox.append(message)

    @property
    def has_mail(self) -> bool:
        """Whether there is a message that nobody has waited for."""
        return bool(self._inbox)

    async def next_message(self) -> Any:
        """The next message for the device."""
        if self._inbox:
            return self._inbox.popleft()
        self._waiter = self._coroutine.get_loop().create_future()
        message = await self._waiter
        self._waiter = None
        return message

    async def until_mail(self) -> None:
        """Waits until there is a message, which stays."""
        message = await self.next_message()
        self._inbox = self._inbox or collections.deque()
        self._inbox.appendleft(message)

    async def write(self, context: grpc.aio.ServicerContext, content: bytes) -> None:
        """Sends a message; what is interrupted meanwhile is still on its way.

        Args:
          context: The session's stream.
          content: The message.
        """
        self.is_writing = True
        await context.write(content)
        self.is_writing = False

    def interrupt(self, error: Exception) -> None:
        """Ends what the session's coroutine waits for, with an error that is not its peer's."""
        if self._ending is None:
            self._ending = error
            self._coroutine.cancel()

    def interruption(self) -> Exception | None:
        """Once, the error of `interrupt`; None if the coroutine was cancelled by its peer."""
        error, self._ending = self._ending, None
        return error
