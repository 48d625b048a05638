"""Privacy of one Gaussian mechanism, exactly and by the older, looser conversions.

A matrix mechanism with sensitivity S and noise multiplier z is a Gaussian
mechanism with `mu = S / z` (sensitivity over standard deviation), that is
mu-Gaussian DP (Dong, Roth & Su 2022), and rho-zCDP with `rho = mu² / 2`.
`epsilon` and `delta` below are the exact trade-off of that mechanism (Balle &
Wang 2018, Theorem 8); the conversions that only know rho are named after what
they convert from, and are never smaller.

dp_accounting's `gaussian_mechanism` solves the same equation to an absolute 1e-12, on
either side: at mu = 1e-8 its epsilon was up to 2e-6 of itself too small, and at epsilon
= 0, delta = 1e-30 its sigma 1e14 times too small. Here errors are relative, and upwards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
from scipy import optimize, special

from tff_dpftrl import validation

_SQRT2 = math.sqrt(2.0)
_SQRT_PI = math.sqrt(math.pi)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)
# Results are moved to the safe side by this much, more than the rounding errors above it.
_SAFETY = 1e-12
# Larger deltas are replaced by this one: 1 − delta would be all rounding error.
_LARGEST_DELTA = 1.0 - 1e-6


def _check_mu(mu: float) -> None:
    if not mu >= 0.0:
        raise validation.UsageError(f"mu (sensitivity / stddev) must be at least 0, got {mu!r}.")


def _check_rho(rho: float) -> None:
    if not rho >= 0.0:
        raise validation.UsageError(f"rho must be at least 0, got {rho!r}.")


def mu_from_rho(rho: float) -> float:
    """Computes the mu of the Gaussian mechanism that is exactly rho-zCDP, √(2 rho)."""
    _check_rho(rho)
    return math.sqrt(2.0) * math.sqrt(rho)


def _minus_erfcx_slope(x: np.ndarray) -> np.ndarray:
    """Returns −erfcx′(x) = 2/√π − 2x·erfcx(x) for x > −1, without cancellation at large x."""
    inverse = np.maximum(x, 1.0) ** -2.0
    series = inverse * (1 - inverse * (1.5 - inverse * (3.75 - inverse * 13.125))) / _SQRT_PI
    return np.where(x > 60.0, series, 2.0 / _SQRT_PI - 2.0 * x * special.erfcx(x))


def _log_delta_at(mu: float, s: float) -> float:
    """Returns the log of delta(epsilon) at epsilon = mu·(s + mu/2), for s >= −mu/2 and mu > 0.

    With u = s/√2 and v = (s + mu)/√2, Balle & Wang's
    Φ(−s) − e^epsilon Φ(−s − mu) is ½ e^(−u²) (erfcx(u) − erfcx(v)).
    """
    u, width = min(s / _SQRT2, 1e300), mu / _SQRT2
    v = u + width
    if u < -5.0:
        upper = special.log_ndtr(-s)
        return float(upper + np.log1p(-0.5 * special.erfcx(v) * math.exp(-u * u - upper)))
    if width < 0.5 or width < 1e-3 * u:  # Where the difference would cancel.
        points = u + width * (_NODES + 1.0) / 2.0
        difference = width / 2.0 * float(_WEIGHTS @ _minus_erfcx_slope(points))
    else:
        difference = float(special.erfcx(u) - special.erfcx(v))
    # What underflows is bounded by the smallest float of its kind.
    return max(-u * u, -sys.float_info.max) + math.log(max(0.5 * difference, 5e-324))


def _root(function: Callable[[float], float], low: float, high: float, *, xtol: float) -> float:
    """Finds where a function that changes its sign between `low` and `high` is 0."""
    return optimize.brentq(  # pyright: ignore[reportReturnType]
        function,
        low,
        high,
        xtol=xtol,
        rtol=1e-15,  # pyright: ignore[reportArgumentType]
    )


def _rounding_of_root(delta: float) -> float:
    """Returns the error of s by the rounding of log(delta), which matters for delta close to 1."""
    return 2e-15 / (1.0 - delta)


def log_delta(mu: float, epsilon: float) -> float:
    """Computes the natural logarithm of the smallest delta, also where delta underflows.

    It is −inf if the mechanism is (epsilon, 0)-DP (mu = 0). It is never too small: where no float
    can hold it, it is the smallest one that can.
    """
    _check_mu(mu)
    if not epsilon >= 0.0:
        raise validation.UsageError(f"epsilon must be at least 0, got {epsilon!r}.")
    if mu == 0.0 or (math.isinf(epsilon) and math.isfinite(mu)):
        return -math.inf
    if math.isinf(mu):
        return 0.0
    return _log_delta_at(mu, epsilon / mu - mu / 2.0)


def delta(mu: float, epsilon: float) -> float:
    """Computes the smallest delta for which the mechanism is (epsilon, delta)-DP.

    Balle & Wang 2018, Theorem 8. Arguments and errors are those of `log_delta`.
    """
    return math.exp(log_delta(mu, epsilon))


def epsilon(mu: float, delta: float) -> float:
    """Computes the smallest epsilon for which the mechanism is (epsilon, delta)-DP.

    `mu` is sensitivity over standard deviation; inf means no noise. Epsilon is rounded up by a
    relative 1e-12, and inf if no float can hold it.
    """
    _check_mu(mu)
    validation.delta(delta)
    if mu == 0.0:
        return 0.0
    if math.isinf(mu):
        return math.inf
    delta = min(delta, _LARGEST_DELTA)
    target = math.log(delta)
    # Below −40 delta is 1, to the last bit.
    lowest, highest = max(-mu / 2.0, -40.0), math.sqrt(-2.0 * target)
    if _log_delta_at(mu, lowest) <= target:
        return 0.0
    # delta <= Φ(−s) < e^(−s²/2), so the root lies below √(2 log 1/delta).
    root = _root(lambda s: _log_delta_at(mu, s) - target, lowest, highest, xtol=1e-14)
    exact = mu * (root + mu / 2.0)
    return exact * (1.0 + _SAFETY) + mu * (_SAFETY + _rounding_of_root(delta))


def mu(epsilon: float, delta: float) -> float:
    """Computes the largest mu whose mechanism is (epsilon, delta)-DP, rounded down.

    The rounding is by a relative 1e-12. A noise standard deviation of sensitivity / mu meets the
    target.
    """
    validation.delta(delta)
    delta = min(delta, _LARGEST_DELTA)
    target = math.log(delta)
    low = high = 1.0
    while log_delta(low, epsilon) > target:
        low /= 4.0
    while log_delta(high, epsilon) <= target:
        high *= 4.0
    root = _root(
        lambda log_mu: log_delta(math.exp(log_mu), epsilon) - target,
        math.log(low),
        math.log(high),
        xtol=1e-15,
    )
    return math.exp(root) * (1.0 - _SAFETY - _rounding_of_root(delta))


def epsilon_from_rho_by_rdp(rho: float, delta: float) -> float:
    """Computes epsilon of *any* rho-zCDP mechanism, by its Rényi divergences.

    The best order α > 1 of Canonne, Kamath & Steinke 2020, Proposition 12:
    `rho α + log(1 − 1/α) + (log(1/delta) − log α) / (α − 1)`. For a Gaussian it
    is looser than `epsilon`.
    """
    _check_rho(rho)
    validation.delta(delta)
    if rho == 0.0 or math.isinf(rho):
        return rho
    log_inverse_delta = -math.log(delta)

    def bound(log_excess: float) -> float:
        excess = math.exp(log_excess)
        order = 1.0 + excess
        return (
            rho * order - math.log1p(1.0 / excess) + (log_inverse_delta - math.log(order)) / excess
        )

    # Every order gives a valid bound: the search only decides how tight it is.
    centre = 0.5 * (math.log(log_inverse_delta) - math.log(rho))
    best = optimize.minimize_scalar(
        bound, bounds=(centre - 6.0, centre + 6.0), method="bounded", options={"xatol": 1e-9}
    )
    return max(0.0, float(best.fun))
