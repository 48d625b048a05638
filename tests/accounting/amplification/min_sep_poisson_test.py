"""b-min-sep sampling against all patterns, Poisson sampling and the schema."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.accounting.amplification import all_patterns
from tff_dpftrl.accounting import dp_fedavg, guarantee
from tff_dpftrl.accounting.amplification import min_sep_poisson
from tff_dpftrl.mechanisms import banded_toeplitz, blt, identity
from tff_dpftrl.participation import schema as schema_lib

BANDED = banded_toeplitz.BandedToeplitz.fhu


def run_of(strategy, noise, num_rounds, min_sep, probability):
    return min_sep_poisson.MinSepPoisson.from_strategy(
        strategy,
        noise_multiplier=noise,
        num_rounds=num_rounds,
        min_sep=min_sep,
        sampling_probability=probability,
    )


@pytest.mark.parametrize(("n", "b", "q"), [(10, 3, 0.2), (9, 1, 0.4), (8, 4, 0.9), (7, 2, 1.0)])
def test_the_number_of_rounds(n, b, q):
    patterns, chances = all_patterns.min_sep_chances(n, b, q)
    assert chances.sum() == pytest.approx(1.0)
    counts = patterns.sum(axis=1)
    tail = run_of(identity.Identity(), 1.0, n, b, q).count_tail()
    expected = [chances[counts >= k].sum() for k in range(len(tail))]
    assert tail == pytest.approx(np.array(expected), abs=1e-8)


@pytest.mark.parametrize(("b", "q"), [(1, 0.3), (2, 0.3), (5, 0.05), (25, 0.01), (25, 0.4)])
def test_thinned_slots_have_the_gaps_of_the_sampling(b, q):
    p = run_of(identity.Identity(), 1.0, 50, b, q).occupation()
    assert q <= p <= 1.0
    kappa, size = q * (1 - p) / p, 400
    inverse = np.zeros(size)
    inverse[0] = 1.0
    for i in range(1, size):
        inverse[i] = (1 - q) * inverse[i - 1] - (kappa * inverse[i - b] if i >= b else 0.0)
    assert (inverse >= 0).all()
    slot = np.concatenate([np.zeros(b), q / p * inverse])[:size]  # Chances of gaps of slots.
    # A gap of occupied slots: the first one is occupied, or it is not and then another gap.
    thinned = np.zeros(size)
    for i in range(size):
        thinned[i] = p * slot[i] + (1 - p) * slot[1 : i + 1] @ thinned[:i][::-1]
    gaps = np.arange(size)
    expected = np.where(gaps >= b, q * (1 - q) ** np.maximum(gaps - b, 0.0), 0.0)
    assert thinned == pytest.approx(expected, abs=1e-12)


def test_the_least_occupation_is_the_least():
    # With a slightly smaller one some gap of slots would have a negative probability.
    b, q = 4, 0.1
    p = 0.98 * run_of(identity.Identity(), 1.0, 50, b, q).occupation()
    kappa, inverse = q * (1 - p) / p, [1.0]
    for i in range(1, 300):
        inverse.append((1 - q) * inverse[-1] - (kappa * inverse[i - b] if i >= b else 0.0))
    assert min(inverse) < 0


def test_more_slots_than_counted_are_improbable():
    run = run_of(identity.Identity(), 1.0, 300, 5, 0.03)
    p, rng = run.occupation(), np.random.default_rng(0)
    kappa, size = 0.03 * (1 - p) / p, 2000
    inverse = np.zeros(size)
    inverse[0] = 1.0
    for i in range(1, size):
        inverse[i] = 0.97 * inverse[i - 1] - (kappa * inverse[i - 5] if i >= 5 else 0.0)
    gaps = rng.choice(5 + np.arange(size), p=inverse / inverse.sum(), size=(20_000, 60))
    # A slot in round 0 makes more of them than the stationary start.
    slots = 1 + (np.cumsum(gaps, axis=1) <= 299).sum(axis=1)
    for chance in (0.1, 0.01):
        most = run.most_slots(math.log(chance))
        assert most < 60
        assert (slots > most).mean() <= chance


def check_all_patterns(seed):
    """Draws a setting; its simulated δ must not exceed the bound's."""
    rng = np.random.default_rng(seed)
    n, b = int(rng.integers(4, 11)), int(rng.integers(1, 5))
    q = float(rng.uniform(0.02, 1.0))
    strategy = [BANDED(int(rng.integers(1, b + 1))), blt.Blt((0.9, 0.3), (0.3, 0.2))][
        int(rng.integers(5) == 0)
    ]
    noise = float(np.exp(rng.uniform(-0.5, 2.0)))
    run = run_of(strategy, noise, n, b, q)
    epsilon = run.epsilon(1e-2)
    assert epsilon <= run.unamplified_epsilon(1e-2)
    patterns, chances = all_patterns.min_sep_chances(n, b, q)
    sums = patterns @ strategy.strategy_matrix(n).T / noise
    for mean, error in all_patterns.simulated_deltas(sums, chances, epsilon, rng):
        assert mean - 5 * error <= 1e-2, (n, b, q, noise, strategy)


@pytest.mark.parametrize("seed", range(4))
def test_all_patterns(seed):
    check_all_patterns(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 104))
def test_all_patterns_of_many_settings(seed):
    check_all_patterns(seed)


def test_a_stride_of_one_is_poisson_sampling():
    exact = dp_fedavg.DpFedAvg(0.05, 1.5, 80).epsilon(1e-6)
    found = run_of(identity.Identity(), 1.5, 80, 1, 0.05).epsilon(1e-6)
    assert exact <= found <= exact * (1 + 1e-6)


def test_certain_participation_costs_what_the_schema_does():
    schema = schema_lib.MinSep.as_many_as_fit(60, 6)
    plain = guarantee.dp_ftrl_guarantee(BANDED(6), noise_multiplier=4.0, schema=schema, delta=1e-6)
    found = run_of(BANDED(6), 4.0, 60, 6, 1.0).epsilon(1e-6)
    assert found == pytest.approx(plain.epsilon, rel=1e-3)
    assert found <= plain.epsilon * (1 + 1e-9)


def test_sampling_amplifies():
    epsilons = [run_of(BANDED(4), 3.0, 200, 4, q).epsilon(1e-6) for q in (0.003, 0.02, 0.2, 1.0)]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] < 0.1 * epsilons[-1]
    by_noise = [run_of(BANDED(4), z, 200, 4, 0.02).epsilon(1e-6) for z in (1.0, 2.0, 8.0)]
    assert by_noise == sorted(by_noise, reverse=True)


def test_the_estimate_agrees_with_all_patterns():
    run = run_of(BANDED(3), 1.5, 9, 3, 0.4)
    estimate = run.estimate(1e-2, 20_000, 0)
    assert estimate.low <= estimate.epsilon <= estimate.high <= run.epsilon(1e-2) * 1.05
    patterns, chances = all_patterns.min_sep_chances(9, 3, 0.4)
    sums = patterns @ BANDED(3).strategy_matrix(9).T / 1.5
    rng = np.random.default_rng(1)

    def largest(epsilon):
        return max(all_patterns.simulated_deltas(sums, chances, epsilon, rng))

    mean, error = largest(estimate.low)
    assert mean + 5 * error >= 1e-2
    mean, error = largest(estimate.high)
    assert mean - 5 * error <= 1e-2


def test_few_draws_say_nothing_of_a_small_delta():
    run = run_of(BANDED(3), 1.5, 9, 3, 0.4)
    estimate = run.estimate(1e-6, 1000, 0)
    assert estimate.low <= estimate.epsilon < estimate.high == run.epsilon(1e-6)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="without negative entries"):
        run_of(banded_toeplitz.BandedToeplitz((1.0, -0.5)), 1.0, 20, 4, 0.1)
    with pytest.raises(ValueError, match="min_sep=2 bands"):
        run_of(BANDED(3), 1.0, 20, 2, 0.1).estimate(1e-2, 2000, 0)
