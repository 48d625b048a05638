"""Time series of counters and levels: the last minutes, day and week, in memory of fixed size.

Every channel is a running total: of a counter, or of a level times seconds. Totals are recorded
at the ends of steps. The difference of two totals is the count in between, or the mean level
times the seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from tff_dpftrl import validation

# If the clock is set back by more seconds than this, the windows start again; otherwise time
# stands still until the clock has caught up.
_SMALL_STEP_BACK = 60.0


@dataclasses.dataclass(frozen=True)
class Resolution:
    """Step size and length of a window.

    Attributes:
      name: Name of the resolution.
      step: Length of a step in seconds; steps end at multiples of it.
      num_steps: Number of steps in the window.
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
"""Resolutions by name: ten minutes, a day and a week."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The values of the completed steps of a resolution.

    Attributes:
      resolution: Resolution of the steps.
      end: End of the last step, in seconds since 1970.
      values: Counts or mean levels of the steps by channel, oldest first, at most
        `resolution.num_steps` each.
    """

    resolution: Resolution
    end: float
    values: dict[str, np.ndarray]


class TimeSeries:
    """Time series of named counters and levels."""

    def __init__(self, counters: Iterable[str], levels: Iterable[str], now: float):
        """Starts all channels at zero.

        Args:
          counters: Names of the counters.
          levels: Names of the levels, which go up and down.
          now: Present time in seconds since 1970.
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
        self._levels = [0.0] * len(self._names)  # Counters have 0.
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
            # The first step began earlier; it is counted from now.
            self._note(name, np.array([now // resolution.step * resolution.step]))
        self._set_next()

    def _set_next(self) -> None:
        self._next = min(self._ends[r.name] + r.step for r in RESOLUTIONS.values())

    def advance(self, now: float) -> float:
        """Records the steps that have ended; call it before any change.

        Args:
          now: Present time in seconds since 1970.

        Returns:
          The time to use, which is not before an earlier one unless the clock was set back far.
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
        """Records the totals at some ends of steps, in order."""
        elapsed = np.maximum(times[None, :] - np.asarray(self._since)[:, None], 0.0)
        totals = np.asarray(self._totals)[:, None] + np.asarray(self._levels)[:, None] * elapsed
        noted = self._noted[name]
        count = times.size
        noted[:, : noted.shape[1] - count] = noted[:, count:]
        noted[:, noted.shape[1] - count :] = totals
        self._ends[name] = float(times[-1])
        self._num_noted[name] = min(self._num_noted[name] + count, noted.shape[1])

    def add(self, name: str, amount: float = 1.0) -> None:
        """Increases a counter."""
        self._totals[self._place[name]] += amount

    def shift(self, name: str, by: float) -> None:
        """Changes a level, which does not go below 0."""
        i = self._place[name]
        self._totals[i] += self._levels[i] * (self._now - self._since[i])
        self._since[i] = self._now
        self._levels[i] = max(self._levels[i] + by, 0.0)

    def total(self, name: str) -> float:
        """Returns the total of a counter since the start, or the present value of a level."""
        i = self._place[name]
        return self._totals[i] if i < self._num_counters else self._levels[i]

    def window(self, name: str) -> Window:
        """Returns the values of the completed steps.

        Args:
          name: Name of the resolution, one of `RESOLUTIONS`.
        """
        resolution = RESOLUTIONS[name]
        noted = self._noted[name][:, -self._num_noted[name] :]
        steps = np.diff(noted, axis=1)
        steps[self._num_counters :] /= resolution.step
        values = dict(zip(self._names, steps, strict=True))
        return Window(resolution, self._ends[name], values)
