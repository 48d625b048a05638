"""Estimates of epsilon by simulated privacy losses, with their uncertainty. Never a guarantee.

δ(ε) = E_P (1 − e^(ε − loss))₊ of removing a unit and E_Q (1 − e^(ε − loss))₊ of adding one are
means over draws. Small δ are decided by rare draws. So draws may come from another distribution,
under which the losses that decide are common; each has the ratio of densities as its weight. That
ratio must have a bound where the loss exceeds ε: then the empirical Bernstein inequality (Maurer
and Pontil 2009, Theorem 4) gives intervals that hold for every number of draws.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tff_dpftrl import validation

_LOG_INVERSE_RISK = math.log(2.0 / 0.0025)
"""Each of four ends of intervals is missed with probability 0.0025 at most: 99 % confidence."""
_BATCH = 20_000


class Draws(NamedTuple):
    """Simulated privacy losses of one direction, and the logarithms of their weights.

    A weight is the ratio of densities, true over drawn from.
    """

    losses: np.ndarray
    log_weights: np.ndarray


class Direction(NamedTuple):
    """Simulation of one direction, removing or adding a unit.

    `draw` draws losses by generator, number of draws, and tilt. A larger tilt makes larger losses;
    a tilt of 0 has no weights. `log_most` maps tilt and epsilon to the logarithm of the largest
    weight of a loss above epsilon. `best_tilt` maps epsilon to the tilt that makes that weight
    smallest; below 0 for 0.
    """

    draw: Callable[[np.random.Generator, int, float], Draws]
    log_most: Callable[[float, float], float]
    best_tilt: Callable[[float], float]


def untilted(draw: Callable[[np.random.Generator, int], np.ndarray]) -> Direction:
    """Builds a direction whose losses are drawn as they are: few draws see small δ."""
    return Direction(
        lambda rng, count, tilt: Draws(draw(rng, count), np.zeros(count)),
        lambda tilt, epsilon: 0.0,
        lambda epsilon: 0.0,
    )


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimate of the larger epsilon of both directions, within 99 % confidence: no guarantee."""

    epsilon: float
    low: float
    high: float
    num_samples: int


def _root(excess: Callable[[float], float], start: float, most: float = math.inf) -> float:
    """Finds where `excess`, which falls at least near there, becomes 0; 0 if it is not above 0.

    The search begins at `start`. The result is at most `most`, even if `excess` is still above 0
    there.
    """
    low = high = start
    step = max(start, 0.1) / 64.0
    while excess(high) > 0.0:
        if high >= most:
            return most
        low, high, step = high, high + step, 1.5 * step
    while low == high or excess(low) <= 0.0:
        if low == 0.0:
            return 0.0
        low, high, step = max(low - step, 0.0), low, 1.1 * step
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (middle, high) if excess(middle) > 0.0 else (low, middle)
    return min(high, most)


def _one_direction(
    direction: Direction, delta: float, bound: float, num_samples: int, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Estimates epsilon of one direction, and its interval."""
    tilt = max(direction.best_tilt(bound), 0.0)
    batches = [
        direction.draw(rng, min(_BATCH, num_samples - begin), tilt)
        for begin in range(0, num_samples, _BATCH)
    ]
    losses = np.concatenate([batch.losses for batch in batches])
    log_weights = np.concatenate([batch.log_weights for batch in batches])

    def excess(epsilon: float, sign: float) -> float:
        above = losses > epsilon
        terms = np.exp(log_weights[above]) * -np.expm1(epsilon - losses[above])
        mean = float(terms.sum()) / num_samples
        variance = float((terms**2).sum()) / (num_samples - 1)  # At least the variance.
        most = math.exp(min(direction.log_most(tilt, epsilon), 700.0))
        error = math.sqrt(2.0 * variance * _LOG_INVERSE_RISK / num_samples)
        error += 7.0 * most * _LOG_INVERSE_RISK / (3.0 * (num_samples - 1))
        return mean + sign * error - delta

    middle = _root(lambda epsilon: excess(epsilon, 0.0), bound)
    low = _root(lambda epsilon: excess(epsilon, -1.0), middle)
    # Few draws say nothing of a small delta: then only the bound is above.
    high = _root(lambda epsilon: excess(epsilon, 1.0), middle, max(middle, bound))
    return middle, low, high


def estimate(
    remove: Direction, add: Direction, *, delta: float, bound: float, num_samples: int, seed: int
) -> Estimate:
    """Estimates epsilon at a delta, the larger one of both directions.

    Losses are drawn near `bound`, an upper bound of epsilon. Each direction needs at least 1000
    samples.
    """
    validation.delta(delta)
    num_samples = validation.integer("num_samples", num_samples, minimum=1000)
    if not math.isfinite(bound):
        raise validation.UsageError(
            "noise_multiplier is too small for an estimate, got one without a finite ε: raise it."
        )
    rng = np.random.default_rng(validation.integer("seed", seed, minimum=0))
    both = [_one_direction(one, delta, bound, num_samples, rng) for one in (remove, add)]
    epsilon, low, high = (max(values) for values in zip(*both, strict=True))
    return Estimate(epsilon, low, high, num_samples)
