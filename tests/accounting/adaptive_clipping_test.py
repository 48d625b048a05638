"""Theorem 1: two Gaussian streams are one, whatever the strategy."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tff_dpftrl.accounting import adaptive_clipping, guarantee
from tff_dpftrl.mechanisms import tree
from tff_dpftrl.participation import schema as schema_lib


@given(noise=st.floats(1e-3, 1e3), factor=st.floats(0.51, 1e3))
def test_split_and_total_are_inverse(noise, factor):
    bits = factor * noise
    update = adaptive_clipping.update_noise_multiplier(noise, bits)
    assert update > noise
    assert adaptive_clipping.total_noise_multiplier(update, bits) == pytest.approx(noise, rel=1e-9)


def test_gboard_default_split():
    # Xu et al. 2023, Algorithm 1: sigma_b = m / 20 with m = 6500 clients and z = 7.
    found = adaptive_clipping.update_noise_multiplier(7.0, 6500 / 20)
    assert found == pytest.approx((7.0**-2 - 650.0**-2) ** -0.5, rel=1e-14)


def test_both_streams_together_cost_what_the_total_costs():
    # The two streams as one Gaussian over stacked coordinates, each in units of its own noise.
    schema = schema_lib.MinSep(12, 4, 3)
    total, bits_stddev = 2.0, 1.7
    update = adaptive_clipping.update_noise_multiplier(total, bits_stddev)
    matrix = tree.Tree(12).strategy_matrix(12)
    stacked = np.concatenate([matrix / update, 0.5 * matrix / bits_stddev])
    mu = max(np.linalg.norm(stacked[:, list(p)].sum(axis=1)) for p in schema.patterns())
    claimed = guarantee.dp_ftrl_guarantee(
        tree.Tree(12), noise_multiplier=total, schema=schema, delta=1e-6
    )
    assert claimed.mu == pytest.approx(mu, rel=1e-12)
    # The same by composition of the two streams.
    streams = [
        guarantee.Guarantee("tree", z, schema, tree.Tree(12).sensitivity(schema), 1e-6)
        for z in (update, 2 * bits_stddev)
    ]
    assert guarantee.composed_rho(streams) == pytest.approx(claimed.rho_zcdp, rel=1e-12)


def test_no_noise_in_a_stream_is_no_noise():
    assert adaptive_clipping.total_noise_multiplier(0.0, 1.0) == 0.0
    assert adaptive_clipping.total_noise_multiplier(1.0, 0.0) == 0.0


@pytest.mark.parametrize("bits", [0.0, 0.5, 1.0, math.nan])
def test_too_little_noise_in_the_bits_is_refused(bits):
    with pytest.raises(ValueError, match="bit_sum_stddev"):
        adaptive_clipping.update_noise_multiplier(2.0, bits)


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan])
def test_total_without_noise_is_refused(noise):
    with pytest.raises(ValueError, match="noise_multiplier"):
        adaptive_clipping.update_noise_multiplier(noise, 1.0)


def test_negative_stddevs_are_refused():
    with pytest.raises(ValueError, match="bit_sum_stddev"):
        adaptive_clipping.total_noise_multiplier(1.0, -1.0)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
