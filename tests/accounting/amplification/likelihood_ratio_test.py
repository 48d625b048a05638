"""Laws of likelihood ratios: exact where known, and above them in convex order."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from tff_dpftrl.accounting import dp_fedavg, gaussian
from tff_dpftrl.accounting.amplification import likelihood_ratio


def mean_of(law):
    return float(law.masses @ np.exp(law.losses)) + law.lost


def total_of(law):
    return float(law.masses.sum()) + law.zero


def random_law(rng, size=40):
    """Returns a law with mean 1 on a coarse grid, some of it at 0."""
    masses = rng.dirichlet(np.full(size, 0.3))
    losses = 0.1 * (np.arange(size) - size // 2)
    first = -(size // 2) - round(math.log(masses @ np.exp(losses)) / 0.1)
    masses *= 1 / (masses @ np.exp(0.1 * (first + np.arange(size))))
    scale = max(masses.sum(), 1.0)
    masses /= scale  # The rest of the mean is lost, so that all is as in a run.
    return likelihood_ratio.Ratio(0.1, first, masses, 1 - masses.sum(), 1 - 1 / scale, 1e-30)


@pytest.mark.parametrize("variance", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-6, 1e-12])
def test_one_gaussian(variance, delta):
    step = 0.005 * math.sqrt(variance)
    law = likelihood_ratio.lognormal(variance, step, 1e-9 * delta)
    exact = gaussian.epsilon(math.sqrt(variance), delta)
    assert exact * (1 - 1e-6) <= law.epsilon(delta) <= exact * (1 + 1e-3) + 1e-7
    assert mean_of(law) == pytest.approx(1.0, abs=1e-12)
    assert total_of(law) == pytest.approx(1.0, abs=1e-12)


def power(law, exponent):
    return functools.reduce(likelihood_ratio.product, [law] * exponent)


def test_compositions_are_powers():
    law = power(likelihood_ratio.lognormal(0.3, 0.01, 1e-18), 7)
    exact = gaussian.epsilon(math.sqrt(2.1), 1e-8)
    assert exact <= law.epsilon(1e-8) <= exact * 1.001


def test_poisson_sampling_is_an_average_with_one():
    step = 0.001
    sampled = likelihood_ratio.average(
        likelihood_ratio.lognormal(1.0, step, 1e-18), likelihood_ratio.one(step, 1e-18), 0.1
    )
    exact = dp_fedavg.DpFedAvg(0.1, 1.0, 5).epsilon(1e-6)
    assert power(sampled, 5).epsilon(1e-6) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("weight", [0.5, 0.02, 0.9])
def test_an_average_lies_little_above_the_exact_one_in_convex_order(seed, weight):
    rng = np.random.default_rng(seed)
    left = random_law(rng)
    right = left if seed == 0 else random_law(rng)
    law = likelihood_ratio.average(left, right, weight)
    assert mean_of(law) == pytest.approx(1.0, abs=1e-12)
    assert total_of(law) == pytest.approx(1.0, abs=1e-12)

    def atoms(one):
        return np.append(np.exp(one.losses), 0.0), np.append(one.masses, one.zero)

    (x, p), (y, q) = atoms(left), atoms(right)
    values = weight * x[:, None] + (1 - weight) * y[None, :]
    chances = p[:, None] * q[None, :]
    found, found_chances = atoms(law)
    lost = weight * left.lost + (1 - weight) * right.lost
    for threshold in np.exp(np.linspace(-3, 3, 31)):
        exact = float((chances * np.maximum(values - threshold, 0)).sum()) + lost
        bound = float(found_chances @ np.maximum(found - threshold, 0)) + law.lost
        # Splitting over an interval of 0.1 adds at most (e^0.1 − 1) / 4 of the threshold.
        assert exact - 1e-12 <= bound <= exact + 0.03 * threshold


def test_means_of_copies():
    law = random_law(np.random.default_rng(1), size=12)
    by_hand = likelihood_ratio.average(
        likelihood_ratio.average(law, law, 0.5), likelihood_ratio.average(law, law, 0.5), 0.5
    )
    of_four = likelihood_ratio.mean(law, 4)
    assert of_four.masses == pytest.approx(by_hand.masses)
    of_five = likelihood_ratio.mean(law, 5)
    assert mean_of(of_five) == pytest.approx(1.0)
    assert of_five.delta(0.2) < of_four.delta(0.2) < law.delta(0.2)


@pytest.mark.parametrize("seed", range(3))
def test_larger_inner_products_cost_more(seed):
    # Kahane's inequality: the mean of two functions of the same normal draws, a hockey stick.
    rng = np.random.default_rng(seed)
    vectors = rng.uniform(0, 1, (4, 4))
    small = vectors @ vectors.T
    large = small + np.outer(v := rng.uniform(0, 0.7, 4), v)
    normal = rng.standard_normal((400_000, 4))

    def ratios(gram):
        u = normal @ np.linalg.cholesky(gram + 1e-12 * np.eye(4)).T
        return np.exp(u - np.diag(gram) / 2).mean(axis=1)

    for epsilon in (0.1, 1.0):
        for sign in (1, -1):
            values = [
                np.maximum(sign * (ratios(gram) - math.exp(sign * epsilon)), 0)
                for gram in (large, small)
            ]
            difference = values[0] - values[1]
            assert difference.mean() > -5 * difference.std() / math.sqrt(len(normal))


def test_epsilon_and_delta_are_inverse():
    law = likelihood_ratio.mean(likelihood_ratio.lognormal(2.0, 0.01, 1e-20), 9)
    for delta in (1e-2, 1e-9):
        assert law.delta(law.epsilon(delta)) == pytest.approx(delta, rel=1e-4)
    assert law.epsilon(1e-20) == math.inf  # Less than what is lost to infinity.
