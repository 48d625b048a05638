"""Clipping: never above the bound, and nothing changed below it."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.private_round import clip_ops


def _norm(arrays):
    return math.sqrt(sum(float(np.sum(np.square(np.asarray(a, np.float64)))) for a in arrays))


def _tensors(arrays):
    return [tf.constant(a, tf.float32) for a in arrays]


def _adversarial_updates():
    rng = np.random.default_rng(0)
    spike = np.full(300_000, 2.0**-13)
    spike[::1024] = 1.0
    big_first = np.full(1 << 20, 2.0**-12)
    big_first[0] = 1.0
    return [
        [rng.normal(size=7)],
        [rng.normal(size=(300, 1000)), rng.normal(size=10)],
        [np.ones(1_000_003)],
        [spike],
        [big_first],
        [np.exp(rng.normal(scale=8, size=200_000))],
        [np.full(5, 1e17)],
        [np.full(1000, 3e-7)],
        [1.0 + 1e-7 * rng.normal(size=4096)],
    ]


@pytest.mark.parametrize("update", _adversarial_updates())
@pytest.mark.parametrize("fraction", [1e-6, 0.3, 0.9999, 1.0])
def test_clipped_norm_is_never_above_the_bound_nor_far_below(update, fraction):
    update = [np.asarray(a, np.float32) for a in update]
    clip_norm = max(_norm(update) * fraction, clip_ops.MIN_CLIP_NORM)
    clipped, _ = clip_ops.clip_by_norm(_tensors(update), clip_norm)
    norm = _norm(clipped)
    assert norm <= clip_norm
    assert norm >= min(clip_norm, _norm(update)) * (1 - 3e-5)


def test_smaller_updates_are_unchanged():
    update = [np.asarray([3.0, 4.0], np.float32), np.asarray(0.5, np.float32)]
    clipped, norm = clip_ops.clip_by_norm(_tensors(update), 6.0)
    np.testing.assert_allclose(norm, math.sqrt(25.25), rtol=1e-6)
    for before, after in zip(update, clipped, strict=True):
        np.testing.assert_array_equal(before, after)


def test_zero_update_stays_zero():
    clipped, norm = clip_ops.clip_by_norm(_tensors([np.zeros(3)]), 1.0)
    assert norm == 0.0
    np.testing.assert_array_equal(clipped[0], np.zeros(3))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize(
    "clipping", [clip_ops.FlatClipping(1.0), clip_ops.PerLayerClipping((1.0, 2.0))]
)
def test_update_without_a_finite_norm_is_zero_in_every_tensor(clipping, value):
    clipped, norm = clipping.clip(_tensors([np.asarray([1.0, value, value]), np.ones(2)]))
    assert not np.isfinite(norm)
    for tensor in clipped:
        np.testing.assert_array_equal(tensor, np.zeros_like(tensor))


def test_per_layer_clipping():
    clipping = clip_ops.PerLayerClipping((1.0, 10.0))
    clipped, norm = clipping.clip(_tensors([[3.0, 4.0], [0.6, 0.8]]))
    np.testing.assert_allclose(norm, math.sqrt(26), rtol=1e-6)
    np.testing.assert_allclose(clipped[0], [0.6, 0.8], rtol=2e-5)
    np.testing.assert_array_equal(clipped[1], np.asarray([0.6, 0.8], np.float32))
    np.testing.assert_allclose(clipping.clip_norm, math.sqrt(101))


def test_even_layers_share_the_norm():
    clipping = clip_ops.PerLayerClipping(clip_ops.even_layer_clip_norms(3.0, 9))
    assert clipping.layer_clip_norms == (1.0,) * 9
    assert clipping.clip_norm == 3.0


def test_one_entry_for_each_tensor():
    with pytest.raises(ValueError, match="2 entries, but the updates have 3 tensors"):
        clip_ops.PerLayerClipping((1.0, 1.0)).check_num_tensors(3)
    with pytest.raises(ValueError, match="layer_clip_norms must have one entry"):
        clip_ops.PerLayerClipping(())


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e-9, 1e20])
def test_unsafe_clip_norms_are_refused(value):
    with pytest.raises(ValueError, match="clip_norm must be a number in"):
        clip_ops.FlatClipping(value)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
