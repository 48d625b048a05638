"""A test of the largest of many correlations, which counts all of them."""

from __future__ import annotations

import math

import numpy as np
from scipy import special, stats

from tff_dpftrl.auditing import audit_report

POWER = 0.99
"""Probability that a test finds the deviation that its finding's `power` names."""


class Scan:
    """Scan of correlations. Under the null hypothesis all values are independent N(0, σ²).

    `chance` is the p-value of the largest of `number` correlations by itself; `says` has it in
    words, with its pair.
    """

    def __init__(self):
        self.number, self.chance, self.says = 0, 2.0, ""
        self._fewest = math.inf
        self._squares = []

    def add(
        self, first: np.ndarray, second: np.ndarray, label: str, pairs: np.ndarray | None = None
    ) -> None:
        """Correlates the rows of two arrays.

        Only pairs that are true in `pairs` count, shape [rows, other rows]. `label` has {} for the
        numbers of the two rows, counted from 1.
        """
        lengths = np.linalg.norm(first, axis=1)[:, np.newaxis] * np.linalg.norm(second, axis=1)
        products = first @ second.T
        values = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0.0)
        pairs = np.ones_like(values, bool) if pairs is None else pairs
        count, number = first.shape[1], int(pairs.sum())
        self.number += number
        self._fewest = min(self._fewest, count)
        place = np.unravel_index(np.argmax(np.where(pairs, np.abs(values), -1.0)), values.shape)
        largest = min(abs(float(values[place])), 1.0)
        self._squares.append((float(np.sum(values[pairs] ** 2)), count, number))
        # Uncentred, r √((N − 1) / (1 − r²)) of independent Gaussians is a t with N − 1 degrees.
        statistic = largest * math.sqrt((count - 1) / max(1.0 - largest**2, 1e-300))
        chance = 2.0 * float(stats.t.sf(statistic, count - 1))
        if chance < self.chance:
            self.chance = chance
            self.says = f"{values[place]:+.3f}, {label.format(*(i + 1 for i in place))}"

    def chance_of_squares(self) -> float:
        """Returns the p-value of the sum of squares: r² has mean 1/N, variance 2(N−1)/(N²(N+2))."""
        total = sum(square for square, _, _ in self._squares)
        mean = sum(number / count for _, count, number in self._squares)
        variance = sum(
            number * 2.0 * (count - 1) / (count**2 * (count + 2.0))
            for _, count, number in self._squares
        )
        # Different pairs are uncorrelated; a gamma distribution has these two moments.
        return float(stats.gamma.sf(total, mean**2 / variance, scale=variance / mean))

    def finding(self, name: str, share: float, *, together: bool = False) -> audit_report.Finding:
        """Returns the finding.

        `share` is the largest chance of "violated" under the null hypothesis. With `together`, half
        of it is for the sum of all squares, which finds many small correlations.
        """
        each = share / 2.0 if together else share
        violated = self.chance * self.number <= each
        says = f"Of {self.number} correlations the largest is {self.says}."
        if together:
            chance = self.chance_of_squares()
            violated |= chance <= each
            says += f" The sum of their squares has a p-value of {chance:.2g}."
        limit = -float(special.ndtri(each / self.number / 2.0)) + float(special.ndtri(POWER))
        power = math.tanh(limit / math.sqrt(max(self._fewest - 3, 1)))
        return audit_report.Finding(
            f"noise: {name}",
            "violated" if violated else "consistent",
            says,
            share,
            self.number,
            power=f"one correlation of {power:.2g}",
        )
