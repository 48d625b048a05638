"""Cyclic Poisson sampling of a banded strategy: which Gaussians it composes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tff_dpftrl.accounting import amplified_banded, dp_fedavg, gaussian, guarantee
from tff_dpftrl.mechanisms import banded, banded_toeplitz, identity, tree
from tff_dpftrl.participation import schema as schema_lib


def test_it_is_one_sampled_gaussian_for_each_turn_of_a_group():
    strategy = banded_toeplitz.BandedToeplitz.fhu(10)
    run = amplified_banded.AmplifiedBanded.from_strategy(
        strategy, noise_multiplier=2.0, num_rounds=95, num_groups=10, sampling_probability=0.05
    )
    norm = np.linalg.norm(strategy.strategy_matrix(95), axis=0).max()
    expected = dp_fedavg.DpFedAvg(0.05, 2.0 / norm, 10)
    assert run.epsilon(1e-7) == pytest.approx(expected.epsilon(1e-7), rel=1e-9)


def test_a_client_in_every_round_of_its_group_costs_what_the_schema_does():
    # With q = 1 there is no amplification: the (k, b) guarantee with b = num_groups.
    strategy = banded_toeplitz.BandedToeplitz.fhu(8)
    schema = schema_lib.MinSep(80, 8, 10)
    plain = guarantee.dp_ftrl_guarantee(strategy, noise_multiplier=9.0, schema=schema, delta=1e-6)
    run = amplified_banded.AmplifiedBanded.from_strategy(
        strategy, noise_multiplier=9.0, num_rounds=80, num_groups=8, sampling_probability=1.0
    )
    # The last turn's columns are cut off at the end of the run; here they count in full.
    full = gaussian.epsilon(math.sqrt(10 * (1 / run.sampled.noise_multiplier) ** 2), 1e-6)
    assert full <= run.epsilon(1e-6) <= full * (1 + 1e-4)
    assert plain.epsilon <= run.epsilon(1e-6)
    assert plain.epsilon == pytest.approx(run.epsilon(1e-6), rel=0.1)


def test_sampling_amplifies():
    strategy = banded_toeplitz.BandedToeplitz.fhu(8)

    def epsilon(probability):
        return amplified_banded.AmplifiedBanded.from_strategy(
            strategy,
            noise_multiplier=3.0,
            num_rounds=200,
            num_groups=8,
            sampling_probability=probability,
        ).epsilon(1e-6)

    assert epsilon(0.01) < epsilon(0.1) < epsilon(1.0)


def test_calibration_meets_the_target():
    run = {"num_rounds": 60, "num_groups": 6, "sampling_probability": 0.1}
    strategy = banded_toeplitz.BandedToeplitz.fhu(6)
    noise = amplified_banded.calibrate_noise_multiplier(
        strategy, target_epsilon=1.5, delta=1e-6, **run
    )
    amplified = amplified_banded.AmplifiedBanded.from_strategy(
        strategy, noise_multiplier=noise, **run
    )
    assert 1.5 * (1 - 1e-3) <= amplified.epsilon(1e-6) <= 1.5


def test_identity_with_one_group_is_dp_fedavg():
    run = amplified_banded.AmplifiedBanded.from_strategy(
        identity.Identity(),
        noise_multiplier=1.5,
        num_rounds=100,
        num_groups=1,
        sampling_probability=0.01,
    )
    assert run.sampled == dp_fedavg.DpFedAvg(0.01, 1.5, 100)


def test_bands_of_a_general_banded_matrix_are_counted():
    rows = np.ones((6, 3))
    rows[0, 1:] = rows[1, 2] = 0.0
    assert amplified_banded.num_bands(banded.Banded(rows)) == 3


def test_no_amplification_without_bands():
    with pytest.raises(ValueError, match="banded"):
        amplified_banded.num_bands(tree.Tree(8))


@pytest.mark.parametrize("groups", [3, 4.5, 0])
def test_too_few_groups_are_refused(groups):
    with pytest.raises(ValueError, match="num_groups"):
        amplified_banded.AmplifiedBanded.from_strategy(
            banded_toeplitz.BandedToeplitz.fhu(4),
            noise_multiplier=1.0,
            num_rounds=20,
            num_groups=groups,
            sampling_probability=0.1,
        )
