"""How much of a server devices may use, whatever they send."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable

from tff_dpftrl import validation

CHECK_IN_BYTES = 4096  # A check-in is a name, two numbers and a token.
SUMMARY_BYTES = 4096
MESSAGE_MARGIN_BYTES = 4096  # Around a part of an update, or a report of its largest size.
# Behind one address of a carrier there are hundreds of devices, of which few are connected.
SESSIONS_PER_ADDRESS = 500
SESSIONS_PER_CONNECTION = 16  # A device has one for each population.
PEER_BYTES = 192  # Of a message of a secure sum, for each device that it has something for.


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a server; beyond them devices are sent away, and rounds go on.

    Attributes:
      sessions: Sessions at a time.
      sessions_per_address: Open sessions of one address (IPv4), or of one network of 64 bits
        (IPv6). None is `SESSIONS_PER_ADDRESS`, and no limit for loopback: a fleet on the same
        machine is many devices. A number holds for all.
      sessions_per_connection: Open sessions of one connection; None is
        `SESSIONS_PER_CONNECTION`, and no limit for loopback. A number holds for all.
      check_ins_per_second: Check-ins that are looked at; further devices are told to come
        back. A second's worth of them may come at once.
      summaries_per_second: Sessions' summaries that are counted, likewise.
      check_in_seconds: How long a device may take to check in once it is connected.
      waiting_seconds: After which a device that was not selected is told to come back.
      keepalive_seconds: After so long without a sign of life a connection is tested; one
        that does not answer for as long again is closed.
      sending_bytes: Configurations that are on their way to devices at a time, together; one
        is in any case.
      receiving_bytes: Updates in parts that are on their way from devices, or wait to be
        summed, at a time, likewise.
      transfer_seconds: How long a device may take to receive its configuration, and to send an
        update in parts, once there is room.
    """

    sessions: int = 20_000
    sessions_per_address: int | None = None
    sessions_per_connection: int | None = None
    check_ins_per_second: float = 10_000.0
    summaries_per_second: float = 1_000.0
    check_in_seconds: float = 10.0
    waiting_seconds: float = 3600.0
    keepalive_seconds: float = 30.0
    sending_bytes: int = 1 << 28
    receiving_bytes: int = 1 << 29
    transfer_seconds: float = 120.0

    def __post_init__(self):
        validation.integer("sessions", self.sessions, minimum=1)
        for name in ("sessions_per_address", "sessions_per_connection"):
            if getattr(self, name) is not None:
                validation.integer(name, getattr(self, name), minimum=1)
        validation.integer("sending_bytes", self.sending_bytes, minimum=1)
        validation.integer("receiving_bytes", self.receiving_bytes, minimum=1)
        for field in dataclasses.fields(self):
            if field.type == "float":
                validation.positive(field.name, getattr(self, field.name))

    def of_peer(self, is_loopback: bool) -> tuple[int | None, int | None]:
        """Returns the limits of the sessions of one address and of one connection; None is none.

        Args:
          is_loopback: Whether the address is this machine itself.
        """
        given = self.sessions_per_address, self.sessions_per_connection
        if is_loopback:
            return given
        return given[0] or SESSIONS_PER_ADDRESS, given[1] or SESSIONS_PER_CONNECTION


class TokenBucket:
    """Lets so many pass in a second, and a second's worth at once."""

    def __init__(self, per_second: float, clock: Callable[[], float]):
        """Begins full.

        Args:
          per_second: How many.
          clock: Seconds, never going back.
        """
        self._rate = validation.positive("per_second", per_second)
        self._most = max(1.0, per_second)
        self._clock = clock
        self._level = self._most
        self._at = clock()

    def take(self) -> bool:
        """Whether one more may pass now."""
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
        if self._level < 1:
            return False
        self._level -= 1
        return True


class Room:
    """Bytes that may be on their way at a time; who comes first is first. For one event loop."""

    def __init__(self, num_bytes: int):
        self._most = num_bytes
        self._free = num_bytes
        self._queue: collections.deque[tuple[int, asyncio.Future]] = collections.deque()

    async def take(self, num_bytes: int) -> None:
        """Waits for so many; for all of them if there are not so many."""
        num_bytes = min(num_bytes, self._most)
        if not self._queue and self._free >= num_bytes:
            self._free -= num_bytes
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            is_granted = turn.done() and not turn.cancelled()
            self.give_back(num_bytes if is_granted else 0)  # Others may not have to wait any more.
            raise

    def give_back(self, num_bytes: int) -> None:
        """Gives back what was taken."""
        self._free += min(num_bytes, self._most)
        while self._queue:
            wanted, turn = self._queue[0]
            if not turn.done():
                if self._free < wanted:
                    return
                self._free -= wanted
                turn.set_result(None)
            self._queue.popleft()
