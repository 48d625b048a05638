"""Sensitivities of the two estimators, by brute force over extreme cohorts."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.private_round import estimators

_Q = 0.25
_CLIP_NORM = 3.0


def _estimate(estimator, weights, updates):
    weights = np.asarray(weights, np.float64)
    total = np.sum(weights * np.asarray(updates, np.float64))
    divisor = estimator.divisor(tf.constant(np.sum(weights), tf.float64)).numpy()
    return total / divisor


def _worst_change(estimate, max_clients):
    """Largest change when one client is added, over weights and updates at the extremes.

    A sum of vectors in a ball reaches its extremes on a line, so scalars are enough.
    """
    worst = 0.0
    for num_clients in range(max_clients + 1):
        for num_light, weight in itertools.product(range(num_clients + 1), (1e-6, 0.5, 0.99)):
            weights = [weight] * num_light + [1.0] * (num_clients - num_light)
            updates = [_CLIP_NORM] * num_clients
            before = estimate(weights, updates)
            for extra_weight, extra in itertools.product((1e-6, 0.5, 1.0), (-1.0, 0.0, 1.0)):
                after = estimate(weights + [extra_weight], updates + [extra * _CLIP_NORM])
                worst = max(worst, abs(after - before))
    return worst


def test_sensitivity_of_the_fixed_denominator():
    estimator = estimators.FixedDenominator(_Q, 40)
    worst = _worst_change(lambda w, u: _estimate(estimator, w, u), 14)
    assert estimator.expected_weight == 10
    assert worst == pytest.approx(estimator.unit_sensitivity * _CLIP_NORM, rel=1e-12)


def test_sensitivity_of_the_clipped_denominator():
    estimator = estimators.ClippedDenominator(_Q, 40)
    worst = _worst_change(lambda w, u: _estimate(estimator, w, u), 14)
    bound = estimator.unit_sensitivity * _CLIP_NORM
    assert bound == pytest.approx(2 * _CLIP_NORM / 10, rel=1e-12)
    # Worst at Σ w = q W_min, all updates aligned, against a new one: 2 S / (q W_min + 1).
    assert 2 * _CLIP_NORM / 11 * (1 - 1e-12) <= worst <= bound


def test_the_search_sees_what_the_true_mean_would_do():
    # Power: the mean over those present moves by up to 2 S however large the cohort may be.
    def mean(weights, updates):
        return np.dot(weights, updates) / max(np.sum(weights), 1e-12)

    assert _worst_change(mean, 14) > 0.9 * 2 * _CLIP_NORM


def test_divisors_depend_on_the_cohort_as_documented():
    fixed = estimators.FixedDenominator(0.5, 20)
    clipped = estimators.ClippedDenominator(0.5, 20)
    for weight, expected in ((0.0, 10.0), (9.5, 10.0), (12.0, 12.0)):
        cohort_weight = tf.constant(weight)
        assert fixed.divisor(cohort_weight).numpy() == 10.0
        assert clipped.divisor(cohort_weight).numpy() == expected


@pytest.mark.parametrize("build", [estimators.FixedDenominator, estimators.ClippedDenominator])
def test_refuses_what_cannot_be(build):
    for q in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="sampling_probability"):
            build(q, 10)
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="total_weight"):
            build(0.1, weight)
