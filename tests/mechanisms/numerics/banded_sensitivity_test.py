"""Tests of the sensitivity from a Gram matrix against enumeration."""

import itertools

import numpy as np
import pytest

from tff_dpftrl.mechanisms.numerics import banded_sensitivity
from tff_dpftrl.participation import schema as schema_lib


def _random_gram(seed, *, signed):
    rng = np.random.default_rng(seed)
    num_rounds = int(rng.integers(1, 10))
    bands = int(rng.integers(1, num_rounds + 1))
    entries = rng.normal(size=(num_rounds,) * 2) if signed else rng.random((num_rounds,) * 2)
    lag = np.subtract.outer(np.arange(num_rounds), np.arange(num_rounds))
    matrix = np.where((lag >= 0) & (lag < bands), entries, 0.0)
    schema = schema_lib.MinSep(
        num_rounds, int(rng.integers(1, num_rounds + 1)), int(rng.integers(1, num_rounds + 1))
    )
    return matrix, bands, schema


def _largest_over_signs(matrix, schema):
    """Max ‖C s‖² over patterns and signs: a lower bound, exact if signs suffice."""
    best = 0.0
    for pattern in schema.patterns():
        columns = matrix[:, list(pattern)]
        for signs in itertools.product((1.0, -1.0), repeat=len(pattern) - 1):
            best = max(best, np.sum((columns @ np.array((1.0, *signs))) ** 2))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_never_below_enumeration_and_equal_where_exact(seed):
    matrix, bands, schema = _random_gram(seed, signed=False)
    diagonals = banded_sensitivity.gram_diagonals(matrix)
    truth = max(np.sum(matrix[:, list(p)].sum(axis=1) ** 2) for p in schema.patterns())
    for kept in (diagonals, diagonals[:bands]):
        result = banded_sensitivity.from_gram(kept, schema)
        assert truth * (1 - 1e-12) <= result.squared <= 1.3 * truth
        if result.exact:
            assert result.squared == pytest.approx(truth, rel=1e-11)
        if bands <= 2 * schema.min_sep or schema.effective_participations <= 2:
            assert result.exact


@pytest.mark.parametrize("seed", range(60))
def test_never_below_any_signs_if_entries_are_negative(seed):
    matrix, bands, schema = _random_gram(seed, signed=True)
    result = banded_sensitivity.from_gram(banded_sensitivity.gram_diagonals(matrix)[:bands], schema)
    truth = _largest_over_signs(matrix, schema)
    assert result.squared >= truth * (1 - 1e-12)
    if result.exact:
        assert result.squared == pytest.approx(truth, rel=1e-11)


def test_indicator_vectors_understate_if_columns_point_apart():
    # The columns are (1, -1) and (0, 1): their sum has norm 1, their difference √5.
    matrix = np.array([[1.0, 0.0], [-1.0, 1.0]])
    result = banded_sensitivity.from_gram(
        banded_sensitivity.gram_diagonals(matrix), schema_lib.MinSep(2, 1, 2)
    )
    assert result.squared == pytest.approx(5.0)
    assert result.exact


def test_frustrated_signs_are_reported_as_a_bound():
    # Three unit vectors with inner products −1/2 cannot all be aligned by signs.
    angles = 2 * np.pi * np.arange(3) / 3
    matrix = np.stack([np.cos(angles), np.sin(angles)])
    result = banded_sensitivity.from_gram(
        banded_sensitivity.gram_diagonals(matrix), schema_lib.MinSep(3, 1, 3)
    )
    assert result.squared == pytest.approx(6.0)
    assert not result.exact


@pytest.mark.parametrize("seed", range(20))
def test_spaced_maximum_equals_enumeration(seed):
    _, _, schema = _random_gram(seed, signed=False)
    values = np.random.default_rng(seed).random(schema.num_rounds)
    expected = max(values[list(p)].sum() for p in schema.patterns())
    assert banded_sensitivity.spaced_maximum(values, schema) == pytest.approx(expected)


def test_a_schema_of_another_length_is_refused():
    with pytest.raises(ValueError, match="diagonals must have 4 columns"):
        banded_sensitivity.from_gram(np.ones((1, 3)), schema_lib.MinSep(4, 1, 1))
