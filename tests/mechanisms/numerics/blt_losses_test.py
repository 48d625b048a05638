"""Tests of the closed forms against coefficients, and against mpmath at 10⁹ rounds."""

import math

import mpmath
import numpy as np
import pytest

from tff_dpftrl.mechanisms import blt
from tff_dpftrl.mechanisms.numerics import blt_losses, toeplitz
from tff_dpftrl.participation import schema as schema_lib

_PRODUCTION = blt.Blt(
    [0.9999999999921251, 0.9944453083640997, 0.8985923474607591, 0.4912001418098778],
    [0.0070314825502323835, 0.10613806907600574, 0.1898159060327625, 0.1966594748073734],
)
_STRATEGIES = {
    "production": _PRODUCTION,
    "one buffer": blt.Blt([0.9], [0.3]),
    "pole at 1 - 1e-12": blt.Blt([1 - 1e-12, 0.99, 0.5], [0.01, 0.1, 0.3]),
    "pole at 1 - 1e-15": blt.Blt([1 - 1e-15, 0.5], [1e-6, 0.3]),
    "negative zero": blt.Blt([0.8, 0.2], [0.5, 0.3]),
    "close poles": blt.Blt([0.9, 0.899999, 0.5], [0.1, 0.1, 0.1]),
    "six": blt.Blt([1 - 10.0**-i for i in range(6, 0, -1)], [0.01 * 2**i for i in range(6)]),
}
_SCHEMAS = [
    (1, 1, 1),
    (2, 1, 2),
    (100, 1, 100),
    (100, 7, 5),
    (1000, 1000, 1),
    (2052, 342, 6),
    (10_000, 10, 1000),
    (10_000, 2500, 4),
    (10_000, 2500, 3),
    (10_000, 3001, 4),
]


def _long_double_prefix_variance(strategy, n):
    """Squared row norms of B by the streaming recurrence, in extended precision."""
    decay = np.array(strategy.buf_decay, dtype=np.longdouble)
    scale = np.array(strategy.output_scale, dtype=np.longdouble)
    buffers, prefix, total, out = decay * 0, np.longdouble(0), np.longdouble(0), []
    for t in range(n):
        noise = np.longdouble(t == 0) - np.sum(scale * buffers)
        buffers = decay * buffers + noise
        prefix += noise
        total += prefix**2
        out.append(total)
    return np.array(out)


@pytest.mark.parametrize("name", _STRATEGIES)
def test_errors_match_brute_force(name):
    strategy = _STRATEGIES[name]
    variance = _long_double_prefix_variance(strategy, 10_000)
    for n in (1, 2, 3, 100, 2052, 10_000):
        assert strategy.max_error(n) ** 2 == pytest.approx(float(variance[n - 1]), rel=1e-12)
        mean = float(np.mean(variance[:n]))
        assert strategy.rms_error(n) ** 2 == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("name", _STRATEGIES)
@pytest.mark.parametrize("n,b,k", _SCHEMAS)
def test_sensitivity_matches_the_sum_of_columns(name, n, b, k):
    strategy, schema = _STRATEGIES[name], schema_lib.MinSep(n, b, k)
    computed = blt_losses.sensitivity_squared(
        1 - np.array(strategy.buf_decay), np.array(strategy.output_scale), schema
    )
    expected = toeplitz.earliest_pattern_norm_squared(strategy.coefficients(n), schema)
    assert computed == pytest.approx(expected, rel=1e-12)


def _mp_sum(x, n):
    return mpmath.mpf(n) if x == 1 else (1 - x**n) / (1 - x)


def _mp_ramp(x, n):
    return (n - x * _mp_sum(x, n)) / (1 - x)


def _mp_reference(strategy, schema):
    """S², MaxError², RmsError² by partial fractions with 80 digits.

    Independent of the module: zeros by polynomial roots, residues by derivatives
    of the numerator, every segment of the sensitivity by itself.
    """
    with mpmath.workdps(80):
        n, b, k = schema.num_rounds, schema.min_sep, schema.effective_participations
        theta = [mpmath.mpf(x) for x in strategy.buf_decay]
        omega = [mpmath.mpf(x) for x in strategy.output_scale]
        d = len(theta)
        s2 = mpmath.mpf(0)
        for m in range(k):
            length = b if m < k - 1 else n - (k - 1) * b
            gain = [_mp_sum(x**b, m + 1) for x in theta]
            s2 += (
                1 + sum(w / x * (g - 1) for w, x, g in zip(omega, theta, gain, strict=True))
            ) ** 2
            s2 += sum(
                omega[i] * omega[j] * gain[i] * gain[j] * _mp_sum(theta[i] * theta[j], length - 1)
                for i in range(d)
                for j in range(d)
            )
        # C(x) = q(x) / Π (1 - θ x). In y = 1/x: Π (y - θ_i) + Σ ω_i Π_{j≠i} (y - θ_j) = 0.
        polynomial = [mpmath.mpf(1)]
        for x in theta:
            polynomial = _mp_times(polynomial, x)
        for i in range(d):
            part = [mpmath.mpf(1)]
            for j in range(d):
                if j != i:
                    part = _mp_times(part, theta[j])
            polynomial = [a + omega[i] * c for a, c in zip(polynomial, [0, *part], strict=True)]
        zeros = mpmath.polyroots(polynomial, maxsteps=500, extraprec=400)
        # b_t: partial fractions of Π (1 - θ x) / ((1 - x) Π (1 - θ̂ x)).
        ratios = [mpmath.mpf(1), *zeros]
        weights = [
            mpmath.fprod(1 - x / r for x in theta)
            / mpmath.fprod(1 - other / r for other in ratios if other != r)
            for r in ratios
        ]
        pairs = [(weights[i] * weights[j], ratios[i] * ratios[j]) for i in range(d + 1)
                 for j in range(d + 1)]  # fmt: skip
        max2 = sum(w * _mp_sum(x, n) for w, x in pairs)
        rms2 = sum(
            w * (mpmath.mpf(n) * (n + 1) / 2 if x == 1 else _mp_ramp(x, n)) for w, x in pairs
        )
        return [float(mpmath.re(value)) for value in (s2, max2, rms2 / n)]


def _mp_times(polynomial, root):
    shifted = [*polynomial, mpmath.mpf(0)]
    lower = [mpmath.mpf(0), *polynomial]
    return [a - root * c for a, c in zip(shifted, lower, strict=True)]


@pytest.mark.parametrize("name", _STRATEGIES)
@pytest.mark.parametrize("n,b,k", [(10**9, 10**8, 6), (10**9, 10**9, 1), (10**6, 1000, 200)])
def test_everything_matches_mpmath(name, n, b, k):
    strategy, schema = _STRATEGIES[name], schema_lib.MinSep(n, b, k)
    s2, max2, rms2 = _mp_reference(strategy, schema)
    computed = blt_losses.sensitivity_squared(
        1 - np.array(strategy.buf_decay), np.array(strategy.output_scale), schema
    )
    assert computed == pytest.approx(s2, rel=1e-12)
    assert strategy.max_error(n) ** 2 == pytest.approx(max2, rel=1e-12)
    assert strategy.rms_error(n) ** 2 == pytest.approx(rms2, rel=1e-12)


def test_mpmath_reference_agrees_with_brute_force_where_both_can_go():
    schema = schema_lib.MinSep(2052, 342, 6)
    s2, max2, rms2 = _mp_reference(_PRODUCTION, schema)
    inverse = toeplitz.inverse_coefficients(_PRODUCTION.coefficients(2052), 2052)
    variance = toeplitz.prefix_noise_variance(inverse)
    assert max2 == pytest.approx(variance[-1], rel=1e-12)
    assert rms2 == pytest.approx(np.mean(variance), rel=1e-12)
    column = _PRODUCTION.coefficients(2052)
    assert s2 == pytest.approx(toeplitz.earliest_pattern_norm_squared(column, schema), rel=1e-12)


def test_participation_in_every_one_of_a_billion_rounds():
    """With k = 10⁹, c sums to 1 + Σ ω / (1 - θ), so S² ≈ n · that², edge effects aside."""
    strategy, n = blt.Blt([0.5], [0.25]), 10**9
    squared = strategy.sensitivity(schema_lib.MinSep(n, 1, n)).squared
    assert squared == pytest.approx(n * 1.5**2, rel=1e-8)
    assert math.isfinite(strategy.max_error(n))
