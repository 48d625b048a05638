"""The average kept by the server optimizer is the exponential moving average of its models."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.learning import iterate_averaging, optimizers

_SPECS = (tf.TensorSpec([3], tf.float32), tf.TensorSpec([2, 2], tf.float32))


def _path(optimizer, num_rounds):
    rng = np.random.default_rng(1)
    weights = tuple(tf.constant(rng.normal(size=s.shape), tf.float32) for s in _SPECS)
    state, models = optimizer.initialize(_SPECS), []
    for _ in range(num_rounds):
        update = tuple(tf.constant(rng.normal(size=s.shape), tf.float32) for s in _SPECS)
        state, weights = optimizer.next(state, weights, update)
        models.append(weights)
    return state, models


@pytest.mark.parametrize("num_rounds", [1, 2, 40])
def test_the_average_has_weights_of_powers_of_the_decay(num_rounds):
    plain = optimizers.sgdm(0.3, 0.9)
    state, models = _path(iterate_averaging.average_iterates(plain, 0.8), num_rounds)
    _, expected = _path(plain, num_rounds)
    share = 0.8 ** np.arange(num_rounds)[::-1]
    for j in range(len(_SPECS)):
        path = np.stack([m[j].numpy() for m in expected])
        # Training itself is as without averaging.
        np.testing.assert_array_equal(np.stack([m[j].numpy() for m in models]), path)
        average = np.tensordot(share / share.sum(), path.astype(np.float64), axes=1)
        np.testing.assert_allclose(state["average"][j], average, rtol=1e-5, atol=1e-5)


def test_hyperparameters_are_those_of_the_optimizer():
    optimizer = iterate_averaging.average_iterates(optimizers.sgdm(0.3), 0.8)
    state = optimizer.initialize(_SPECS)
    assert dict(optimizer.get_hparams(state)) == {"learning_rate": np.float32(0.3)}
    changed = optimizer.set_hparams(state, {"learning_rate": 0.1})
    zeros = tuple(tf.zeros(s.shape) for s in _SPECS)
    ones = tuple(tf.ones(s.shape) for s in _SPECS)
    _, weights = optimizer.next(changed, zeros, ones)
    np.testing.assert_allclose(weights[0], -0.1 * np.ones(3), rtol=1e-6)


def test_refuses_a_decay_out_of_range():
    for bad in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="decay"):
            iterate_averaging.average_iterates(optimizers.sgdm(0.3), bad)
