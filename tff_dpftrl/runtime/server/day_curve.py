"""Learns from check-ins how many devices are available at each hour of UTC.

A server sees the devices that it has told to come. Their number, divided by the turns of an
available device in the same time, estimates the available devices. Devices that were told under
different estimates are averaged, weighted by how many of each are still expected. Some devices come
without a turn, for instance after failures. The estimate then rises until arrivals meet the need
all the same.

An estimate that is too low brings too many devices, and is corrected within minutes. One that is
too high keeps them away for days. So an estimate rises to at most twice the number of devices that
were told to come.

Counts are of all devices together, by hour of the day: no device is distinguished from another.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.runtime.protocol import pace_steering

_HOUR = 3600.0
_DAY = 24 * _HOUR
_STEP_SECONDS = 60.0  # Least length of a step, which is a multiple of the rounds' period.
_PATIENCE_SECONDS = 300.0  # If nobody looks at the clock for longer, the server was away.
_KEPT_SHARE = 0.5  # Weight of an hour's counts beside those of a day later.
_GIVEN_ARRIVALS = 25.0  # Weight of the curve to begin with, in arrivals an hour.
_MOST_OF_TOLD = 2.0  # Largest estimate from new evidence, as a multiple of the told devices.
_SURE_ARRIVALS = 60.0  # If this many are expected and none comes, the server cannot be reached.
_CHANGE = 0.03  # Relative change of an estimate from which devices are told by the new one.
_MAX_VERSIONS = 64
_LEAST_SHARE = 1e-3  # Least estimate of an hour to begin with, as a share of the mean.
_LARGEST = 1e12  # Largest estimate, in devices; also the largest count in a file.
_VERSION = 1


@dataclasses.dataclass
class _Told:
    """Devices that got their turns from the same estimate."""

    steering: pace_steering.PaceSteering  # Pace steering that drew the turns.
    devices: float = 0.0  # Expected number of devices that have not come since, if all are there.


class DayCurve:
    """Estimate of the available devices by hour of the day; for one thread.

    `steering` is the pace steering by the present estimate. Times are in seconds since 1970.
    """

    def __init__(self, first: pace_steering.PaceSteering, now: float):
        """Starts without evidence, with the pace steering `first`."""
        self.steering = self._first = first
        self._given = _available(first)
        self._step = first.period_seconds * math.ceil(_STEP_SECONDS / first.period_seconds)
        self._arrivals, self._turns = np.zeros(24), np.zeros(24)
        self._hour = 0  # Last hour with evidence, counted from 1970.
        self._told = collections.deque([_Told(first)], maxlen=_MAX_VERSIONS)
        self._quiet_until = 0.0
        self._begin_anew(now)

    def _begin_anew(self, now: float) -> None:
        self._looked_at = now
        self._begin = math.floor(now / self._step) * self._step
        self._quiet_until = max(self._quiet_until, self._begin + self._step)  # No whole step.
        self._came = 0
        self._missing = 0.0  # Devices expected since the last one came.
        self._last_came = self._begin

    @property
    def available(self) -> np.ndarray:
        """Estimated numbers of available devices at each full hour of UTC, shape [24]."""
        level = (_GIVEN_ARRIVALS + self._arrivals.sum()) / (
            _GIVEN_ARRIVALS + (self._turns * self._given).sum()
        )
        prior = level * np.maximum(self._given, _LEAST_SHARE * self._given.mean())
        estimate = (_GIVEN_ARRIVALS + self._arrivals) / (_GIVEN_ARRIVALS / prior + self._turns)
        return np.minimum(estimate, _LARGEST)

    def came(self, now: float, count: int = 1) -> bool:
        """Counts devices that have checked in; returns whether `steering` has changed."""
        has_changed = self.advance(now)
        self._came += count
        return has_changed

    def advance(self, now: float) -> bool:
        """Learns from the steps that are over; returns whether `steering` has changed.

        Call it every minute, even if nobody comes.
        """
        before = self.steering
        if now < self._looked_at:  # The clock was ahead, perhaps by years.
            self._quiet_until = min(self._quiet_until, now + _DAY)
        if now - self._looked_at > self._step + _PATIENCE_SECONDS or now < self._begin:
            self._was_away(self._looked_at, now)
            self._told[-1].devices += self._came
            self._begin_anew(now)
        self._looked_at = now
        while now >= self._begin + self._step:
            self._end_step()
        return self.steering is not before

    def _was_away(self, since: float, until: float) -> None:
        # Devices that found no server back off for about as long, and then come untold.
        self._quiet_until = max(self._quiet_until, until + min(max(until - since, 0.0), _DAY))

    def _end_step(self) -> None:
        begin, end, came = self._begin, self._begin + self._step, self._came
        self._begin, self._came = end, 0
        devices = turns = 0.0
        share = self._share(begin)
        periods = round(self._step / self._first.period_seconds)
        for told in self._told:
            expected = told.steering.expected_turns(begin, end)
            devices += told.devices
            turns += told.devices * expected
            told.devices *= (1 - share * expected / periods) ** periods
        self._told[-1].devices += came  # Each of them is told when to come again.
        if came:
            if self._missing >= _SURE_ARRIVALS:
                self._was_away(self._last_came, begin)
            self._missing, self._last_came = 0.0, end
        else:
            self._missing += turns
        if turns > 0 and begin >= self._quiet_until and self._missing < _SURE_ARRIVALS:
            self._learn((begin + end) / 2, came, turns / devices, devices)
            self._steer()

    def _share(self, now: float) -> float:
        available = self.available
        return float(available[round(now / _HOUR) % 24] / available.max())

    def _learn(self, now: float, came: int, turns: float, devices: float) -> None:
        hour = round(now / _HOUR)
        slot = hour % 24
        if hour != self._hour:
            self._hour = hour
            needed = self._first.devices_needed * _HOUR / self._first.period_seconds
            kept = _KEPT_SHARE * min(1.0, needed / max(self._arrivals[slot], 1.0))
            self._arrivals[slot] *= kept
            self._turns[slot] *= kept
        most = max(_MOST_OF_TOLD * devices, self.available[slot])
        self._arrivals[slot] += min(came, most * turns)
        self._turns[slot] += turns

    def _steer(self) -> None:
        available = self.available
        if np.abs(np.log(available / np.maximum(_available(self.steering), 1e-9))).max() < _CHANGE:
            return
        self.steering = dataclasses.replace(
            self._first,
            population_size=float(available.mean()),
            availability=tuple(available.tolist()),
        )
        self._told.append(_Told(self.steering))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the counts, two for each hour of the day, to a file, atomically."""
        content = {
            "version": _VERSION,
            "looked_at": self._looked_at,
            "hour": self._hour,
            "arrivals": self._arrivals.tolist(),
            "turns": self._turns.tolist(),
        }
        durable_files.write(path, (json.dumps(content, indent=2) + "\n").encode())

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], first: pace_steering.PaceSteering, now: float
    ) -> DayCurve:
        """Reads a file of `save`; an estimate without evidence if there is no file.

        Where there is no evidence, the pace steering is `first`. It raises ValueError if the file
        has other content.
        """
        curve = cls(first, now)
        try:
            content = json_text.parse(pathlib.Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return curve
        except ValueError:
            content = None
        if not isinstance(content, dict) or not _is_content(content):
            raise validation.UsageError(
                f"{path} holds no curve of the day: move it away, and it is learned anew."
            )
        curve._arrivals[:], curve._turns[:] = content["arrivals"], content["turns"]
        curve._hour = content["hour"]
        curve._was_away(min(content["looked_at"], now), now)
        curve._steer()
        return curve


class LearnedPace:
    """Curve of the day behind a source of turns, and the file that it is kept in."""

    def __init__(
        self,
        pace: pace_steering.TurnsAhead,
        path: pathlib.Path,
        clock: Callable[[], float],
    ):
        """Loads the curve, if the file exists, and has turns drawn by it.

        `pace` begins with the steering that was given. The clock returns the seconds since 1970.
        """
        self._pace, self._path, self._clock = pace, path, clock
        self._curve = DayCurve.load(path, pace.steering, clock())
        pace.steering = self._curve.steering

    def checked_in(self) -> None:
        """Counts a device."""
        if self._curve.came(self._clock()):
            self._pace.steering = self._curve.steering

    def learn(self) -> None:
        """Learns from the time that has passed; to be called every minute."""
        if self._curve.advance(self._clock()):
            self._pace.steering = self._curve.steering

    def save(self) -> None:
        """Writes the file."""
        self._curve.save(self._path)


def _available(steering: pace_steering.PaceSteering) -> np.ndarray:
    """Returns the numbers of available devices at each full hour, shape [24]."""
    relative = np.asarray(steering.availability, float)
    return steering.population_size * relative / relative.mean()


def _is_content(content: dict[str, Any]) -> bool:
    arrivals, turns = content.get("arrivals"), content.get("turns")
    if not (isinstance(arrivals, list) and isinstance(turns, list)):
        return False
    if content.get("version") != _VERSION or not len(arrivals) == len(turns) == 24:
        return False
    numbers = [content.get("looked_at"), content.get("hour"), *arrivals, *turns]
    return type(content.get("hour")) is int and all(
        type(number) in (int, float) and 0 <= number <= _LARGEST for number in numbers
    )
