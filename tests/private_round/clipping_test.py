"""Clipping: never above the bound, and nothing changed below it."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.private_round import clipping


def _round(t):
    return tf.constant(t, tf.int64)


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
    clip_norm = max(_norm(update) * fraction, validation.MIN_CLIP_NORM)
    clipped, _ = clipping.clip_by_norm(_tensors(update), clip_norm)
    norm = _norm(clipped)
    assert norm <= clip_norm
    assert norm >= min(clip_norm, _norm(update)) * (1 - 3e-5)


@pytest.mark.parametrize("dtype", [tf.complex64, tf.int32, tf.bool, tf.string])
@pytest.mark.parametrize("rule", [clipping.FlatClipping(1.0), clipping.PerLayerClipping(1.0)])
def test_only_floats_are_clipped_since_the_noise_is_real(rule, dtype):
    update = [tf.zeros(3), tf.zeros([2], dtype)]
    with pytest.raises(validation.UsageError, match=f"only floats.* got {dtype.name}"):
        rule.clip(update, _round(0))


def test_smaller_updates_are_unchanged():
    update = [np.asarray([3.0, 4.0], np.float32), np.asarray(0.5, np.float32)]
    for clipped, norm in (
        clipping.clip_by_norm(_tensors(update), 6.0),
        clipping.FlatClipping(6.0).clip(_tensors(update), _round(0)),
    ):
        np.testing.assert_allclose(norm, math.sqrt(25.25), rtol=1e-6)
        for before, after in zip(update, clipped, strict=True):
            np.testing.assert_array_equal(before, after)


def test_bounds_given_as_python_numbers_are_not_rounded():
    # float32 would make 0.3 a bound that is 4e-8 too large.
    ((clipped,), _) = clipping.clip_by_norm(_tensors([[9.0]]), 0.3)
    assert float(clipped[0]) == pytest.approx(0.3 * (1 - clipping.CLIP_MARGIN), rel=1e-14)


def test_zero_update_stays_zero():
    clipped, norm = clipping.clip_by_norm(_tensors([np.zeros(3)]), 1.0)
    assert norm == 0.0
    np.testing.assert_array_equal(clipped[0], np.zeros(3))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize(
    "clip", [clipping.FlatClipping(1.0), clipping.PerLayerClipping.from_layer_norms((1.0, 2.0))]
)
def test_update_without_a_finite_norm_is_zero_in_every_tensor(clip, value):
    update = _tensors([np.asarray([1.0, value, value]), np.ones(2)])
    clipped, norm = clip.clip(update, _round(0))
    assert not np.isfinite(norm)
    for tensor in clipped:
        np.testing.assert_array_equal(tensor, np.zeros_like(tensor))


def test_per_layer_clipping():
    clip = clipping.PerLayerClipping.from_layer_norms((1.0, 10.0))
    clipped, norm = clip.clip(_tensors([[3.0, 4.0], [0.6, 0.8]]), _round(0))
    np.testing.assert_allclose(norm, math.sqrt(26), rtol=1e-6)
    np.testing.assert_allclose(clipped[0], [0.6, 0.8], rtol=2e-5)
    np.testing.assert_array_equal(clipped[1], np.asarray([0.6, 0.8], np.float32))
    np.testing.assert_allclose([clip.constant_norm, clip.norm(_round(0))], math.sqrt(101))


def test_one_entry_for_each_tensor():
    with pytest.raises(ValueError, match="2 entries, but an update has 3 tensors"):
        clipping.PerLayerClipping.from_layer_norms((1.0, 1.0)).check_num_tensors(3)
    with pytest.raises(ValueError, match="layer_clip_norms must have one entry"):
        clipping.PerLayerClipping.from_layer_norms(())


@pytest.mark.parametrize("value", [1e-9, 1e20])
def test_unsafe_clip_norms_are_refused(value):
    with pytest.raises(ValueError, match="clip_norm must be a finite number, at least 1e-06"):
        clipping.FlatClipping(value)


@pytest.mark.parametrize("changing", [[1.0, 0.5], lambda t: 1.0], ids=["schedule", "function"])
def test_only_one_norm_for_all_rounds_is_constant(changing):
    assert clipping.FlatClipping(2).constant_norm == 2.0
    with pytest.raises(ValueError, match="noise of different rounds is correlated"):
        clipping.FlatClipping(changing).constant_norm  # noqa: B018


def _update(scale=1.0):
    rng = np.random.default_rng(0)
    shapes = [(3, 4), (5,), ()]
    return [
        tf.constant(scale * (j + 1) * rng.normal(size=s), tf.float32) for j, s in enumerate(shapes)
    ]


@pytest.mark.parametrize("build", [clipping.FlatClipping, clipping.PerLayerClipping])
def test_norm_follows_the_round(build):
    assert build(2.5).norm(_round(7)).numpy() == 2.5
    listed = build([4.0, 2.0, 1.0])
    assert [listed.norm(_round(t)).numpy() for t in range(5)] == [4.0, 2.0, 1.0, 1.0, 1.0]
    function = build(lambda t: 8.0 / tf.cast(t + 1, tf.float32))
    found = [function.norm(_round(t)).numpy() for t in range(4)]
    assert found == [8.0, 4.0, np.float32(8 / 3), 2.0]


@pytest.mark.parametrize("build", [clipping.FlatClipping, clipping.PerLayerClipping])
def test_clipped_norm_is_at_most_that_of_the_round(build):
    clip = build([1.0, 0.01])
    for scale in (0.01, 1.0, 1e6):
        update = _update(scale)
        for t, bound in ((0, 1.0), (1, 0.01), (9, 0.01)):
            clipped, _ = clip.clip(update, _round(t))
            assert _norm(clipped) <= bound


def test_flat_clipping_scales_the_whole_update():
    update = _update()
    clipped, _ = clipping.FlatClipping(1.5).clip(update, _round(0))
    scale = 1.5 / _norm(update)
    for before, after in zip(update, clipped, strict=True):
        np.testing.assert_allclose(after, scale * before, rtol=2e-5)


@pytest.mark.parametrize("proportions", [None, (1.0, 2.0, 2.0)])
def test_each_layer_has_its_share(proportions):
    clip = clipping.PerLayerClipping([3.0, 0.3], proportions)
    shares = np.full(3, 3**-0.5) if proportions is None else np.array([1, 2, 2]) / 3
    # All layers are far above their bounds, so that all bounds are reached.
    update = _update(1e3)
    for t, clip_norm in ((0, 3.0), (1, 0.3)):
        clipped, _ = clip.clip(update, _round(t))
        norms = np.array([_norm([tensor]) for tensor in clipped])
        np.testing.assert_allclose(norms, clip_norm * shares, rtol=2e-5)
        assert np.all(norms <= clip_norm * shares * (1 + 1e-7))
        # S = √Σ S_j².
        assert _norm(clipped) == pytest.approx(clip_norm, rel=2e-5)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, [], [1.0, 0.0], [[1.0]]])
@pytest.mark.parametrize("build", [clipping.FlatClipping, clipping.PerLayerClipping])
def test_refuses_unusable_norms(build, bad):
    with pytest.raises(ValueError, match="clip_norm"):
        build(bad)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_a_function_that_returns_an_unusable_norm_stops_the_round(bad):
    clip = clipping.FlatClipping(lambda t: tf.constant(bad))
    with pytest.raises(tf.errors.InvalidArgumentError, match="clip_norm"):
        tf.function(clip.norm)(_round(0))


def test_refuses_unusable_proportions():
    for bad in ((), (1.0, 0.0), (1.0, -1.0), (np.nan,), (np.inf, 1.0), 1.0):
        with pytest.raises(ValueError, match="proportions"):
            clipping.PerLayerClipping(1.0, bad)
    clip = clipping.PerLayerClipping(1.0, (1.0, 1.0))
    with pytest.raises(ValueError, match="proportions has 2 entries, but an update has 3"):
        clip.clip(_update(), _round(0))
