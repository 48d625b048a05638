"""Limits on what devices may use of a server, whatever they send."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Mapping

from tff_dpftrl import validation

CHECK_IN_BYTES = 4096  # A check-in is a name, two numbers and a token.
SUMMARY_BYTES = 4096
MESSAGE_MARGIN_BYTES = 4096  # Overhead of a message besides a part of an update or a report.
# Behind one address of a carrier there are hundreds of devices, of which few are connected.
SESSIONS_PER_ADDRESS = 500
SESSIONS_PER_CONNECTION = 16  # A device has one for each population.
PEER_BYTES = 192  # Bytes in a message of a secure sum for each other device.


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a server; beyond them devices are sent away, and rounds go on."""

    sessions: int = 20_000  # Largest number of open sessions of all populations.
    # Largest number of open sessions of one address (IPv4), or of one network of 64 bits (IPv6).
    # None is `SESSIONS_PER_ADDRESS`, and no limit for loopback, where a fleet is many devices. A
    # number also holds for loopback.
    sessions_per_address: int | None = None
    # Largest number of open sessions of one connection. None is `SESSIONS_PER_CONNECTION`, and no
    # limit for loopback. A number also holds for loopback.
    sessions_per_connection: int | None = None
    # Largest rate of check-ins that are checked, of all populations; further devices are asked to
    # come back. A second's worth of check-ins may come at once.
    check_ins_per_second: float = 10_000.0
    summaries_per_second: float = 1_000.0  # Largest rate of counted summaries, and largest burst.
    check_in_seconds: float = 10.0  # Time limit for the check-in of a connected device, in seconds.
    waiting_seconds: float = 3600.0  # Time until a device that was not selected is sent away.
    # Idle time after which a connection is tested, in seconds. A connection that does not answer
    # for as long again is closed.
    keepalive_seconds: float = 30.0
    # Largest total size of configurations that are being sent at a time, in bytes. A single larger
    # one is sent alone.
    sending_bytes: int = 1 << 28
    # Largest total size of updates in parts that are being received or wait to be summed, in bytes.
    # A single larger one is received alone.
    receiving_bytes: int = 1 << 29
    # Time limit for receiving a configuration, and for sending an update in parts, in seconds; it
    # counts once there is room.
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

    def session_limits(self, is_loopback: bool) -> tuple[int | None, int | None]:
        """Returns the session limits of one address and of one connection; None is no limit."""
        given = self.sessions_per_address, self.sessions_per_connection
        if is_loopback:
            return given
        return given[0] or SESSIONS_PER_ADDRESS, given[1] or SESSIONS_PER_CONNECTION


class TokenBucket:
    """Rate limit that lets a second's worth pass at once."""

    def __init__(self, per_second: float, clock: Callable[[], float]):
        """Begins full; the clock returns seconds and never goes back."""
        self._rate = validation.positive("per_second", per_second)
        self._most = max(1.0, per_second)
        self._clock = clock
        self._level = self._most
        self._at = clock()

    def take(self) -> bool:
        """Takes one token; returns whether there was one."""
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
        if self._level < 1:
            return False
        self._level -= 1
        return True


class Quota:
    """Places and a rate of arrivals that populations share, so that none can use up all of them.

    Each population has its share for itself. What the shares leave is for whoever comes first.
    """

    def __init__(
        self,
        places: int,
        per_second: float,
        shares: Mapping[str, float],
        clock: Callable[[], float],
    ):
        """Begins with all places free.

        `places` and `per_second` are for all populations together. `shares`, at most 1 together,
        are what each population has for itself. The clock returns seconds and never goes back.
        """
        self._own = {name: int(share * places) for name, share in shares.items()}
        self._common = places - sum(self._own.values())
        self._taken = dict.fromkeys(shares, 0)
        rates = {name: share * per_second for name, share in shares.items()}
        rates[""] = per_second - sum(rates.values())
        self._arrivals = {
            name: TokenBucket(rate, clock)
            for name, rate in rates.items()
            if rate > 1e-9 * per_second
        }

    def take_place(self, name: str) -> bool:
        """Takes a place for a population; returns whether there was one."""
        if self._taken[name] >= self._own[name]:
            beyond = (max(0, taken - self._own[one]) for one, taken in self._taken.items())
            if sum(beyond) >= self._common:
                return False
        self._taken[name] += 1
        return True

    def give_back_place(self, name: str) -> None:
        """Gives a place back."""
        self._taken[name] -= 1

    def arrives(self, name: str) -> bool:
        """Counts an arrival of a population; returns whether it is within the rate."""
        buckets = (self._arrivals.get(whose) for whose in (name, ""))
        return any(bucket is not None and bucket.take() for bucket in buckets)


class Room:
    """Budget of bytes in transfer at a time, first come, first served; for one event loop."""

    def __init__(self, num_bytes: int):
        self._most = num_bytes
        self._free = num_bytes
        self._queue: collections.deque[tuple[int, asyncio.Future]] = collections.deque()

    async def take(self, num_bytes: int) -> None:
        """Waits for bytes of the budget, at most for the whole budget."""
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
            self.give_back(num_bytes if is_granted else 0)  # Others may be next now.
            raise

    def give_back(self, num_bytes: int) -> None:
        """Gives back bytes that were taken."""
        self._free += min(num_bytes, self._most)
        while self._queue:
            wanted, turn = self._queue[0]
            if not turn.done():
                if self._free < wanted:
                    return
                self._free -= wanted
                turn.set_result(None)
            self._queue.popleft()
