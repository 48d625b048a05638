"""When a device may work: idle, charging, on a network that costs nothing (paper 004, section 3).

Work begins only while all conditions hold, and is given up when one of them ends: a session
calls `Eligibility.unmet` between its steps, and what takes long inside a step calls it too.
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
    """Tells whether the device may work now."""

    @abc.abstractmethod
    def unmet(self) -> tuple[str, ...]:
        """The conditions that do not hold now.

        Returns:
          Names among "idle", "charging" and "unmetered"; empty if the device may work. What
          cannot be found out does not hold.
        """


@dataclasses.dataclass
class SettableEligibility(Eligibility):
    """Conditions that the application sets, which holds them all until told otherwise.

    Attributes:
      idle: Whether nobody is using the device.
      charging: Whether it runs on external power.
      unmetered: Whether its network costs nothing.
    """

    idle: bool = True
    charging: bool = True
    unmetered: bool = True

    @override
    def unmet(self) -> tuple[str, ...]:
        return tuple(name for name, holds in dataclasses.asdict(self).items() if not holds)


class LinuxEligibility(Eligibility):
    """Battery and load of a Linux machine; what its network costs is for its owner to say.

    - Charging: there is no battery, or there is external power and no battery is being
      drained. Batteries of mice and the like do not count.
    - Idle: other programs keep fewer than `max_load_per_core` threads a core busy, by the
      load average over a minute. The load of this process itself is taken out, from its
      processor time smoothed in the same way; that of its children is not.
    """

    def __init__(
        self,
        *,
        is_unmetered: bool = True,
        max_load_per_core: float = 0.5,
        root: str | os.PathLike[str] = "/",
        num_cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        own_processor_s: Callable[[], float] = time.process_time,
    ):
        """Begins to watch.

        Args:
          is_unmetered: Whether the network costs nothing.
          max_load_per_core: Load by others above which the machine is in use.
          root: Folder in which `sys` and `proc` are.
          num_cores: Number of cores; those of this machine if None.
          clock: Seconds since any moment, never going back.
          own_processor_s: Seconds of processor time of this process so far.

        Raises:
          ValueError: If a number is out of range.
        """
        self._is_unmetered = is_unmetered
        self._max_load = validation.positive("max_load_per_core", max_load_per_core)
        cores = (os.cpu_count() or 1) if num_cores is None else num_cores
        self._num_cores = validation.integer("num_cores", cores, minimum=1)
        self._root = pathlib.Path(root)
        self._clock, self._own_processor_s = clock, own_processor_s
        self._own_load, self._seen = 0.0, (clock(), own_processor_s())

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
            # As the kernel smooths the load average, which counts this process's threads too.
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
            return True  # A machine, or a kernel, that knows no batteries.
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
    """What a file of sysfs says; None if it says nothing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
