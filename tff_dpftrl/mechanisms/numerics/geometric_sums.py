"""Sums of powers in closed form, precise for ratios arbitrarily close to 1.

Ratios x are given by their logarithm: a ratio of 1 - 1e-12 keeps its sixteen digits. Arguments
broadcast; results are float64.
"""

from __future__ import annotations

import functools

import numpy as np
from scipy import linalg

_SERIES_TERMS = 14
_SERIES_BELOW = 0.5
_EXPLICIT_TERMS = 32
_NODES_PER_PANEL = 24


def geometric_sum(
    log_ratio: np.ndarray, length: float | np.ndarray, negative: np.ndarray | None = None
) -> np.ndarray:
    """Computes Σ_{t<length} x^t = (1 - x^length) / (1 - x) with x = ± exp(log_ratio).

    `negative` is the sign, entry by entry; None if x is positive, where log_ratio must not be 0,
    and length need not be an integer.
    """
    if negative is None:
        return np.expm1(length * log_ratio) / np.expm1(log_ratio)
    magnitude = np.exp(log_ratio)
    power = np.exp(length * log_ratio) * np.where(np.mod(length, 2) == 1, -1.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        positive = np.expm1(length * log_ratio) / np.expm1(log_ratio)
    return np.where(negative, (1.0 - power) / (1.0 + magnitude), positive)


def geometric_sum_slope(
    log_ratio: np.ndarray, length: float | np.ndarray, total: np.ndarray
) -> np.ndarray:
    """Computes the derivative of `total = geometric_sum(...)` by log x, Σ t x^t, for x in (0, 1).

    It is (x · total - length · x^length) / (1 - x), or its series where length · |log x| is small
    and the difference would cancel.
    """
    ratio, gap = np.exp(log_ratio), -np.expm1(log_ratio)
    slope = (ratio * total - length * np.exp(length * log_ratio)) / gap
    return _replace_small(slope, gap, length, 2, derivative=True)


def ramp_sum(
    log_ratio: np.ndarray, length: float, negative: np.ndarray | None = None
) -> np.ndarray:
    """Computes Σ_{t<length} (length - t) x^t, the sum of the first `length` geometric sums.

    It is (length - x · geometric_sum) / (1 - x), or its series near x = 1. The length is an
    integer; x and `negative` are those of `geometric_sum`.
    """
    total = geometric_sum(log_ratio, length, negative)
    sign = 1.0 if negative is None else np.where(negative, -1.0, 1.0)
    ratio = sign * np.exp(log_ratio)
    gap = (
        -np.expm1(log_ratio)
        if negative is None
        else np.where(negative, 1.0 - ratio, -np.expm1(log_ratio))
    )
    ramp = (length - ratio * total) / gap
    return _replace_small(ramp, gap, length, 2, derivative=False)


def ramp_sum_slope(log_ratio: np.ndarray, length: float, ramp: np.ndarray) -> np.ndarray:
    """Computes the derivative of `ramp_sum` by log x, Σ (length - t) t x^t, for positive x."""
    total = geometric_sum(log_ratio, length)
    slope_of_total = geometric_sum_slope(log_ratio, length, total)
    ratio, gap = np.exp(log_ratio), -np.expm1(log_ratio)
    slope = ratio * (ramp - total - slope_of_total) / gap
    return _replace_small(slope, gap, length, 3, derivative=True)


def _replace_small(
    value: np.ndarray, gap: np.ndarray, length: float | np.ndarray, first: int, derivative: bool
) -> np.ndarray:
    """Puts a binomial series, in place, where length · gap is small and `value` has cancelled.

    Σ_{t<n} x^t = Σ_j (-gap)^j binom(n, j + 1) with gap = 1 - x, and with n + 1 and j + 2 for the
    ramp; a derivative by log x shifts the index by one, and multiplies each term by j + 1 and all
    by x. `first` is the lower index of the first binomial coefficient; the upper one is length if
    it is 1 + derivative, else length + 1.
    """
    small = np.abs(gap) * length < _SERIES_BELOW
    if not np.any(small):
        return value
    gap = np.broadcast_to(gap, value.shape)[small]
    top = np.broadcast_to(length, value.shape)[small] + (first - 1.0 - derivative)
    term = np.ones(len(gap))
    for j in range(first):
        term = term * (top - j) / (j + 1)
    result = term
    for j in range(1, _SERIES_TERMS):
        term = term * gap * (first - 1 + j - top) / (first + j)
        result = result + ((j + 1) * term if derivative else term)
    value[small] = result * (1.0 - gap) if derivative else result
    return value


@functools.lru_cache(maxsize=64)
def summation_nodes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes read-only nodes m_r and weights w_r with Σ_{m<count} f(m) = Σ_r w_r f(m_r).

    Up to 32 terms the nodes are the integers and the weights 1. Beyond, the range is cut into
    panels that double in length, with the Gauss quadrature of the uniform weight on each panel's
    integers: exact for polynomials of degree 47, and to rounding for sums and products of e^{-λm}
    of any λ ≥ 0. So a sum over 10⁹ terms costs about 600 evaluations.
    """
    nodes = [np.arange(min(count, _EXPLICIT_TERMS), dtype=np.float64)]
    weights = [np.ones(len(nodes[0]))]
    start = len(nodes[0])
    while start < count:
        size = min(start, count - start)
        if size <= _NODES_PER_PANEL:
            panel, weight = np.arange(size, dtype=np.float64), np.ones(size)
        else:
            panel, weight = _discrete_gauss(size)
        nodes.append(start + panel)
        weights.append(weight)
        start += size
    result = np.concatenate(nodes), np.concatenate(weights)
    for array in result:
        array.flags.writeable = False
    return result


def _discrete_gauss(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes Gauss quadrature for sums over 0 ... size - 1 (discrete Chebyshev, Golub-Welsch)."""
    j = np.arange(1.0, _NODES_PER_PANEL)
    off_diagonal = np.sqrt(j**2 * (float(size) ** 2 - j**2) / (4.0 * (4.0 * j**2 - 1.0)))
    # Centred at zero and scaled to [-1, 1] for accuracy.
    half = 0.5 * size
    nodes, vectors = linalg.eigh_tridiagonal(np.zeros(_NODES_PER_PANEL), off_diagonal / half)
    return 0.5 * (size - 1) + half * nodes, size * np.square(vectors[0])
