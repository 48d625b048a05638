"""What hosts say to each other, and the order in which it is carried.

For each host there is a queue, and one batch on its way at a time: what a host says to another
one arrives in order, or, if it fails, not at all, of which the sender hears.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from tff_dpftrl import validation
from tff_dpftrl.runtime.actors import messages, roles
from tff_dpftrl.runtime.cluster import observed

_logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 22
_MOST_MAIL = 2048
_EACH = 256  # Bytes of a message without what is counted.


@dataclasses.dataclass(frozen=True)
class Deliver:
    """A message to an actor or a device."""

    to: str
    message: Any


@dataclasses.dataclass(frozen=True)
class Begin:
    """An actor is to be made; `parent` hears when it is lost."""

    address: str
    role: Any
    parent: str


@dataclasses.dataclass(frozen=True)
class End:
    """An actor is to be ended."""

    address: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """An actor has ended: devices that wait for an answer of it get none."""

    address: str


@dataclasses.dataclass(frozen=True)
class Told:
    """An event, and when it was noted, in seconds since 1970."""

    at: float
    noted: observed.Noted


Mail: TypeAlias = Deliver | Begin | End | Ended | Told


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one host says to another at a time.

    Attributes:
      sender: Name of the host.
      life: Names its process.
      receiver: Life of the process that the batch is for; empty if the sender has not met it.
      number: Counts the batches of the sender's process, from 1. A process is sent one batch at
        a time, so that the numbers that it receives from each sender grow.
      tasks: Digests of the tasks that it has read, by name.
      mail: In order.
    """

    sender: str
    life: str
    receiver: str
    number: int
    tasks: Mapping[str, str]
    mail: tuple[Mail, ...]


class OtherTasks(validation.UsageError):
    """Mail of a host that has read other tasks than who is to take it."""


class Replayed(ValueError):
    """A batch that a process has received before, or one older than what it has received."""


class Unreachable(Exception):
    """A host did not take what it was sent, or nobody knows whether it did."""


class Outbox:
    """Queues of mail, one for each host; for one event loop."""

    def __init__(
        self,
        carry: Callable[[str, list[Mail], int], Awaitable[None]],
        failed: Callable[[str, list[Mail]], None],
        *,
        most_bytes: int = _MOST_BYTES,
    ):
        """Begins empty.

        Args:
          carry: Brings mail to a host, given about how many bytes it is; raises
            `Unreachable` if it cannot. One call for a host runs at a time.
          failed: Told what was lost with a call that failed: all that was to follow, too.
          most_bytes: Of a batch, about; a larger message goes alone.
        """
        self._carry = carry
        self._failed = failed
        self._most_bytes = most_bytes
        self._queues: dict[str, collections.deque[Mail]] = {}
        self._carriers: dict[str, asyncio.Task] = {}
        self._is_closed = False

    def post(self, host: str, mail: Mail) -> None:
        """Queues mail; it is on its way before this returns to the event loop twice."""
        if self._is_closed:
            return
        self._queues.setdefault(host, collections.deque()).append(mail)
        if host not in self._carriers:
            self._carriers[host] = asyncio.get_running_loop().create_task(self._empty(host))

    async def flush(self, seconds: float) -> None:
        """Waits until all queues are empty, for so long at most."""
        if self._carriers:
            await asyncio.wait(list(self._carriers.values()), timeout=seconds)

    def close(self) -> None:
        """Ends what is on its way; nothing more is carried."""
        self._is_closed = True
        for carrier in self._carriers.values():
            carrier.cancel()

    async def _empty(self, host: str) -> None:
        queue = self._queues[host]
        try:
            while queue:
                batch, num_bytes = self._next(queue)
                try:
                    await self._carry(host, batch, num_bytes)
                except Exception as error:  # Its text may quote the mail.
                    if not isinstance(error, Unreachable):
                        _logger.error("mail to %s failed with %s", host, type(error).__name__)
                    lost = [*batch, *queue]
                    queue.clear()
                    self._failed(host, lost)
        finally:
            del self._carriers[host], self._queues[host]

    def _next(self, queue: collections.deque[Mail]) -> tuple[list[Mail], int]:
        batch: list[Mail] = []
        total = 0
        counted: set[int] = set()
        while queue and len(batch) < _MOST_MAIL:
            num_bytes = _num_bytes(queue[0], counted, self._most_bytes)
            if batch and total + num_bytes > self._most_bytes:
                break
            total += num_bytes
            batch.append(queue.popleft())
        return batch, total


def _num_bytes(mail: Mail, counted: set[int], most: int) -> int:
    """About how much a message adds to a batch; the same model again adds nothing."""
    if isinstance(mail, Begin):
        model = getattr(mail.role, "model", b"")
        state = mail.role.commit.state if isinstance(mail.role, roles.MasterAggregatorRole) else b""
        return _EACH + _once(model, counted) + _once(state, counted)
    message = mail.message if isinstance(mail, Deliver) else None
    match message:
        case messages.Configure():
            return _EACH + _once(message.model, counted)
        case messages.SecureSumMessage() | messages.SecureSumAnswer():
            return _EACH + len(message.content) + len(getattr(message, "vector", b""))
        case messages.Report():
            size = getattr(message.payload, "ByteSize", None)
            return _EACH + (0 if size is None else size())
        case messages.PartialSum() | messages.RoundCommitted():
            return most  # Few, and of any size.
    return _EACH


def _once(content: bytes, counted: set[int]) -> int:
    if id(content) in counted:
        return 0
    counted.add(id(content))
    return len(content)
