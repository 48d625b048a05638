"""Transport of observations from the hosts of a server to the status page.

The observer of a host is a `Recorder`: it counts calls, and keeps events in order. The process
with the status page regularly takes the recordings of all hosts, and a `Reader` replays the calls
with their times. A recording has a bounded size even if it is never taken: the longer it waits,
the coarser its times. It contains nothing about a single device.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import heapq
import itertools
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from typing_extensions import override

from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.server import observer

_MIN_WIDTH = 1 / 32  # Initial width of a time bucket in seconds.
_MAX_ROWS = 8192
_MAX_EVENTS = 2048
_MAX_KINDS = 1024  # Largest number of distinct calls, with their arguments.
_OTHER = "other"
_MAX_KNOWN = 4 * _MAX_EVENTS
_CLOCKS_AGREE = 5.0  # Seconds; a smaller difference may be the time that an answer took.
_GONE_SECONDS = 30.0
# Observer methods in the order of a session. The calls of a bucket are replayed in this order,
# so that levels do not fall below 0.
_METHODS = (
    "session_opened",
    "session_refused",
    "waiting",
    "sent_away",
    "configured",
    "sent",
    "reported",
    "session_closed",
    "session_summarized",
)
_RANK = {method: rank for rank, method in enumerate(_METHODS)}


class OpenSessions(NamedTuple):
    """Numbers of open sessions.

    Attributes:
      idle: Number of sessions whose devices neither wait nor train.
      waiting: Number of sessions whose devices wait to be selected.
      training: Number of sessions whose devices take part in a round.
    """

    idle: int = 0
    waiting: int = 0
    training: int = 0

    def moved(self, idle: int = 0, waiting: int = 0, training: int = 0) -> OpenSessions:
        """Returns the counts after adding the given changes."""
        return OpenSessions(self.idle + idle, self.waiting + waiting, self.training + training)


class NamedEvent(NamedTuple):
    """An event with a unique name, by which copies from several hosts count once.

    Attributes:
      name: Unique name.
      event: Event of an actor.
    """

    name: str
    event: Any


class Calls(NamedTuple):
    """Observer calls of one time bucket.

    Attributes:
      at: Time of the last call, in seconds since 1970.
      rows: Tuples of method name and arguments, with the number of calls and the sum of their
        `num_bytes` (0 for methods without this argument).
    """

    at: float
    rows: tuple[tuple[tuple[Any, ...], int, int], ...]


class TimedEvent(NamedTuple):
    """An event, and the time of its arrival in seconds since 1970."""

    at: float
    named: NamedEvent


@dataclasses.dataclass(frozen=True)
class State:
    """Snapshot of sessions and rounds, for a reader that missed the events before it.

    Attributes:
      sessions: Numbers of open sessions.
      events: Events that still hold, in order: the last leader, the progress of selection, and
        for each task the last committed round and the running attempt.
    """

    sessions: OpenSessions = OpenSessions()
    events: tuple[TimedEvent, ...] = ()


@dataclasses.dataclass(frozen=True)
class Recording:
    """The calls and events of a host since its last recording was taken.

    Attributes:
      source: Name of the recorder, which a restart of the host changes.
      at: Time at which the recording was taken, by the host's clock.
      before: Snapshot at the beginning.
      items: Calls and events, in order.
      sessions: Numbers of open sessions at the end.
    """

    source: str
    at: float
    before: State
    items: tuple[Calls | TimedEvent, ...]
    sessions: OpenSessions


class _Bucket:
    """Counters of the calls of a time bucket, by method and arguments."""

    __slots__ = ("since", "at", "rows")

    def __init__(self, now: float):
        self.since = self.at = now
        self.rows: dict[tuple[Any, ...], list[int]] = {}

    def add(self, key: tuple[Any, ...], count: int, num_bytes: int) -> int:
        """Counts calls; returns the number of new rows."""
        row = self.rows.get(key)
        if row is None:
            self.rows[key] = [count, num_bytes]
            return 1
        row[0] += count
        row[1] += num_bytes
        return 0

    def taken(self) -> Calls:
        ordered = sorted(self.rows.items(), key=lambda item: _RANK[item[0][0]])
        return Calls(self.at, tuple((key, *row) for key, row in ordered))


class Recorder(observer.Observer):
    """Observer that records calls and events; for one thread."""

    def __init__(self, *, clock: Callable[[], float] = time.time):
        """Starts an empty recording."""
        self._clock = clock
        self.source = secrets.token_hex(8)
        self._names = (f"{self.source}/{number}" for number in itertools.count(1))
        self._sessions = OpenSessions()
        self._current = _CurrentEvents()
        self._before, self._current_before = self._sessions, _CurrentEvents()
        self._clear()

    def _clear(self) -> None:
        self._items: list[_Bucket | TimedEvent] = []
        self._width = _MIN_WIDTH
        self._num_rows = self._num_events = 0
        self._kinds: set[tuple[Any, ...]] = set()
        self._is_open = False  # Whether the last item is a bucket for further calls.

    def take(self) -> Recording:
        """Returns the recording since the last call; it is small and picklable."""
        items = tuple(item.taken() if isinstance(item, _Bucket) else item for item in self._items)
        before = State(self._before, self._current_before.in_order())
        recording = Recording(self.source, self._clock(), before, items, self._sessions)
        self._before, self._current_before = self._sessions, self._current.copy()
        self._clear()
        return recording

    # Events.

    def note(self, now: float, event: Any) -> NamedEvent:
        """Records an event of an actor on this host, and names it: other hosts must `relay` it."""
        named = NamedEvent(next(self._names), event)
        self.relay(now, named)
        return named

    @override
    def on_event(self, now: float, event: Any) -> None:
        """Records an event that is not sent to other hosts."""
        self.note(now, event)

    def relay(self, now: float, named: NamedEvent) -> None:
        """Records an event that was named on another host."""
        timed = TimedEvent(now, named)
        self._current.on_event(timed)
        self._items.append(timed)
        self._is_open = False
        self._num_events += 1
        if self._num_events > _MAX_EVENTS:  # Moves the oldest event into the snapshot.
            place = next(i for i, item in enumerate(self._items) if isinstance(item, TimedEvent))
            self._current_before.on_event(self._items.pop(place))
            self._num_events -= 1

    # Calls.

    @override
    def session_opened(self) -> None:
        self._sessions = self._sessions.moved(idle=1)
        self._count("session_opened")

    @override
    def session_refused(self, reason: str) -> None:
        self._count("session_refused", reason)

    @override
    def waiting(self) -> None:
        self._sessions = self._sessions.moved(idle=-1, waiting=1)
        self._count("waiting")

    @override
    def sent_away(self, reason: str, has_waited: bool) -> None:
        if has_waited:
            self._sessions = self._sessions.moved(idle=1, waiting=-1)
        self._count("sent_away", reason, has_waited)

    @override
    def configured(self, task: str, num_bytes: int) -> None:
        self._sessions = self._sessions.moved(waiting=-1, training=1)
        self._count("configured", task, num_bytes=num_bytes)

    @override
    def sent(self, task: str, num_bytes: int) -> None:
        self._count("sent", task, num_bytes=num_bytes)

    @override
    def reported(self, task: str, refusal: str, num_bytes: int) -> None:
        self._sessions = self._sessions.moved(idle=1, training=-1)
        self._count("reported", task, refusal, num_bytes=num_bytes)

    @override
    def session_closed(self, phase: str) -> None:
        self._sessions = self._sessions.moved(
            **{phase if phase in ("waiting", "training") else "idle": -1}
        )
        self._count("session_closed", phase)

    @override
    def session_summarized(self, summary: wire_pb2.SessionSummary) -> None:
        """Counts a summary; its figures are rounded to two digits."""
        key = ("session_summarized", summary.population, summary.shape)
        detailed = (
            *key,
            float(f"{summary.seconds:.2g}"),
            int(float(f"{summary.peak_memory_bytes:.2g}")),
            tuple(sorted(summary.versions.items())),
        )
        # Bounds the number of distinct calls: further summaries count by their shape only.
        has_room = detailed in self._kinds or len(self._kinds) < _MAX_KINDS // 2
        self._count(*(detailed if has_room else (*key, math.nan, 0, ())))

    def _count(self, *key: Any, num_bytes: int = 0) -> None:
        if key not in self._kinds:
            if len(self._kinds) >= _MAX_KINDS:
                key = tuple(
                    _OTHER if isinstance(part, str) and i else part for i, part in enumerate(key)
                )
            self._kinds.add(key)
        now = self._clock()
        bucket = self._items[-1] if self._is_open else None
        if bucket is None or not 0 <= now - bucket.since < self._width:
            bucket = _Bucket(now)
            self._items.append(bucket)
            self._is_open = True
        bucket.at = max(bucket.at, now)
        self._num_rows += bucket.add(key, 1, num_bytes)
        while self._num_rows > _MAX_ROWS:
            self._make_coarser()

    def _make_coarser(self) -> None:
        """Merges pairs of buckets; events between two buckets move before them."""
        self._width *= 2
        items: list[_Bucket | TimedEvent] = []
        former: _Bucket | None = None
        for item in self._items:
            if isinstance(item, TimedEvent):
                items.append(item)
            elif former is None:
                former = item
            else:
                for key, (count, num_bytes) in item.rows.items():
                    former.add(key, count, num_bytes)
                former.at = item.at
                items.append(former)
                former = None
        if former is not None:
            items.append(former)
        self._items = items
        self._is_open = isinstance(items[-1], _Bucket)
        self._num_rows = sum(len(item.rows) for item in items if isinstance(item, _Bucket))


class _CurrentEvents:
    """Events that still hold: the last leader, running attempts, and last committed rounds."""

    def __init__(self, timed: dict[tuple[str, str], TimedEvent] | None = None):
        self._timed = {} if timed is None else timed

    def copy(self) -> _CurrentEvents:
        return _CurrentEvents(dict(self._timed))

    def in_order(self) -> tuple[TimedEvent, ...]:
        return tuple(sorted(self._timed.values(), key=lambda timed: timed.at))

    def on_event(self, timed: TimedEvent) -> None:
        event = timed.named.event
        match event:
            case events.Leading():  # The attempts of the former Coordinator are lost.
                began = [key for key in self._timed if key[0] == "began"]
                for key in began:
                    del self._timed[key]
                self._timed["leads", ""] = timed
            case events.SelectionProgress():
                self._timed["selection", ""] = timed
            case events.RoundBegan():
                self._timed["began", event.task] = timed
            case events.RoundReleased() | events.RoundSkipped() | events.RoundLost():
                began = self._timed.get(("began", event.task))
                if began is not None and began.named.event.attempt == event.attempt:
                    del self._timed["began", event.task]
                if not isinstance(event, events.RoundLost):
                    self._timed["released", event.task] = timed


class Reader:
    """Replays recordings to an observer.

    Several readers of the same hosts, successive or concurrent, each see a part of the calls and
    events, and all see the present state.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time):
        """Creates a reader that has read nothing."""
        self._clock = clock
        self._time: float | None = None
        self._known: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._sessions: dict[str, OpenSessions] = {}
        self._read_at: dict[str, float] = {}

    def now(self) -> float:
        """Returns the clock for the observer: the time of the replayed call, or of the last one."""
        return self._clock() if self._time is None else self._time

    async def replay(self, recordings: Iterable[Recording], to: observer.Observer) -> None:
        """Replays the calls of all hosts, just recorded, in the order of their times.

        A host without a recording for half a minute counts as lost, with its devices. The clock of
        the observer must be `now`.
        """
        until = self._clock()
        since = -math.inf if self._time is None else self._time
        parts = [self._steps(part, until, to) for part in recordings]
        for at, step in heapq.merge(*parts, key=lambda pair: pair[0]):
            self._time = max(since, min(at, until))
            step()
            await asyncio.sleep(0)  # A recording may cover hours.
        self._time = max(since, until)
        for source in [s for s, at in self._read_at.items() if until - at > _GONE_SECONDS]:
            self._bring_up_to(to, source, OpenSessions())
            del self._sessions[source], self._read_at[source]

    def _steps(
        self, part: Recording, until: float, to: observer.Observer
    ) -> Iterator[tuple[float, Callable[[], None]]]:
        """Yields the calls of a recording, with their times by the reader's clock."""
        ahead = part.at - until
        if abs(ahead) <= _CLOCKS_AGREE:
            ahead = 0.0
        begin = part.items[0].at - ahead if part.items else until
        at = -math.inf
        for timed in part.before.events:
            at = max(at, min(timed.at - ahead, begin))
            yield at, functools.partial(self._notify, to, timed.named)
        at = max(at, begin)
        yield at, functools.partial(self._bring_up_to, to, part.source, part.before.sessions)
        for item in part.items:
            at = max(at, item.at - ahead)  # The order matters more than the times.
            if isinstance(item, TimedEvent):
                yield at, functools.partial(self._notify, to, item.named)
            else:
                yield at, functools.partial(_call, to, item)
        self._sessions[part.source] = part.sessions
        self._read_at[part.source] = until

    def _notify(self, to: observer.Observer, named: NamedEvent) -> None:
        if named.name in self._known:
            self._known.move_to_end(named.name)  # Each recording repeats the events that hold.
            return
        self._known[named.name] = None
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        to.on_event(self.now(), named.event)

    def _bring_up_to(self, to: observer.Observer, source: str, sessions: OpenSessions) -> None:
        """Replaces calls that this reader missed by others with the same open sessions."""
        known = self._sessions.get(source, OpenSessions())
        for wanted, had, phase in zip(
            sessions, known, ("reported", "waiting", "training"), strict=True
        ):
            for _ in range(wanted - had):
                to.session_opened()
                if phase != "reported":
                    to.waiting()
                if phase == "training":
                    to.configured("", 0)
            for _ in range(had - wanted):
                to.session_closed(phase)


def _call(to: observer.Observer, calls: Calls) -> None:
    for (method, *arguments), count, num_bytes in calls.rows:
        call = getattr(to, method)
        if method == "session_summarized":
            population, shape, seconds, memory, versions = arguments
            summary = wire_pb2.SessionSummary(
                population=population,
                shape=shape,
                seconds=seconds,
                peak_memory_bytes=memory,
                versions=dict(versions),
            )
            arguments = [summary]
        each, rest = divmod(num_bytes, count)
        for i in range(count):
            if method in ("configured", "sent", "reported"):
                call(*arguments, each + (i < rest))
            else:
                call(*arguments)
