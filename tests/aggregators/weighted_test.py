"""Tests of weighted clients: what a weight does, and what it cannot do."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tff_dpftrl
from tff_dpftrl import aggregators, execution
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import blt, identity, restarts
from tff_dpftrl.participation import schema as schema_lib

_TYPE = tff.to_type(collections.OrderedDict(b=(np.float32, [2]), a=(np.float32, [])))
_BLT = blt.Blt((0.99, 0.8), (0.05, 0.2))
_CAP = 8.0
# Weight as sent, and what it scales the update by.
_WEIGHTS = {4.0: 0.5, 8.0: 1.0, 1e30: 1.0, 0.0: 0.0, -5.0: 0.0, math.nan: 0.0, math.inf: 1.0}


@pytest.fixture(scope="module", autouse=True)
def _context():
    with execution.secure_sum_simulation():
        yield


def _fixed(**more):
    arguments = {"noise_multiplier": 1.0, "clip_norm": 1.0, "clients_per_round": 4}
    return aggregators.build_dp_ftrl_aggregator(_BLT, **arguments | more)


def _adaptive():
    return aggregators.build_adaptive_dp_ftrl_aggregator(
        restarts.Restarted(identity.Identity(), (0, 2)),
        noise_multiplier=1.0,
        clients_per_round=50,
        clipping=aggregators.AdaptiveClipping(1.0, clip_learning_rate=1.0),
        deterministic_seed=7,
    )


def _secure(build, **more):
    return build(
        restarts.Restarted(_BLT, (0, 2)),
        noise_multiplier=1.0,
        clients_per_round=8,
        encoding=grid.for_bits(3, 10, 16),
        deterministic_seed=7,
        rotation_seed=8,
        **more,
    )


_FACTORIES = {
    "fixed": lambda: _fixed(deterministic_seed=7),
    "adaptive": _adaptive,
    "secure": lambda: _secure(aggregators.build_secagg_dp_ftrl_aggregator, clip_norm=1.0),
    "secure, adaptive": lambda: _secure(
        aggregators.build_secagg_dp_ftrl_aggregator,
        clip_norm=aggregators.AdaptiveClipping(
            1.0, clip_learning_rate=1.0, clipped_count_stddev=3.0
        ),
    ),
}


def _update(x: float):
    return collections.OrderedDict(b=np.array([x, -x], np.float32), a=np.float32(2 * x))


@pytest.mark.filterwarnings("ignore::tff_dpftrl.aggregators.ExpensiveClippingWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "fixed" else [pytest.mark.slow])
        for name in _FACTORIES
    ],
)
def test_it_is_the_inner_factory_on_scaled_updates(name):
    inner = _FACTORIES[name]()
    factory = aggregators.WeightedFactory(inner, weight_cap=_CAP)
    process, plain = factory.create(_TYPE, tff.TensorType(np.float32)), inner.create(_TYPE)
    state, plain_state = process.initialize(), plain.initialize()
    for t in range(3):
        updates = [_update(0.1 * (i + t) + 0.05) for i in range(len(_WEIGHTS))]
        output = process.next(state, updates, [np.float32(weight) for weight in _WEIGHTS])
        scaled = [
            tf.nest.map_structure(lambda x, s=scale: np.float32(s) * x, update)
            for update, scale in zip(updates, _WEIGHTS.values(), strict=True)
        ]
        expected = plain.next(plain_state, scaled)
        for key in ("a", "b"):
            np.testing.assert_array_equal(output.result[key], expected.result[key])
        state, plain_state = output.state, expected.state


def test_a_client_moves_the_average_as_far_as_without_weights_at_most():
    process = aggregators.WeightedFactory(_fixed(deterministic_seed=3), weight_cap=0.001).create(
        _TYPE, tff.TensorType(np.int64)
    )
    state = process.initialize()
    without = process.next(state, [], []).result
    moved = process.next(state, [_update(1e6)], [np.int64(2**62)]).result
    distance = np.sqrt(np.sum((moved["b"] - without["b"]) ** 2) + (moved["a"] - without["a"]) ** 2)
    assert distance == pytest.approx(1.0 / 4, rel=1e-4)
    # Weightless, or not finite: nothing, though 0 times infinity is no number.
    for update, weight in ((_update(1e6), 0), (_update(math.inf), 0), (_update(math.inf), 5)):
        same = process.next(state, [update], [np.int64(weight)]).result
        np.testing.assert_array_equal(same["b"], without["b"])


def test_the_guarantee_is_that_without_weights():
    schema = schema_lib.MinSep(20, 5, 4)
    inner = _fixed()
    assert aggregators.WeightedFactory(inner).guarantee(schema, 1e-6) == inner.guarantee(
        schema, 1e-6
    )


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: aggregators.WeightedFactory(tff.aggregators.SumFactory()), "client_weighting"),
        (lambda: aggregators.WeightedFactory(_fixed(), weight_cap=0.0), "weight_cap"),
        (
            lambda: aggregators.WeightedFactory(_fixed()).create(_TYPE, _TYPE),
            "weight_type must be a numeric scalar",
        ),
        (
            lambda: aggregators.WeightedFactory(_fixed()).create(_TYPE, tff.TensorType(np.bool_)),
            "weight_type must be a numeric scalar",
        ),
    ],
)
def test_what_has_no_bound_is_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def _linear():
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential(
            [
                tf.keras.layers.InputLayer([2]),
                tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        ),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=(tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1])),
    )


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("builder", ["fed_avg", "fed_prox"])
def test_tffs_weighted_algorithms_train_with_it(builder, compiled):
    algorithms = tff.learning.algorithms
    build, *more = {
        "fed_avg": (algorithms.build_weighted_fed_avg,),
        "fed_prox": (algorithms.build_weighted_fed_prox, 0.1),
    }[builder]
    optimizer = tff.learning.optimizers.build_sgdm(0.01)
    one = tff.learning.optimizers.build_sgdm(1.0)
    loop = {"loop_implementation": tff.learning.LoopImplementation.DATASET_ITERATOR}

    def weights_after_a_round(num_examples):
        aggregator = aggregators.WeightedFactory(_fixed(noise_multiplier=0.0), weight_cap=_CAP)
        arguments = {"model_aggregator": aggregator} | loop
        process = build(_linear, *more, optimizer, one, **arguments)
        if compiled:
            process = tff_dpftrl.compile_process(process)
        x = np.ones([num_examples, 2], np.float32)
        # One batch whatever the number of examples, so that the update is always the same.
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(64)
        state = process.next(process.initialize(), [data]).state
        return np.asarray(process.get_model_weights(state).trainable[0])

    full = weights_after_a_round(16)
    assert np.all(full > 0)
    # The update is 0.02 in each of two coordinates, below the clip norm; four divide it.
    np.testing.assert_allclose(full, 0.02 / 4, rtol=1e-4)
    np.testing.assert_allclose(weights_after_a_round(4), full / 2, rtol=1e-5)
