"""Tests of strategies whose inverse is banded."""

import math

import numpy as np
import pytest
from scipy import special

from tests.mechanisms import examples
from tff_dpftrl.mechanisms import inverse_banded
from tff_dpftrl.participation import schema as schema_lib


@pytest.mark.parametrize("num_rounds", [1, 3, 20])
@pytest.mark.parametrize("coefficients", [(1.0,), (2.0, -0.5, 0.3), (1.0, -0.7)])
def test_the_inverse_has_the_bands(coefficients, num_rounds):
    strategy = inverse_banded.InverseBanded(coefficients)
    expected = sum(c * np.eye(num_rounds, k=-lag) for lag, c in enumerate(coefficients))
    np.testing.assert_array_equal(strategy.noise_matrix(num_rounds), expected)
    examples.check_matrices(strategy, num_rounds)


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
