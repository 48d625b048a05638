"""A skipped round: noise and restarts move on as after a release, and nothing else does."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.mechanisms import banded, blt, identity, restarts, tree
from tff_dpftrl.private_round import (
    adaptive_clipping,
    clipping,
    estimators,
    fixed_clip,
    sampled_gaussian,
)

_SHAPES = [(3,), (2, 2)]
_BLT = blt.Blt((0.9, 0.5), (0.3, 0.2))
_STRATEGIES = {
    "identity": identity.Identity(),
    "blt": _BLT,
    "banded": banded.Banded([[1.0, 0.0], *[[1.0, 0.5]] * 7]),
    "tree": tree.Tree(8),
    "vanilla tree": tree.Tree(8, variance_reduction=False),
    "restarted": restarts.Restarted(_BLT, (0, 3, 5)),
}
_COMMON = {"noise_multiplier": 1.5, "clients_per_round": 4, "deterministic_seed": 7}


def _fixed(strategy):
    return fixed_clip.FixedClipRound(strategy, clipping=clipping.FlatClipping(2.0), **_COMMON)


def _adaptive(strategy):
    settings = adaptive_clipping.AdaptiveClipping(initial_clip_norm=0.5, clipped_count_stddev=1.0)
    return adaptive_clipping.AdaptiveClipRound(strategy, clipping=settings, **_COMMON)


def _average(round_, state):
    """The release of a round without clients, flat; and the state after it."""
    state, average, _ = round_.release(state, round_.no_contribution(_SHAPES))
    return np.concatenate([np.ravel(tensor) for tensor in average]), state


@pytest.mark.parametrize(
    "name",
    [
        *("identity", "blt", "banded", "tree", "restarted"),
        pytest.param("vanilla tree", marks=pytest.mark.slow),
    ],
)
def test_later_noise_is_that_of_a_run_that_released_every_round(name):
    round_ = _fixed(_STRATEGIES[name])
    state, expected = round_.initial_state(_SHAPES), []
    for _ in range(8):
        row, state = _average(round_, state)
        expected.append(row)
    assert len(np.unique(np.round(expected, 12), axis=0)) == 8
    state = round_.initial_state(_SHAPES)
    for t in range(8):
        if t in (0, 2, 3, 6):
            state = round_.skip(state, _SHAPES)
        else:
            row, state = _average(round_, state)
            np.testing.assert_array_equal(row, expected[t])


def test_an_adaptive_norm_waits_through_a_skipped_round_and_restarts_on_time():
    round_ = _adaptive(restarts.Restarted(_BLT, (0, 3)))
    state = round_.initial_state(_SHAPES)
    _, state = _average(round_, state)
    released = state.clip
    assert float(released.estimate) != 0.5 and float(released.active) == 0.5
    for t in (1, 2):
        before, state = state, round_.skip(state, _SHAPES)
        assert int(state.round_index) == t + 1
        np.testing.assert_array_equal(state.seed, before.seed)
        assert not np.array_equal(state.buffer, before.buffer)
        assert not np.array_equal(state.count_buffer, before.count_buffer)
        assert float(state.clip.estimate) == float(released.estimate)
        assert float(state.clip.excess) == float(released.excess)
    # Round 3 restarts: it takes over the last estimate that was released.
    assert float(state.clip.active) == float(released.estimate)


def test_both_streams_of_an_adaptive_round_go_on_past_a_skipped_one():
    round_ = _adaptive(_BLT)
    state = round_.initial_state(_SHAPES)
    _, after_release = _average(round_, state)
    after_skip = round_.skip(state, _SHAPES)
    for one, other in zip(after_release[:4], after_skip[:4], strict=True):
        np.testing.assert_array_equal(one, other)
    expected, _ = _average(round_, after_release)
    average, _ = _average(round_, after_skip)  # The same clip norm scales them: no restart yet.
    np.testing.assert_array_equal(average, expected)


def test_independent_noise_moves_to_the_next_round():
    round_ = sampled_gaussian.SampledGaussianRound(
        clipping=clipping.FlatClipping(1.0),
        noise_multiplier=1.0,
        estimator=estimators.FixedDenominator(0.5, 6),
        deterministic_seed=7,
    )
    state = round_.initial_state(_SHAPES)
    first, after = _average(round_, state)
    second, _ = _average(round_, after)
    average, _ = _average(round_, round_.skip(state, _SHAPES))
    np.testing.assert_array_equal(average, second)
    assert not np.array_equal(first, second)


def test_a_skipped_round_counts_against_the_horizon():
    round_ = _fixed(tree.Tree(1))
    state = round_.skip(round_.initial_state(_SHAPES), _SHAPES)
    with pytest.raises(tf.errors.InvalidArgumentError, match="1 rounds"):
        round_.skip(state, _SHAPES)
