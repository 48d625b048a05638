"""Gaussians: Box and Muller of Philox words, with the right tail and no atoms."""

import numpy as np
import tensorflow as tf
from scipy import stats

from tff_dpftrl.private_round import gaussians


def _gaussians_in_float64(words):
    """Box and Muller's transform of the same words, in float64 and by another formula."""
    upper, lower, angle = (row.astype(np.longdouble) for row in words)
    is_far = words[0] >= 2**31
    u = (np.where(is_far, upper - 2.0**31, upper) * 2.0**32 + lower + 0.5) / 2.0**64
    radius = np.sqrt(2 * np.where(is_far, -np.log(u), -np.log1p(-u)))
    angle = (angle + 0.5) / 2.0**32 * 2 * np.pi
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)]).astype(np.float64)


def test_normal_is_box_and_muller_of_philox_words():
    seed = tf.constant([11, -12], tf.int64)
    words = tf.random.stateless_uniform(
        [3, 15], seed, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    ).numpy()
    expected = np.ravel(_gaussians_in_float64(words))
    np.testing.assert_allclose(gaussians.normal(seed, 30), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(gaussians.normal(seed, 29), gaussians.normal(seed, 30)[:29])


def test_gaussians_reach_far_into_the_tail_and_never_hit_zero():
    # TensorFlow's own end at 5.68, and its smallest distance is 0.
    edges = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1]
    words = np.array(np.meshgrid(edges, edges, edges), np.uint32).reshape([3, -1])
    values = gaussians.gaussians_from_words(tf.constant(words)).numpy()
    expected = _gaussians_in_float64(words)
    np.testing.assert_allclose(
        np.linalg.norm(values.astype(np.float64), axis=0),
        np.linalg.norm(expected, axis=0),
        rtol=1e-6,
    )
    assert np.max(values) > 9.4
    assert np.all(np.linalg.norm(values, axis=0) > 0.0) and np.all(values != 0.0)


def test_the_tail_of_normal_has_the_right_weight():
    n = 4_000_000
    values = gaussians.normal(tf.constant([5, 6], tf.int64), n).numpy().astype(np.float64)
    for bound in (3.0, 4.0, 4.5):
        expected = n * 2 * stats.norm.sf(bound)
        # Six standard errors; at 4.5 that is 27 +- 31: only an excess would be found there.
        assert abs(np.sum(np.abs(values) > bound) - expected) < 6 * np.sqrt(expected)


def test_normal_is_standard():
    n = 400_000
    values = gaussians.normal(tf.constant([1, 2], tf.int64), n).numpy().astype(np.float64)
    # Six standard errors of mean and variance; a stddev of 1.02 would be outside.
    assert abs(values.mean()) < 6 / np.sqrt(n)
    assert abs(values.var() - 1) < 6 * np.sqrt(2 / n) < 1.02**2 - 1
