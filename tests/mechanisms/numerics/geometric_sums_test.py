"""Tests of the geometric sums against mpmath, at every distance from 1."""

import mpmath
import numpy as np
import pytest

from tff_dpftrl.mechanisms.numerics import geometric_sums

mpmath.mp.dps = 60

_GAPS = [1e-15, 1e-12, 1e-9, 3e-7, 4e-5, 1e-3, 0.2, 0.7, 0.999]
_LENGTHS = [1, 2, 3, 17, 1000, 12345, 10**6, 10**9]


def _exact(gap, n):
    """Geometric sum, ramp sum and their slopes by log x, to 60 digits."""
    x = 1 - mpmath.mpf(gap)
    total = (1 - x**n) / (1 - x)
    ramp = (n - x * total) / (1 - x)
    slope = (x * total - n * x**n) / (1 - x)
    ramp_slope = x * (ramp - total - slope) / (1 - x)
    return [float(value) for value in (total, ramp, slope, ramp_slope)]


@pytest.mark.parametrize("n", _LENGTHS)
def test_sums_and_slopes_match_mpmath(n):
    log_ratio = np.log1p(-np.array(_GAPS))
    expected = np.array([_exact(gap, n) for gap in _GAPS]).T
    total = geometric_sums.geometric_sum(log_ratio, n)
    ramp = geometric_sums.ramp_sum(log_ratio, n)
    np.testing.assert_allclose(total, expected[0], rtol=2e-14)
    np.testing.assert_allclose(ramp, expected[1], rtol=2e-14)
    # Slopes only steer the optimiser; they may lose a few digits where they cancel.
    slope = geometric_sums.geometric_sum_slope(log_ratio, n, total)
    np.testing.assert_allclose(slope, expected[2], rtol=1e-12, atol=1e-14)
    ramp_slope = geometric_sums.ramp_sum_slope(log_ratio, n, ramp)
    np.testing.assert_allclose(ramp_slope, expected[3], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 1000])
def test_negative_ratios(n):
    log_ratio, negative = np.log([0.3, 0.9, 0.9]), np.array([True, True, False])
    ratio = np.where(negative, -1, 1) * np.exp(log_ratio)
    powers = ratio[:, np.newaxis] ** np.arange(n)
    np.testing.assert_allclose(
        geometric_sums.geometric_sum(log_ratio, n, negative), powers.sum(axis=1), rtol=1e-13
    )
    np.testing.assert_allclose(
        geometric_sums.ramp_sum(log_ratio, n, negative), powers @ np.arange(n, 0, -1), rtol=1e-13
    )


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 50, 64, 100, 1000, 123457])
def test_summation_nodes_add_up_products_of_exponentials(count):
    nodes, weights = geometric_sums.summation_nodes(count)
    assert np.sum(weights) == pytest.approx(count, rel=1e-14)
    assert len(nodes) <= 32 + 24 * max(0, int(count).bit_length() - 4)
    m = np.arange(count, dtype=float)
    for rate in (0.0, 1e-9, 1e-5, 1e-3, 0.03, 0.4, 3.0, 50.0):
        expected = np.sum(np.exp(-rate * m) * (1 + 1e-6 * m))
        computed = weights @ (np.exp(-rate * nodes) * (1 + 1e-6 * nodes))
        assert computed == pytest.approx(expected, rel=1e-13)


def test_summation_nodes_of_a_billion_terms():
    count = 10**9
    nodes, weights = geometric_sums.summation_nodes(count)
    assert len(nodes) < 700
    for gap in (1e-12, 1e-9, 1e-6, 1e-3, 0.5):
        expected = _exact(gap, count)[0]
        computed = weights @ np.exp(nodes * np.log1p(-gap))
        assert computed == pytest.approx(expected, rel=1e-13)
