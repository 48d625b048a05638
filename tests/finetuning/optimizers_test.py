"""Tests of learning rates, and of the optimizers against their own formulas."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.finetuning import optimizers


def _options(**options):
    needed = {"initial_weights": "x", "target_epsilon": 1.0, "compute_budget": 64}
    config = config_lib.FinetuningConfig(**needed | {"num_steps": 10, "warmup_steps": 0} | options)
    return config.part(optimizers.OptimizerOptions)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [0.5] * 4),
        ({"warmup_steps": 3}, [0.125, 0.25, 0.375, 0.5]),
        ({"warmup_steps": None}, [0.25, 0.5, 0.5, 0.5]),
        ({"decay": "linear"}, [0.5, 0.45, 0.4, 0.35]),
        ({"decay": "cosine"}, [0.25 * (1 + np.cos(np.pi * t / 10)) for t in range(4)]),
    ],
)
def test_rates_grow_and_fall(options, expected):
    options = _options(learning_rate=0.5, **options)
    found = [optimizers.learning_rate(options, step) for step in range(4)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def _moved(gradients, **options):
    optimizer = optimizers.build(_options(learning_rate=0.1, **options))
    weight = tf.Variable(np.ones(2, np.float32))
    optimizer.build([weight])
    for gradient in gradients:
        optimizer.apply_gradients([(tf.constant(gradient, tf.float32), weight)])
    return weight.numpy() - 1.0


def test_optimizers_take_the_options_that_are_theirs():
    one, two = np.array([1.0, -2.0]), np.array([0.5, 3.0])
    np.testing.assert_allclose(_moved([one, two], optimizer="sgd"), -0.1 * (one + two), rtol=1e-5)
    heavy = _moved([one, two], optimizer="momentum", momentum=0.5)
    np.testing.assert_allclose(heavy, -0.1 * (1.5 * one + two), rtol=1e-5)
    moments = {"momentum": 0.8, "second_moment_decay": 0.9}
    first = 0.2 * (0.8 * one + two) / (1 - 0.8**2)
    second = 0.1 * (0.9 * one**2 + two**2) / (1 - 0.9**2)
    adam = -0.1 * (np.sign(one) + first / np.sqrt(second))
    np.testing.assert_allclose(_moved([one, two], optimizer="adam", **moments), adam, rtol=1e-4)
    decayed = _moved([one], optimizer="adamw", weight_decay=0.5, **moments)
    np.testing.assert_allclose(decayed, -0.1 * np.sign(one) - 0.05, rtol=1e-4)
    assert np.all(np.sign(_moved([one], optimizer="adafactor")) == -np.sign(one))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
