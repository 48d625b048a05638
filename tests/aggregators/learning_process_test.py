"""The aggregators inside TFF's own learning processes and wrappers."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import aggregators
from tff_dpftrl.mechanisms import blt, identity, tree

_BLT = blt.Blt((0.99, 0.8), (0.05, 0.2))
_FEATURES, _CLASSES = 4, 3


def _model_fn():
    initializer = tf.keras.initializers.GlorotUniform(seed=1)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer([_FEATURES]),
            tf.keras.layers.Dense(5, "tanh", kernel_initializer=initializer),
            tf.keras.layers.Dense(_CLASSES, kernel_initializer=initializer),
        ]
    )
    return tff.learning.models.from_keras_model(
        model,
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        input_spec=collections.OrderedDict(
            x=tf.TensorSpec([None, _FEATURES]), y=tf.TensorSpec([None], tf.int64)
        ),
    )


def _clients(num_clients, seed):
    rng = np.random.default_rng(seed)
    datasets = []
    for _ in range(num_clients):
        x = rng.normal(size=(6, _FEATURES)).astype(np.float32)
        y = rng.integers(_CLASSES, size=6)
        datasets.append(
            tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=x, y=y)).batch(3)
        )
    return datasets


def _fed_avg(aggregator, server_optimizer):
    return tff.learning.algorithms.build_unweighted_fed_avg(
        _model_fn,
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
        server_optimizer_fn=server_optimizer,
        model_aggregator=aggregator,
    )


def _fed_sgd(aggregator, server_optimizer):
    return tff.learning.algorithms.build_fed_sgd(
        _model_fn,
        server_optimizer_fn=server_optimizer,
        model_aggregator=tff.aggregators.as_weighted_aggregator(aggregator),
    )


def _train(build, aggregator, server_optimizer, num_rounds=2, num_clients=3):
    process = build(aggregator, server_optimizer)
    state = process.initialize()
    for t in range(num_rounds):
        state = process.next(state, _clients(num_clients, t)).state
    return process.get_model_weights(state).trainable


_OPTIMIZERS = {
    "sgd": tff.learning.optimizers.build_sgdm(1.0),
    "momentum": tff.learning.optimizers.build_sgdm(0.5, momentum=0.9),
    "adam": tff.learning.optimizers.build_adam(0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "build, strategy, optimizer",
    [
        (_fed_avg, _BLT, "sgd"),
        (_fed_avg, tree.Tree(3), "momentum"),
        (_fed_sgd, identity.Identity(), "adam"),
    ],
    ids=["fed-avg-blt-sgd", "fed-avg-tree-momentum", "fed-sgd-identity-adam"],
)
def test_without_noise_it_trains_like_the_plain_mean(build, strategy, optimizer):
    ours = aggregators.build_dp_ftrl_aggregator(
        strategy, noise_multiplier=0.0, clip_norm=1e6, clients_per_round=3
    )
    plain = tff.aggregators.UnweightedMeanFactory()
    expected = _train(build, plain, _OPTIMIZERS[optimizer])
    for a, b in zip(_train(build, ours, _OPTIMIZERS[optimizer]), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_with_noise_weights_differ_by_the_noise():
    # SGD with rate 1 adds the emitted noise to the weights, whatever the strategy.
    def train(noise_multiplier):
        ours = aggregators.build_dp_ftrl_aggregator(
            _BLT,
            noise_multiplier=noise_multiplier,
            clip_norm=1e3,
            clients_per_round=2,
            deterministic_seed=1,
        )
        return _train(_fed_avg, ours, _OPTIMIZERS["sgd"], num_rounds=1, num_clients=2)

    noisy, quiet = train(1e-3), train(0.0)
    difference = np.concatenate([np.ravel(a - b) for a, b in zip(noisy, quiet, strict=True)])
    # Stddev 1e-3 * 1e3 / 2 on 43 coordinates: the sample's is within 6 / sqrt(86) of it.
    assert abs(np.std(difference) / 0.5 - 1) < 6 / np.sqrt(2 * len(difference))
    assert np.min(np.abs(difference)) > 0


@pytest.mark.slow
def test_estimated_clip_norm_is_among_the_metrics():
    adaptive = aggregators.build_adaptive_dp_ftrl_aggregator(
        _BLT,
        noise_multiplier=0.0,
        clients_per_round=2,
        clipping=aggregators.AdaptiveClipping(initial_clip_norm=100.0, only_estimates=True),
    )
    process = _fed_avg(adaptive, _OPTIMIZERS["sgd"])
    output = process.next(process.initialize(), _clients(2, 0))
    # Both clients are unclipped, half should be: 100 exp(-0.2 (1 - 0.5)).
    estimate = output.metrics["aggregator"]["estimated_clip_norm"]
    np.testing.assert_allclose(estimate, 100 * np.exp(-0.1), rtol=1e-6)


def test_tff_wrappers_compose():
    inner = aggregators.build_dp_ftrl_aggregator(
        _BLT, noise_multiplier=0.0, clip_norm=10.0, clients_per_round=2
    )
    wrapped = tff.aggregators.zeroing_factory(100.0, tff.aggregators.clipping_factory(2.0, inner))
    wrapped = tff.aggregators.add_measurements(
        wrapped,
        server_measurement_fn=lambda mean: collections.OrderedDict(mean=mean),
    )
    process = wrapped.create(tff.TensorType(np.float32, [2]))
    output = process.next(
        process.initialize(), [np.float32([8, 0]), np.float32([1000, 0]), np.float32([0, 1])]
    )
    np.testing.assert_allclose(output.result, [1.0, 0.5], rtol=3e-5)
    np.testing.assert_array_equal(output.measurements["mean"], output.result)
