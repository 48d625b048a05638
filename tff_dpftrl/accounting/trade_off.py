"""Trade-off of a privacy guarantee: how well anybody can guess whether one's data was used."""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy import special

_ROUNDING = 1e-12
_LARGEST_EXPONENT = 700.0
"""Exponent that no float overflows with; it matters to rates below 1e-304 alone."""


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """Bounds of all tests that tell a run with one's data from a run without it.

    All bounds hold for both directions, so that the curve is symmetric. The run satisfies each of
    the `points` (ε, δ). `mu` is that of the Gaussian mechanism that the run is equivalent to; None
    if it is none.
    """

    points: tuple[tuple[float, float], ...]
    mu: float | None = None

    def least_false_negative_rate(self, false_positive_rate: np.ndarray) -> np.ndarray:
        """Bounds the rate at which a test says "not used" of data that was used, from below.

        `false_positive_rate` is the rate at which it says "used" of data that was not (Dong, Roth &
        Su 2022: Definition 2.6 with `mu`, Proposition 2.5 for each point).
        """
        rate = np.asarray(false_positive_rate, float)
        least = np.zeros_like(rate)
        if self.mu is not None:
            least = special.ndtr(-special.ndtri(rate) - self.mu)
        for epsilon, delta in self.points:
            first = 1.0 - delta - np.exp(min(epsilon, _LARGEST_EXPONENT)) * rate
            second = np.exp(-epsilon) * (1.0 - delta - rate)
            least = np.maximum(least, np.maximum(first, second))
        return least

    def best_guess(self) -> float:
        """Bounds how often the best guess is right if a coin decided whether data was used.

        It is (1 + total variation) / 2. For a Gaussian mechanism that is Φ(μ / 2); a point (ε, δ)
        bounds it by (e^ε + δ) / (1 + e^ε), which is (1 + δ) / 2 at ε = 0.
        """
        bounds = [1.0 - (1.0 - delta) * float(special.expit(-eps)) for eps, delta in self.points]
        if self.mu is not None:
            bounds.append(float(special.ndtr(self.mu / 2.0)))
        return min(1.0, min(bounds) * (1.0 + _ROUNDING))
