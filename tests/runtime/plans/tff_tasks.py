"""The tasks of `small_tasks` as processes of TFF."""

from __future__ import annotations

import collections
import functools

import pytest

pytest.importorskip("tensorflow_federated", reason="makes plans of TFF's processes")

import tensorflow as tf
import tensorflow_federated as tff

from tests.runtime.plans import small_tasks
from tff_dpftrl import aggregators
from tff_dpftrl.learning import dp_fedavg, tff_metrics
from tff_dpftrl.mechanisms import blt
from tff_dpftrl.mechanisms import tree as tree_mechanism
from tff_dpftrl.private_round import clipping, estimators

BLT = blt.Blt((0.9, 0.5), (0.3, 0.2))
_SGD = tff.learning.optimizers.build_sgdm(0.1)
_COMMON = {"noise_multiplier": 0.5, "clients_per_round": 3, "deterministic_seed": 7}
_SECURE_METRICS = tff_metrics.aggregator(small_tasks.SECURE_METRICS)


def model():
    """Builds the model y = x w + b of Keras, with a metric."""

    def mse():
        return collections.OrderedDict(mse=tf.keras.metrics.MeanSquaredError())

    keras = tf.keras.Sequential(
        [tf.keras.layers.Dense(1, input_shape=(3,), kernel_initializer="zeros")]
    )
    return tff.learning.models.functional_model_from_keras(
        keras, tf.keras.losses.MeanSquaredError(), small_tasks.SPEC, metrics_constructor=mse
    )


def federated_averaging(aggregator=None, metrics_aggregator=None):
    return tff.learning.algorithms.build_unweighted_fed_avg(
        model(),
        client_optimizer_fn=_SGD,
        model_aggregator=aggregator,
        metrics_aggregator=metrics_aggregator,
        loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
    )


def fixed(noise_multiplier, strategy=BLT):
    """Builds an aggregator with a fixed clip norm, and a seed for tests."""
    options = _COMMON | {"noise_multiplier": noise_multiplier}
    return aggregators.build_dp_ftrl_aggregator(strategy, clip_norm=1.0, **options)


def _dp_fedavg():
    aggregator = aggregators.SampledGaussianFactory(
        clipping=clipping.FlatClipping(1.0),
        noise_multiplier=0.5,
        estimator=estimators.FixedDenominator(0.5, 6),
        deterministic_seed=7,
    )
    return dp_fedavg.build_dp_fedavg(model(), aggregator=aggregator, client_optimizer=_SGD)


def _adaptive():
    return aggregators.build_adaptive_dp_ftrl_aggregator(
        BLT, clipping=small_tasks.CLIPPING, **_COMMON
    )


def _secagg(clip_norm):
    return aggregators.build_secagg_dp_ftrl_aggregator(
        BLT, clip_norm=clip_norm, encoding=small_tasks.ENCODING, rotation_seed=5, **_COMMON
    )


PROCESSES = {
    "blt": functools.cache(lambda: federated_averaging(fixed(0.5))),
    "tree": functools.cache(lambda: federated_averaging(fixed(0.5, tree_mechanism.Tree(8)))),
    "adaptive": functools.cache(lambda: federated_averaging(_adaptive())),
    "dp_fedavg": functools.cache(_dp_fedavg),
}


@functools.cache
def _secure(clip_norm, metrics_aggregator):
    return federated_averaging(_secagg(clip_norm), metrics_aggregator)


_CLIP_NORMS = {"secagg": 1.0, "secagg adaptive": small_tasks.CLIPPING}
# To be built, and compiled, where secure sums are simulated.
SECURE_PROCESSES = {
    name: functools.partial(_secure, clip_norm, None) for name, clip_norm in _CLIP_NORMS.items()
}
# The same with nothing in the clear, metrics included.
SECURE_ONLY_PROCESSES = {
    name: functools.partial(_secure, clip_norm, _SECURE_METRICS)
    for name, clip_norm in _CLIP_NORMS.items()
}
