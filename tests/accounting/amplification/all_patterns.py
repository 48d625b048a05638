"""Privacy losses of a sampling whose patterns are listed: densities without any shortcut."""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy import special


def min_sep_chances(num_rounds, min_sep, probability):
    """Returns all b-min-sep patterns, shape [patterns, num_rounds], and their probabilities."""
    share = probability / (1 + (min_sep - 1) * probability)
    patterns, chances = [], []
    for pattern in itertools.product((0, 1), repeat=num_rounds):
        total = 0.0
        for waiting in range(min_sep):
            chance = share if waiting else 1 - (min_sep - 1) * share
            left = waiting
            for present in pattern:
                if left:
                    chance *= 1.0 - present
                    left -= 1
                else:
                    chance *= probability if present else 1 - probability
                    left = (min_sep - 1) if present else 0
            total += chance
        if total > 0:
            patterns.append(pattern)
            chances.append(total)
    return np.array(patterns), np.array(chances)


def simulated_deltas(sums, chances, epsilon, rng, num_samples=20_000):
    """Simulates δ(ε) of P = Σ chances N(sums, I) against N(0, I), removing and adding.

    Args:
      sums: Means of the components in standard deviations, shape [patterns, rows].
      chances: Their probabilities, shape [patterns].
      epsilon: ε.
      rng: Generator.
      num_samples: Number of draws in each direction.

    Returns:
      Two pairs of a mean and its standard error.
    """
    gram_half = (sums**2).sum(axis=1) / 2
    noise = rng.standard_normal((num_samples, sums.shape[1]))
    chosen = rng.choice(len(sums), size=num_samples, p=chances / chances.sum())

    def losses(z):
        return special.logsumexp(z @ sums.T - gram_half, axis=1, b=chances)

    with_unit, without = losses(noise + sums[chosen]), losses(noise)
    excesses = (
        np.maximum(-np.expm1(np.minimum(epsilon - with_unit, 0)), 0),
        np.maximum(-np.expm1(np.minimum(epsilon + without, 0)), 0),
    )
    return [(float(e.mean()), float(e.std()) / math.sqrt(num_samples)) for e in excesses]
