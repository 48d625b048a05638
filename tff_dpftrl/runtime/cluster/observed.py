"""What hosts of a server on many machines observe, on its way to the status page.

A host has a `Recorder` for an observer: calls become counts, and events stay in their order.
Somebody who shows them takes what was recorded, now and then, from all hosts, and a `Reader`
makes the calls anew, at the times at which they were made. Nobody need take anything: what is
recorded is of bounded size, coarser in time the longer it waits. Nothing is about a device.
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

_LEAST_WIDTH = 1 / 32  # Seconds that a bucket of calls is wide, at first.
_MOST_ROWS = 8192
_MOST_EVENTS = 2048
_MOST_KINDS = 1024  # Of calls, by their arguments.
_OTHER = "other"
_REMEMBERED = 4 * _MOST_EVENTS
_CLOCKS_AGREE = 5.0  # Seconds; less may be the time that an answer took.
_GONE_SECONDS = 30.0
# In the order of a session, in which the calls of a bucket are made: levels do not fall below 0.
_METHODS = (
    "session_opened",
    "session_refused",
    "waiting",
    "sent_away",
    "configured",
    "reported",
    "session_closed",
    "session_summarized",
)
_RANK = {method: rank for rank, method in enumerate(_METHODS)}


class Levels(NamedTuple):
    """Sessions that are open.

    Attributes:
      other: Neither of the following.
      waiting: To be selected.
      training: That take part.
    """

    other: int = 0
    waiting: int = 0
    training: int = 0

    def moved(self, other: int = 0, waiting: int = 0, training: int = 0) -> Levels:
        """What they are after a change."""
        return Levels(self.other + other, self.waiting + waiting, self.training + training)


class Noted(NamedTuple):
    """An event that counts once, through however many hosts it comes.

    Attributes:
      name: Its name.
      event: The event.
    """

    name: str
    event: Any


class Calls(NamedTuple):
    """Calls that were made at about the same time.

    Attributes:
      at: When the last one was, in seconds since 1970.
      rows: What was called and its arguments, how often, and the sum of the bytes, if it is
        told of any.
    """

    at: float
    rows: tuple[tuple[tuple[Any, ...], int, int], ...]


class Heard(NamedTuple):
    """An event, and when it was heard of, in seconds since 1970."""

    at: float
    noted: Noted


@dataclasses.dataclass(frozen=True)
class State:
    """What holds at a moment, for who did not hear how it came to that.

    Attributes:
      levels: Sessions that are open.
      standing: Who leads, and of each task the last committed round and the attempt that runs,
        in their order.
    """

    levels: Levels = Levels()
    standing: tuple[Heard, ...] = ()


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a host has recorded since it was last asked.

    Attributes:
      source: Name of its recorder; a host that was started anew has another one.
      at: When this was taken, by the host's clock.
      before: What held before.
      items: What happened, in its order.
      levels: What they are now.
    """

    source: str
    at: float
    before: State
    items: tuple[Calls | Heard, ...]
    levels: Levels


class _Bucket:
    """Calls by their arguments."""

    __slots__ = ("since", "at", "rows")

    def __init__(self, now: float):
        self.since = self.at = now
        self.rows: dict[tuple[Any, ...], list[int]] = {}

    def add(self, key: tuple[Any, ...], count: int, num_bytes: int) -> int:
        """Counts; returns how many rows are new."""
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
    """Records what it hears; to be called on one thread."""

    def __init__(self, *, clock: Callable[[], float] = time.time):
        """Nothing is recorded yet.

        Args:
          clock: Seconds since 1970.
        """
        self._clock = clock
        self.source = secrets.token_hex(8)
        self._names = (f"{self.source}/{number}" for number in itertools.count(1))
        self._levels = Levels()
        self._standing = _Standing()
        self._before, self._standing_before = self._levels, _Standing()
        self._clear()

    def _clear(self) -> None:
        self._items: list[_Bucket | Heard] = []
        self._width = _LEAST_WIDTH
        self._num_rows = self._num_events = 0
        self._kinds: set[tuple[Any, ...]] = set()
        self._is_open = False  # Whether the last item is a bucket that takes more.

    def take(self) -> Taken:
        """What was recorded since this was last called; small, and can be sent elsewhere."""
        items = tuple(item.taken() if isinstance(item, _Bucket) else item for item in self._items)
        before = State(self._before, self._standing_before.in_order())
        taken = Taken(self.source, self._clock(), before, items, self._levels)
        self._before, self._standing_before = self._levels, self._standing.copy()
        self._clear()
        return taken

    # Events.

    def note(self, now: float, event: Any) -> Noted:
        """Hears of an event that comes from an actor here.

        Args:
          now: Seconds since 1970.
          event: Event that an actor sent to the observer.

        Returns:
          What other hosts are to `relay`, so that it counts once.
        """
        noted = Noted(next(self._names), event)
        self.relay(now, noted)
        return noted

    def on_event(self, now: float, event: Any) -> None:
        """See the base class; of an event that no other host is told."""
        self.note(now, event)

    def relay(self, now: float, noted: Noted) -> None:
        """Hears of an event that was noted on another host."""
        heard = Heard(now, noted)
        self._standing.on_event(heard)
        self._items.append(heard)
        self._is_open = False
        self._num_events += 1
        if self._num_events > _MOST_EVENTS:  # The oldest one goes, but for what it means now.
            place = next(i for i, item in enumerate(self._items) if isinstance(item, Heard))
            self._standing_before.on_event(self._items.pop(place))
            self._num_events -= 1

    # Calls.

    @override
    def session_opened(self) -> None:
        self._levels = self._levels.moved(other=1)
        self._count("session_opened")

    @override
    def session_refused(self, reason: str) -> None:
        self._count("session_refused", reason)

    @override
    def waiting(self) -> None:
        self._levels = self._levels.moved(other=-1, waiting=1)
        self._count("waiting")

    @override
    def sent_away(self, reason: str, has_waited: bool) -> None:
        if has_waited:
            self._levels = self._levels.moved(other=1, waiting=-1)
        self._count("sent_away", reason, has_waited)

    @override
    def configured(self, task: str, num_bytes: int) -> None:
        self._levels = self._levels.moved(waiting=-1, training=1)
        self._count("configured", task, num_bytes=num_bytes)

    @override
    def reported(self, task: str, refusal: str, num_bytes: int) -> None:
        self._levels = self._levels.moved(other=1, training=-1)
        self._count("reported", task, refusal, num_bytes=num_bytes)

    @override
    def session_closed(self, phase: str) -> None:
        self._levels = self._levels.moved(
            **{phase if phase in ("waiting", "training") else "other": -1}
        )
        self._count("session_closed", phase)

    def session_summarized(self, summary: wire_pb2.SessionSummary) -> None:
        """See the base class; figures are kept to two digits."""
        key = ("session_summarized", summary.population, summary.shape)
        detailed = (
            *key,
            float(f"{summary.seconds:.2g}"),
            int(float(f"{summary.peak_memory_bytes:.2g}")),
            tuple(sorted(summary.versions.items())),
        )
        # Whatever devices say, there are only so many kinds; then their shapes are counted.
        has_room = detailed in self._kinds or len(self._kinds) < _MOST_KINDS // 2
        self._count(*(detailed if has_room else (*key, math.nan, 0, ())))

    def _count(self, *key: Any, num_bytes: int = 0) -> None:
        if key not in self._kinds:
            if len(self._kinds) >= _MOST_KINDS:
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
        while self._num_rows > _MOST_ROWS:
            self._make_coarser()

    def _make_coarser(self) -> None:
        """Merges buckets by pairs; events between the two come first."""
        self._width *= 2
        items: list[_Bucket | Heard] = []
        former: _Bucket | None = None
        for item in self._items:
            if isinstance(item, Heard):
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


class _Standing:
    """Events, for as long as they hold."""

    def __init__(self, heard: dict[tuple[str, str], Heard] | None = None):
        self._heard = {} if heard is None else heard

    def copy(self) -> _Standing:
        return _Standing(dict(self._heard))

    def in_order(self) -> tuple[Heard, ...]:
        return tuple(sorted(self._heard.values(), key=lambda heard: heard.at))

    def on_event(self, heard: Heard) -> None:
        event = heard.noted.event
        match event:
            case events.Leading():  # The attempts of whoever led before are lost.
                began = [key for key in self._heard if key[0] == "began"]
                for key in began:
                    del self._heard[key]
                self._heard["leads", ""] = heard
            case events.RoundBegan():
                self._heard["began", event.task] = heard
            case events.RoundReleased() | events.RoundSkipped() | events.RoundLost():
                began = self._heard.get(("began", event.task))
                if began is not None and began.noted.event.attempt == event.attempt:
                    del self._heard["began", event.task]
                if not isinstance(event, events.RoundLost):
                    self._heard["released", event.task] = heard


class Reader:
    """Makes recorded calls anew.

    Several readers of the same hosts, one after another or at the same time, each see a part of
    what happened, and all see what holds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time):
        """Nothing was read yet.

        Args:
          clock: Seconds since 1970.
        """
        self._clock = clock
        self._time: float | None = None
        self._known: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._levels: dict[str, Levels] = {}
        self._read_at: dict[str, float] = {}

    def now(self) -> float:
        """The clock of the observer: when that happened which is told, or was told last."""
        return self._clock() if self._time is None else self._time

    async def replay(self, taken: Iterable[Taken], to: observer.Observer) -> None:
        """Makes the calls, in the order of their times, as if their hosts were one.

        Args:
          taken: What was taken from hosts, just now. A host that is missing for half a minute
            is taken to be lost, with its devices.
          to: Hears of it; its clock has to be `now`.
        """
        until = self._clock()
        since = -math.inf if self._time is None else self._time
        parts = [self._steps(part, until, to) for part in taken]
        for at, step in heapq.merge(*parts, key=lambda pair: pair[0]):
            self._time = max(since, min(at, until))
            step()
            await asyncio.sleep(0)  # There may be hours of it.
        self._time = max(since, until)
        for source in [s for s, at in self._read_at.items() if until - at > _GONE_SECONDS]:
            self._bring_up_to(to, source, Levels())
            del self._levels[source], self._read_at[source]

    def _steps(
        self, part: Taken, until: float, to: observer.Observer
    ) -> Iterator[tuple[float, Callable[[], None]]]:
        """What there is to do, and when it was, by the clock of who reads it."""
        ahead = part.at - until
        if abs(ahead) <= _CLOCKS_AGREE:
            ahead = 0.0
        begin = part.items[0].at - ahead if part.items else until
        at = -math.inf
        for heard in part.before.standing:
            at = max(at, min(heard.at - ahead, begin))
            yield at, functools.partial(self._tell, to, heard.noted)
        at = max(at, begin)
        yield at, functools.partial(self._bring_up_to, to, part.source, part.before.levels)
        for item in part.items:
            at = max(at, item.at - ahead)  # Their order matters more than the time.
            if isinstance(item, Heard):
                yield at, functools.partial(self._tell, to, item.noted)
            else:
                yield at, functools.partial(_call, to, item)
        self._levels[part.source] = part.levels
        self._read_at[part.source] = until

    def _tell(self, to: observer.Observer, noted: Noted) -> None:
        if noted.name in self._known:
            self._known.move_to_end(noted.name)  # What stands is said again and again.
            return
        self._known[noted.name] = None
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        to.on_event(self.now(), noted.event)

    def _bring_up_to(self, to: observer.Observer, source: str, levels: Levels) -> None:
        """Makes up for calls that somebody else was told of, or nobody."""
        known = self._levels.get(source, Levels())
        for wanted, had, phase in zip(
            levels, known, ("reported", "waiting", "training"), strict=True
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
            if method in ("configured", "reported"):
                call(*arguments, each + (i < rest))
            else:
                call(*arguments)
