"""The composition engine on randomised response, whose composition is a binomial sum."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from tff_dpftrl.accounting import privacy_loss

_LOSS = 0.1
_TOLERANCE = 1e-5


def _step(infinity_mass: float = 0.0) -> privacy_loss.Step:
    """Randomised response: loss ±0.1, or infinite."""
    high = (1 - infinity_mass) / (1 + math.exp(-_LOSS))
    masses = np.array([high * math.exp(-_LOSS), high])
    return privacy_loss.Step(np.array([-_LOSS, _LOSS]), masses, infinity_mass)


def _exact_delta(num_steps: int, epsilon: float) -> float:
    with mpmath.workdps(60):
        high = 1 / (1 + mpmath.exp(-mpmath.mpf(_LOSS)))
        total = mpmath.mpf(0)
        for count in range(num_steps + 1):
            loss = mpmath.mpf(_LOSS) * (2 * count - num_steps)
            if loss > epsilon:
                mass = (
                    mpmath.binomial(num_steps, count)
                    * high**count
                    * (1 - high) ** (num_steps - count)
                )
                total += mass * (1 - mpmath.exp(epsilon - loss))
        return float(total)


def _composed(step, num_steps, saddle, log_delta):
    interval = privacy_loss.resolution(saddle, num_steps, _TOLERANCE)
    return privacy_loss.ComposedLoss([(step, num_steps)], saddle, interval, log_delta - 25.0)


@pytest.mark.parametrize("num_steps", [1, 40, 1000])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_delta_is_the_binomial_sum(num_steps, share):
    # Half way between two atoms, which are 0.2 apart: at an atom delta has a kink, and spreading
    # atoms over the grid costs more than it does with the continuous losses of Gaussian noise.
    most = min(num_steps, 8 * math.sqrt(num_steps))
    count = math.floor((num_steps + share * most) / 2)
    epsilon = _LOSS * (2 * count - num_steps) - _LOSS
    epsilon = max(epsilon, 0.0)
    exact = _exact_delta(num_steps, epsilon)
    saddle = privacy_loss.saddle_for_epsilon([(_step(), num_steps)], epsilon)
    computed = _composed(_step(), num_steps, saddle, math.log(exact)).delta(epsilon)
    # Moving epsilon by a relative 1e-5 moves log delta by the tilt times that; rounding is charged.
    moved = 2 * _TOLERANCE * saddle.tilt * max(epsilon, 1e-3)
    assert exact <= computed <= exact * math.exp(moved + 1e-7)


@pytest.mark.parametrize("delta", [1e-30, 1e-12, 1e-6, 1e-2])
def test_epsilon_is_just_large_enough(delta):
    saddle = privacy_loss.saddle_for_delta([(_step(), 500)], math.log(delta))
    computed = _composed(_step(), 500, saddle, math.log(delta)).epsilon(delta)
    assert computed <= saddle.epsilon
    assert _exact_delta(500, computed) <= delta
    assert _exact_delta(500, computed * (1 - 1e-3)) > delta


def test_epsilon_is_never_negative():
    saddle = privacy_loss.saddle_for_delta([(_step(), 100)], math.log(0.05))
    composed = _composed(_step(), 100, saddle, math.log(0.05))
    largest = _exact_delta(100, 0.0)  # Total variation: with more δ nothing is left to promise.
    assert [composed.epsilon(delta) for delta in (1.1 * largest, 0.99, 1 - 1e-9)] == [0.0] * 3
    assert composed.epsilon(0.9 * largest) > 0.0


def test_infinite_losses_are_charged():
    step = _step(infinity_mass=1e-8)
    saddle = privacy_loss.saddle_for_delta([(step, 100)], math.log(1e-5))
    composed = _composed(step, 100, saddle, math.log(1e-5))
    lost = -math.expm1(100 * math.log1p(-1e-8))
    assert composed.epsilon(lost) == math.inf
    epsilon = composed.epsilon(1e-5)
    plain = _composed(_step(), 100, saddle, math.log(1e-5))
    assert plain.epsilon(1e-5) < epsilon < plain.epsilon(1e-5 - 1.1 * lost)
    assert composed.delta(epsilon) == pytest.approx(1e-5, rel=1e-6)


def test_a_hopelessly_coarse_grid_promises_nothing():
    step = _step()
    saddle = privacy_loss.Saddle(500.0, 1.0, (privacy_loss._cumulant(step, 500.0),))
    composed = privacy_loss.ComposedLoss([(step, 10)], saddle, 10.0, math.log(1e-12))
    assert composed.epsilon(1e-6) == math.inf
    assert composed.delta(1.0) == 1.0
