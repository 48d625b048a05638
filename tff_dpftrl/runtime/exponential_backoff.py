"""Exponential back-off: how long to wait after failures in a row, with or without jitter."""

from __future__ import annotations

import random

_MAX_DOUBLINGS = 60  # Keeps the power of two finite.


def exponential_s(failures: int, first_s: float, longest_s: float) -> float:
    """Computes the back-off after some failures in a row.

    Args:
      failures: Number of failures, at least 1.
      first_s: Seconds after the first failure; they double with each further one.
      longest_s: Largest back-off in seconds.
    """
    return min(longest_s, first_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))


def jittered_s(seconds: float, generator: random.Random) -> float:
    """Draws a waiting time, so that those who failed together do not return together.

    Args:
      seconds: Largest waiting time in seconds.
      generator: Source of randomness.

    Returns:
      Seconds between half of the largest waiting time and all of it.
    """
    return seconds * (1.0 - 0.5 * generator.random())
