"""One session of a device on the server: a stream, from its opening to its end."""

from __future__ import annotations

import asyncio
import collections
import enum
from typing import Any

import grpc

from tff_dpftrl.runtime.actors import messages
from tff_dpftrl.runtime.server import desk as desk_lib
from tff_dpftrl.runtime.server import peers


class Phase(str, enum.Enum):
    """Phase of a session, or the phase in which it ended; the value is for the observer."""

    REFUSED = "refused"
    CONNECTING = "connecting"
    WAITING = "waiting"
    NOISE_PARTY = "noise party"  # A noise party that waits.
    SENT_AWAY = "sent away"
    TRAINING = "training"
    REPORTED = "reported"


class Session:
    """State of a session, and its mailbox.

    Attributes:
      deadline: Time at which the phase is over, in seconds of the event loop's clock.
      report_to: Address of the Aggregator that is notified when the session ends; empty if there is
        none.
      is_writing: Whether a message is on its way to the device, so that no other can be sent.
      peer: Other end of the connection; None before it is counted.
    """

    __slots__ = (
        "address",
        "desk",
        "phase",
        "deadline",
        "report_to",
        "is_in_secure_sum",
        "is_noise_party",
        "is_writing",
        "peer",
        "_coroutine",
        "_inbox",
        "_waiter",
        "_ending",
    )

    def __init__(self, address: str, deadline: float, desk: desk_lib.Desk):
        """Begins a session of the running asyncio task, at a new address."""
        coroutine = asyncio.current_task()
        if coroutine is None:
            raise RuntimeError("A session must be made in an asyncio task.")
        self.address = address
        self.desk = desk
        self.phase = Phase.CONNECTING
        self.deadline = deadline
        self.report_to = ""

        self.is_in_secure_sum = False
        self.is_noise_party = False
        self.is_writing = False
        self.peer: peers.Peer | None = None
        self._coroutine = coroutine
        self._inbox: collections.deque[Any] | None = None
        self._waiter: asyncio.Future | None = None
        self._ending: Exception | None = None

    def receive(self, message: Any) -> None:
        """Takes a message for the device."""
        if type(message) is messages.Configure:
            # From now on an Aggregator waits for the device, even if the coroutine ends first.
            self.report_to = message.report_to
            self.is_in_secure_sum = bool(message.secure_sum_session)
        elif self.report_to and type(message) is messages.ComeBack:
            return  # The sender does not know yet that the device takes part.
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(message)
        elif self._inbox is None:
            self._inbox = collections.deque([message])
        else:
            self._inbox.append(message)

    @property
    def has_mail(self) -> bool:
        """Whether the mailbox holds a message."""
        return bool(self._inbox)

    async def next_message(self) -> Any:
        """Waits for the next message for the device, and returns it."""
        if self._inbox:
            return self._inbox.popleft()
        self._waiter = self._coroutine.get_loop().create_future()
        message = await self._waiter
        self._waiter = None
        return message

    async def until_mail(self) -> None:
        """Waits until there is a message, and leaves it in the mailbox."""
        message = await self.next_message()
        self._inbox = self._inbox or collections.deque()
        self._inbox.appendleft(message)

    async def write(self, context: grpc.aio.ServicerContext, content: bytes) -> None:
        """Sends a serialised message; if it is interrupted, `is_writing` stays True."""
        self.is_writing = True
        await context.write(content)
        self.is_writing = False

    def interrupt(self, error: Exception) -> None:
        """Cancels the session's coroutine, with an error that tells it from a lost connection."""
        if self._ending is None:
            self._ending = error
            self._coroutine.cancel()

    def interruption(self) -> Exception | None:
        """Returns the error of `interrupt` once; None if the connection was lost."""
        error, self._ending = self._ending, None
        return error
