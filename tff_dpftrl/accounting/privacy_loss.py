"""Epsilon and delta of many steps of one or more kinds, fast and never too small.

A step is given by a finite *dominating pair*: atoms with a privacy loss and a mass
under the upper distribution, plus a mass with infinite loss. The loss of T steps is
the T-fold convolution, found by one FFT for each kind. Before it, the masses are tilted by
e^(λ · loss), with λ at the saddle point of the sought tail: then the FFT needs only
the few standard deviations around the answer, and its rounding errors are small
relative to delta, however small delta is (Gopi, Lee & Wutschitz 2021 convolve
without the tilt, and lose delta below about 1e-15 and windows to the mean).

Every approximation errs upwards: moving atoms to a grid splits their mass so that
both distributions keep their total ("connect the dots", Doroshenko et al. 2022), and
truncated and aliased mass is added, never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy import fft, optimize

# Smallest epsilon that the tolerance is relative to.
_SMALL_EPSILON = 1e-3
# Relative excess charged for floating-point rounding of delta.
_ROUNDING = 1e-8
# Tilted mass that may wrap around into the window; it only adds.
_ALIASED = 1e-13
_MAX_GRID = 1 << 24


class Step(NamedTuple):
    """Finite pair of distributions that dominates one step.

    Atoms have privacy losses, in any order, and masses under the upper distribution, which gives an
    infinite loss the probability `infinity_mass`.
    """

    losses: np.ndarray
    masses: np.ndarray
    infinity_mass: float


Steps: TypeAlias = Sequence[tuple[Step, int]]
"""Steps of each kind, and how often each is taken."""


class Saddle(NamedTuple):
    """Saddle point that decides the tail of the composed loss.

    `tilt` is λ, the best exponent of the Chernoff bound, and `epsilon` that bound. `cumulants` are
    log E[e^(λ · loss)] of one step of each kind, without infinite losses.
    """

    tilt: float
    epsilon: float
    cumulants: tuple[float, ...]


def _cumulant(step: Step, tilt: float) -> float:
    exponents = tilt * step.losses
    largest = float(np.max(exponents, where=step.masses > 0.0, initial=-np.inf))
    # Less is done than by SciPy's logsumexp, which took most of the time of an epsilon. Atoms
    # without mass may lie above.
    return largest + math.log(float(step.masses @ np.exp(np.minimum(exponents - largest, 0.0))))


def _cumulants(steps: Steps, tilt: float) -> tuple[float, ...]:
    return tuple(_cumulant(step, tilt) for step, _ in steps)


def total_cumulant(steps: Steps, cumulants: Sequence[float]) -> float:
    """Computes the cumulant of all steps from those of one step of each kind."""
    return math.fsum(
        number * cumulant for (_, number), cumulant in zip(steps, cumulants, strict=True)
    )


def tilted_mean_of_square(step: Step, tilt: float, values: np.ndarray) -> float:
    """Computes E[values²], one value an atom, under a step's law tilted by e^(tilt · loss)."""
    exponents = tilt * step.losses
    weights = step.masses * np.exp(exponents - np.max(exponents))
    return float(weights @ values**2 / weights.sum())


def saddle_for_delta(steps: Steps, log_delta: float) -> Saddle:
    """Finds the tilt of the smallest Chernoff bound of epsilon at a delta."""

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        return (total_cumulant(steps, _cumulants(steps, tilt)) - log_delta) / tilt

    best = optimize.minimize_scalar(
        bound, bounds=(-9.0, 16.0), method="bounded", options={"xatol": 1e-4}
    )
    tilt = math.exp(best.x)
    return Saddle(tilt, max(float(best.fun), 0.0), _cumulants(steps, tilt))


def saddle_for_epsilon(steps: Steps, epsilon: float) -> Saddle:
    """Finds the tilt of the smallest Chernoff bound of delta at an epsilon."""

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        return total_cumulant(steps, _cumulants(steps, tilt)) - tilt * epsilon

    best = optimize.minimize_scalar(
        bound, bounds=(-9.0, 16.0), method="bounded", options={"xatol": 1e-4}
    )
    tilt = math.exp(best.x)
    return Saddle(tilt, epsilon, _cumulants(steps, tilt))


def chernoff_delta(steps: Steps, epsilon: float) -> float:
    """Computes the smallest Chernoff bound of delta at an epsilon, and adds infinite losses."""
    saddle = saddle_for_epsilon(steps, epsilon)
    log_delta = total_cumulant(steps, saddle.cumulants) - saddle.tilt * epsilon
    infinite = math.fsum(number * step.infinity_mass for step, number in steps)
    return math.exp(min(log_delta, 0.0)) + infinite


def resolution(saddle: Saddle, num_steps: int, tolerance: float) -> float:
    """Computes the grid interval h, in units of privacy loss, that costs `tolerance` of epsilon.

    Splitting an atom over an interval h multiplies E[e^(λ · loss)] by at most 1 + λ (λ + 1) h² / 8,
    which T times moves epsilon by T (λ + 1) h² / 8. `tolerance` is relative to an epsilon of at
    least 1e-3.
    """
    allowed = tolerance * max(saddle.epsilon, _SMALL_EPSILON)
    return math.sqrt(8.0 * allowed / (num_steps * (saddle.tilt + 1.0)))


def _window(steps: Steps, saddle: Saddle, log_negligible: float) -> tuple[float, float]:
    """Computes where the answer needs the composed loss, and the period of the FFT: (low, high).

    The FFT wraps around with period high − low, so that positive losses in the window gain tilted
    mass of at most `_ALIASED` from each side; the untilted mass above `high` is at most
    e^log_negligible.
    """

    def chernoff(sign: float, log_mass: float) -> float:
        def bound(log_shift: float) -> float:
            shift = sign * math.exp(log_shift)
            moved = _cumulants(steps, saddle.tilt + shift)
            growth = [new - old for new, old in zip(moved, saddle.cumulants, strict=True)]
            return (total_cumulant(steps, growth) - log_mass) / abs(shift)

        best = optimize.minimize_scalar(
            bound, bounds=(-12.0, 16.0), method="bounded", options={"xatol": 1e-3}
        )
        return sign * float(best.fun)

    high = max(saddle_for_delta(steps, log_negligible).epsilon, saddle.epsilon)
    low = min(chernoff(-1.0, math.log(_ALIASED)), 0.0)
    top = chernoff(1.0, math.log(_ALIASED))
    return min(low, high - top), high


def _on_grid(step: Step, interval: float, size: int, tilt: float, cumulant: float) -> np.ndarray:
    """Computes tilted masses on the multiples of `interval`, modulo `size`, shape [size].

    They sum to a little more than 1: the grid only adds. Where the grid is much too coarse
    for the tilt, the sum overflows.
    """
    below = np.floor(step.losses / interval)
    remainder = step.losses - below * interval
    share_above = np.clip(np.expm1(-remainder) / math.expm1(-interval), 0.0, 1.0)
    index = below.astype(np.int64)
    result = np.zeros(size)
    for offset, share in ((0, 1.0 - share_above), (1, share_above)):
        masses = step.masses * share
        used = masses > 0.0
        exponents = np.log(masses[used]) + tilt * (index[used] + offset) * interval
        with np.errstate(over="ignore"):
            tilted = np.exp(exponents - cumulant)
        result += np.bincount((index[used] + offset) % size, weights=tilted, minlength=size)
    return result


def _power(values: np.ndarray, exponent: int) -> np.ndarray:
    """Raises complex values to a positive integer power by squaring, ten times as fast as **."""
    while not exponent & 1:
        values = values * values
        exponent >>= 1
    result = values
    while exponent := exponent >> 1:
        values = values * values
        if exponent & 1:
            result = result * values
    return result


class ComposedLoss:
    """Privacy loss of all steps, accurate near one epsilon and never too small.

    `interval` is the grid's, in units of privacy loss, from `resolution`. `log_negligible` is the
    natural logarithm of a probability that may be ignored, far below the delta that is given or
    computed. That delta is charged for it.
    """

    def __init__(
        self,
        steps: Steps,
        saddle: Saddle,
        interval: float,
        log_negligible: float,
    ):
        low, high = _window(steps, saddle, log_negligible)
        interval = max(interval, (high - low) / _MAX_GRID)
        first = math.floor(low / interval) - 2
        size: int = fft.next_fast_len(  # pyright: ignore[reportAssignmentType]
            math.ceil(high / interval) + 3 - first, real=True
        )
        spectrum, cumulants = None, []
        for (step, number), cumulant in zip(steps, saddle.cumulants, strict=True):
            single = _on_grid(step, interval, size, saddle.tilt, cumulant)
            total = single.sum()
            self._too_coarse = not math.isfinite(total)
            if self._too_coarse:
                return
            factor = _power(fft.rfft(single / total), number)  # pyright: ignore[reportArgumentType]
            spectrum = factor if spectrum is None else spectrum * factor
            cumulants.append(cumulant + math.log(total))
        tilted: np.ndarray = fft.irfft(spectrum, size)  # pyright: ignore[reportAssignmentType]
        tilted = np.maximum(np.roll(tilted, -first % size), 0.0)

        self._losses = (first + np.arange(size)) * interval
        self._origin = saddle.epsilon
        # Atom j has mass e^(log_scale) · relative[j].
        self._log_scale = total_cumulant(steps, cumulants) - saddle.tilt * self._origin
        distance = self._losses - self._origin
        relative = tilted * np.exp(np.minimum(-saddle.tilt * distance, 600.0))
        beyond = math.exp(log_negligible - self._log_scale)
        # Entry k sums over the atoms above the k-th one.
        self._upper = np.append(np.cumsum(relative[::-1])[-2::-1], 0.0) + beyond
        lower = tilted * np.exp(np.minimum(-(saddle.tilt + 1.0) * distance, 600.0))
        self._lower = np.append(np.cumsum(lower[::-1])[-2::-1], 0.0)
        self._infinity = -math.expm1(
            math.fsum(number * math.log1p(-step.infinity_mass) for step, number in steps)
        )

    def _finite_delta(self) -> np.ndarray:
        """Returns delta at each loss of the grid, over e^(log_scale), without infinite losses."""
        growth = np.exp(np.minimum(self._losses - self._origin, 600.0))
        return np.maximum(self._upper - growth * self._lower, 0.0) * (1.0 + _ROUNDING)

    def epsilon(self, delta: float) -> float:
        """Computes the smallest epsilon at `delta`, rounded up."""
        if self._too_coarse or self._infinity >= delta:
            return math.inf
        target = math.exp(math.log(delta - self._infinity) - self._log_scale) / (1.0 + _ROUNDING)
        too_small = np.flatnonzero(self._finite_delta() > target * (1.0 + _ROUNDING))
        if not too_small.size:
            return max(0.0, float(self._losses[0]))
        k = too_small[-1]
        if k == len(self._losses) - 1:
            return math.inf
        if self._lower[k] == 0.0:
            return max(0.0, float(self._losses[k + 1]))
        # Between two losses of the grid, delta is upper − e^epsilon · lower.
        between = self._origin + math.log((self._upper[k] - target) / self._lower[k])
        return max(0.0, min(between, float(self._losses[k + 1])))

    def delta(self, epsilon: float) -> float:
        """Computes the smallest delta, rounded up, at an epsilon within the window."""
        if self._too_coarse:
            return 1.0
        k = int(np.searchsorted(self._losses, epsilon, side="right")) - 1
        growth = math.exp(epsilon - self._origin)
        relative = max(self._upper[k] - growth * self._lower[k], 0.0) * (1.0 + _ROUNDING)
        if relative == 0.0:
            return min(1.0, self._infinity)
        return min(1.0, self._infinity + math.exp(self._log_scale + math.log(relative)))
