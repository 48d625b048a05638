"""A weighted estimate with fresh noise, without TFF, against the formula written in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.private_round import clipping, estimators, sampled_gaussian

_SHAPES = [(4,)]


def _round(**arguments):
    defaults = {
        "clipping": clipping.FlatClipping([1.0, 0.5]),
        "noise_multiplier": 0.0,
        "estimator": estimators.FixedDenominator(0.5, 6),
        "weight_cap": 4.0,
        "deterministic_seed": 3,
    }
    return sampled_gaussian.SampledGaussianRound(**(defaults | arguments))


def _clip(round_, values, weight, round_index=0):
    first = tf.constant(round_index, tf.int64)
    return round_.clip_client([tf.constant(values, tf.float32)], first, weight)


@pytest.mark.parametrize("round_index, bound", [(0, 1.0), (1, 0.5), (9, 0.5)])
def test_clip_norm_and_weight_of_a_client(round_index, bound):
    (update, weight), is_finite = _clip(_round(), [0, 3, 0, 4], 2, round_index)
    expected = 2 / 4 * bound * np.array([0, 0.6, 0, 0.8])
    np.testing.assert_allclose(update[0], expected, rtol=1.1 * clipping.CLIP_MARGIN)
    assert weight == 0.5 and is_finite


@pytest.mark.parametrize(
    "values, num_examples, weight",
    [([1] * 4, 100, 1.0), ([1] * 4, 0, 0.0), ([1] * 4, -3, 0.0), ([np.nan, 1, 1, 1], 4, 0.0)],
)
def test_weights_are_capped_and_absent_clients_have_none(values, num_examples, weight):
    contribution, _ = _clip(_round(), values, num_examples)
    assert contribution.weight == weight
    assert np.any(contribution.update[0]) == (weight > 0)


def test_a_weight_is_required():
    with pytest.raises(ValueError, match="weight must be the client's number of examples"):
        _clip(_round(), [1] * 4, None)


def test_the_estimator_divides_the_sum():
    round_ = _round()
    clients = [_clip(round_, [0.5, 0, 0, 0], 4)[0], _clip(round_, [0, 0.25, 0, 0], 2)[0]]
    state = round_.initial_state(_SHAPES)
    _, (estimate,), _ = round_.release(state, round_.total(clients, _SHAPES))
    np.testing.assert_allclose(estimate, np.array([0.5, 0.125, 0, 0]) / (0.5 * 6), rtol=1e-12)


def test_noise_is_scaled_by_the_sensitivity_and_follows_the_clip_norm():
    # Nobody in the rounds: the estimates are noise alone, the same draws in both runs.
    averages = {}
    for name, clip in (("changing", [1.0, 0.5]), ("constant", 1.0)):
        round_ = _round(noise_multiplier=2.0, clipping=clipping.FlatClipping(clip))
        state, rows = round_.initial_state(_SHAPES), []
        for _ in range(2):
            state, (noise,), measurements = round_.release(state, round_.total([], _SHAPES))
            rows.append(noise.numpy())
        averages[name] = np.array(rows)
        last = np.ravel(clip)[-1]
        stddev = 2.0 * estimators.FixedDenominator(0.5, 6).unit_sensitivity * last
        assert measurements["noise_stddev"].numpy() == pytest.approx(stddev)
    factors = np.array([[1.0], [0.5]])
    np.testing.assert_allclose(averages["changing"], factors * averages["constant"], rtol=1e-12)
    assert not np.allclose(averages["constant"][0], averages["constant"][1])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"clipping": 1.0}, "clipping must be a FlatClipping or a PerLayerClipping"),
        ({"estimator": 0.5}, "estimator must be a FixedDenominator or a ClippedDenominator"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
        ({"weight_cap": 0}, "weight_cap must be"),
    ],
)
def test_what_cannot_be_used_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        _round(**arguments)
