"""The prefix-sum form of the server update equals SGD on the residuals."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.learning import dp_ftrl_optimizer, optimizers

_SPECS = (tf.TensorSpec([3], tf.float32), tf.TensorSpec([2, 2], tf.float32))


def _residuals(num_rounds):
    rng = np.random.default_rng(1)
    return [
        tuple(tf.constant(rng.normal(size=spec.shape), tf.float32) for spec in _SPECS)
        for _ in range(num_rounds)
    ]


def _run(optimizer, initial, residuals):
    state, weights, path = optimizer.initialize(_SPECS), initial, []
    for residual in residuals:
        state, weights = optimizer.next(state, weights, residual)
        path.append(weights)
    return path


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_sgd_on_residuals(momentum):
    initial = (tf.constant([1.0, -2.0, 0.5]), tf.ones([2, 2]))
    residuals = _residuals(20)
    ours = _run(dp_ftrl_optimizer.build_dp_ftrl_optimizer(0.3, momentum), initial, residuals)
    sgd = _run(optimizers.sgdm(0.3, momentum), initial, residuals)
    for mine, theirs in zip(ours, sgd, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    # Without momentum it is literally θ⁰ − η Σ g.
    if momentum == 0.0:
        for j, start in enumerate(initial):
            prefix = np.cumsum([r[j].numpy() for r in residuals], axis=0, dtype=np.float64)
            for t, weights in enumerate(ours):
                np.testing.assert_allclose(weights[j], start - 0.3 * prefix[t], atol=1e-5)


def test_hyperparameters_can_be_read_and_set():
    optimizer = dp_ftrl_optimizer.build_dp_ftrl_optimizer(0.3, 0.5)
    state = optimizer.initialize(_SPECS)
    assert dict(optimizer.get_hparams(state)) == {"learning_rate": np.float32(0.3), "momentum": 0.5}
    changed = optimizer.set_hparams(state, {"learning_rate": 0.1, "momentum": 0.5})
    assert changed["learning_rate"] == np.float32(0.1)
    initial = (tf.zeros([3]), tf.zeros([2, 2]))
    _, weights = optimizer.next(changed, initial, (tf.ones([3]), tf.ones([2, 2])))
    np.testing.assert_allclose(weights[0], -0.1 * np.ones(3), rtol=1e-6)


def test_refuses_unusable_arguments():
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="learning_rate"):
            dp_ftrl_optimizer.build_dp_ftrl_optimizer(bad)
    for bad in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="momentum"):
            dp_ftrl_optimizer.build_dp_ftrl_optimizer(0.1, bad)
