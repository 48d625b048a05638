"""Theorem 1: two Gaussian streams are one, whatever the strategy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tff_dpftrl.mechanisms import noise_split, tree
from tff_dpftrl.participation import schema as schema_lib


@given(noise=st.floats(1e-3, 1e3), factor=st.floats(0.51, 1e3))
def test_split_and_total_are_inverse(noise, factor):
    counts = factor * noise
    update = noise_split.update_noise_multiplier(noise, counts)
    # Far more noise on the count than on the updates leaves z where it was, in float64.
    assert update >= noise
    assert 1 / math.hypot(1 / update, 0.5 / counts) == pytest.approx(noise, rel=1e-9)


def test_gboard_default_split():
    # Xu et al. 2023, Algorithm 1: sigma_b = m / 20 with m = 6500 clients and z = 7.
    computed = noise_split.update_noise_multiplier(7.0, 6500 / 20)
    assert computed == pytest.approx((7.0**-2 - 650.0**-2) ** -0.5, rel=1e-14)


def test_both_streams_together_cost_what_the_total_costs():
    # The two streams as one Gaussian over stacked coordinates, each in units of its own noise.
    schema = schema_lib.MinSep(12, 4, 3)
    total, counts_stddev = 2.0, 1.7
    update = noise_split.update_noise_multiplier(total, counts_stddev)
    matrix = tree.Tree(12).strategy_matrix(12)
    stacked = np.concatenate([matrix / update, 0.5 * matrix / counts_stddev])
    mu = max(np.linalg.norm(stacked[:, list(p)].sum(axis=1)) for p in schema.patterns())
    claimed = tree.Tree(12).sensitivity(schema).value / total
    assert claimed == pytest.approx(mu, rel=1e-12)


def test_no_noise_needs_none_in_the_count():
    assert noise_split.update_noise_multiplier(0.0, 0.0) == 0.0


@pytest.mark.parametrize("stddev", [0.0, 0.5, 1.0, -1.0, math.nan, math.inf])
def test_too_little_noise_in_the_count_is_refused(stddev):
    with pytest.raises(ValueError, match="clipped_count_stddev must be"):
        noise_split.update_noise_multiplier(2.0, stddev)


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf])
def test_noise_that_is_no_number_is_refused(noise):
    with pytest.raises(ValueError, match="noise_multiplier must be"):
        noise_split.update_noise_multiplier(noise, 1.0)
