"""Tasks of a few weights, their devices' examples, and a key, for tests of plans."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pickle

import numpy as np
import tensorflow as tf
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.discretization import grid
from tff_dpftrl.execution import federated_round
from tff_dpftrl.learning import local_updates, metric_sums, optimizers, rounds
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.mechanisms import blt
from tff_dpftrl.mechanisms import tree as tree_mechanism
from tff_dpftrl.private_round import (
    adaptive_clipping,
    aggregation,
    clipping,
    estimators,
    fixed_clip,
    sampled_gaussian,
    secure_sums,
)
from tff_dpftrl.runtime.plans import bounding, building, example_pipeline, plan_pb2

SPEC = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, 1], tf.float32))
KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = [KEY.public_key()]
BATCH_SIZE = 2
EPOCHS = 2
SELECTION = plan_pb2.Selection(collection="numbers", max_examples=50, max_age_hours=48.0)
LIMITS = plan_pb2.Limits(memory_bytes=500_000_000, seconds=60.0, upload_bytes=10_000)
PARTICIPATION = plan_pb2.Participation(
    min_sep_rounds=2, min_sep_hours=1.5, stride_edges=[1, 2, 4], times_edges=[1, 2, 3]
)
_BLT = blt.Blt((0.9, 0.5), (0.3, 0.2))
_SGD = optimizers.sgdm(0.1)
_COMMON = {"noise_multiplier": 0.5, "clients_per_round": 3, "deterministic_seed": 7}
CLIPPING = adaptive_clipping.AdaptiveClipping(
    initial_clip_norm=1.0, clipped_count_stddev=1.0, only_estimates=True
)
ENCODING = grid.for_bits(4, 8, 16)
SECURE_METRICS = functools.partial(metric_sums.build, is_secure=True)
_plans: dict[tuple[object, str], bytes] = {}  # By round and options.


@functools.cache
def model():
    """Builds the model y = x w + b, with a metric."""

    def predict_on_batch(model_weights, x, training=True):
        del training
        (weights, bias), _ = model_weights
        return tf.matmul(x, weights) + bias

    def update_metrics(state, labels, batch_output, sample_weight=None):
        del sample_weight
        errors = tf.square(batch_output.predictions - labels)
        total, count = state["mse"]
        total, count = total + tf.reduce_sum(errors), count + tf.cast(tf.size(errors), tf.float32)
        return collections.OrderedDict(mse=[total, count])

    return model_lib.Model(
        initial_weights=((np.zeros([3, 1], np.float32), np.zeros([1], np.float32)), ()),
        predict_on_batch=predict_on_batch,
        loss=lambda output, label, sample_weight=None: tf.reduce_mean(tf.square(output - label)),
        input_spec=SPEC,
        initialize_metrics_state=lambda: collections.OrderedDict(mse=[tf.zeros([])] * 2),
        update_metrics_state=update_metrics,
        finalize_metrics=lambda sums: collections.OrderedDict(
            mse=tf.math.divide_no_nan(*sums["mse"])
        ),
    )


def federated_averaging(
    aggregation_, metrics=metric_sums.build, clipping_=None
) -> federated_round.FederatedRound:
    """Builds the round of an aggregation."""
    return rounds.build_training(
        model(),
        local_update=local_updates.FedAvg(_SGD, clipping_),
        aggregation=aggregation_,
        server_optimizer=optimizers.sgdm(1.0),
        metrics=metrics,
    )


def fixed(noise_multiplier, strategy=_BLT, **options):
    """Builds an aggregation with a fixed clip norm, and a seed for tests."""
    options = _COMMON | {"noise_multiplier": noise_multiplier} | options
    private_round = fixed_clip.FixedClipRound(
        strategy, clipping=clipping.FlatClipping(1.0), **options
    )
    return aggregation.Aggregation(private_round)


def _adaptive():
    private_round = adaptive_clipping.AdaptiveClipRound(_BLT, clipping=CLIPPING, **_COMMON)
    return aggregation.Aggregation(private_round, report_non_finite_clients=True)


def _dp_fedavg():
    clip = clipping.FlatClipping(1.0)
    private_round = sampled_gaussian.SampledGaussianRound(
        clipping=clip,
        noise_multiplier=0.5,
        estimator=estimators.FixedDenominator(0.5, 6),
        deterministic_seed=7,
    )
    made = aggregation.Aggregation(private_round, report_non_finite_clients=True)
    return federated_averaging(made, clipping_=clip)


# Aggregations of rounds; their `private_round` says what a skipped round is.
AGGREGATIONS = {
    "blt": lambda: fixed(0.5),
    "tree": lambda: fixed(0.5, tree_mechanism.Tree(8)),
    "adaptive": _adaptive,
}
ROUNDS = {
    "blt": functools.cache(lambda: federated_averaging(fixed(0.5))),
    "tree": functools.cache(lambda: federated_averaging(fixed(0.5, tree_mechanism.Tree(8)))),
    "adaptive": functools.cache(lambda: federated_averaging(_adaptive())),
    "dp_fedavg": functools.cache(_dp_fedavg),
}


def secagg(encoding=ENCODING, *, clipping_=None, strategy=_BLT, **options):
    """Builds an aggregation by secure sums; `clipping_` is that of a learned norm."""
    common = _COMMON | options
    if clipping_ is not None:
        private_round = adaptive_clipping.AdaptiveClipRound(
            strategy, clipping=clipping_, unit_inflation=encoding.inflated_clip_norm(1.0), **common
        )
    else:
        private_round = fixed_clip.FixedClipRound(
            strategy,
            clipping=clipping.FlatClipping(1.0),
            encoded_norm=encoding.inflated_clip_norm(1.0),
            **common,
        )
    vector_sum = secure_sums.VectorSum(encoding, 1.0, rotation_seed=5)
    return aggregation.Aggregation(private_round, vector_sum=vector_sum)


@functools.cache
def _secure(clipping_, metrics):
    return federated_averaging(secagg(clipping_=clipping_), metrics)


_CLIPPINGS = {"secagg": None, "secagg adaptive": CLIPPING}
SECURE_ROUNDS = {
    name: functools.partial(_secure, clipping_, metric_sums.build)
    for name, clipping_ in _CLIPPINGS.items()
}
# The same with nothing in the clear, metrics included.
SECURE_ONLY_ROUNDS = {
    name: functools.partial(_secure, clipping_, SECURE_METRICS)
    for name, clipping_ in _CLIPPINGS.items()
}
SECURE_AGGREGATION = plan_pb2.SecureAggregation(
    threat_model=plan_pb2.SecureAggregation.HONEST_BUT_CURIOUS, least_devices=2, most_devices=8
)


@functools.cache
def evaluation():
    return rounds.build_evaluation(model())


@functools.cache
def secure_evaluation():
    """Builds an evaluation whose metrics are summed securely."""
    return rounds.build_evaluation(model(), metrics=SECURE_METRICS)


def pipeline(**options):
    def to_batch(features):
        return features["x"], features["y"]

    features = {
        "x": tf.io.FixedLenFeature([3], tf.float32),
        "y": tf.io.FixedLenFeature([1], tf.float32),
    }
    options = {"batch_size": BATCH_SIZE, "epochs": EPOCHS} | options
    return example_pipeline.ExamplePipeline(features, to_batch, **options)


def limits_of(made):
    """Returns the upper limits of a report in a round, or a process of TFF, of these tests."""
    if not isinstance(made, federated_round.FederatedRound):
        from tff_dpftrl.execution import process_form

        made = process_form.round_of(made)
    names = {label.rpartition("/")[2] for label in made.state.labels}
    clip_norm = 1.0 if "seed" in names else None
    return bounding.ReportLimits(
        clip_norm="active" if "active" in names else clip_norm,
        encoding=ENCODING if "rotation_seed" in names else None,
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
