"""Tests of the optimiser of banded Toeplitz strategies."""

import numpy as np
import pytest
from scipy import optimize

from tff_dpftrl.mechanisms import banded_toeplitz, banded_toeplitz_optimize
from tff_dpftrl.mechanisms.numerics import toeplitz
from tff_dpftrl.participation import schema as schema_lib


def _loss(strategy, schema, minimize_rms):
    return strategy.rms_loss(schema) if minimize_rms else strategy.max_loss(schema)


@pytest.mark.parametrize("minimize_rms", [True, False])
@pytest.mark.parametrize(
    "num_rounds,min_sep,k,bands", [(20, 6, 3, 6), (17, 5, 3, 4), (30, 3, 1, 8)]
)
def test_reaches_the_optimum_of_a_generic_optimiser(num_rounds, min_sep, k, bands, minimize_rms):
    schema = schema_lib.MinSep(num_rounds, min_sep, k)

    def loss(free):
        return _loss(banded_toeplitz.BandedToeplitz((1.0, *free)), schema, minimize_rms)

    generic = optimize.minimize(loss, np.full(bands - 1, 0.2), method="BFGS")
    ours = banded_toeplitz_optimize.optimize_banded_toeplitz(
        schema, bands, minimize_rms=minimize_rms
    )
    assert ours.bands == bands
    assert _loss(ours, schema, minimize_rms) == pytest.approx(generic.fun, rel=1e-9)


def test_gradient_matches_differences():
    uses = np.array([3.0, 3, 3, 2, 2, 2])
    weights = np.arange(20, 0, -1.0)
    free = np.random.default_rng(0).random(5) * 0.3
    error = optimize.check_grad(
        lambda x: banded_toeplitz_optimize._log_loss(x, uses, weights)[0],
        lambda x: banded_toeplitz_optimize._log_loss(x, uses, weights)[1],
        free,
    )
    # Forward differences of a function of order one: √eps.
    assert error < 1e-6


def test_newton_reciprocal_agrees_with_forward_substitution():
    c = np.array(banded_toeplitz.BandedToeplitz.fhu(400).coefficients)
    length = 30_001
    assert len(c) * length > banded_toeplitz_optimize._DIRECT_PRODUCTS
    np.testing.assert_allclose(
        banded_toeplitz_optimize._reciprocal(c, length),
        toeplitz.inverse_coefficients(c, length),
        atol=1e-14,
    )


def test_exploding_noise_gives_a_finite_value():
    value, gradient = banded_toeplitz_optimize._log_loss(np.array([5.0]), np.ones(2), np.ones(2000))
    assert np.isfinite(value)
    assert not np.any(gradient)


def test_improves_on_the_start_and_stays_exact():
    schema = schema_lib.MinSep(2052, 342, 6)
    best = banded_toeplitz_optimize.optimize_banded_toeplitz(schema, 342)
    fhu = banded_toeplitz.BandedToeplitz.fhu(342)
    assert best.rms_loss(schema) < 0.985 * fhu.rms_loss(schema)
    assert best.sensitivity(schema).exact


@pytest.mark.slow
def test_a_million_rounds():
    schema = schema_lib.MinSep(10**6, 1000, 20)
    best = banded_toeplitz_optimize.optimize_banded_toeplitz(schema, 100)
    fhu = banded_toeplitz.BandedToeplitz.fhu(100)
    assert best.rms_loss(schema) < 0.75 * fhu.rms_loss(schema)


@pytest.mark.parametrize(
    "min_sep, k, bands, limit",
    [(20, 1, 0, "least 1"), (20, 1, 21, "most 20"), (5, 2, 6, "most min_sep = 5")],
)
def test_bands_out_of_range_are_refused(min_sep, k, bands, limit):
    with pytest.raises(ValueError, match=f"bands must be at {limit}"):
        banded_toeplitz_optimize.optimize_banded_toeplitz(schema_lib.MinSep(20, min_sep, k), bands)


def test_one_band_is_the_identity():
    best = banded_toeplitz_optimize.optimize_banded_toeplitz(schema_lib.MinSep(20, 5, 2), 1)
    assert best.coefficients == (1.0,)
