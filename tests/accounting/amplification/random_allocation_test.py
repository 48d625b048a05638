"""Random allocation against all patterns, Poisson sampling, and balls in bins."""

from __future__ import annotations

import itertools
import math
import sys

import numpy as np
import pytest

from tests.accounting.amplification import all_patterns
from tff_dpftrl.accounting import dp_fedavg, gaussian
from tff_dpftrl.accounting.amplification import balls_in_bins, random_allocation
from tff_dpftrl.mechanisms import identity


def allocated(noise, num_rounds, rounds_per_client):
    return random_allocation.RandomAllocation(noise, num_rounds, rounds_per_client)


@pytest.mark.parametrize(("n", "k"), [(10, 1), (10, 3), (6, 4), (4, 4)])
@pytest.mark.parametrize("noise", [0.7, 2.0])
def test_all_patterns(n, k, noise):
    patterns = np.array([p for p in itertools.product((0, 1), repeat=n) if sum(p) == k])
    chances = np.full(len(patterns), 1 / len(patterns))
    epsilon = allocated(noise, n, k).epsilon(1e-2)
    both = all_patterns.simulated_deltas(
        patterns / noise, chances, epsilon, np.random.default_rng(n + k)
    )
    assert all(mean - 5 * error <= 1e-2 for mean, error in both)
    if k in (1, n):  # The reduction to single rounds loses nothing.
        assert max(mean + 5 * error for mean, error in both) >= 1e-2


def test_one_round_is_balls_in_bins_of_as_many_bins():
    bins = balls_in_bins.BallsInBins.from_strategy(
        identity.Identity(), noise_multiplier=1.0, num_rounds=30, num_bins=30
    )
    assert allocated(1.0, 30, 1).epsilon(1e-6) == pytest.approx(bins.epsilon(1e-6), rel=1e-3)


@pytest.mark.parametrize("noise", [0.6, 1.0, 4.0])
def test_it_costs_less_than_poisson_sampling_of_the_same_share(noise):
    poisson = dp_fedavg.DpFedAvg(20 / 500, noise, 500).epsilon(1e-6)
    assert 0.5 * poisson < allocated(noise, 500, 20).epsilon(1e-6) < poisson


def test_all_rounds_are_one_gaussian():
    exact = gaussian.epsilon(3.0 / 2.0, 1e-6)
    assert allocated(2.0, 9, 9).epsilon(1e-6) == pytest.approx(exact, rel=1e-9)


def test_delta_of_epsilon_is_delta():
    run = allocated(1.5, 100, 4)
    assert run.delta(run.epsilon(1e-7)) == pytest.approx(1e-7, rel=1e-3)


def test_more_noise_and_fewer_rounds_cost_less():
    by_noise = [allocated(noise, 50, 5).epsilon(1e-6) for noise in (0.5, 1.0, 2.0, 8.0)]
    by_rounds = [allocated(1.0, 50, k).epsilon(1e-6) for k in (1, 2, 5, 20)]
    by_length = [allocated(1.0, n, 5).epsilon(1e-6) for n in (5, 20, 50, 300)]
    assert by_noise == sorted(by_noise, reverse=True)
    assert by_rounds == sorted(by_rounds)
    assert by_length == sorted(by_length, reverse=True)


def test_little_noise_has_the_plain_bound():
    run = allocated(0.01, 10, 2)
    assert run.epsilon(1e-6) == run.unamplified_epsilon(1e-6)
    assert allocated(0.0, 10, 2).epsilon(1e-6) == math.inf


@pytest.mark.parametrize(("noise", "n", "k"), [(0.06, 100, 4), (0.1, 100, 20), (1.0, 4000, 2000)])
def test_huge_losses_have_the_plain_bound(noise, n, k):
    run = random_allocation.RandomAllocation(noise, n, k)
    for delta in (1e-5, 1e-15):
        assert run.epsilon(delta) == run.unamplified_epsilon(delta)


@pytest.mark.parametrize("k", [0, 11, 1.5])
def test_wrong_numbers_of_rounds_are_refused(k):
    with pytest.raises(ValueError, match="rounds_per_client"):
        allocated(1.0, 10, k)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
