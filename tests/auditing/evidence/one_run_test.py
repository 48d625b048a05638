"""Bounds of one run: against exact mechanisms, enumeration and published numbers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, special, stats

from tff_dpftrl.accounting import gaussian
from tff_dpftrl.auditing.evidence import one_run


def test_the_published_number():
    # Steinke, Nasr & Jagielski 2023 (arXiv:2305.08846v1), Appendix D: 1,000 canaries, 75 of 100
    # guesses right, δ = 1e-4, 95 %.
    found = one_run.Guesses(1000, 100, 75).epsilon_at_least(1e-4, 0.05)
    assert found == pytest.approx(0.673, abs=5e-4)


@pytest.mark.parametrize("correct", [0, 40, 70, 99, 100])
def test_without_delta_it_is_the_tail_of_a_binomial(correct):
    counted = one_run.Guesses(500, 100, correct)
    for epsilon in (0.0, 0.5, 2.0, 30.0):
        chance = 1.0 / (1.0 + np.exp(-epsilon))
        expected = stats.binom.pmf(np.arange(correct, 101), 100, chance).sum()
        assert counted.p_value(epsilon, 0.0) == pytest.approx(expected, rel=1e-9)
    bound = counted.epsilon_at_least(0.0, 0.05)
    if bound > 0.0:  # Clopper–Pearson of the chance to be right.
        assert special.expit(bound) == pytest.approx(
            special.betaincinv(correct, 101 - correct, 0.05), rel=1e-6
        )
    assert (bound == 0.0) == (correct < 59)


@pytest.mark.parametrize("guesses", [5, 20, 60])
@pytest.mark.parametrize("epsilon, delta", [(0.0, 0.0), (1.0, 0.0), (0.5, 1e-3), (2.0, 0.01)])
def test_mechanisms_that_keep_the_claim_are_within_the_chance(epsilon, delta, guesses):
    """Exact distributions of correct guesses, of two mechanisms that use all of (ε, δ)."""
    canaries, chance = 60, special.expit(epsilon)
    counts = np.arange(guesses + 1)
    # Randomized response that tells the truth with probability δ, canary by canary.
    each = stats.binom.sf(counts - 1, guesses, delta + (1.0 - delta) * chance)
    # Randomized response that tells all truths at once with probability δ.
    at_once = delta + (1.0 - delta) * stats.binom.sf(counts - 1, guesses, chance)
    bound = [one_run.Guesses(canaries, guesses, v).p_value(epsilon, delta) for v in counts]
    assert np.all(each <= np.array(bound) + 1e-12)
    assert np.all(at_once <= np.array(bound) + 1e-12)


def test_the_linear_programme_is_solved():
    """No distribution of the number of free guesses, of mean 2 m δ, exceeds the p-value."""
    counted, epsilon, delta = one_run.Guesses(50, 20, 16), 0.3, 0.01
    chance = special.expit(epsilon)
    gain = stats.binom.sf(15 - np.arange(51), 20, chance)
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        some = rng.choice(51, 3, replace=False)
        weights = rng.dirichlet(np.ones(3))
        weights *= min(1.0, 2 * 50 * delta / max(weights @ some, 1e-9))
        found.append((1.0 - weights.sum()) * gain[0] + weights @ gain[some])
    assert max(found) <= counted.p_value(epsilon, delta) + 1e-12
    assert max(found) > 0.8 * counted.p_value(epsilon, delta)


def _runs(mu, canaries, repetitions):
    rng = np.random.default_rng(7)
    for _ in range(repetitions):
        present = rng.random(canaries) < 0.5
        yield rng.normal(size=canaries) + mu * present, present


def _largest_chance(counted, mu):
    """The largest P[v or more right] under all conditions of a μ-GDP mechanism, as tangents."""
    m, r, z = counted.canaries, counted.guesses, np.linspace(-7.0, 7.0, 400)
    right = np.arange(r + 1)
    rows, limits = [], []
    for c in range(1, r + 1):
        alpha, beta = np.where(right >= c, right, 0) / m, np.where(right >= c - 1, r - right, 0) / m
        slope = np.exp((z**2 - (z + mu) ** 2) / 2.0)
        rows.append(alpha - slope[:, np.newaxis] * beta)
        limits.append(special.ndtr(z + mu) - slope * special.ndtr(z))
    found = optimize.linprog(
        -(right >= counted.correct).astype(float),
        A_ub=np.concatenate(rows),
        b_ub=np.concatenate(limits),
        A_eq=np.ones((1, r + 1)),
        b_eq=[1.0],
    )
    return -found.fun


@pytest.mark.parametrize(
    "canaries, guesses, correct, mu",
    [(8, 8, 7, 1.0), (8, 8, 8, 0.5), (6, 4, 4, 2.0), (5, 5, 3, 0.3), (40, 20, 17, 0.7)],
)
def test_the_chance_of_right_guesses_is_the_largest_that_a_gaussian_claim_allows(
    canaries, guesses, correct, mu
):
    counted = one_run.Guesses(canaries, guesses, correct)
    largest = _largest_chance(counted, mu)
    assert counted.contradicts(mu, 1.002 * largest)
    assert not counted.contradicts(mu, 0.998 * largest)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_randomized_response_keeps_the_gaussian_claim_that_follows_from_it(epsilon):
    # Its trade-off curve touches that of μ where both rates are 1 / (1 + e^ε).
    chance = special.expit(epsilon)
    mu = 2.0 * special.ndtri(chance)
    for correct in range(1, 31):
        tail = stats.binom.sf(correct - 1, 30, chance)
        assert not one_run.Guesses(50, 30, correct).contradicts(mu, 0.999 * tail)


def test_bounds_of_mu_are_wrong_no_more_often_than_stated_and_above_those_of_epsilon():
    mu, delta, rate, repetitions = 1.0, 1e-6, 0.1, 25
    wrong, larger = 0, 0
    for scores, present in _runs(mu, 300, repetitions):
        bound, _ = one_run.mu_at_least(scores, present, error_rate=rate)
        wrong += bound > mu
        epsilon, _ = one_run.epsilon_at_least(scores, present, delta=delta, error_rate=rate)
        larger += bound > 0.0 and gaussian.epsilon(bound, delta) > epsilon
    assert wrong <= stats.binom.isf(1e-6, repetitions, rate)
    assert larger > 0.95 * repetitions


def test_a_gaussian_mechanism_is_called_too_weak_no_more_often_than_stated():
    mu, delta, rate, repetitions = 1.0, 1e-3, 0.1, 500
    truth = gaussian.epsilon(mu, delta)
    # A bound exceeds the truth only if the truth is refused.
    wrong = sum(
        one_run.guess(scores, present, 60).p_value(truth, delta) <= rate
        for scores, present in _runs(mu, 300, repetitions)
    )
    assert wrong <= stats.binom.isf(1e-6, repetitions, rate)


def test_randomized_response_reaches_its_error_rate():
    """The bound of pure ε is tight: it is wrong nearly as often as it may be."""
    epsilon, rate, repetitions = 1.0, 0.1, 4000
    correct = np.random.default_rng(0).binomial(200, special.expit(epsilon), repetitions)
    bound = {
        v: one_run.Guesses(200, 200, v).epsilon_at_least(0.0, rate) for v in set(correct.tolist())
    }
    wrong = sum(bound[v] > epsilon for v in correct.tolist())
    margin = 6.0 * np.sqrt(repetitions * rate * (1.0 - rate))
    assert 0.5 * rate * repetitions <= wrong <= rate * repetitions + margin


def test_a_mechanism_without_noise_is_found():
    scores, present = next(iter(_runs(20.0, 1000, 1)))
    found, guesses = one_run.epsilon_at_least(scores, present, delta=1e-6, error_rate=0.05)
    assert found > 4.0
    assert guesses.correct == guesses.guesses


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_epsilon_of_equal_gaussians_is_the_exact_one(mu):
    assert one_run.epsilon_of_gaussians(mu, 1.0, 1e-5) == pytest.approx(
        gaussian.epsilon(mu, 1e-5), rel=1e-9
    )


@pytest.mark.parametrize("shift, scale", [(1.0, 1.3), (0.0, 2.0), (0.5, 0.7), (-0.8, 1.1)])
def test_epsilon_of_unequal_gaussians_by_integration(shift, scale):
    x = np.linspace(-25.0, 25.0, 400_001)
    p, q = stats.norm.pdf(x, shift, scale), stats.norm.pdf(x)
    epsilon = one_run.epsilon_of_gaussians(shift, scale, 0.05)
    parts = [
        np.maximum(a - np.exp(epsilon) * b, 0.0).sum() * (x[1] - x[0]) for a, b in ((p, q), (q, p))
    ]
    assert max(parts) == pytest.approx(0.05, rel=1e-4)


def test_the_estimate_is_close_for_a_gaussian_mechanism_of_many_canaries():
    # 300 canaries of 8,000 parameters, each sends its unit direction once, noise of deviation 1.
    rng = np.random.default_rng(1)
    dimension, canaries = 8_000, 300
    directions = rng.normal(size=(2 * canaries, dimension)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    released = directions[:canaries].sum(axis=0) + rng.normal(size=dimension)
    found = directions @ released / np.linalg.norm(released)  # Their cosines.
    estimate = one_run.estimate(found[:canaries], found[canaries:], delta=1e-3)
    # Standard error of a difference of means over a deviation, and 4 % for what the other
    # canaries add to the noise (variance 1 + 300 / 8,000).
    assert estimate.mu == pytest.approx(1.0, abs=5.0 * np.sqrt(2.0 / canaries) + 0.04)
    assert estimate.epsilon == pytest.approx(gaussian.epsilon(1.0, 1e-3), rel=0.5)


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="correct <= guesses"):
        one_run.Guesses(10, 5, 6)
    with pytest.raises(ValueError, match="delta"):
        one_run.Guesses(10, 5, 5).p_value(1.0, 1.0)
    with pytest.raises(ValueError, match="epsilon"):
        one_run.Guesses(10, 5, 5).p_value(-1.0, 0.1)
    with pytest.raises(ValueError, match="error_rate"):
        one_run.Guesses(10, 5, 5).epsilon_at_least(0.1, 0.0)
    with pytest.raises(ValueError, match="guesses must be at most 4"):
        one_run.guess(np.zeros(4), np.zeros(4, bool), 5)
    with pytest.raises(ValueError, match="present"):
        one_run.guess(np.zeros(4), np.zeros(4), 2)
    with pytest.raises(ValueError, match="add canaries"):
        one_run.estimate(np.ones(1), np.ones(5), delta=0.1)
    with pytest.raises(ValueError, match="must vary"):
        one_run.estimate(np.ones(5), np.ones(5), delta=0.1)
