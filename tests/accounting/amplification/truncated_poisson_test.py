"""Truncated Poisson sampling against all samples of a small population."""

from __future__ import annotations

import itertools
import math
import sys

import numpy as np
import pytest
from scipy import stats

from tff_dpftrl.accounting import dp_fedavg, mixture_of_gaussians
from tff_dpftrl.accounting.amplification import truncated_poisson


def truncated(probability, noise, num_rounds, num_clients, largest):
    return truncated_poisson.TruncatedPoisson(probability, noise, num_rounds, num_clients, largest)


def sums_of_one_round(values, probability, largest):
    """Returns the possible sums of a round and their probabilities."""
    chances: dict[float, float] = {}
    for sample in itertools.product((0, 1), repeat=len(values)):
        members = [i for i, present in enumerate(sample) if present]
        chance = probability ** len(members) * (1 - probability) ** (len(values) - len(members))
        kept = list(itertools.combinations(members, min(len(members), largest)))
        for some in kept:
            total = float(sum(values[i] for i in some))
            chances[total] = chances.get(total, 0.0) + chance / len(kept)
    return np.array(list(chances)), np.array(list(chances.values()))


@pytest.mark.parametrize(
    "others", [(-1, -1, -1, -1), (1, 1, 1, 1), pytest.param((1, -1, 1, -1), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("probability", "largest"), [(0.1, 3), (0.3, 2), (0.2, 4), (0.5, 1)])
def test_all_samples_of_five_clients_in_one_round(others, probability, largest):
    # The unit sends 1, or 0 as its neighbour; one round is one number, so this is an integral.
    noise = 0.8
    points = np.linspace(-12, 12, 4_801)

    def density(own):
        sums, chances = sums_of_one_round((own, *others), probability, largest)
        return stats.norm.pdf(points[:, None], sums, noise) @ chances

    run = truncated(probability, noise, 1, 5, largest)
    with_unit, without = density(1), density(0)
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        for upper, lower in ((with_unit, without), (without, with_unit)):
            exact = np.maximum(upper - math.exp(epsilon) * lower, 0).sum() * 0.005
            assert exact <= run.delta(epsilon) + 1e-5


def test_a_bound_without_the_penalty_would_be_too_small():
    # Who takes another's place changes the sum by two contributions.
    points = np.linspace(-12, 12, 24_001)

    def density(own):
        sums, chances = sums_of_one_round((own, -1, -1, -1, -1), 0.5, 1)
        return stats.norm.pdf(points[:, None], sums, 0.5) @ chances

    exact = np.maximum(density(1) - math.exp(12.0) * density(0), 0).sum() * 0.001
    untruncated = mixture_of_gaussians.delta(
        mixture_of_gaussians.uls(0.5, 0.5), num_steps=1, epsilon=12.0
    )
    assert 1.5 * untruncated < exact <= truncated(0.5, 0.5, 1, 5, 1).delta(12.0)


def test_large_cohorts_cost_what_poisson_sampling_does():
    poisson = dp_fedavg.DpFedAvg(0.01, 1.0, 200)
    assert truncated(0.01, 1.0, 200, 1000, 60).epsilon(1e-6) == pytest.approx(
        poisson.epsilon(1e-6), rel=1e-4
    )


def test_smaller_cohorts_cost_more_and_then_too_much():
    epsilons = [truncated(0.01, 1.0, 200, 1000, b).epsilon(1e-6) for b in (60, 32, 31, 20)]
    assert epsilons == sorted(epsilons)
    assert epsilons[-2] < math.inf == epsilons[-1]


def test_the_penalty_is_the_probability_of_a_bad_round():
    run = truncated(0.4, 1.0, 3, 4, 2)
    full = 3 * 0.4**2 * 0.6 + 0.4**3
    assert run.penalty == pytest.approx(1 - (1 - 0.4 * full) ** 3)


def test_delta_of_epsilon_is_delta():
    run = truncated(0.02, 1.0, 100, 1000, 60)
    assert run.delta(run.epsilon(1e-6)) == pytest.approx(1e-6, rel=1e-3)


def test_calibration_meets_the_target_or_says_why_not():
    target = {"sampling_probability": 0.01, "num_rounds": 200, "num_clients": 1000}
    noise = truncated_poisson.calibrate_noise_multiplier(
        **target, largest_cohort=40, target_epsilon=2.0, delta=1e-6
    )
    assert 2.0 * (1 - 1e-3) <= truncated(0.01, noise, 200, 1000, 40).epsilon(1e-6) <= 2.0
    with pytest.raises(ValueError, match="largest_cohort must be larger"):
        truncated_poisson.calibrate_noise_multiplier(
            **target, largest_cohort=10, target_epsilon=2.0, delta=1e-6
        )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
