"""Eligibility of a device: idle, charging, on an unmetered network (paper 004, section 3).

A session begins only while all conditions hold, and is interrupted when one of them ends.
Sessions call `Eligibility.unmet` between their steps, and inside of steps that take long.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Callable

from typing_extensions import override

from tff_dpftrl import validation

_LOAD_SPAN_S = 60.0  # The first load average of Linux decays over one minute.
_SUPPLIES = ("Mains", "USB", "Wireless")
_NOT_DRAINING = ("Charging", "Full", "Not charging")


class Eligibility(abc.ABC):
    """Conditions under which a device may work."""

    @abc.abstractmethod
    def unmet(self) -> tuple[str, ...]:
        """Returns the names of the conditions that do not hold now.

        They are among "idle", "charging" and "unmetered"; none if the device may work. A
        condition that cannot be checked does not hold.
        """


@dataclasses.dataclass
class SettableEligibility(Eligibility):
    """Conditions that the application sets; all hold by default."""

    idle: bool = True  # Whether nobody is using the device.
    charging: bool = True  # Whether the device runs on external power.
    unmetered: bool = True  # Whether the device's network is free of charge.

    @override
    def unmet(self) -> tuple[str, ...]:
        return tuple(name for name, holds in dataclasses.asdict(self).items() if not holds)


class LinuxEligibility(Eligibility):
    """Battery and load of a Linux machine; the caller states whether its network is unmetered.

    - Charging: there is no battery, or there is external power and no battery is being
      drained. Batteries of peripherals, such as mice, are ignored.
    - Idle: the load average over a minute, without this process, is at most
      `max_load_per_core` threads a core. The load of this process is its processor time,
      smoothed in the same way. The load of its child processes is not subtracted.
    """

    def __init__(
        self,
        *,
        is_unmetered: bool = True,
        max_load_per_core: float = 0.5,
        root: str | os.PathLike[str] = "/",
        num_cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        processor_s: Callable[[], float] = time.process_time,
    ):
        """Starts to measure the load of this process.

        The caller declares whether the network is free of charge (`is_unmetered`). `root` is the
        folder of `sys` and `proc`. `clock` is monotonic. It and `processor_s`, the processor time
        of this process, are in seconds.
        """
        self._is_unmetered = is_unmetered
        self._max_load = validation.positive("max_load_per_core", max_load_per_core)
        cores = (os.cpu_count() or 1) if num_cores is None else num_cores
        self._num_cores = validation.integer("num_cores", cores, minimum=1)
        self._root = pathlib.Path(root)
        self._clock, self._own_processor_s = clock, processor_s
        self._own_load, self._seen = 0.0, (clock(), processor_s())

    @override
    def unmet(self) -> tuple[str, ...]:
        conditions = {
            "idle": self._is_idle(),
            "charging": self._is_charging(),
            "unmetered": self._is_unmetered,
        }
        return tuple(name for name, holds in conditions.items() if not holds)

    def _is_idle(self) -> bool:
        now = (self._clock(), self._own_processor_s())
        seconds, processor_s = (new - old for new, old in zip(now, self._seen, strict=True))
        if seconds > 0:
            # The kernel smooths the load average in this way; it includes this process.
            weight = -math.expm1(-seconds / _LOAD_SPAN_S)
            self._own_load += weight * (processor_s / seconds - self._own_load)
            self._seen = now
        try:
            load = float((self._root / "proc/loadavg").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return False
        return load - self._own_load <= self._max_load * self._num_cores

    def _is_charging(self) -> bool:
        batteries, has_power = [], False
        try:
            supplies = sorted((self._root / "sys/class/power_supply").iterdir())
        except FileNotFoundError:
            return True  # The machine or the kernel has no batteries.
        except OSError:
            return False
        for supply in supplies:
            kind = _read(supply / "type")
            if kind in _SUPPLIES:
                has_power |= _read(supply / "online") == "1"
            elif kind in ("Battery", "UPS") and _read(supply / "scope") != "Device":
                batteries.append(_read(supply / "status"))
        if not batteries:
            return True
        has_power |= any(status in _NOT_DRAINING for status in batteries)
        return has_power and "Discharging" not in batteries


def _read(path: pathlib.Path) -> str | None:
    """Reads a file of sysfs; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
