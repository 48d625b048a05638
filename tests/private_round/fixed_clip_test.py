"""DP-FTRL with a fixed clip norm, without TFF, against the formula written in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.mechanisms import blt, identity, tree
from tff_dpftrl.private_round import clipping, fixed_clip, interface

_SHAPES = [(3,), (2, 2)]


def _round(strategy, **arguments):
    defaults = {
        "noise_multiplier": 1.5,
        "clipping": clipping.FlatClipping(2.0),
        "clients_per_round": 4,
        "deterministic_seed": 7,
    }
    return fixed_clip.FixedClipRound(strategy, **(defaults | arguments))


def _released(round_, num_rounds, updates=()):
    """What is released in each round, as rows; every round sees the same updates."""
    state, rows = round_.initial_state(_SHAPES), []
    for _ in range(num_rounds):
        seen = round_.broadcast(state)
        clients = [round_.clip_client(update, seen)[0] for update in updates]
        state, average, measurements = round_.release(state, round_.total(clients, _SHAPES))
        rows.append(np.concatenate([np.ravel(tensor) for tensor in average]))
    return np.array(rows), measurements


def test_without_noise_it_is_the_clipped_sum_over_the_denominator():
    round_ = _round(identity.Identity(), noise_multiplier=0.0)
    small = [tf.constant([0.5, 0.0, 0.0]), tf.zeros([2, 2])]
    large = [tf.zeros([3]), tf.constant([[3.0, 0.0], [0.0, 4.0]])]
    ((row,), measurements) = _released(round_, 1, [small, large])
    expected = np.array([0.5, 0, 0, 2 * 3 / 5, 0, 0, 2 * 4 / 5]) / 4
    np.testing.assert_allclose(row, expected, rtol=1.1 * clipping.CLIP_MARGIN)
    assert measurements["clip_norm"] == 2.0 and measurements["noise_stddev"] == 0.0


def test_noise_that_is_in_the_totals_is_not_added_again():
    strategy = blt.Blt((0.9, 0.5), (0.1, 0.2))
    round_ = _round(strategy, noise_parties=4, deterministic_seed=None)
    noised = interface.Contribution([tf.constant([1.0, -2.0, 8.0]), tf.ones([2, 2])])
    state = round_.initial_state(_SHAPES)
    assert state.buffer == () and not np.any(state.seed)  # Nothing of it is secret.
    after, average, measurements = round_.release(state, noised)
    np.testing.assert_array_equal(average[0], [0.25, -0.5, 2.0])
    # Each of the four has added noise of 1.5 times the norm 2.
    assert after.round_index == 1 and measurements["noise_stddev"] == np.sqrt(4) * 3.0
    assert round_.skip(after, _SHAPES).round_index == 2 and not round_.is_separable


@pytest.mark.parametrize("strategy", [blt.Blt((0.9, 0.5), (0.1, 0.2)), tree.Tree(6)])
def test_noise_is_the_scaled_stream_of_the_strategy(strategy):
    noise, measurements = _released(_round(strategy, encoded_norm=3.0), 5)
    assert measurements["noise_stddev"] == 1.5 * 3.0
    unit = _round(strategy, noise_multiplier=1.0, clients_per_round=1, encoded_norm=3.0)
    np.testing.assert_allclose(noise, 1.5 / 4 * _released(unit, 5)[0], rtol=1e-12)


def test_one_tensor_after_the_other_has_the_bits_of_all_together():
    round_ = _round(identity.Identity())
    state = round_.initial_state(_SHAPES)
    assert round_.is_separable
    assert not _round(blt.Blt((0.9, 0.5), (0.1, 0.2))).is_separable
    assert not _round(tree.Tree(6)).is_separable
    total = [tf.fill(shape, tf.constant(0.1, tf.float64)) for shape in _SHAPES]
    for _ in range(3):
        together, expected, _ = round_.release(state, interface.Contribution(total))
        executed, after = round_.execute(state)
        found = [
            round_.release_tensor(state.round_index, executed, tf.constant(i), x)
            for i, x in enumerate(total)
        ]
        state = after
        tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
        tf.nest.map_structure(np.testing.assert_array_equal, state, together)


def test_a_blt_correlates_the_draws_of_independent_noise():
    strategy = blt.Blt((0.9, 0.5), (0.1, 0.2))
    independent, _ = _released(_round(identity.Identity()), 6)
    correlated, _ = _released(_round(strategy), 6)
    expected = strategy.noise_matrix(6) @ independent
    np.testing.assert_allclose(correlated, expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(correlated[1:], independent[1:], rtol=1e-2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
        ({"clients_per_round": 0}, "clients_per_round must be"),
        ({"clipping": 2.0}, "clipping must be a FlatClipping or a PerLayerClipping"),
        ({"clipping": clipping.FlatClipping([2.0, 1.0])}, "one clip norm for all rounds"),
        ({"encoded_norm": 1.9}, "encoded_norm must be .* cannot make"),
    ],
)
def test_what_cannot_be_used_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        _round(identity.Identity(), **arguments)
