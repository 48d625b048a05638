"""Every strategy's sensitivity against the enumeration of every pattern.

For n <= 12 rounds all patterns of all schemas are tried, on the materialised C.
"""

import functools

import numpy as np
import pytest

from tff_dpftrl.mechanisms import (
    banded,
    banded_toeplitz,
    blt,
    dense,
    identity,
    inverse_banded,
    restarts,
    tree,
)
from tff_dpftrl.participation import schema as schema_lib

_MAX_ROUNDS = 12
_ROUNDING = 1e-12


def _random(bands, *, signed):
    rng = np.random.default_rng(bands)
    lag = np.subtract.outer(np.arange(_MAX_ROUNDS), np.arange(_MAX_ROUNDS))
    entries = rng.normal(size=lag.shape) if signed else rng.random(lag.shape)
    return np.where((lag > 0) & (lag < bands), entries, 0.0) + np.diag(
        1.0 + rng.random(_MAX_ROUNDS)
    )


def _banded(bands, *, signed):
    matrix = _random(bands, signed=signed)
    rows = np.zeros((_MAX_ROUNDS, bands))
    for j in range(bands):
        rows[j:, j] = np.diagonal(matrix, -j)
    return banded.Banded(rows)


_TREE = tree.Tree(_MAX_ROUNDS)
_BLT = blt.Blt((0.95, 0.5), (0.3, 0.2))

# Strategies whose stated sensitivity must be exact under every schema.
_EXACT = {
    "identity": identity.Identity(),
    "tree": _TREE,
    "vanilla tree": tree.Tree(_MAX_ROUNDS, variance_reduction=False),
    "full tree": tree.FullTree(),
    "blt": _BLT,
    "two-banded": _banded(2, signed=False),
    "fhu": banded_toeplitz.BandedToeplitz.fhu(5),
    "bisr": inverse_banded.InverseBanded.bisr(4),
    "lambda-cgd": inverse_banded.InverseBanded.lambda_cgd(0.7),
    "restarted tree": restarts.Restarted(_TREE, (0, 3, 8)),
    "restarted blt": restarts.Restarted(_BLT, (0, 4, 9)),
    "restarted bisr": restarts.Restarted(inverse_banded.InverseBanded.bisr(4), (0, 5)),
}
# Strategies that may get an upper bound, at most this much above the truth.
_BOUNDED = {
    "banded": (_banded(4, signed=False), 1.25),
    "dense": (dense.Dense(_random(_MAX_ROUNDS, signed=False)), 1.35),
    "rising banded Toeplitz": (banded_toeplitz.BandedToeplitz((1.0, 0.1, 0.8)), 1.35),
    "blt that rises": (blt.Blt((0.9, 0.6), (0.8, 0.7)), 1.6),
    "restarted banded": (restarts.Restarted(_banded(4, signed=False), (0, 6)), 1.25),
}
# CᵀC has negative entries: the worst contributions point in different directions.
_SIGNED = {
    "signed banded": _banded(3, signed=True),
    "signed dense": dense.Dense(_random(_MAX_ROUNDS, signed=True)),
    "signed Toeplitz": banded_toeplitz.BandedToeplitz((1.0, -0.4, 0.3)),
    "oscillating inverse": inverse_banded.InverseBanded((1.0, 0.6)),
    "restarted signed": restarts.Restarted(_banded(3, signed=True), (0, 5)),
}


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


@pytest.mark.parametrize("num_rounds", range(1, _MAX_ROUNDS + 1))
@pytest.mark.parametrize("name", _EXACT)
def test_exact_under_every_schema(name, num_rounds):
    strategy = _EXACT[name]
    for schema, truth in _schemas_and_truth(strategy, num_rounds):
        result = strategy.sensitivity(schema)
        assert result.exact, (schema, result)
        assert result.squared == pytest.approx(truth, rel=_ROUNDING), schema


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("name", _BOUNDED)
def test_never_below_and_never_far_above(name, num_rounds):
    strategy, slack = _BOUNDED[name]
    for schema, truth in _schemas_and_truth(strategy, num_rounds):
        result = strategy.sensitivity(schema)
        assert truth * (1 - _ROUNDING) <= result.squared <= slack * truth, schema
        if result.exact:
            assert result.squared == pytest.approx(truth, rel=_ROUNDING), schema


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("name", _SIGNED)
def test_never_below_any_signs(name, num_rounds):
    strategy = _SIGNED[name]
    for schema, computed in _schemas_and_truth(strategy, num_rounds, signs=(1.0, -1.0)):
        assert strategy.sensitivity(schema).squared >= computed * (1 - _ROUNDING), schema


def test_the_signed_cases_are_cases():
    for name, strategy in _SIGNED.items():
        matrix = strategy.strategy_matrix(_MAX_ROUNDS)
        assert np.min(matrix.T @ matrix) < -1e-3, name


@pytest.mark.parametrize("bands", range(1, 6))
def test_banded_is_exact_from_min_sep_equal_to_bands(bands):
    strategy = _banded(bands, signed=True)
    for schema, truth in _schemas_and_truth(strategy, _MAX_ROUNDS):
        if schema.min_sep >= bands:
            result = strategy.sensitivity(schema)
            assert result.exact
            assert result.squared == pytest.approx(truth, rel=_ROUNDING)
