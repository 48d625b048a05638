"""Pace steering: draws when a device is to check in again, without a memory of any device.

The server gives each device, at the end of its session, the times at which to come back (Bonawitz
et al. 2019, section 2.3). It keeps no record of them. The times depend on the time of day, on the
number of available devices and on the number of needed devices:

- In a large population, each device comes at a random time, so that the needed number comes in
  every second. Waits are exponential in the expected number of turns, and so have no memory. Even
  after an outage, when all devices come at once, the rate of those that come again is the needed
  one from the first second on.
- Devices of a small population come together, at a rendezvous: the multiples of a round's length,
  which need no coordination. Each device comes with the probability that brings the needed number;
  all devices come if there are too few.
- Both follow a daily curve: when four times as many devices are available, each comes a quarter as
  often.

A device that is not available at its turn must not come as soon as it is: in the evening, all
devices of the day would come at once. It gets a few turns (`turns`), takes the first one that it
can, and skips the others.
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
_SURE = 1 - 1e-9  # Largest probability to come to a rendezvous.
_LEAST_AVAILABILITY = 1e-3  # Share of the mean: with no device there, waits would be infinite.


@dataclasses.dataclass(frozen=True)
class PaceSteering:
    """Distribution of check-ins for a population's size and demand."""

    devices_needed: float  # Devices, over-selected, of all tasks' rounds in `period_seconds`.
    period_seconds: float  # Duration of a round from one selection to the next, in seconds.
    population_size: float  # Number of devices available at the same time, averaged over the day.
    # Relative numbers of available devices at each full hour of UTC, shape [24]; interpolated in
    # between.
    availability: tuple[float, ...] = (1.0,) * 24
    small_population: float = 10.0  # Multiple of `devices_needed` up to which devices rendezvous.
    rendezvous_fraction: float = 0.1  # Share of the period within which its devices come.

    def __post_init__(self):
        for name in ("devices_needed", "period_seconds", "population_size"):
            validation.positive(name, getattr(self, name))
        validation.number("small_population", self.small_population, at_least=0)
        validation.probability("rendezvous_fraction", self.rendezvous_fraction)
        curve = np.asarray(self.availability, float)
        if curve.shape != (24,) or not (np.isfinite(curve) & (curve >= 0)).all() or not curve.any():
            raise validation.UsageError(
                "availability must be 24 numbers, none negative and not all zero, got "
                f"{self.availability!r}."
            )

    def __call__(self, now: float, randomness: random.Random) -> float:
        """Draws the seconds after which one device is to check in again."""
        return float(self.waits(now, randomness.random(), randomness.random()))

    def turns(self, now: float, randomness: random.Random, count: int) -> tuple[float, ...]:
        """Draws `count` turns of one device, in increasing seconds from now (Unix time)."""
        draws = np.array([[randomness.random(), randomness.random()] for _ in range(count)])
        return tuple(self.successive(now, draws[:, 0], draws[:, 1]).tolist())

    def successive(self, now: float, turns: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Computes successive turns, for any number of devices at once.

        Both draws are uniform from [0, 1), shape [..., count]: `turns` decide the turns, `places`
        the time within a rendezvous. The result has this shape: seconds from now, increasing along
        the last axis.
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
        """Computes the seconds, at least 0, after which devices are to check in again.

        `now` is UTC, in seconds since the epoch, one number or one for each device. Both draws are
        uniform from [0, 1), of the same shape as the result: `turns` decide the turns, `places` the
        time within a rendezvous.
        """
        turns = -np.log1p(-np.asarray(turns, float))
        is_small = self._is_small(now)
        if not np.any(is_small):
            return self._until_turn(now, turns)
        rendezvous = self._until_rendezvous(now, turns, np.asarray(places, float))
        if np.all(is_small):
            return rendezvous
        return np.where(is_small, rendezvous, self._until_turn(now, turns))

    def expected_turns(self, begin: float, end: float) -> float:
        """Computes the expected number of turns of a device between two times (UTC, in seconds).

        From one rendezvous to the next, or between multiples of these, the number is exact for
        small populations, too.
        """
        middle = (begin + end) / 2
        chance = self.devices_needed / float(self._available(middle))
        if self._is_small(middle):
            chance = min(chance, _SURE)
        return chance * (end - begin) / self.period_seconds

    def _is_small(self, now: np.ndarray | float) -> np.ndarray:
        return self._available(now) <= self.small_population * self.devices_needed

    def _available(self, now: np.ndarray | float) -> np.ndarray:
        """Computes the expected number of devices that are available at a time."""
        curve = self._curve
        return self.population_size * np.interp(now % _DAY / _HOUR, np.arange(25), curve)

    @functools.cached_property
    def _curve(self) -> np.ndarray:
        curve = np.asarray(self.availability, float)
        relative = np.append(curve, curve[0])
        mean = (relative[1:] + relative[:-1]).mean() / 2
        return np.maximum(relative / mean, _LEAST_AVAILABILITY)

    def _until_rendezvous(
        self, now: np.ndarray | float, turns: np.ndarray, places: np.ndarray
    ) -> np.ndarray:
        # Turns count from the last rendezvous; the next one is one period later.
        last = np.floor(now / self.period_seconds) * self.period_seconds
        wait = self._until(last, turns, self._turns_of_rendezvous)
        skipped = np.floor(wait / self.period_seconds)
        start = last + (skipped + 1) * self.period_seconds - now
        return start + places * self.rendezvous_fraction * self.period_seconds

    def _until_turn(self, now: np.ndarray | float, turns: np.ndarray) -> np.ndarray:
        return self._until(now, turns, self._turns_at_random)

    def _until(
        self, now: np.ndarray | float, turns: np.ndarray, of_a_day: np.ndarray
    ) -> np.ndarray:
        """Computes the seconds until the given numbers of turns have passed."""
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
        """Expected turns of an available device since midnight, shape [_STEPS + 1]."""
        return self._turns_of_a_day(self._chances)

    @functools.cached_property
    def _turns_of_rendezvous(self) -> np.ndarray:
        """Turns since midnight so that a period has one or more with probability `_chances`."""
        return self._turns_of_a_day(-np.log1p(-np.minimum(self._chances, _SURE)))

    def _turns_of_a_day(self, in_a_period: np.ndarray) -> np.ndarray:
        steps = (in_a_period[1:] + in_a_period[:-1]) / 2 * (_DAY / _STEPS) / self.period_seconds
        return np.append(0.0, np.cumsum(steps))


_AHEAD = 256  # Number of devices whose turns are drawn together.
_FRESH_SECONDS = 1.0


class TurnsAhead:
    """Source of devices' turns, drawn for many devices at once, since thousands come a second.

    Turns may be up to a second old; the time that has passed is subtracted. A new `steering` holds
    within a second. Thread-safe.
    """

    def __init__(self, steering: PaceSteering, count: int = 8):
        """Draws nothing yet; each device will get `count` turns."""
        self.steering = steering
        self._count = validation.integer("count", count, minimum=1)
        self._drawn: collections.deque[tuple[float, np.ndarray]] = collections.deque()

    def __call__(self, now: float, randomness: random.Random) -> tuple[float, ...]:
        """Returns turns of one device, in increasing seconds ≥ 0 from now (Unix time)."""
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
        return self.steering.successive(now, draws[0], draws[1])
