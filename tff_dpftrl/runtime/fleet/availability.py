"""Eligibility of simulated devices: always, or at night (Bonawitz et al. 2019, figure 5)."""

from __future__ import annotations

import random
from collections.abc import Callable

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.runtime.device import eligibility

_HOURS = 24.0
_NIGHT = 2.0  # The hour around which most devices are idle and charging.
_SPREAD = 3.0  # Standard deviation, in hours, between devices.
_MIN_HOURS, _MAX_HOURS = 5.0, 12.0  # Hours a day for which a device is available.


class Nightly(eligibility.Eligibility):
    """Eligibility of a device that is charged for some hours around its middle of the night."""

    def __init__(
        self,
        generator: random.Random,
        *,
        clock: Callable[[], float],
        day_s: float = 24 * 3600.0,
    ):
        """Draws when the device is charged, in days of `day_s` seconds; the clock is of UTC."""
        self._clock = clock
        self._day_s = validation.positive("day_s", day_s)
        self._middle = generator.gauss(_NIGHT, _SPREAD)
        self._hours = generator.uniform(_MIN_HOURS, _MAX_HOURS)

    @override
    def unmet(self) -> tuple[str, ...]:
        hour = self._clock() % self._day_s / self._day_s * _HOURS
        distance = (hour - self._middle + _HOURS / 2) % _HOURS - _HOURS / 2
        return () if abs(distance) <= self._hours / 2 else ("charging",)


class UntilStopped(eligibility.Eligibility):
    """Eligibility that also ends when the fleet is stopped."""

    def __init__(self, other: eligibility.Eligibility, is_stopped: Callable[[], bool]):
        """Wraps the eligibility of the device while the fleet runs."""
        self._other, self._is_stopped = other, is_stopped

    @override
    def unmet(self) -> tuple[str, ...]:
        return ("running",) if self._is_stopped() else self._other.unmet()
