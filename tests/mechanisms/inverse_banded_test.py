"""Tests of strategies whose inverse is banded."""

import math

import numpy as np
import pytest
from scipy import special

from tff_dpftrl.mechanisms import inverse_banded, noise_recipe
from tff_dpftrl.participation import schema as schema_lib

_STRATEGIES = [
    inverse_banded.InverseBanded((1.0,)),
    inverse_banded.InverseBanded((2.0, -0.5, 0.3)),
    inverse_banded.InverseBanded.bisr(4),
    inverse_banded.InverseBanded.lambda_cgd(0.7),
    inverse_banded.InverseBanded.bifr(9, 0.3),
]


@pytest.mark.parametrize("strategy", _STRATEGIES)
@pytest.mark.parametrize("num_rounds", [1, 3, 20])
def test_matrices_and_variances(strategy, num_rounds):
    noise = strategy.noise_matrix(num_rounds)
    for t in range(num_rounds):
        for s in range(num_rounds):
            lag = t - s
            inside = 0 <= lag < strategy.bands
            assert noise[t, s] == (strategy.inverse_coefficients[lag] if inside else 0.0)
    np.testing.assert_allclose(
        noise @ strategy.strategy_matrix(num_rounds), np.eye(num_rounds), atol=1e-12
    )
    np.testing.assert_allclose(
        strategy.round_noise_variance(num_rounds), np.sum(noise**2, axis=1), rtol=1e-12
    )
    np.testing.assert_allclose(
        strategy.prefix_noise_variance(num_rounds),
        np.sum(np.cumsum(noise, axis=0) ** 2, axis=1),
        rtol=1e-12,
    )


@pytest.mark.parametrize("gamma", [0.2, 0.5, 0.9])
def test_bifr_has_the_binomial_series(gamma):
    expected = [(-1) ** j * special.binom(gamma, j) for j in range(12)]
    strategy = inverse_banded.InverseBanded.bifr(12, gamma)
    np.testing.assert_allclose(strategy.inverse_coefficients, expected, rtol=1e-12)


def test_members_of_the_family():
    bisr = inverse_banded.InverseBanded.bisr(3)
    np.testing.assert_allclose(bisr.inverse_coefficients, (1.0, -0.5, -0.125), rtol=1e-15)
    np.testing.assert_allclose(
        inverse_banded.InverseBanded.bifr(2, 0.7).inverse_coefficients,
        inverse_banded.InverseBanded.lambda_cgd(0.7).inverse_coefficients,
    )
    prefix = inverse_banded.InverseBanded.bifr(5, 1.0)
    np.testing.assert_allclose(prefix.strategy_matrix(8), np.tril(np.ones((8, 8))))


@pytest.mark.parametrize("bands", [2, 5, 50])
def test_the_monotone_theorem_applies_to_the_family(bands):
    schema = schema_lib.MinSep(500, 100, 4)
    for gamma in (0.1, 0.5, 0.9):
        assert inverse_banded.InverseBanded.bifr(bands, gamma).sensitivity(schema).exact


def test_coefficients_of_c_that_oscillate_are_bounded():
    strategy = inverse_banded.InverseBanded((1.0, 0.6))  # c_t = (−0.6)^t.
    schema = schema_lib.MinSep(8, 2, 3)
    matrix = strategy.strategy_matrix(8)
    truth = max(np.sum(matrix[:, list(p)].sum(axis=1) ** 2) for p in schema.patterns())
    result = strategy.sensitivity(schema)
    assert result.squared >= truth
    assert not result.exact


def test_recipe_memory_and_round_trip():
    strategy = inverse_banded.InverseBanded([1, -0.5])
    assert strategy.noise_recipe() == noise_recipe.InverseBandedNoise(((1.0, -0.5),))
    assert strategy.memory_copies(100) == 0
    values = strategy.to_dict()
    assert values == {"mechanism": "inverse-banded", "inverse_coefficients": [1.0, -0.5]}
    assert inverse_banded.InverseBanded.from_dict(values) == strategy


@pytest.mark.parametrize("bad", [(), (0.0, 1.0), (-1.0,), (1.0, math.inf), ("x",), None])
def test_bad_coefficients_are_refused(bad):
    with pytest.raises(ValueError, match="inverse_coefficients"):
        inverse_banded.InverseBanded(bad)


def test_bad_parameters_of_the_family_are_refused():
    with pytest.raises(ValueError, match="bands must be at least 1"):
        inverse_banded.InverseBanded.bisr(0)
    for gamma in (0.0, 1.1, -0.5, math.nan):
        with pytest.raises(ValueError, match="gamma must be .* above 0 and at most 1"):
            inverse_banded.InverseBanded.bifr(3, gamma)
    for correlation in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="correlation must be .* at most 1"):
            inverse_banded.InverseBanded.lambda_cgd(correlation)
