"""Tests of banded Toeplitz strategies."""

import math

import numpy as np
import pytest

from tests.mechanisms import examples
from tff_dpftrl.mechanisms import banded, banded_toeplitz
from tff_dpftrl.mechanisms.numerics import banded_sensitivity
from tff_dpftrl.participation import schema as schema_lib

_COEFFICIENTS = [(1.0,), (2.0, 0.5), (1.0, 0.2, 0.9), (1.0, -0.4, 0.3, 0.1)]


@pytest.mark.parametrize("coefficients", _COEFFICIENTS)
@pytest.mark.parametrize("num_rounds", [1, 2, 3, 17])
def test_agrees_with_the_general_banded_strategy(coefficients, num_rounds):
    general = banded.Banded(_rows(coefficients, num_rounds))
    strategy = banded_toeplitz.BandedToeplitz(coefficients)
    examples.check_matrices(strategy, num_rounds)
    np.testing.assert_array_equal(
        strategy.strategy_matrix(num_rounds), general.strategy_matrix(num_rounds)
    )
    for min_sep in range(1, num_rounds + 1):
        for k in (1, 2, 5):
            schema = schema_lib.MinSep(num_rounds, min_sep, k)
            ours, theirs = strategy.sensitivity(schema), general.sensitivity(schema)
            if ours.exact and theirs.exact:
                assert ours.squared == pytest.approx(theirs.squared, rel=1e-12)


def _rows(coefficients, num_rounds):
    bands = min(len(coefficients), num_rounds)
    rows = np.tile(coefficients[:bands], (num_rounds, 1))
    rows[:bands] = np.tril(rows[:bands])
    return rows


@pytest.mark.parametrize("coefficients", _COEFFICIENTS)
@pytest.mark.parametrize("num_rounds", [1, 3, 11])
def test_gram_diagonals_match_the_dense_matrix(coefficients, num_rounds):
    strategy = banded_toeplitz.BandedToeplitz(coefficients)
    bands = min(len(coefficients), num_rounds)
    np.testing.assert_allclose(
        strategy._gram_diagonals(num_rounds),
        banded_sensitivity.gram_diagonals(strategy.strategy_matrix(num_rounds))[:bands],
        atol=1e-14,
    )


def test_fhu_has_the_central_binomials():
    expected = [math.comb(2 * t, t) / 4**t for t in range(40)]
    np.testing.assert_allclose(banded_toeplitz.BandedToeplitz.fhu(40).coefficients, expected)


def test_full_fhu_is_the_square_root_of_the_prefix_sums():
    root = banded_toeplitz.BandedToeplitz.fhu(30).strategy_matrix(30)
    np.testing.assert_allclose(root @ root, np.tril(np.ones((30, 30))), atol=1e-13)


def test_coefficients_that_rise_are_not_taken_for_the_earliest_pattern():
    strategy = banded_toeplitz.BandedToeplitz((1.0, 0.0, 0.0, 1.0, 1.0))
    schema = schema_lib.MinSep(12, 2, 2)
    matrix = strategy.strategy_matrix(12)
    earliest = np.sum(matrix[:, [0, 2]].sum(axis=1) ** 2)
    result = strategy.sensitivity(schema)
    assert earliest < examples.worst(matrix, schema) == pytest.approx(result.squared)
    assert result.exact


def test_a_long_rising_filter_gets_a_bound_without_a_large_matrix(monkeypatch):
    monkeypatch.setattr(banded_toeplitz, "_MAX_GRAM_ENTRIES", 0)
    strategy = banded_toeplitz.BandedToeplitz((1.0, 0.2, 0.9))
    schema = schema_lib.MinSep(12, 1, 3)
    bound = strategy.sensitivity(schema)
    monkeypatch.undo()
    assert not bound.exact
    assert strategy.sensitivity(schema).squared <= bound.squared


@pytest.mark.parametrize("bad", [(), (0.0, 1.0), (-1.0,), (1.0, math.nan), ("x",), None])
def test_bad_coefficients_are_refused(bad):
    with pytest.raises(ValueError, match="coefficients"):
        banded_toeplitz.BandedToeplitz(bad)
    with pytest.raises(ValueError, match="bands must be at least 1"):
        banded_toeplitz.BandedToeplitz.fhu(0)
