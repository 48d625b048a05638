"""Tests of trade-off curves and of the odds of a guess, against integrals and enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, stats

from tff_dpftrl.accounting import display, gaussian, mixture_of_gaussians, parts, trade_off


@pytest.mark.parametrize("mu", [1e-6, 0.1, 1.0, 1.4142, 5.0, 8.0])
def test_the_best_guess_of_a_gaussian_is_an_integral(mu):
    # A coin chooses N(0, 1) or N(mu, 1); the best guess is the likelier one.
    right, _ = integrate.quad(
        lambda x: 0.5 * max(stats.norm.pdf(x), stats.norm.pdf(x - mu)),
        *(-12.0, mu + 12.0),
        points=[0.0, mu / 2.0, mu],
        limit=500,
        epsabs=1e-13,
    )
    of_run = trade_off.TradeOff(((gaussian.epsilon(mu, 1e-7), 1e-7),), mu)
    assert right - 1e-9 <= of_run.best_guess() <= right * (1 + 1e-9)
    # The same from points alone, which is looser.
    points = tuple((e, gaussian.delta(mu, e)) for e in (0.0, 1.0, 3.0))
    assert trade_off.TradeOff(points).best_guess() == pytest.approx(right, abs=1e-9)
    assert trade_off.TradeOff(points[1:]).best_guess() > right


def _best_guess_by_integration(mixture, num_steps):
    """Integrates the larger density of a few steps on a grid of outcomes."""
    axis = np.linspace(-9.0, 9.0 + mixture.sensitivities[-1] / mixture.stddev, 1201)
    shifts = np.array(mixture.sensitivities) / mixture.stddev
    without = stats.norm.pdf(axis)
    used = stats.norm.pdf(axis[:, None] - shifts) @ np.array(mixture.probabilities)
    for _ in range(num_steps - 1):
        without = np.multiply.outer(without, stats.norm.pdf(axis))
        used = np.multiply.outer(
            used, stats.norm.pdf(axis[:, None] - shifts) @ np.array(mixture.probabilities)
        )
    return 0.5 * float(np.maximum(without, used).sum()) * (axis[1] - axis[0]) ** num_steps


@pytest.mark.parametrize(
    ("noise", "probability", "group_size", "num_steps"),
    [
        (1.0, 0.3, 1, 1),
        pytest.param(0.7, 0.2, 1, 2, marks=pytest.mark.slow),
        pytest.param(2.0, 0.5, 3, 2, marks=pytest.mark.slow),
        pytest.param(0.5, 1.0, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_the_best_guess_with_samples_is_an_integral(noise, probability, group_size, num_steps):
    mixture = mixture_of_gaussians.els(noise, probability, group_size)
    epsilon = mixture_of_gaussians.epsilon(mixture, num_steps=num_steps, delta=1e-6)
    rounds = parts.SampledRounds(noise, probability, num_steps, group_size)
    points = parts.profile(rounds, (), epsilon)
    assert points[0][0] == 0.0 and len(points) == 12
    right = _best_guess_by_integration(mixture, num_steps)
    # The grid of the integral errs by its spacing squared, 2e-4 at most.
    assert right - 2e-4 <= trade_off.TradeOff(points).best_guess() <= right + 5e-4


def test_the_choice_before_the_first_step_is_added():
    rounds, choice = parts.SampledRounds(1.0, 0.1, 10), parts.Part(parts.MEDIAN, "", epsilon=0.5)
    points, later = parts.profile(rounds, (), 2.0), parts.profile(rounds, (choice,), 2.5)
    assert later == tuple((0.5 + epsilon, delta) for epsilon, delta in points)
    assert trade_off.TradeOff(later).best_guess() > trade_off.TradeOff(points).best_guess()


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0, 8.0])
@pytest.mark.parametrize("delta", [1e-9, 0.01, 0.5])
def test_the_best_guess_from_epsilon_and_delta_is_reached(epsilon, delta):
    # Randomised response that tells the truth with probability delta: (epsilon, delta)-DP.
    lie = (1.0 - delta) / (1.0 + math.exp(epsilon))
    one, other = [delta, 1.0 - delta - lie, lie, 0.0], [0.0, lie, 1.0 - delta - lie, delta]
    tests = itertools.product([False, True], repeat=4)
    best = max(
        sum(0.5 * (a if says_one else b) for a, b, says_one in zip(one, other, test, strict=True))
        for test in tests
    )
    bound = trade_off.TradeOff(((epsilon, delta),)).best_guess()
    assert best == pytest.approx(bound, rel=1e-11) and bound >= best


def test_no_test_of_a_gaussian_is_below_its_curve():
    mu = 1.3
    rates = np.linspace(0.0, 1.0, 101)
    exact = stats.norm.cdf(-mu + stats.norm.isf(rates))
    points = tuple((e, gaussian.delta(mu, e)) for e in np.linspace(0.0, 4.0, 11))
    by_points = trade_off.TradeOff(points).least_false_negative_rate(rates)
    assert np.all(by_points <= exact + 1e-12) and np.max(exact - by_points) < 0.01
    of_mu = trade_off.TradeOff(points[-1:], mu).least_false_negative_rate(rates)
    np.testing.assert_allclose(of_mu, exact, atol=1e-12)


@pytest.mark.filterwarnings("error")
def test_the_curve_of_a_huge_epsilon_is_that_of_no_promise():
    curve = trade_off.TradeOff(((5e18, 1e-7),), 1e9)
    rates = np.array([0.0, 1e-9, 0.5, 1.0])
    np.testing.assert_allclose(curve.least_false_negative_rate(rates), [1, 0, 0, 0], atol=1e-6)


def test_a_run_with_next_to_no_noise_has_no_profile():
    rounds = parts.SampledRounds(0.5, 0.2, 1000)
    assert parts.profile(rounds, (), parts.compose(rounds, (), 1e-7)) == ()
    assert parts.profile(parts.SampledRounds(1.0, 0.1, 0), (), 0.0) == ()


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.5, "50 %"),
        (0.7201, "73 %"),
        (0.72, "72 %"),
        (0.99, "99 %"),
        (0.9901, "99.1 %"),
        (0.99951, "99.96 %"),
        (0.99999951, "100 %"),
        (1.0, "100 %"),
    ],
)
def test_percent_are_rounded_up(share, text):
    assert display.percent_up(share) == text
