"""Cyclic Poisson sampling with secret groups: a gain where groups share no rows, and no trap."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.accounting.amplification import all_patterns
from tff_dpftrl.accounting import amplified_banded
from tff_dpftrl.accounting.amplification import secret_groups
from tff_dpftrl.mechanisms import banded_toeplitz, identity

STRATEGIES = {
    1: identity.Identity(),
    2: banded_toeplitz.BandedToeplitz((0.8, 0.6)),
    4: banded_toeplitz.BandedToeplitz((1.0, 0.5, 0.25, 0.125)),
}


def run_of(bands, noise, num_rounds, num_groups, probability):
    return secret_groups.SecretGroups.from_strategy(
        STRATEGIES[bands],
        noise_multiplier=noise,
        num_rounds=num_rounds,
        num_groups=num_groups,
        sampling_probability=probability,
    )


@pytest.mark.parametrize(
    ("bands", "n", "groups", "q"),
    [(1, 8, 4, 0.3), (1, 10, 3, 1.0), (2, 10, 4, 0.5), (2, 9, 5, 0.8), (4, 10, 5, 0.6)],
)
@pytest.mark.parametrize("noise", [0.8, 2.5])
def test_all_patterns(bands, n, groups, q, noise):
    epsilon = run_of(bands, noise, n, groups, q).epsilon(1e-2)
    patterns, chances = all_patterns.cyclic_chances(n, groups, q)
    sums = patterns @ STRATEGIES[bands].strategy_matrix(n).T / noise
    rng = np.random.default_rng(groups)
    for mean, error in all_patterns.simulated_deltas(sums, chances, epsilon, rng):
        assert mean - 5 * error <= 1e-2


def test_it_is_tight_for_independent_noise():
    epsilon = run_of(1, 1.0, 8, 4, 0.5).epsilon(1e-2)
    patterns, chances = all_patterns.cyclic_chances(8, 4, 0.5)
    rng = np.random.default_rng(0)
    both = all_patterns.simulated_deltas(patterns, chances, epsilon, rng, 200_000)
    assert max(mean + 5 * error for mean, error in both) >= 1e-2


@pytest.mark.parametrize("noise", [1.0, 2.0, 4.0])
def test_secrecy_is_worth_something(noise):
    run = run_of(1, noise, 100, 4, 0.3)
    assert 0.4 * run.known.epsilon(1e-3) < run.epsilon(1e-3) < 0.85 * run.known.epsilon(1e-3)


def test_as_many_bands_as_groups_gain_nothing():
    run = run_of(4, 1.0, 100, 7, 0.3)
    assert run.num_apart == 1
    assert run.epsilon(1e-3) == run.known.epsilon(1e-3)


def test_known_groups_are_accounted_for_elsewhere():
    known = amplified_banded.AmplifiedBanded.from_strategy(
        STRATEGIES[2], noise_multiplier=1.0, num_rounds=30, num_groups=6, sampling_probability=0.2
    )
    assert run_of(2, 1.0, 30, 6, 0.2).known == known


def test_calibration_meets_the_target():
    noise = secret_groups.calibrate_noise_multiplier(
        STRATEGIES[2],
        num_rounds=60,
        num_groups=6,
        sampling_probability=0.2,
        target_epsilon=2.0,
        delta=1e-6,
    )
    assert 2.0 * (1 - 1e-3) <= run_of(2, noise, 60, 6, 0.2).epsilon(1e-6) <= 2.0


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
