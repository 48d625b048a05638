"""When a device is to check in again: pace steering, without a memory of anybody.

The server says to each device that it sends away, or thanks, in how many seconds to come
back (Bonawitz et al. 2019, section 2.3). It keeps nothing about who was told what. What it
says depends on the time, on how many devices there are and on how many are needed:

- Of a large population, each device comes at random, such that as many come in every second
  as are needed. Waits are exponential in the expected number of turns, which forget the
  past: whatever came before (an outage, after which all come at once), the rate of those
  that come again is the needed one from the first second on.
- A small population is told to come together, at times that everybody would compute alike:
  the multiples of a round's length. Each device is there with the probability that brings
  as many as are needed, all of them if there are too few.
- Both follow a curve of the day: when four times as many devices are available, each comes
  a quarter as often.

A device that is not available when its turn has come must not come as soon as it is: in the
evening all those of the day would come at once. It is given a few turns (`turns`), takes
the first one that it can, and lets the others go.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random

import numpy as np

from tff_dpftrl import validation

_HOUR = 3600.0
_DAY = 24 * _HOUR
_STEPS = 24 * 60  # Minutes, for the turns of a day.
_SURE = 1 - 1e-9  # The greatest chance to come to a meeting.
_NEVER_LESS = 1e-3  # Of the mean availability: with nobody there, waits would have no end.


@dataclasses.dataclass(frozen=True)
class PaceSteering:
    """What a population needs, and what it has.

    Attributes:
      devices_needed: Devices that the rounds of all tasks want in `period_seconds`,
        over-selection included.
      period_seconds: How long a round takes, from one selection to the next.
      population_size: Devices that are available at the same time, mean over the day.
      availability: How that changes over the day: relative numbers at each full hour of
        UTC, shape [24]; in between it is interpolated.
      small_population: A population of up to so many times the devices needed comes
        together.
      meeting_fraction: Share of the period within which it comes.
    """

    devices_needed: float
    period_seconds: float
    population_size: float
    availability: tuple[float, ...] = (1.0,) * 24
    small_population: float = 10.0
    meeting_fraction: float = 0.1

    def __post_init__(self):
        for name in ("devices_needed", "period_seconds", "population_size"):
            validation.positive(name, getattr(self, name))
        validation.number("small_population", self.small_population, at_least=0)
        validation.probability("meeting_fraction", self.meeting_fraction)
        curve = np.asarray(self.availability, float)
        if curve.shape != (24,) or not (np.isfinite(curve) & (curve >= 0)).all() or not curve.any():
            raise validation.UsageError(
                "availability must be 24 numbers, none negative and not all zero, got "
                f"{self.availability!r}."
            )

    def __call__(self, now: float, randomness: random.Random) -> float:
        """Seconds after which one device is to check in again; see `waits`."""
        return float(self.waits(now, randomness.random(), randomness.random()))

    def turns(self, now: float, randomness: random.Random, count: int) -> tuple[float, ...]:
        """Turns of one device, for it to take the first that it can.

        Args:
          now: Seconds since the epoch, UTC.
          randomness: What they are drawn from.
          count: How many.

        Returns:
          Seconds from now, growing, shape [count].
        """
        draws = np.array([[randomness.random(), randomness.random()] for _ in range(count)])
        return tuple(self.successive(now, draws[:, 0], draws[:, 1]).tolist())

    def successive(self, now: float, turns: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Turns that follow one another, for any number of devices at once.

        Args:
          now: Seconds since the epoch, UTC.
          turns: Uniform draws from [0, 1), shape [..., count].
          places: The same once more.

        Returns:
          Seconds from now, growing along the last axis, shape [..., count].
        """
        seconds = np.empty(np.shape(turns))
        last = np.zeros(seconds.shape[:-1])
        for i in range(seconds.shape[-1]):
            last = last + self.waits(now + last, turns[..., i], places[..., i])
            seconds[..., i] = last
        return seconds

    def waits(
        self,
        now: np.ndarray | float,
        turns: np.ndarray | float,
        places: np.ndarray | float,
    ) -> np.ndarray:
        """Seconds after which devices are to check in again.

        Args:
          now: Seconds since the epoch, UTC; one number, or one for each device.
          turns: Uniform draws from [0, 1), any shape: which turn each device takes.
          places: The same once more: where in a meeting it arrives.

        Returns:
          Seconds, at least 0, of the same shape.
        """
        turns = -np.log1p(-np.asarray(turns, float))
        is_small = self._available(now) <= self.small_population * self.devices_needed
        if not np.any(is_small):
            return self._until_turn(now, turns)
        meetings = self._until_meeting(now, turns, np.asarray(places, float))
        if np.all(is_small):
            return meetings
        return np.where(is_small, meetings, self._until_turn(now, turns))

    def _available(self, now: np.ndarray | float) -> np.ndarray:
        """Expected number of devices that are available at a time."""
        curve = self._curve
        return self.population_size * np.interp(now % _DAY / _HOUR, np.arange(25), curve)

    @functools.cached_property
    def _curve(self) -> np.ndarray:
        curve = np.asarray(self.availability, float)
        relative = np.append(curve, curve[0])
        mean = (relative[1:] + relative[:-1]).mean() / 2
        return np.maximum(relative / mean, _NEVER_LESS)

    def _until_meeting(
        self, now: np.ndarray | float, turns: np.ndarray, places: np.ndarray
    ) -> np.ndarray:
        # Counted from the last meeting: the next one comes after one turn of a period.
        last = np.floor(now / self.period_seconds) * self.period_seconds
        skipped = np.floor(self._until(last, turns, self._turns_of_meetings) / self.period_seconds)
        start = last + (skipped + 1) * self.period_seconds - now
        return start + places * self.meeting_fraction * self.period_seconds

    def _until_turn(self, now: np.ndarray | float, turns: np.ndarray) -> np.ndarray:
        return self._until(now, turns, self._turns_at_random)

    def _until(
        self, now: np.ndarray | float, turns: np.ndarray, of_a_day: np.ndarray
    ) -> np.ndarray:
        """Seconds until so many turns have passed."""
        seconds = np.linspace(0, _DAY, _STEPS + 1)
        since_midnight = now % _DAY
        goal = np.interp(since_midnight, seconds, of_a_day) + turns
        days, rest = np.divmod(goal, of_a_day[-1])
        return np.maximum(days * _DAY + np.interp(rest, of_a_day, seconds) - since_midnight, 0.0)

    @functools.cached_property
    def _chances(self) -> np.ndarray:
        """Share of the available devices that a period needs, shape [_STEPS + 1]."""
        hours = np.linspace(0, 24, _STEPS + 1)
        available = self.population_size * np.interp(hours, np.arange(25), self._curve)
        return self.devices_needed / available

    @functools.cached_property
    def _turns_at_random(self) -> np.ndarray:
        """Turns that an available device has had since midnight, shape [_STEPS + 1]."""
        return self._turns_of_a_day(self._chances)

    @functools.cached_property
    def _turns_of_meetings(self) -> np.ndarray:
        """The same, such that the chance of one turn or more in a period is the share."""
        return self._turns_of_a_day(-np.log1p(-np.minimum(self._chances, _SURE)))

    def _turns_of_a_day(self, in_a_period: np.ndarray) -> np.ndarray:
        steps = (in_a_period[1:] + in_a_period[:-1]) / 2 * (_DAY / _STEPS) / self.period_seconds
        return np.append(0.0, np.cumsum(steps))


_AHEAD = 256  # Devices whose turns are drawn together.
_FRESH_SECONDS = 1.0


class TurnsAhead:
    """Hands out turns that are drawn for many devices at once: a server tells thousands a second.

    Drawn up to a second before, they are handed out as what is left of them. Any thread may
    call it.
    """

    def __init__(self, steering: PaceSteering, count: int = 8):
        """Draws nothing yet.

        Args:
          steering: What the turns follow.
          count: Turns of a device.
        """
        self._steering = steering
        self._count = validation.integer("count", count, minimum=1)
        self._drawn: collections.deque[tuple[float, np.ndarray]] = collections.deque()

    def __call__(self, now: float, randomness: random.Random) -> tuple[float, ...]:
        """Turns of one device.

        Args:
          now: Seconds since the epoch, UTC.
          randomness: What they are drawn from.

        Returns:
          Seconds from now, none negative, growing.
        """
        try:
            drawn_at, turns = self._drawn.popleft()
        except IndexError:
            drawn_at, turns = now, None
        if turns is None or not 0 <= now - drawn_at <= _FRESH_SECONDS:
            self._drawn.clear()
            drawn_at = now
            turns, *others = self._draw(now, randomness)
            self._drawn.extend((now, other) for other in others)
        return tuple(np.maximum(turns - (now - drawn_at), 0.0).tolist())

    def _draw(self, now: float, randomness: random.Random) -> np.ndarray:
        generator = np.random.default_rng(randomness.getrandbits(128))
        draws = generator.random((2, _AHEAD, self._count))
        return self._steering.successive(now, draws[0], draws[1])
