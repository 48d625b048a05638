"""Messages between hosts, and the queues that keep them in order.

Each host has a queue for every other host, and one batch in transit at a time. Messages to a host
arrive in order. If a batch fails, it and all queued messages are dropped, and the sender is
notified.
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

_MAX_BATCH_BYTES = 1 << 22
_MAX_BATCH_MAIL = 2048
_OVERHEAD = 256  # Estimated bytes of a message without its large fields.


@dataclasses.dataclass(frozen=True)
class Deliver:
    """Delivery of a message to an actor or a device."""

    to: str
    message: Any


@dataclasses.dataclass(frozen=True)
class Begin:
    """Request to start an actor; `parent` is notified if it is lost."""

    address: str
    role: Any
    parent: str


@dataclasses.dataclass(frozen=True)
class End:
    """Request to end an actor."""

    address: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """Notice that an actor has ended: devices that wait for its answer get none."""

    address: str


@dataclasses.dataclass(frozen=True)
class EventNotice:
    """An event of a population, and when it was noted, in seconds since 1970."""

    at: float
    named: observed.NamedEvent
    population: str


Mail: TypeAlias = Deliver | Begin | End | Ended | EventNotice


@dataclasses.dataclass(frozen=True)
class Batch:
    """Messages that one host sends to another at once.

    Attributes:
      sender: Name of the sending host.
      life: Id of the sender's process.
      receiver: Id of the process for which the batch is; empty if the sender does not know it.
      number: Number of the batch among those of the sender's process, from 1. One batch is in
        transit to a process at a time, so that the numbers from each sender grow.
      tasks: Digests of the tasks that the sender has read, by name.
      mail: Messages, in order.
    """

    sender: str
    life: str
    receiver: str
    number: int
    tasks: Mapping[str, str]
    mail: tuple[Mail, ...]


class OtherTasks(validation.UsageError):
    """Error for mail of a host that has read other tasks than the receiver."""


class Replayed(ValueError):
    """Error for a batch that is not newer than the last one that the process received."""


class Unreachable(Exception):
    """Error for a host that did not take mail, or may not have taken it."""


class Outbox:
    """Queues of outgoing mail, one for each host; for one event loop."""

    def __init__(
        self,
        carry: Callable[[str, list[Mail], int], Awaitable[None]],
        failed: Callable[[str, list[Mail]], None],
        *,
        max_batch_bytes: int = _MAX_BATCH_BYTES,
    ):
        """Creates empty queues.

        `carry` sends a batch of mail, of this approximate size in bytes, to a host, or raises
        `Unreachable`; one call for each host runs at a time. `failed` is told of the batch that
        failed and of all mail in the queue of a host that was lost. A message above the limit of a
        batch is sent on its own.
        """
        self._carry = carry
        self._failed = failed
        self._max_batch_bytes = max_batch_bytes
        self._queues: dict[str, collections.deque[Mail]] = {}
        self._carriers: dict[str, asyncio.Task] = {}
        self._is_closed = False

    def post(self, host: str, mail: Mail) -> None:
        """Queues mail; it is sent within two iterations of the event loop."""
        if self._is_closed:
            return
        self._queues.setdefault(host, collections.deque()).append(mail)
        if host not in self._carriers:
            self._carriers[host] = asyncio.get_running_loop().create_task(self._empty(host))

    async def flush(self, seconds: float) -> None:
        """Waits until all queues are empty, at most for a number of seconds."""
        if self._carriers:
            await asyncio.wait(list(self._carriers.values()), timeout=seconds)

    def close(self) -> None:
        """Cancels all transfers; nothing more is sent."""
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
        while queue and len(batch) < _MAX_BATCH_MAIL:
            num_bytes = _num_bytes(queue[0], counted, self._max_batch_bytes)
            if batch and total + num_bytes > self._max_batch_bytes:
                break
            total += num_bytes
            batch.append(queue.popleft())
        return batch, total


def _num_bytes(mail: Mail, counted: set[int], max_bytes: int) -> int:
    """Estimates the bytes that a message adds to a batch; a model is counted once."""
    if isinstance(mail, Begin):
        model = getattr(mail.role, "model", b"")
        state = mail.role.commit.state if isinstance(mail.role, roles.MasterAggregatorRole) else b""
        return _OVERHEAD + _once(model, counted) + _once(state, counted)
    message = mail.message if isinstance(mail, Deliver) else None
    match message:
        case messages.Configure():
            return _OVERHEAD + _once(message.model, counted)
        case messages.SecureSumMessage() | messages.SecureSumAnswer():
            return _OVERHEAD + len(message.content) + len(getattr(message, "vector", b""))
        case messages.Report():
            size = getattr(message.payload, "ByteSize", None)
            return _OVERHEAD + (0 if size is None else size())
        case messages.PartialSum() | messages.RoundCommitted():
            return max_bytes  # Rare, and of any size.
    return _OVERHEAD


def _once(content: bytes, counted: set[int]) -> int:
    if id(content) in counted:
        return 0
    counted.add(id(content))
    return len(content)
