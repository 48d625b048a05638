"""Tests of blockwise variances and gradients against dense algebra."""

import numpy as np
import pytest

from tff_dpftrl.mechanisms.numerics import banded_blocks

# One block, full blocks, a shorter last block, one band.
_SIZES = [(1, 1), (5, 1), (7, 3), (9, 3), (20, 20), (40, 11)]


def _rows(num_rounds, bands):
    rows = np.random.default_rng(bands).random((num_rounds, bands))
    rows[:, 0] += 1.0
    rows[:bands] = np.tril(rows[:bands])
    return rows


def _dense(rows):
    num_rounds, bands = rows.shape
    matrix = np.zeros((num_rounds, num_rounds))
    for t in range(num_rounds):
        for j in range(min(bands, t + 1)):
            matrix[t, t - j] = rows[t, j]
    return matrix


@pytest.mark.parametrize("num_rounds,bands", _SIZES)
def test_variances_match_the_dense_inverse(num_rounds, bands):
    rows = _rows(num_rounds, bands)
    noise = np.linalg.inv(_dense(rows))
    round_variance, prefix_variance = banded_blocks.noise_variances(rows)
    np.testing.assert_allclose(round_variance, np.sum(noise**2, axis=1), rtol=1e-11)
    sums = np.cumsum(noise, axis=0)
    np.testing.assert_allclose(prefix_variance, np.sum(sums**2, axis=1), rtol=1e-11)


@pytest.mark.parametrize("num_rounds,bands", _SIZES)
def test_gradient_matches_the_dense_formula(num_rounds, bands):
    rows = _rows(num_rounds, bands)
    weights = np.random.default_rng(7).random(num_rounds)
    noise = np.linalg.inv(_dense(rows))
    sums = np.tril(np.ones((num_rounds, num_rounds)))
    full = -2.0 * noise.T @ sums.T @ np.diag(weights) @ sums @ noise @ noise.T
    expected = np.zeros_like(rows)
    for t in range(num_rounds):
        for j in range(min(bands, t + 1)):
            expected[t, j] = full[t, t - j]
    variances, gradient = banded_blocks.weighted_error_gradient(rows, lambda _: weights)
    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(variances, banded_blocks.noise_variances(rows)[1])


def test_gradient_matches_differences_when_the_weights_depend_on_the_variances():
    rows = _rows(9, 3)

    def value(changed):
        return np.sum(banded_blocks.noise_variances(changed)[1] ** 3)

    _, gradient = banded_blocks.weighted_error_gradient(rows, lambda v: 3.0 * v**2)
    step = 1e-5
    for t, j in [(0, 0), (4, 1), (8, 2), (6, 0)]:
        up, down = rows.copy(), rows.copy()
        up[t, j] += step
        down[t, j] -= step
        slope = (value(up) - value(down)) / (2 * step)
        assert gradient[t, j] == pytest.approx(slope, rel=1e-6)
