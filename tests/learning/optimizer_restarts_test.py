"""A restarted optimizer goes on as a new one does, from the same weights."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.learning import optimizer_restarts, optimizers

_SPECS = (tf.TensorSpec([3], tf.float32), tf.TensorSpec([2, 2], tf.float32))
_OPTIMIZERS = {"momentum": lambda: optimizers.sgdm(0.3, 0.9), "adam": lambda: optimizers.adam(0.3)}


def _updates(num_rounds):
    rng = np.random.default_rng(1)
    return [
        tuple(tf.constant(rng.normal(size=s.shape), tf.float32) for s in _SPECS)
        for _ in range(num_rounds)
    ]


def _train(optimizer, updates, weights, state=None):
    state = optimizer.initialize(_SPECS) if state is None else state
    for update in updates:
        state, weights = optimizer.next(state, weights, update)
    return state, weights


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_it_begins_anew_in_the_rounds_that_are_named(name):
    updates, start = _updates(9), tuple(tf.ones(s.shape) for s in _SPECS)
    restarting = optimizer_restarts.restart_at(_OPTIMIZERS[name](), [3, 7])
    _, restarted = _train(restarting, updates, start)
    expected = start
    for part in (updates[:3], updates[3:7], updates[7:]):
        _, expected = _train(_OPTIMIZERS[name](), part, expected)
    _, plain = _train(_OPTIMIZERS[name](), updates, start)
    for one, other, without in zip(restarted, expected, plain, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.abs(one - without).max() > 1e-3


def test_a_learning_rate_that_was_set_stays():
    optimizer = optimizer_restarts.restart_at(optimizers.sgdm(0.3), [0])
    state = optimizer.set_hparams(optimizer.initialize(_SPECS), {"learning_rate": 0.1})
    zeros, ones = (tuple(f(s.shape) for s in _SPECS) for f in (tf.zeros, tf.ones))
    state, weights = optimizer.next(state, zeros, ones)
    np.testing.assert_allclose(weights[0], -0.1 * np.ones(3), rtol=1e-6)
    assert float(dict(optimizer.get_hparams(state))["learning_rate"]) == pytest.approx(0.1)


@pytest.mark.parametrize("rounds", [[], [-1]])
def test_refuses_rounds_that_are_none(rounds):
    with pytest.raises(ValueError, match="rounds"):
        optimizer_restarts.restart_at(optimizers.sgdm(0.3), rounds)
