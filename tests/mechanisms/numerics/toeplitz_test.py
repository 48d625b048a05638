"""Tests of Toeplitz matrices against dense matrices and every participation pattern."""

import itertools

import numpy as np
import pytest

from tff_dpftrl.mechanisms.numerics import toeplitz
from tff_dpftrl.participation import schema as schema_lib

_SQUARE_ROOT = np.cumprod([1.0] + [(2 * t - 1) / (2 * t) for t in range(1, 12)])
_COLUMNS = {
    "square root": _SQUARE_ROOT,
    "banded": np.array([1.0, 0.6, 0.3]),
    "constant": np.ones(12),
    "increasing": np.array([1.0, 1.3, 0.2, 0.4]),
    "signs": np.array([1.0, -0.5, 0.25, 0.7, -0.1]),
    "gap": np.array([1.0, 0.0, 0.0, 0.9]),
}


def _worst_pattern(matrix, schema):
    """Maximum over patterns of Σ |CᵀC|: what contributions of any direction could reach."""
    gram = np.abs(matrix.T @ matrix)
    return max(gram[np.ix_(pattern, pattern)].sum() for pattern in schema.patterns())


def test_matrix_and_inverse_match_dense_algebra():
    dense = toeplitz.matrix(_SQUARE_ROOT, 12)
    np.testing.assert_array_equal(dense[:, 0], _SQUARE_ROOT)
    np.testing.assert_array_equal(dense[3:, 3], _SQUARE_ROOT[:-3])
    assert np.all(np.triu(dense, 1) == 0)
    inverse = toeplitz.inverse_coefficients(_SQUARE_ROOT, 12)
    np.testing.assert_allclose(toeplitz.matrix(inverse, 12) @ dense, np.eye(12), atol=1e-14)


def test_coefficients_past_the_end_are_zero():
    dense = toeplitz.matrix([2.0, 1.0], 5)
    np.testing.assert_array_equal(dense, 2 * np.eye(5) + np.eye(5, k=-1))
    inverse = toeplitz.inverse_coefficients([2.0, 1.0], 5)
    np.testing.assert_allclose(inverse, 0.5 * (-0.5) ** np.arange(5))


def test_noise_variances_are_row_norms():
    n = 12
    inverse = np.linalg.inv(toeplitz.matrix(_SQUARE_ROOT, n))
    prefix = np.cumsum(inverse, axis=0)
    np.testing.assert_allclose(
        toeplitz.prefix_noise_variance(inverse[:, 0]), np.sum(prefix**2, axis=1), rtol=1e-13
    )
    np.testing.assert_allclose(
        toeplitz.round_noise_variance(inverse[:, 0]), np.sum(inverse**2, axis=1), rtol=1e-13
    )


@pytest.mark.parametrize("length, num_rounds, min_sep, k", [
    (3, 50, 4, 9), (4, 50, 4, 13), (12, 50, 4, 13), (12, 50, 4, 5), (12, 50, 1, 50), (50, 50, 7, 8),
    (12, 13, 5, 3), (1, 50, 50, 1),
])  # fmt: skip
def test_the_earliest_pattern_is_the_sum_of_its_columns(length, num_rounds, min_sep, k):
    column = np.random.default_rng(1).normal(size=length)
    summed = toeplitz.matrix(column, num_rounds)[:, : k * min_sep : min_sep].sum(axis=1)
    schema = schema_lib.MinSep(num_rounds, min_sep, k)
    found = toeplitz.earliest_pattern_norm_squared(column, schema)
    assert found == pytest.approx(summed @ summed, rel=1e-12)


@pytest.mark.parametrize("coefficients", [[1.0, -0.98], [2.0, 1.9], [1.0, -1.2, 0.4, 0.1]])
def test_what_a_decayed_inverse_leaves_out_is_negligible(coefficients):
    whole = toeplitz.inverse_coefficients(np.array(coefficients), 50_000)
    decayed = toeplitz.decayed_inverse(np.array(coefficients), 50_000)
    assert len(decayed) < len(whole)
    np.testing.assert_array_equal(decayed, whole[: len(decayed)])
    assert np.sum(np.abs(whole[len(decayed) :])) <= 2.0**-60 * np.max(np.abs(whole))


def test_an_inverse_that_does_not_decay_is_computed_or_refused():
    ones = toeplitz.decayed_inverse(np.array([1.0, -1.0]), 50_000)
    np.testing.assert_array_equal(ones, np.ones(50_000))
    with pytest.raises(ValueError, match="num_rounds=1000000000 is too many for this strategy"):
        toeplitz.decayed_inverse(np.array([1.0, -1.0]), 10**9)


@pytest.mark.parametrize("length", [1, 2, 3, 99, 100, 101, 5000])
def test_exponential_sums_match_a_loop(length):
    decay, scale = np.array([0.999, 0.4, -0.3]), np.array([0.2, 1.0, 0.7])
    expected = [float(np.sum(scale * decay**t)) for t in range(length)]
    np.testing.assert_allclose(
        toeplitz.exponential_sums(decay, scale, length), expected, rtol=1e-12, atol=1e-14
    )


def test_exponential_sums_of_nothing_are_empty_or_zero():
    assert toeplitz.exponential_sums(np.array([0.5]), np.array([1.0]), 0).shape == (0,)


@pytest.mark.parametrize("name", _COLUMNS)
def test_sensitivity_is_exact_or_a_bound_on_every_pattern(name):
    column = _COLUMNS[name]
    for n, b, k in itertools.product([1, 2, 5, 9, 12], [1, 2, 3, 5, 12], [1, 2, 3, 12]):
        schema = schema_lib.MinSep(n, b, k)
        oracle = _worst_pattern(toeplitz.matrix(column, n), schema)
        sensitivity = toeplitz.sensitivity(column, schema)
        if sensitivity.exact:
            assert sensitivity.squared == pytest.approx(oracle, rel=1e-13)
        else:
            assert sensitivity.squared >= oracle * (1 - 1e-13)
            assert "bound" in sensitivity.method


def test_monotone_and_separated_columns_are_exact():
    schema = schema_lib.MinSep(12, 3, 4)
    assert toeplitz.sensitivity(_SQUARE_ROOT, schema).exact
    assert toeplitz.sensitivity(_COLUMNS["increasing"][:3], schema).exact  # bands ≤ min_sep
    assert not toeplitz.sensitivity(_COLUMNS["increasing"], schema).exact
    assert toeplitz.sensitivity(_COLUMNS["increasing"], schema_lib.MinSep(12, 3, 1)).exact


def test_bad_coefficients_are_refused():
    with pytest.raises(ValueError, match="no inverse"):
        toeplitz.inverse_coefficients([0.0, 1.0], 3)
    with pytest.raises(ValueError, match="finite"):
        toeplitz.sensitivity([1.0, np.nan], schema_lib.MinSep(3, 1, 2))
