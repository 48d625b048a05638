"""Tasks of a few weights, their devices' examples, and a key, for tests of plans."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pickle

import numpy as np
import pytest
import tensorflow as tf
from cryptography.hazmat.primitives.asymmetric import ed25519

pytest.importorskip("tensorflow_federated", reason="makes tasks with TFF")

import tensorflow_federated as tff

from tff_dpftrl import aggregators
from tff_dpftrl.discretization import grid
from tff_dpftrl.execution import tff_names
from tff_dpftrl.learning import dp_fedavg, metric_sums, own_model, tff_metrics
from tff_dpftrl.mechanisms import blt
from tff_dpftrl.mechanisms import tree as tree_mechanism
from tff_dpftrl.private_round import clipping, estimators
from tff_dpftrl.runtime.plans import bounding, building, example_pipeline, plan_pb2

SPEC = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, 1], tf.float32))
KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = [KEY.public_key()]
BATCH_SIZE = 2
EPOCHS = 2
SELECTION = plan_pb2.Selection(collection="numbers", max_examples=50, max_age_hours=48.0)
LIMITS = plan_pb2.Limits(memory_bytes=500_000_000, seconds=60.0, upload_bytes=10_000)
PARTICIPATION = plan_pb2.Participation(
    min_sep_rounds=2,
    min_sep_hours=1.5,
    stride_edges=[1, 2, 4],
    times_edges=[1, 2, 3],
)
_BLT = blt.Blt((0.9, 0.5), (0.3, 0.2))
_SGD = tff.learning.optimizers.build_sgdm(0.1)
_COMMON = {"noise_multiplier": 0.5, "clients_per_round": 3, "deterministic_seed": 7}
_CLIPPING = aggregators.AdaptiveClipping(
    initial_clip_norm=1.0, clipped_count_stddev=1.0, only_estimates=True
)
_ENCODING = grid.for_bits(4, 8, 16)
_SECURE_SUMS = functools.partial(metric_sums.build, is_secure=True)
SECURE_METRICS = tff_metrics.aggregator(_SECURE_SUMS)
_plans: dict[tuple[object, str], bytes] = {}  # By process and options.


def model():
    """Builds the model y = x w + b, with a metric."""

    def mse():
        return collections.OrderedDict(mse=tf.keras.metrics.MeanSquaredError())

    keras = tf.keras.Sequential(
        [tf.keras.layers.Dense(1, input_shape=(3,), kernel_initializer="zeros")]
    )
    return tff.learning.models.functional_model_from_keras(
        keras, tf.keras.losses.MeanSquaredError(), SPEC, metrics_constructor=mse
    )


def federated_averaging(aggregator=None, metrics_aggregator=None):
    return tff.learning.algorithms.build_unweighted_fed_avg(
        model(),
        client_optimizer_fn=_SGD,
        model_aggregator=aggregator,
        metrics_aggregator=metrics_aggregator,
        loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
    )


def fixed(noise_multiplier, strategy=_BLT):
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
    return aggregators.build_adaptive_dp_ftrl_aggregator(_BLT, clipping=_CLIPPING, **_COMMON)


# Aggregators of processes; their `private_round` says what a skipped round is.
AGGREGATORS = {
    "blt": lambda: fixed(0.5),
    "tree": lambda: fixed(0.5, tree_mechanism.Tree(8)),
    "adaptive": _adaptive,
}
PROCESSES = {
    "blt": functools.cache(lambda: federated_averaging(fixed(0.5))),
    "tree": functools.cache(lambda: federated_averaging(fixed(0.5, tree_mechanism.Tree(8)))),
    "adaptive": functools.cache(lambda: federated_averaging(_adaptive())),
    "dp_fedavg": functools.cache(_dp_fedavg),
}


def _secagg():
    return aggregators.build_secagg_dp_ftrl_aggregator(
        _BLT, clip_norm=1.0, encoding=_ENCODING, rotation_seed=5, **_COMMON
    )


def _secagg_adaptive():
    return aggregators.build_secagg_dp_ftrl_aggregator(
        _BLT, clip_norm=_CLIPPING, encoding=_ENCODING, rotation_seed=5, **_COMMON
    )


@functools.cache
def _secure_only(aggregator):
    return federated_averaging(aggregator(), SECURE_METRICS)


# To be built, and compiled, where secure sums are simulated.
SECURE_PROCESSES = {
    "secagg": functools.cache(lambda: federated_averaging(_secagg())),
    "secagg adaptive": functools.cache(lambda: federated_averaging(_secagg_adaptive())),
}
# The same with nothing in the clear, metrics included.
SECURE_ONLY_PROCESSES = {
    name: functools.partial(_secure_only, aggregator)
    for name, aggregator in (("secagg", _secagg), ("secagg adaptive", _secagg_adaptive))
}
SECURE_AGGREGATION = plan_pb2.SecureAggregation(
    threat_model=plan_pb2.SecureAggregation.HONEST_BUT_CURIOUS, least_devices=2, most_devices=8
)


@functools.cache
def evaluation():
    return tff.learning.algorithms.build_fed_eval(
        model(), loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR
    )


@functools.cache
def secure_evaluation():
    """Builds an evaluation whose metrics are summed securely."""
    own = model()
    finalizers, specs = own_model.metrics(own)
    return tff.learning.algorithms.build_fed_eval(
        own,
        metrics_aggregation_process=tff_metrics.evaluation_process(
            _SECURE_SUMS, finalizers, tff_names.tensorflow_to_type(specs)
        ),
        loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
    )


def pipeline(**options):
    def to_batch(features):
        return features["x"], features["y"]

    features = {
        "x": tf.io.FixedLenFeature([3], tf.float32),
        "y": tf.io.FixedLenFeature([1], tf.float32),
    }
    options = {"batch_size": BATCH_SIZE, "epochs": EPOCHS} | options
    return example_pipeline.ExamplePipeline(features, to_batch, **options)


def limits_of(process):
    """Returns the upper limits of a report in a process of this module."""
    state = str(process.initialize.type_signature.result)
    clip_norm = 1.0 if "seed=" in state else None
    return bounding.ReportLimits(
        clip_norm="active" if "active=" in state else clip_norm,
        encoding=_ENCODING if "rotation_seed=" in state else None,
    )


def plans(process, **options):
    """Returns the plans of a process of this module, which are built once for the same options."""
    key = process, repr(sorted(options.items()))
    if key not in _plans:
        # The options are kept, too: the key has addresses of theirs.
        _plans[key] = options, pickle.dumps(build_plans(process, **options))
    return pickle.loads(_plans[key][1])  # Tests change them.


def build_plans(process, *, shuffle=False, **options):
    """Builds the plans of a process of this module."""
    values = {"report_limits": limits_of(process)} | options
    names = [field.name for field in dataclasses.fields(building.DeviceTerms)]
    changes = {name: values.pop(name) for name in names if name in values}
    return building.build_plans(process, pipeline(shuffle=shuffle), terms(**changes), **values)


def terms(**changes):
    """Returns the terms of the small task, with changes."""
    values = {
        "population": "tests",
        "task": "small",
        "selection": SELECTION,
        "limits": LIMITS,
        "participation": PARTICIPATION,
    }
    return building.DeviceTerms(**(values | changes))


def rows(seed, num_examples):
    """Makes a device's data: x, [n, 3], and y, [n, 1], near a linear function of x."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_examples, 3)).astype(np.float32)
    y = x @ np.float32([[1.0], [-2.0], [0.5]]) + rng.normal(size=(num_examples, 1)) / 10
    return x, y.astype(np.float32)


def dataset(seed, num_examples):
    """Makes the batches that a device's pipeline makes, for a simulation."""
    return (
        tf.data.Dataset.from_tensor_slices(rows(seed, num_examples))
        .repeat(EPOCHS)
        .batch(BATCH_SIZE)
    )


def examples(seed, num_examples):
    """Serialises the data of `rows` as a device stores it."""
    return [_example(x, y) for x, y in zip(*rows(seed, num_examples), strict=True)]


def _example(x, y):
    def floats(values):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    features = tf.train.Features(feature={"x": floats(x), "y": floats(y)})
    return tf.train.Example(features=features).SerializeToString()
