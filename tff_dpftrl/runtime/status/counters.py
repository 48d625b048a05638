"""Counters in memory of a fixed size: labels, histograms, and counts of the last week."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Iterable

import numpy as np

OTHER = "other"
_MAX_LENGTH = 60
_PER_OCTAVE = 4
# If the clock is set back by more seconds than this, the windows start again; otherwise time
# stands still until the clock has caught up.
_SMALL_STEP_BACK = 60.0
# Length of a step in seconds, and number of steps: ten minutes, a day, a week.
_WINDOWS = {"minutes": (5, 120), "day": (300, 288), "week": (3600, 168)}


class BoundedCounts:
    """Counters of known labels and of the first further ones; all others count as "other"."""

    def __init__(self, known: Iterable[str] = (), *, room: int = 0):
        """Starts at zero, with room for this number of labels that are not known."""
        self._known = frozenset(known)
        self._room = room
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, label: str, count: int = 1) -> None:
        """Counts a label; a long one counts as "other"."""
        if label not in self._counts and label not in self._known:
            if self._room and len(label) <= _MAX_LENGTH and label != OTHER:
                self._room -= 1
            else:
                label = OTHER
        self._counts[label] += count

    def items(self) -> list[tuple[str, int]]:
        """Returns labels and counts, the most frequent first."""
        return sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))

    def total(self) -> int:
        """Returns the sum of all counters."""
        return self._counts.total()


class Distribution:
    """Histogram with buckets whose edges grow by a factor of the fourth root of 2.

    Numbers below the first edge, or above the last, have a separate bucket. The error of a
    quantile is at most 9 %, half a bucket.
    """

    def __init__(self, least: float, most: float):
        """Creates an empty histogram, whose last edge is `least` times a power of two."""
        octaves = math.ceil(math.log2(most / least) - 1e-9)
        self.edges = [least * 2 ** (i / _PER_OCTAVE) for i in range(octaves * _PER_OCTAVE + 1)]
        self.counts = [0] * (len(self.edges) + 1)
        self.count = 0
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Counts a number, unless it is NaN or infinite."""
        if math.isfinite(value):
            self.counts[bisect.bisect_left(self.edges, value)] += 1
            self.count += 1
            self.sum += value

    def quantile(self, fraction: float) -> float | None:
        """Returns the number that a fraction of all numbers does not exceed; None if empty."""
        rank, below = fraction * self.count, 0
        for i, count in enumerate(self.counts):
            if count and below + count >= rank:
                if i == 0 or i == len(self.edges):  # Only one edge of the bucket is known.
                    return self.edges[min(i, len(self.edges) - 1)]
                share = (rank - below) / count
                return self.edges[i - 1] * (self.edges[i] / self.edges[i - 1]) ** share
            below += count
        return self.edges[-1] if self.count else None

    def octaves(self) -> list[tuple[float, int]]:
        """Returns every fourth edge with the count of all numbers up to it."""
        places = range(0, len(self.edges), _PER_OCTAVE)
        return [(self.edges[i], sum(self.counts[: i + 1])) for i in places]


@dataclasses.dataclass(frozen=True)
class Window:
    """Counts of the completed steps of a window by counter, oldest first."""

    name: str
    step: int
    values: dict[str, np.ndarray]


class Totals:
    """Named counters, with their counts in recent steps, and levels, which go up and down."""

    def __init__(self, counters: Iterable[str], levels: Iterable[str], now: float):
        """Starts all of them at zero, at a time in seconds since 1970."""
        self._counters = dict.fromkeys(counters, 0.0)
        self._levels = dict.fromkeys(levels, 0.0)
        self._now = now
        self._begin()

    def _begin(self) -> None:
        """Starts all windows; the first step is counted from now."""
        totals = list(self._counters.values())
        # Totals at the ends of steps, and the last of these ends as a number of steps.
        self._noted = {name: np.tile(totals, (num + 1, 1)) for name, (_, num) in _WINDOWS.items()}
        self._first = {name: int(self._now // step) for name, (step, _) in _WINDOWS.items()}
        self._last = dict(self._first)

    def advance(self, now: float) -> float:
        """Records the steps that have ended; returns the time to use. Call it before any change."""
        if self._now - _SMALL_STEP_BACK <= now < self._now:
            return self._now
        was_set_back, self._now = now < self._now, now
        if was_set_back:
            self._begin()
        for name, (step, num_steps) in _WINDOWS.items():
            passed = min(int(now // step) - self._last[name], num_steps + 1)
            if passed > 0:
                noted = self._noted[name]
                noted[:-passed] = noted[passed:].copy()
                noted[-passed:] = list(self._counters.values())
                self._last[name] = int(now // step)
        return now

    def add(self, name: str, amount: float = 1.0) -> None:
        """Increases a counter."""
        self._counters[name] += amount

    def shift(self, name: str, by: float) -> None:
        """Changes a level, which does not go below 0."""
        self._levels[name] = max(self._levels[name] + by, 0.0)

    def total(self, name: str) -> float:
        """Returns the total of a counter since the start, or the present value of a level."""
        return self._levels[name] if name in self._levels else self._counters[name]

    def recent(self, counter: str, window: str) -> float:
        """Returns what was counted in a window, with the step that has not ended."""
        num_known = min(self._last[window] - self._first[window], _WINDOWS[window][1])
        begin = self._noted[window][-1 - num_known, list(self._counters).index(counter)]
        return self._counters[counter] - float(begin)

    def window(self, name: str) -> Window:
        """Returns the counts of the completed steps of ten "minutes", of a "day" or of a "week"."""
        step, num_steps = _WINDOWS[name]
        num_known = min(self._last[name] - self._first[name], num_steps)
        counts = np.diff(self._noted[name][num_steps - num_known :], axis=0)
        return Window(name, step, dict(zip(self._counters, counts.T, strict=True)))
