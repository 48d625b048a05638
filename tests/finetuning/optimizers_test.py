"""Tests of learning rates, and of the optimizers against their own formulas."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.finetuning import optimizers, private_steps


def _options(**options):
    needed = {"initial_weights": "x", "target_epsilon": 1.0, "compute_budget": 64}
    config = config_lib.FinetuningConfig(**needed | {"num_steps": 10, "warmup_steps": 0} | options)
    return config.part(config_lib.StepOptions)


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


@pytest.mark.parametrize(
    "options, averaging",
    [
        ({"optimizer": "sgd", "decay": "cosine", "warmup_steps": None}, None),
        ({"optimizer": "momentum", "momentum": 0.7}, 0.8),
        ({"optimizer": "momentum", "momentum": 0.9, "decay": "linear", "warmup_steps": 3}, None),
        ({"optimizer": "adam", "momentum": 0.6, "decay": "cosine"}, None),
        ({"optimizer": "adamw", "weight_decay": 0.5, "decay": "cosine", "warmup_steps": 2}, 0.7),
    ],
)
def test_a_workload_is_what_the_optimizer_makes_of_impulses(options, averaging):
    options, size = (
        _options(learning_rate=0.5, num_steps=20, iterate_averaging=averaging, **options),
        20,
    )
    optimizer = optimizers.build(options)
    weights = tf.Variable(np.zeros(size, np.float32))
    optimizer.build([weights])
    adam = options.optimizer in ("adam", "adamw")
    # Adam divides by √v + 1e-7: with such small gradients that is constant but for the √(1 − β₂^t)
    # of its step. The scale of the impulses brings both back to 1.
    scale, average, rows = 1e-11, [np.zeros(size)], []
    for step, impulse in enumerate(np.eye(size, dtype=np.float32)):
        optimizer.learning_rate.assign(optimizers.learning_rate(options, step))
        if adam:
            correction = np.sqrt(1 - options.second_moment_decay ** (step + 1))
            impulse = scale * impulse
            optimizer.learning_rate.assign(optimizer.learning_rate / correction)
            if options.optimizer == "adamw":
                optimizer.weight_decay = options.weight_decay * correction
        optimizer.apply_gradients([(tf.constant(impulse), weights)])
        model = weights.numpy().astype(np.float64)
        if averaging is not None:
            average = private_steps._averaged(average, [model], averaging, step + 1)
            model = average[0]
        rows.append(-model / 0.5 * (1e-7 / scale if adam else 1.0))
    found = optimizers.update_rule(options).workload(size)
    np.testing.assert_allclose(np.array(rows), found.matrix(), rtol=1e-3, atol=1e-5)
