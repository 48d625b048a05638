"""An optimizer without AutoGraph takes the same steps, and its code is not converted."""

import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.learning import python_optimizers

_SPECS = (tf.TensorSpec([3], tf.float32), tf.TensorSpec([2, 2], tf.float32))


def _steps(optimizer):
    rng = np.random.default_rng(1)
    weights = tuple(tf.ones(s.shape) for s in _SPECS)
    state = optimizer.initialize(_SPECS)
    step = tf.function(optimizer.next)
    for _ in range(3):
        update = tuple(tf.constant(rng.normal(size=s.shape), tf.float32) for s in _SPECS)
        state, weights = step(state, weights, update)
    return state, weights


@pytest.mark.parametrize("build", ["build_sgdm", "build_adam"])
def test_steps_and_state_are_the_same(build):
    plain = getattr(tff.learning.optimizers, build)(0.3)
    plain = tff.learning.optimizers.schedule_learning_rate(
        plain, lambda index: 0.3 / (1.0 + tf.cast(index, tf.float32))
    )
    wrapped = python_optimizers.without_autograph(plain)
    expected, found = _steps(plain), _steps(wrapped)
    tf.nest.assert_same_structure(expected, found)
    for one, other in zip(tf.nest.flatten(expected), tf.nest.flatten(found), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_learning_rate_can_be_set():
    optimizer = python_optimizers.without_autograph(tff.learning.optimizers.build_sgdm(0.3))
    state = optimizer.set_hparams(optimizer.initialize(_SPECS), {"learning_rate": 0.1})
    assert optimizer.get_hparams(state) == {"learning_rate": 0.1}
    _, weights = optimizer.next(
        state, tuple(tf.zeros(s.shape) for s in _SPECS), tuple(tf.ones(s.shape) for s in _SPECS)
    )
    np.testing.assert_allclose(weights[0], -0.1, rtol=1e-6)


def test_what_only_autograph_could_trace_is_refused():
    class Branching(tff.learning.optimizers.Optimizer):
        def initialize(self, specs):
            return ()

        def next(self, state, weights, gradients):
            if tf.reduce_all(weights[0] > 0.0):
                weights = gradients
            return state, weights

    _steps(Branching())
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        _steps(python_optimizers.without_autograph(Branching()))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
