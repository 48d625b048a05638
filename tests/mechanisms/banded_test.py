"""Tests of banded strategies against dense matrices."""

import numpy as np
import pytest

from tests.mechanisms import examples
from tff_dpftrl.mechanisms import banded
from tff_dpftrl.mechanisms.numerics import banded_sensitivity
from tff_dpftrl.participation import schema as schema_lib

_SIZES = [(1, 1), (5, 1), (7, 3), (9, 3), (20, 20), (40, 11)]


def _random_rows(num_rounds, bands, seed=0):
    rows = np.random.default_rng(seed).normal(size=(num_rounds, bands))
    rows[:, 0] = np.abs(rows[:, 0]) + 2.0
    rows[:bands] = np.tril(rows[:bands])
    return rows


@pytest.mark.parametrize("num_rounds,bands", _SIZES)
def test_matrices_hold_the_rows_and_invert_each_other(num_rounds, bands):
    rows = _random_rows(num_rounds, bands)
    strategy = banded.Banded(rows)
    for n in {num_rounds, (num_rounds + 1) // 2}:
        matrix = strategy.strategy_matrix(n)
        expected = [
            [rows[t, t - s] if 0 <= t - s < bands else 0.0 for s in range(n)] for t in range(n)
        ]
        np.testing.assert_array_equal(matrix, expected)
        examples.check_matrices(strategy, n)
        columns = strategy.columns(n)
        for t in range(n):
            column = matrix[t:, t][: columns.shape[1]]
            np.testing.assert_array_equal(columns[t, : len(column)], column)


@pytest.mark.parametrize("num_rounds,bands", _SIZES)
def test_sensitivity_agrees_with_the_dense_gram_matrix(num_rounds, bands):
    strategy = banded.Banded(_random_rows(num_rounds, bands))
    diagonals = banded_sensitivity.gram_diagonals(strategy.strategy_matrix(num_rounds))
    for min_sep in range(1, num_rounds + 1):
        for k in (1, 2, 3, 7):
            schema = schema_lib.MinSep(num_rounds, min_sep, k)
            ours = strategy.sensitivity(schema)
            dense = banded_sensitivity.from_gram(diagonals, schema)
            assert ours.squared == pytest.approx(dense.squared, rel=1e-12)
            if min_sep >= bands:
                assert ours.exact


def test_unequal_columns_are_chosen_best_not_earliest():
    strategy = banded.Banded(np.array([[1.0], [3.0], [1.0], [2.0], [2.5]]))
    # Rounds 1 and 4 are better than 0, 2, 4 (with k = 2) and than 1, 3.
    assert strategy.sensitivity(schema_lib.MinSep(5, 2, 2)).squared == 9.0 + 6.25


def test_bands_that_overlap_add_within_a_pattern():
    rows = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    result = banded.Banded(rows).sensitivity(schema_lib.MinSep(3, 1, 3))
    # C (1, 1, 1) = (1, 2, 2).
    assert (result.squared, result.exact) == (9.0, True)


@pytest.mark.slow
def test_a_long_horizon_needs_no_dense_matrix():
    num_rounds, bands = 20_000, 4
    rows = np.tile([1.0, 0.5, 0.375, 0.3125], (num_rounds, 1))
    rows[:bands] = np.tril(rows[:bands])
    strategy = banded.Banded(rows)
    schema = schema_lib.MinSep(num_rounds, 10, 5)
    assert strategy.sensitivity(schema).squared == pytest.approx(5 * np.sum(rows[-1] ** 2))
    # A Toeplitz C: the sum of the noise grows by 1 / (Σ c)² a round in the end.
    variances = strategy.prefix_noise_variance(num_rounds)
    assert variances[-1] - variances[-2] == pytest.approx(1 / 2.1875**2, rel=1e-9)


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((3, 0)),
        np.ones(3),
        np.ones((2, 3)),
        np.ones((3, 2)),  # A non-zero entry before the first column.
        np.array([[1.0], [0.0]]),
        np.array([[1.0], [np.nan]]),
        np.array([[1.0], [np.inf]]),
    ],
)
def test_bad_rows_are_refused(rows):
    with pytest.raises(ValueError, match="rows"):
        banded.Banded(rows)


def test_rows_are_copied_and_read_only():
    rows = np.ones((3, 1))
    strategy = banded.Banded(rows)
    rows[0] = 5.0
    assert strategy.rows[0, 0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        strategy.rows[0, 0] = 2.0
