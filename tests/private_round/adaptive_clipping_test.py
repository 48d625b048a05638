"""What one client can move in both streams of adaptive clipping, against what is charged."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.mechanisms import identity
from tff_dpftrl.private_round import adaptive_clipping

_SHAPES = [(3,), ()]


def _round(**arguments):
    clipping = adaptive_clipping.AdaptiveClipping(2.0, clipped_count_stddev=1.0)
    defaults = {"noise_multiplier": 1.0, "clients_per_round": 4, "clipping": clipping}
    return adaptive_clipping.AdaptiveClipRound(identity.Identity(), **(defaults | arguments))


def _contribution(round_, clip, values):
    update = [tf.constant(values[:3], tf.float32), tf.constant(values[3], tf.float32)]
    contribution, _ = round_.clip_client(update, clip)
    return np.append(contribution.update[0], contribution.update[1]), float(contribution.bit)


def test_noise_that_is_in_both_totals_is_not_added_again():
    """The estimate of the clip norm follows the noised count as it is."""
    round_ = _round(noise_parties=4)
    state = round_.initial_state(_SHAPES)
    assert (state.buffer, state.count_buffer) == ((), ()) and not np.any(state.seed)
    update = [tf.constant([4.0, 0.0, -8.0], tf.float64), tf.constant(1.0, tf.float64)]
    noised = adaptive_clipping.CountedContribution(update, tf.constant(3.0, tf.float64))
    after, average, measurements = round_.release(state, noised)
    np.testing.assert_array_equal(average[0], [1.0, 0.0, -2.0])
    assert measurements["unclipped_fraction"] == 3.0 / 4 + 0.5
    one_stddev = round_.update_noise_multiplier * float(measurements["clip_norm"])
    assert float(measurements["noise_stddev"]) == pytest.approx(np.sqrt(4) * one_stddev)
    assert float(after.clip.estimate) == pytest.approx(2.0 * math.exp(-0.2 * (1.25 - 0.5)))
    skipped = round_.skip(after, _SHAPES)
    assert skipped.round_index == 2 and skipped.clip.estimate == after.clip.estimate


_CLIENTS = [
    [0.0] * 4,
    [-0.0] * 4,
    [1e-30] * 4,
    [1e-45, 0, 0, 0],
    [0.1] * 4,
    [1.0] * 4,
    [-1.0, 1.0, 1.0, -1.0],
    [7.0, 0, 0, -3],
    [1e30] * 4,
    [3e38] * 4,
    [math.nan, 0, 0, 0],
    [math.inf, 0, 0, -math.inf],
]


@pytest.mark.parametrize("values", _CLIENTS, ids=str)
@pytest.mark.parametrize("estimate", [0.5, 2.0, 50.0])
@pytest.mark.parametrize("unit_inflation", [None, 1.0])
def test_no_client_moves_both_streams_by_more_than_is_charged(values, estimate, unit_inflation):
    # Zeroing a client out sends zeros, whatever it would have sent.
    round_ = _round(unit_inflation=unit_inflation)
    clip = adaptive_clipping.ClipState(tf.constant(2.0), tf.constant(estimate), tf.constant(0.0))
    update, bit = _contribution(round_, clip, values)
    zeroed_update, zeroed_bit = _contribution(round_, clip, [0.0] * 4)
    scale = 1.0 if unit_inflation is not None else 2.0
    moved = np.linalg.norm(update - zeroed_update) / (round_.update_noise_multiplier * scale)
    counted = (bit - zeroed_bit) / round_.clipped_count_stddev
    assert moved**2 + counted**2 <= round_.noise_multiplier**-2


def test_the_charge_is_reached():
    # Power: with a bit of +1/2 for zeros the same clients would have moved 1.75 where 1 is charged.
    round_ = _round()
    clip = round_.initial_state(_SHAPES).clip
    update, bit = _contribution(round_, clip, [9.0] * 4)
    assert bit == -0.5
    moved = (np.linalg.norm(update) / (round_.update_noise_multiplier * 2.0)) ** 2
    assert moved + bit**2 == pytest.approx(1.0, rel=3e-5)
    assert moved + (bit - 0.5) ** 2 == pytest.approx(1.75, rel=3e-5)


def test_the_noise_covers_what_encoding_may_add_to_a_contribution():
    totals = adaptive_clipping.CountedContribution(
        [tf.zeros(shape, tf.float64) for shape in _SHAPES], tf.constant(0.0, tf.float64)
    )
    stddevs, averages = [], []
    for unit_inflation in (None, 1.0, 1.5):
        round_ = _round(unit_inflation=unit_inflation, deterministic_seed=3)
        _, average, measured = round_.release(round_.initial_state(_SHAPES), totals)
        stddevs.append(float(measured["noise_stddev"]))
        averages.append(np.append(average[0], average[1]))
    assert stddevs == pytest.approx(np.array([1.0, 1.0, 1.5]) * stddevs[0], rel=1e-6)
    np.testing.assert_allclose(averages[1], averages[0], rtol=1e-5)
    np.testing.assert_allclose(averages[2], 1.5 * averages[0], rtol=1e-5)
    assert np.abs(averages[0]).min() > 0.0


def test_a_client_that_sends_zeros_counts_as_one_that_does_not_report():
    round_ = _round()
    clip = round_.initial_state(_SHAPES).clip
    for values in ([0.0] * 4, [math.nan] * 4):
        update, bit = _contribution(round_, clip, values)
        assert bit == 0.0 and not np.any(update)
    nobody = round_.no_contribution(_SHAPES)
    assert nobody.bit == 0.0 and not np.any(nobody.update[0])
    assert _contribution(round_, clip, [0.1] * 4)[1] == 0.5


def test_cost_of_the_estimation():
    assert _round().estimation_cost == pytest.approx(1 / math.sqrt(0.75))
    assert _round(noise_multiplier=0.0).estimation_cost == 1.0


def test_what_is_no_adaptive_clipping_is_refused():
    with pytest.raises(ValueError, match="clipping must be an AdaptiveClipping"):
        _round(clipping=1.0)
    with pytest.raises(ValueError, match="unit_inflation must be a finite number, at least 1"):
        _round(unit_inflation=0.9)


@pytest.mark.parametrize(
    "given, noise_multiplier, expected", [(None, 1.0, 5.0), (None, 0.0, 0.0), (3.0, 0.0, 3.0)]
)
def test_the_bits_have_noise_where_the_updates_have(given, noise_multiplier, expected):
    settings = adaptive_clipping.AdaptiveClipping(2.0, clipped_count_stddev=given)
    assert settings.count_stddev(noise_multiplier, clients_per_round=100) == expected
