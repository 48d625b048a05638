"""Counts and levels over time: the last minutes, day and week, in memory of a fixed size.

Every channel is a running total: of what was counted, or of level times seconds. Totals are
noted at the ends of steps; the difference of two of them is the count in between, or (over
the seconds) the mean level.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from tff_dpftrl import validation

# A clock that is set back by more than this begins the windows anew; until then it stands.
_SMALL_STEP_BACK = 60.0


@dataclasses.dataclass(frozen=True)
class Resolution:
    """How far back, and how finely.

    Attributes:
      name: What it is called.
      step: Seconds of a step; steps end at multiples of it.
      num_steps: How many are kept.
    """

    name: str
    step: int
    num_steps: int


RESOLUTIONS = {
    resolution.name: resolution
    for resolution in (
        Resolution("minutes", 5, 120),
        Resolution("day", 300, 288),
        Resolution("week", 3600, 168),
    )
}
"""Ten minutes, a day and a week, by name."""


@dataclasses.dataclass(frozen=True)
class Window:
    """What happened in the steps of a resolution that have ended.

    Attributes:
      resolution: The resolution.
      end: When the last step ended, in seconds since 1970.
      values: By channel, oldest first, at most `resolution.num_steps`: counts in each step,
        or mean levels.
    """

    resolution: Resolution
    end: float
    values: dict[str, np.ndarray]


class TimeSeries:
    """Channels that are counted or go up and down, and what they were."""

    def __init__(self, counters: Iterable[str], levels: Iterable[str], now: float):
        """Starts at zero.

        Args:
          counters: Names of what is counted.
          levels: Names of what goes up and down.
          now: Seconds since 1970.
        """
        counters, levels = list(counters), list(levels)
        self._names = counters + levels
        self._num_counters = len(counters)
        self._place = {name: i for i, name in enumerate(self._names)}
        if len(self._place) < len(self._names):
            raise validation.UsageError(
                f"counters and levels must have different names: {self._names}."
            )
        self._totals = [0.0] * len(self._names)
        self._levels = [0.0] * len(self._names)  # Of counters, 0.
        self._since = [now] * len(self._names)
        self._now = now
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._noted = {
            name: np.zeros((len(self._names), resolution.num_steps + 1))
            for name, resolution in RESOLUTIONS.items()
        }
        self._ends = dict.fromkeys(RESOLUTIONS, 0.0)
        self._num_noted = dict.fromkeys(RESOLUTIONS, 0)
        for name, resolution in RESOLUTIONS.items():
            # The first step began before; it is counted from here.
            self._note(name, np.array([now // resolution.step * resolution.step]))
        self._set_next()

    def _set_next(self) -> None:
        self._next = min(self._ends[r.name] + r.step for r in RESOLUTIONS.values())

    def advance(self, now: float) -> float:
        """Notes the steps that have ended; to be called before anything changes.

        Args:
          now: Seconds since 1970.

        Returns:
          The time that counts: not before that of an earlier call, unless the clock was set.
        """
        if now < self._now:
            if now >= self._now - _SMALL_STEP_BACK:
                return self._now
            self._set_clock_back(now)
        self._now = now
        if now >= self._next:
            for name, resolution in RESOLUTIONS.items():
                last = now // resolution.step
                passed = min(
                    int(last - self._ends[name] // resolution.step), resolution.num_steps + 1
                )
                if passed > 0:
                    self._note(name, (last - np.arange(passed)[::-1]) * resolution.step)
            self._set_next()
        return now

    def _set_clock_back(self, now: float) -> None:
        for i in range(len(self._names)):
            self._totals[i] += self._levels[i] * (self._now - self._since[i])
            self._since[i] = now
        self._begin(now)

    def _note(self, name: str, times: np.ndarray) -> None:
        """Keeps the totals at some ends of steps, of which the last is the latest."""
        elapsed = np.maximum(times[None, :] - np.asarray(self._since)[:, None], 0.0)
        totals = np.asarray(self._totals)[:, None] + np.asarray(self._levels)[:, None] * elapsed
        noted = self._noted[name]
        count = times.size
        noted[:, : noted.shape[1] - count] = noted[:, count:]
        noted[:, noted.shape[1] - count :] = totals
        self._ends[name] = float(times[-1])
        self._num_noted[name] = min(self._num_noted[name] + count, noted.shape[1])

    def add(self, name: str, amount: float = 1.0) -> None:
        """Counts."""
        self._totals[self._place[name]] += amount

    def shift(self, name: str, by: float) -> None:
        """Moves a level, which does not go below 0."""
        i = self._place[name]
        self._totals[i] += self._levels[i] * (self._now - self._since[i])
        self._since[i] = self._now
        self._levels[i] = max(self._levels[i] + by, 0.0)

    def total(self, name: str) -> float:
        """What was counted since the start; of a level, what it is now."""
        i = self._place[name]
        return self._totals[i] if i < self._num_counters else self._levels[i]

    def window(self, name: str) -> Window:
        """What happened, in the steps that have ended.

        Args:
          name: One of `RESOLUTIONS`.
        """
        resolution = RESOLUTIONS[name]
        noted = self._noted[name][:, -self._num_noted[name] :]
        steps = np.diff(noted, axis=1)
        steps[self._num_counters :] /= resolution.step
        values = dict(zip(self._names, steps, strict=True))
        return Window(resolution, self._ends[name], values)
