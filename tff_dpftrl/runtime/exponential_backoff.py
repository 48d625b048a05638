"""Exponential back-off: how long to wait after failures in a row, with or without jitter."""

from __future__ import annotations

import random

_MAX_DOUBLINGS = 60  # Keeps the power of two finite.


def exponential_s(failures: int, first_s: float, longest_s: float) -> float:
    """Computes the back-off in seconds after `failures` ≥ 1 in a row; it doubles with each one."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))


def jittered_s(seconds: float, generator: random.Random) -> float:
    """Draws half to all of a time in seconds, so that failed clients do not return together."""
    return seconds * (1.0 - 0.5 * generator.random())
