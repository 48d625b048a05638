"""Every strategy's sensitivity against the enumeration of every pattern.

For n <= 12 rounds all patterns of all schemas are tried, on the materialised C.
"""

import functools

import numpy as np
import pytest

from tests.mechanisms import examples
from tff_dpftrl.participation import schema as schema_lib

_ROUNDING = 1e-12


@functools.cache
def _indicators(num_rounds, min_sep):
    schema = schema_lib.MinSep(num_rounds, min_sep, num_rounds)
    patterns = list(schema.patterns())
    vectors = np.zeros((len(patterns), num_rounds))
    for vector, pattern in zip(vectors, patterns, strict=True):
        vector[list(pattern)] = 1.0
    return vectors


def _largest(matrix, vectors):
    """Max ‖C u‖² over the vectors u with at most k entries, for k = 1 ... n."""
    num_rounds = matrix.shape[1]
    squares = np.sum((vectors @ matrix.T) ** 2, axis=1)
    sizes = np.count_nonzero(vectors, axis=1)
    return [squares[sizes <= k].max() for k in range(1, num_rounds + 1)]


def _schemas_and_truth(strategy, num_rounds, signs=(1.0,)):
    matrix = strategy.strategy_matrix(num_rounds)
    for min_sep in range(1, num_rounds + 1):
        vectors = _indicators(num_rounds, min_sep)
        if len(signs) > 1:
            rng = np.random.default_rng(0)
            vectors = np.concatenate(
                [vectors] + [vectors * rng.choice(signs, vectors.shape) for _ in range(30)]
            )
        for k, truth in enumerate(_largest(matrix, vectors), start=1):
            yield schema_lib.MinSep(num_rounds, min_sep, k), truth


@pytest.mark.parametrize("num_rounds", range(1, examples.ROUNDS + 1))
@pytest.mark.parametrize("name", examples.EXACT)
def test_exact_under_every_schema(name, num_rounds):
    strategy = examples.EXACT[name]
    for schema, truth in _schemas_and_truth(strategy, num_rounds):
        result = strategy.sensitivity(schema)
        assert result.exact, (schema, result)
        assert result.squared == pytest.approx(truth, rel=_ROUNDING), schema


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("name", examples.BOUNDED)
def test_never_below_and_never_far_above(name, num_rounds):
    strategy, slack = examples.BOUNDED[name]
    for schema, truth in _schemas_and_truth(strategy, num_rounds):
        result = strategy.sensitivity(schema)
        assert truth * (1 - _ROUNDING) <= result.squared <= slack * truth, schema
        if result.exact:
            assert result.squared == pytest.approx(truth, rel=_ROUNDING), schema


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("name", examples.SIGNED)
def test_never_below_any_signs(name, num_rounds):
    strategy = examples.SIGNED[name]
    for schema, computed in _schemas_and_truth(strategy, num_rounds, signs=(1.0, -1.0)):
        assert strategy.sensitivity(schema).squared >= computed * (1 - _ROUNDING), schema


def test_the_signed_cases_are_cases():
    for name, strategy in examples.SIGNED.items():
        matrix = strategy.strategy_matrix(examples.ROUNDS)
        assert np.min(matrix.T @ matrix) < -1e-3, name


@pytest.mark.parametrize("bands", range(1, 6))
def test_banded_is_exact_from_min_sep_equal_to_bands(bands):
    strategy = examples.banded_strategy(bands, signed=True)
    for schema, truth in _schemas_and_truth(strategy, examples.ROUNDS):
        if schema.min_sep >= bands:
            result = strategy.sensitivity(schema)
            assert result.exact
            assert result.squared == pytest.approx(truth, rel=_ROUNDING)
