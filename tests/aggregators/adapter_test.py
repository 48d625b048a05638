"""The factories against their private rounds run without TFF: the same numbers."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import aggregators
from tff_dpftrl.mechanisms import blt, restarts

_TYPE = tff.to_type(
    collections.OrderedDict(a=tff.TensorType(np.float32, [3]), b=[(np.float32, [2, 2])])
)
_SHAPES = [(3,), (2, 2)]
_BLT = restarts.Restarted(blt.Blt((0.99, 0.8), (0.05, 0.2)), (0, 2))
_COMMON = {"noise_multiplier": 0.7, "clients_per_round": 3, "deterministic_seed": 5}

_UNWEIGHTED = {
    "fixed": aggregators.build_dp_ftrl_aggregator(_BLT, clip_norm=1.5, **_COMMON),
    "per-layer": aggregators.build_dp_ftrl_aggregator(
        _BLT, clipping=aggregators.PerLayerClipping(1.5), **_COMMON
    ),
    "adaptive": aggregators.build_adaptive_dp_ftrl_aggregator(
        _BLT,
        clipping=aggregators.AdaptiveClipping(2.0, clip_learning_rate=1.0, clipped_count_stddev=1),
        **_COMMON,
    ),
}


def _cohorts():
    rng = np.random.default_rng(0)

    def update(scale):
        arrays = [(scale * rng.normal(size=shape)).astype(np.float32) for shape in _SHAPES]
        return collections.OrderedDict(a=arrays[0], b=[arrays[1]])

    cohorts = [[update(scale) for scale in scales] for scales in ((0.1, 1, 9), (), (2, 0), (5,))]
    cohorts[0][1]["a"][2] = np.nan
    return cohorts


def _check_same_rounds(process, private_round, weights=None):
    state, plain_state = process.initialize(), private_round.initial_state(_SHAPES)
    for cohort in _cohorts():
        arguments, weight_of = [cohort], [{}] * len(cohort)
        if weights is not None:
            arguments.append(weights[: len(cohort)])
            weight_of = [{"weight": weight} for weight in weights]
        output = process.next(state, *arguments)
        seen = private_round.broadcast(plain_state)
        contributions = [
            private_round.clip_client(tf.nest.flatten(update), seen, **weight)[0]
            for update, weight in zip(cohort, weight_of, strict=False)
        ]
        totals = private_round.total(contributions, _SHAPES)
        plain_state, average, measurements = private_round.release(plain_state, totals)
        for ours, theirs in zip(tf.nest.flatten(output.result), average, strict=True):
            # One unit in the last place: TFF's worker compiles for other processors.
            np.testing.assert_allclose(ours, np.float32(theirs), rtol=1.2e-7, atol=1e-7)
        assert set(output.measurements) == set(measurements)
        for name, value in measurements.items():
            assert output.measurements[name] == pytest.approx(value.numpy(), rel=1e-6)
        state = output.state
        own = type(plain_state)(*state[: len(plain_state)])
        tf.nest.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), own, plain_state
        )


@pytest.mark.parametrize("name", _UNWEIGHTED)
def test_factory_runs_its_private_round(name):
    factory = _UNWEIGHTED[name]
    _check_same_rounds(factory.create(_TYPE), factory.private_round)


@pytest.mark.parametrize(
    "estimator", [aggregators.FixedDenominator(0.5, 6), aggregators.ClippedDenominator(0.5, 3)]
)
def test_sampled_factory_runs_its_private_round(estimator):
    factory = aggregators.SampledGaussianFactory(
        clipping=aggregators.FlatClipping([2.0, 1.0, 0.5]),
        noise_multiplier=0.7,
        estimator=estimator,
        weight_cap=4.0,
        deterministic_seed=5,
    )
    process = factory.create(_TYPE, tff.TensorType(np.float32))
    _check_same_rounds(process, factory.private_round, list(np.float32([1, 3, 9])))


@pytest.mark.parametrize("name", _UNWEIGHTED)
def test_clients_are_sent_neither_seed_nor_past_noise(name):
    round_ = _UNWEIGHTED[name].private_round
    state = round_.initial_state(_SHAPES)
    assert round_.broadcast_field in ("round_index", "clip")
    leaves = tf.nest.flatten(round_.broadcast(state))
    assert all(leaf.shape == () for leaf in leaves)


def test_a_round_without_weights_refuses_one():
    round_ = _UNWEIGHTED["fixed"].private_round
    with pytest.raises(ValueError, match="weight must be None"):
        round_.clip_client([tf.ones([3])], tf.constant(0, tf.int64), weight=1.0)
