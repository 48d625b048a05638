"""Clipping that changes with the round: bounds, shares and refusals."""

import math
import sys

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.private_round import clip_schedule


def _round(t):
    return tf.constant(t, tf.int64)


def _norm(tensors):
    return math.sqrt(sum(float(np.sum(np.square(np.asarray(t, np.float64)))) for t in tensors))


def _update(scale=1.0):
    rng = np.random.default_rng(0)
    shapes = [(3, 4), (5,), ()]
    return [
        tf.constant(scale * (j + 1) * rng.normal(size=s), tf.float32) for j, s in enumerate(shapes)
    ]


@pytest.mark.parametrize(
    "build", [clip_schedule.FlatClipSchedule, clip_schedule.PerLayerClipSchedule]
)
def test_norm_follows_the_round(build):
    assert build(2.5).norm(_round(7)).numpy() == 2.5
    listed = build([4.0, 2.0, 1.0])
    assert [listed.norm(_round(t)).numpy() for t in range(5)] == [4.0, 2.0, 1.0, 1.0, 1.0]
    function = build(lambda t: 8.0 / tf.cast(t + 1, tf.float32))
    assert [function.norm(_round(t)).numpy() for t in range(4)] == [
        8.0,
        4.0,
        np.float32(8 / 3),
        2.0,
    ]


@pytest.mark.parametrize(
    "build", [clip_schedule.FlatClipSchedule, clip_schedule.PerLayerClipSchedule]
)
def test_clipped_norm_is_at_most_that_of_the_round(build):
    clip = build([1.0, 0.01])
    for scale in (0.01, 1.0, 1e6):
        update = _update(scale)
        for t, bound in ((0, 1.0), (1, 0.01), (9, 0.01)):
            clipped = clip.clip(update, _round(t))
            assert _norm(clipped) <= bound


def test_flat_clipping_scales_the_whole_update():
    update = _update()
    clipped = clip_schedule.FlatClipSchedule(1.5).clip(update, _round(0))
    scale = 1.5 / _norm(update)
    for before, after in zip(update, clipped, strict=True):
        np.testing.assert_allclose(after, scale * before, rtol=2e-5)
    untouched = clip_schedule.FlatClipSchedule(1e6).clip(update, _round(0))
    for before, after in zip(update, untouched, strict=True):
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("proportions", [None, (1.0, 2.0, 2.0)])
def test_each_layer_has_its_share(proportions):
    clip = clip_schedule.PerLayerClipSchedule([3.0, 0.3], proportions)
    shares = np.full(3, 3**-0.5) if proportions is None else np.array([1, 2, 2]) / 3
    # All layers are far above their bounds, so that all bounds are reached.
    update = _update(1e3)
    for t, clip_norm in ((0, 3.0), (1, 0.3)):
        clipped = clip.clip(update, _round(t))
        norms = np.array([_norm([tensor]) for tensor in clipped])
        np.testing.assert_allclose(norms, clip_norm * shares, rtol=2e-5)
        assert np.all(norms <= clip_norm * shares * (1 + 1e-7))
        # S = √Σ S_j².
        assert _norm(clipped) == pytest.approx(clip_norm, rel=2e-5)


def test_small_layers_stay_while_large_ones_are_clipped():
    update = [tf.constant([0.3]), tf.constant([40.0, 0.0])]
    clip = clip_schedule.PerLayerClipSchedule.from_layer_norms([0.6, 0.8])
    assert clip.norm(_round(0)).numpy() == np.float32(1.0)
    small, large = clip.clip(update, _round(0))
    np.testing.assert_array_equal(small, [np.float32(0.3)])
    np.testing.assert_allclose(large, [0.8, 0.0], rtol=2e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize(
    "build", [clip_schedule.FlatClipSchedule, clip_schedule.PerLayerClipSchedule]
)
def test_what_is_not_finite_becomes_zero_everywhere(build, bad):
    clipped = build(1.0).clip([tf.constant([1.0, bad]), tf.constant([2.0])], _round(0))
    for tensor in clipped:
        np.testing.assert_array_equal(tensor, np.zeros(tensor.shape))


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, [], [1.0, 0.0], [[1.0]]])
@pytest.mark.parametrize(
    "build", [clip_schedule.FlatClipSchedule, clip_schedule.PerLayerClipSchedule]
)
def test_refuses_unusable_norms(build, bad):
    with pytest.raises(ValueError, match="clip_norm"):
        build(bad)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_a_function_that_returns_an_unusable_norm_stops_the_round(bad):
    clip = clip_schedule.FlatClipSchedule(lambda t: tf.constant(bad))
    with pytest.raises(tf.errors.InvalidArgumentError, match="clip_norm"):
        tf.function(clip.norm)(_round(0))


def test_refuses_unusable_proportions():
    for bad in ((), (1.0, 0.0), (1.0, -1.0), (np.nan,), (np.inf, 1.0), 1.0):
        with pytest.raises(ValueError, match="proportions"):
            clip_schedule.PerLayerClipSchedule(1.0, bad)
    clip = clip_schedule.PerLayerClipSchedule(1.0, (1.0, 1.0))
    with pytest.raises(ValueError, match="proportions has 2 entries, but the model has 3"):
        clip.clip(_update(), _round(0))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
