"""What can happen to a server, where, and one such fault for each number."""

from __future__ import annotations

import dataclasses
import enum
import random


class Kind(str, enum.Enum):
    """Kind of a fault."""

    KILL = "killed"  # With -9.
    STOP = "stopped past the lease"  # And goes on: another server leads meanwhile.
    PAUSE = "stopped for less"
    RAISE = "raises"  # The one actor, or the store.
    CUT = "all connections cut"
    CUT_SOME = "some connections cut"
    STALL = "connections stall"
    NODE = "a whole node killed"  # Where there are several.


SOME_MOMENT = "at some moment"

# Messages that come by themselves, by the actor that they come to.
_MESSAGES = {
    "Selector": (
        "CheckIn",
        "SelectDevices",
        "ForwardDevices",
        "DeviceGone",
        "check that a Coordinator leads",
    ),
    "Coordinator": ("heartbeat", "LeaseGranted", "DevicesWaiting", "RoundCommitted"),
    "MasterAggregator": ("start", "DevicesForwarded", "ReportsCounted", "PartialSum")
    + ("RoundStored",),
    "MergingAggregator": ("start", "ReportsCounted", "CloseReporting", "PartialSum"),
    "Aggregator": ("start", "Report", "DeviceGone", "CloseReporting"),
    "SecureAggregator": ("start", "DeviceGone", "CloseReporting")
    + tuple(f"SecureSumMessage {step}" for step in range(5)),
    "StoreActor": ("RenewLease", "CommitRound"),
    "ServerStep": ("apply",),
}
# Those that come only where something has been lost before, which is then done.
_MESSAGES_OF_A_START = {
    "Selector": ("start",),
    "Coordinator": ("start", "CommitsRead"),
    "StoreActor": ("start", "AcquireLease", "ReadCommits"),
}


def _around(messages: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(
        f"{who}: {message}: {side}"
        for who, of_whom in messages.items()
        for message in of_whom
        for side in ("before", "after")
    )


POINTS = (*_around(_MESSAGES), "Store: commit: inside", "Store: renew: inside")
POINTS_OF_A_START = (*_around(_MESSAGES_OF_A_START), "Store: acquire: inside")
_AT_POINTS = (Kind.KILL, Kind.STOP, Kind.RAISE)
# Which of these connections are cut at is of no matter to most points.
_OF_CONNECTIONS = (Kind.CUT, Kind.CUT_SOME, Kind.STALL)
_CUT_AT = tuple(
    point
    for point in POINTS
    if point.startswith(("SecureAggregator: ", "Aggregator: Report", "StoreActor: CommitRound"))
)


def all_settings(*, has_nodes: bool = False) -> list[tuple[Kind, str]]:
    """Returns every kind of fault at every point where it may be tried, in a fixed order.

    Args:
      has_nodes: Whether whole nodes can be killed.

    Returns:
      The settings.
    """
    found = [(kind, point) for point in POINTS + POINTS_OF_A_START for kind in _AT_POINTS]
    found += [(kind, point) for point in _CUT_AT for kind in _OF_CONNECTIONS]
    anywhere = [kind for kind in Kind if kind not in (Kind.RAISE, Kind.NODE)]
    found += [(kind, SOME_MOMENT) for kind in anywhere for _ in range(4)]
    generator = random.Random("the order of faults")
    generator.shuffle(found)
    if has_nodes:  # They take long: one in a score.
        for place in range(0, len(found), 20):
            found.insert(place, (Kind.NODE, SOME_MOMENT))
    return found


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
      number: It follows from this number.
      kind: What happens.
      point: Where; `SOME_MOMENT` if not at a point of a server.
      is_of_a_start: Whether the server that leads is killed before, so that there is a start.
      skip: How often the point is passed before.
      delay: Seconds until it happens, where there is no point.
      hold: Seconds that what is stopped or stalled stays so.
      share: The share of connections that it happens to.
      looks: Whether the memory of what is stopped is searched.
    """

    number: int
    kind: Kind
    point: str
    is_of_a_start: bool
    skip: int
    delay: float
    hold: float
    share: float
    looks: bool


def draw(number: int, *, lease_seconds: float, has_nodes: bool = False) -> Fault:
    """Returns the fault of a number: numbers that follow one another have all settings in turn.

    Args:
      number: Any number from 0.
      lease_seconds: How long a lease lasts.
      has_nodes: Whether the server runs on nodes of a cluster, which can be lost.

    Returns:
      The fault.
    """
    settings = all_settings(has_nodes=has_nodes)
    kind, point = settings[number % len(settings)]
    drawn = random.Random(number)
    is_of_a_start = point in POINTS_OF_A_START
    skip = 0 if is_of_a_start else drawn.choice((0, 0, 1, 2, 5))
    if "DeviceGone" in point:
        skip = 0
    delay = drawn.uniform(0.0, 1.0)
    if kind is Kind.STOP:
        hold = lease_seconds * drawn.uniform(1.2, 2.5)
    elif kind is Kind.PAUSE:
        hold = lease_seconds * drawn.uniform(0.2, 0.8)
    else:
        hold = drawn.uniform(0.5, 3.0)
    share = 1.0 if kind is Kind.CUT else drawn.choice((0.25, 0.5, 1.0))
    if kind is Kind.CUT_SOME:
        share = drawn.choice((0.25, 0.5, 0.75))
    looks = kind is Kind.STOP and drawn.random() < 0.3
    return Fault(number, kind, point, is_of_a_start, skip, delay, hold, share, looks)
