"""Law of a likelihood ratio P/Q under Q, on a grid, never too small in convex order.

The samplings of this folder compare Q = N(0, I) with a mixture P = Σ_j w_j N(m_j, I). Both
directions of their privacy loss depend on one random variable, M = dP/dQ under Q:

    δ(ε) of removing a unit:  E (M − e^ε)₊,     δ(ε) of adding one:  E (1 − e^ε M)₊.

Both are expectations of convex functions of M >= 0, and E M = 1. Three facts make an upper bound
of both directions at once, whatever ε:

1. *Spreading.* M is a sum of products of independent factors, linear in each of them. Replacing a
   factor by a mean-preserving spread (an atom by two atoms around it with the same mean) can
   only raise the expectation of a convex function (Jensen, given the other factors). So every
   rounding to the grid below is such a split. An atom above the grid is split between 0 and
   infinity: `lost` is the part of the mean that lies at infinity, which counts in full.
2. *Kahane's inequality* (1985). M = Σ_j w_j exp(u_j − G_jj/2) with u ~ N(0, G) and
   G_jl = <m_j, m_l>. If G <= H entry by entry (both positive semi-definite), then E f(M_G) <= E
   f(M_H) for every convex f. Proof: let u(t) = √(1−t) u_G + √t u_H and Z_j = exp(u_j(t) −
   E u_j(t)²/2). Gaussian integration by parts gives d/dt E f(Σ w_j Z_j) = ½ Σ_jl (H − G)_jl
   w_j w_l E[Z_j Z_l f''(M)] >= 0. So correlations may be raised until M has a simple structure.
3. *Joint convexity.* If P = Σ_r v_r P_r then E f(dP/dQ) <= Σ_r v_r E f(dP_r/dQ): telling the
   adversary r can only help it.

All arithmetic is with positive numbers, so that masses have a small *relative* error however far
in the tail they are; `_ROUNDING` is charged for it. Losses above `_LARGEST_LOSS` count as infinite,
so that nothing overflows and no mass that matters vanishes: an epsilon beyond it is inf.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import special

LARGEST_VARIANCE = 400.0
"""Variance of one Gaussian's privacy loss from which on no secrecy is counted: ε > 200."""
NEGLIGIBLE_SHARE = 1e-7
"""Share of delta that an operation may send to infinity."""
_ROUNDING = 1e-8
"""Relative excess charged for floating-point rounding of delta."""
_LARGEST_LOSS, _SMALLEST_LOSS = 250.0, -300.0
"""Ends of every grid. With epsilon up to the largest loss, what is below the smallest is as 0."""
_SMALLEST_DELTA = 1e-70
"""Delta below which masses that vanish would matter: no epsilon is computed."""


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Distribution of a nonnegative variable of mean 1: atoms at 0 and at e^(step · index).

    `step` is in units of privacy loss; `masses` begin at index `first`. `zero` is the probability
    of 0. `lost` is the part of the mean that lies at infinity, with probability 0. `negligible` is
    the part of the mean, or probability, that an operation may send to infinity or 0.
    """

    step: float
    first: int
    masses: np.ndarray
    zero: float
    lost: float
    negligible: float

    @property
    def losses(self) -> np.ndarray:
        """Logarithms of the atoms, shape [atoms]."""
        return self.step * (self.first + np.arange(len(self.masses)))

    def trimmed(self) -> Ratio:
        """Spreads atoms that hardly matter, or are beyond the ends, to 0 and infinity."""
        losses = self.losses
        means = self.masses * np.exp(losses)
        above = np.cumsum(means[::-1])[::-1]
        below = np.cumsum(self.masses)
        # Atoms from `high` on, and below `low`, are dropped.
        high = int(np.searchsorted(-above, -self.negligible))
        high = min(high, int(np.searchsorted(losses, _LARGEST_LOSS, side="right")))
        if high == 0:
            return dataclasses.replace(self, first=0, masses=np.zeros(1), zero=1.0, lost=1.0)
        low = int(np.searchsorted(below, self.negligible))
        low = min(max(low, int(np.searchsorted(losses, _SMALLEST_LOSS))), high - 1)
        masses = self.masses[low:high].copy()
        # Below: from e^x to 0 and the lowest atom, so that the mean stays.
        share = np.exp((np.arange(low) - low) * self.step)
        masses[0] += float(self.masses[:low] @ share)
        zero = (
            self.zero + float(self.masses[:low] @ (1.0 - share)) + float(self.masses[high:].sum())
        )
        lost = self.lost + (float(above[high]) if high < len(above) else 0.0)
        return dataclasses.replace(
            self, first=self.first + low, masses=masses, zero=zero, lost=lost
        )

    def delta(self, epsilon: float) -> float:
        """Computes the larger delta of both directions; 1 beyond the largest loss."""
        if epsilon > _LARGEST_LOSS:
            return 1.0
        return max(self._remove(epsilon), self._add(epsilon))

    def _remove(self, epsilon: float) -> float:
        excess = np.maximum(np.exp(self.losses) - math.exp(epsilon), 0.0)
        return (self.lost + float(self.masses @ excess)) * (1.0 + _ROUNDING)

    def _add(self, epsilon: float) -> float:
        missing = np.maximum(-np.expm1(self.losses + epsilon), 0.0)
        return (self.zero + float(self.masses @ missing)) * (1.0 + _ROUNDING)

    def epsilon(self, delta: float) -> float:
        """Computes the smallest epsilon at a delta, rounded up; inf if there is none."""
        high = min(max(abs(self.losses[0]), abs(self.losses[-1])), _LARGEST_LOSS)
        if delta < _SMALLEST_DELTA or not self.delta(high) <= delta:
            return math.inf
        low = 0.0
        if self.delta(0.0) <= delta:
            return 0.0
        while high - low > 1e-7 * max(high, 1e-3):
            middle = (low + high) / 2.0
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return high


def one(step: float, negligible: float) -> Ratio:
    """Builds the law of the constant 1, the ratio of a distribution to itself."""
    return Ratio(step, 0, np.ones(1), 0.0, 0.0, negligible)


def lognormal(variance: float, step: float, negligible: float) -> Ratio:
    """Builds the distribution of exp(u − variance/2), u ~ N(0, variance).

    It is the likelihood ratio of one Gaussian; `variance` is sensitivity² / noise variance.
    `negligible` is the part of the mean, or the probability, that may be sent to infinity or 0. The
    masses of cells under Q and under P are exact, and split to their edges.
    """
    if variance == 0.0:
        return one(step, negligible)
    scale = math.sqrt(variance)
    reach = -float(special.ndtri(negligible))
    low = math.floor(max(-variance / 2.0 - reach * scale, _SMALLEST_LOSS) / step)
    high = min(math.ceil((variance / 2.0 + reach * scale) / step), int(_LARGEST_LOSS / step))
    edges = np.arange(low, high + 1) * step
    at_q = (edges + variance / 2.0) / scale
    at_p = at_q - scale
    mass = np.exp(_log_cell_masses(at_q))
    mean = np.exp(_log_cell_masses(at_p) - edges[:-1])  # Relative to the lower edge.
    to_high = np.clip((mean - mass) / math.expm1(step), 0.0, mass)
    masses = np.zeros(len(edges))
    masses[:-1] += mass - to_high
    masses[1:] += to_high
    # Below the grid: to 0 and the lowest atom, with the mean; above: to 0 and infinity.
    below = math.exp(special.log_ndtr(at_p[0]) - edges[0])
    masses[0] += below
    zero = max(float(special.ndtr(at_q[0])) - below, 0.0) + float(special.ndtr(-at_q[-1]))
    return Ratio(step, low, masses, zero, float(special.ndtr(-at_p[-1])), negligible)


def _log_cell_masses(edges: np.ndarray) -> np.ndarray:
    """Computes log(Φ(edges[1:]) − Φ(edges[:-1])) without cancellation."""
    left, right = edges[:-1], edges[1:]
    flip = left + right > 0.0
    near = special.log_ndtr(np.where(flip, -left, right))
    far = special.log_ndtr(np.where(flip, -right, left))
    return near + np.log(-np.expm1(far - near))


def product(first: Ratio, second: Ratio) -> Ratio:
    """Computes the law of the product of two independent ratios, as of a composition."""
    masses = np.convolve(first.masses, second.masses)
    zero = first.zero + second.zero - first.zero * second.zero
    return Ratio(
        first.step,
        first.first + second.first,
        masses,
        zero,
        first.lost + second.lost,
        max(first.negligible, second.negligible),
    ).trimmed()


def _add_pairs(
    out: np.ndarray,
    high: np.ndarray,
    low: np.ndarray,
    low_zero: float,
    before: int,
    weight: float,
    step: float,
) -> None:
    """Adds the distribution of weight · X + (1 − weight) · Y to `out`, where X > Y.

    `high` and `low` are the masses of X and Y, shape [size]; `low_zero` is the probability that Y
    is 0. `out` has shape [before + size + 1], and index `before` is the grid index of their first
    atom. The mean lies at most `before` steps below X.
    """
    size, growth = len(high), math.expm1(step)
    last = math.floor(math.log(weight) / step)  # Shift from X where Y hardly matters.
    floor = math.exp(last * step)
    room = floor * (1.0 + growth) - weight
    far = size  # Lag from which on the shift is `last`.
    if room > 0.0:
        lag = math.ceil(-math.log(room / (1.0 - weight)) / step) + 1
        far = min(size, max(1, lag))
    for lag in range(1, far):
        value = weight + (1.0 - weight) * math.exp(-lag * step)
        shift = math.floor(math.log(value) / step)
        below = math.exp(shift * step)
        share = min(max((value - below) / (below * growth), 0.0), 1.0)
        pairs = high[lag:] * low[: size - lag]
        begin = before + lag + shift
        out[begin : begin + size - lag] += (1.0 - share) * pairs
        out[begin + 1 : begin + 1 + size - lag] += share * pairs
    # All farther lags, and Y = 0: the share is linear in Y / X.
    beyond, ratio = np.full(size, low_zero), np.zeros(size)
    if far < size:
        index = np.arange(size)
        beyond[far:] += np.cumsum(low[: size - far])
        scaled = np.cumsum(low[: size - far] * np.exp((index[: size - far] - size) * step))
        ratio[far:] = scaled * np.exp((size - index[far:]) * step)
    base = max(weight / floor - 1.0, 0.0) / growth
    to_upper = np.minimum(base * beyond + (1.0 - weight) / (floor * growth) * ratio, beyond)
    begin = before + last
    out[begin : begin + size] += high * (beyond - to_upper)
    out[begin + 1 : begin + 1 + size] += high * to_upper


def average(left: Ratio, right: Ratio, weight: float) -> Ratio:
    """Bounds the distribution of weight · left + (1 − weight) · right, in convex order.

    Both ratios are independent, on grids of the same step.
    """
    step, first = left.step, min(left.first, right.first)
    size = max(left.first + len(left.masses), right.first + len(right.masses)) - first
    first_masses, second_masses = np.zeros(size), np.zeros(size)
    first_masses[left.first - first :][: len(left.masses)] = left.masses
    second_masses[right.first - first :][: len(right.masses)] = right.masses
    before = math.ceil(-math.log(min(weight, 1.0 - weight)) / step) + 1
    out = np.zeros(before + size + 1)
    out[before:-1] += first_masses * second_masses  # Equal indices.
    _add_pairs(out, first_masses, second_masses, right.zero, before, weight, step)
    if left is right and weight == 0.5:
        out[:] += out
        out[before:-1] -= first_masses * second_masses
    else:
        _add_pairs(out, second_masses, first_masses, left.zero, before, 1.0 - weight, step)
    return Ratio(
        step,
        first - before,
        out,
        left.zero * right.zero,
        weight * left.lost + (1.0 - weight) * right.lost,
        max(left.negligible, right.negligible),
    ).trimmed()


def mean(ratio: Ratio, count: int) -> Ratio:
    """Computes the law of the mean of `count` independent copies."""
    result, members, size = None, 0, 1
    while True:
        if count & 1:
            result = ratio if result is None else average(result, ratio, members / (members + size))
            members += size
        count >>= 1
        if not count:
            assert result is not None
            return result
        ratio, size = average(ratio, ratio, 0.5), 2 * size
