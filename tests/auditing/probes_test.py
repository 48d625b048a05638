"""Probes from one state: the statistics where a process cannot be replayed, and odd updates."""

import dataclasses
import sys

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("tensorflow_federated", reason="audits aggregators of TFF")

import tensorflow_federated as tff

import tff_dpftrl
from tests.auditing import planted_bugs
from tff_dpftrl.auditing import mechanism as mechanism_lib
from tff_dpftrl.auditing import playing, probes, tff_aggregators

_TYPE = tff.to_type([tff.TensorType(np.float32, [60]), tff.TensorType(np.float32, [4])])


def _pairs(rng, noise, pairs=400, columns=64):
    return noise(rng, (pairs, columns)), noise(rng, (pairs, columns))


@pytest.mark.parametrize(
    "noise",
    [
        lambda rng, shape: rng.laplace(size=shape),
        # One scale a coordinate, and coordinates that are nearly equal.
        lambda rng, shape: rng.normal(size=shape) * np.geomspace(1.0, 1e3, shape[1]),
        lambda rng, shape: rng.normal(size=(shape[0], 1)) + 0.1 * rng.normal(size=shape),
    ],
)
def test_equal_laws_are_told_apart_no_more_often_than_said(noise):
    rng, level = np.random.default_rng(0), 0.05
    found = np.zeros(2)
    for _ in range(300):
        one, two = _pairs(rng, noise)
        found += [
            probes._means_apart(one, two) < level,
            probes._variances_apart(one, two) < level,
        ]
    # Five standard errors above 15 of 300.
    assert np.all(found <= 300 * level + 5.0 * np.sqrt(300 * level))


def test_other_means_and_other_spreads_are_told_apart():
    rng = np.random.default_rng(1)
    one, two = _pairs(rng, lambda rng, shape: rng.normal(size=shape))
    moved = two.copy()
    moved[:, 3] += 0.6
    assert probes._means_apart(one, moved) < 1e-3
    assert probes._variances_apart(one, 1.05 * two) < 1e-3
    # A coordinate without noise hides nothing, here or elsewhere.
    one[:, 0], moved[:, 0] = 1.0, 1.0
    assert probes._means_apart(one, moved) < 1e-3
    two[:, 0] = 1.0 + 1e-3
    assert probes._means_apart(one, two) < 1e-50


def test_the_stated_power_is_had():
    rng, trials, level, columns = np.random.default_rng(2), 400, 1e-3, 64
    shift = probes._detectable(trials, level / columns)
    found = 0
    for _ in range(200):
        one, two = _pairs(rng, lambda rng, shape: rng.normal(size=shape), trials, columns)
        two[:, 5] += shift
        found += probes._means_apart(one, two) < level
    assert found >= 190  # 198 expected; below 190 has a chance of 1e-5.


def _probes(aggregator, mechanism=None, value_type=_TYPE):
    player = playing.Player(tff_aggregators.of_process(aggregator.create(value_type)))
    mechanism = mechanism or mechanism_lib.Mechanism.of(aggregator)
    saved, _ = probes.saved_states(player, mechanism, [0])
    return probes.Probes(player, mechanism, saved, canary_norm=1e3, seed=0)


def test_updates_whose_squares_overflow_are_clipped_or_count_as_nothing():
    aggregator = tff_dpftrl.build_dp_ftrl_aggregator(
        tff_dpftrl.Identity(), noise_multiplier=1.0, clip_norm=1.0, clients_per_round=4
    )
    assert _probes(aggregator).stays_finite().outcome == "consistent"


@pytest.mark.parametrize(
    "dtype, outcome, says",
    [
        (np.float32, "consistent", "the noise covers 1."),
        (tf.bfloat16.as_numpy_dtype, "not tested", "clip norms more pass."),
    ],
)
def test_a_contribution_that_rounding_hides_is_not_tested(dtype, outcome, says):
    # Noise of 10 clip norms in each of 60 coordinates, of which bfloat16 keeps 8 bits.
    aggregator = tff_dpftrl.build_dp_ftrl_aggregator(
        tff_dpftrl.Identity(), noise_multiplier=10.0, clip_norm=1.0, clients_per_round=4
    )
    found = _probes(aggregator, value_type=tff.to_type([tff.TensorType(dtype, [60])]))
    finding = found.contribution(1.0, 0.0, 0.01)
    assert finding.outcome == outcome and says in finding.says, finding.says


# The noise has no seed. Means of 200 rounds have a standard error of a fifth of a clip norm: one
# full update is found in 97 of 100 cases, and at least four in other directions are tried.
@pytest.mark.slow
@pytest.mark.parametrize(
    "clip_norm, error_rate, outcome",
    [
        (planted_bugs.CLIP_NORM / 10.0, 0.05, "violated"),
        (planted_bugs.CLIP_NORM, 1e-6, "consistent"),
    ],
)
def test_contributions_are_bounded_by_means_where_no_round_can_be_replayed(
    clip_norm, error_rate, outcome
):
    # Fresh noise in every round, of standard deviation 2 clip norms.
    aggregator = planted_bugs.PLANTED["cohort repeated with new noise"].build()
    numbers = dataclasses.replace(mechanism_lib.Mechanism.of(aggregator), clip_norm=clip_norm)
    found = _probes(aggregator, numbers)
    assert not found.is_replayable()
    assert found.contribution(1.0, 0.0, error_rate).outcome == outcome


def test_measurements_may_come_and_go():
    one, two = (
        playing.Played(None, np.zeros(1), {"always": 1.0} | more) for more in ({}, {"at[0]": 2.0})
    )
    assert probes._first_difference(one, one) is None
    assert probes._first_difference(two, one) == "the measurement at[0] is nan in place of 2"
    name, p_value = probes._measured_apart([(one.measurements, two.measurements)] * 5)
    assert name == "at[0]" and p_value == 1.0


class _ClipsInFloat32(tff.aggregators.UnweightedAggregationFactory):
    """Drops what is not finite, then clips: the norm of finite numbers may be infinite."""

    def create(self, value_type):
        inner = tff.aggregators.SumFactory().create(value_type)

        @tff.tensorflow.computation(value_type)
        def clip(value):
            tensors = tf.nest.flatten(value)
            is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in tensors])
            clipped, _ = tf.clip_by_global_norm(tensors, 1.0)
            kept = [tf.where(is_finite, x, tf.zeros_like(x)) for x in clipped]
            return tf.nest.pack_sequence_as(value, kept)

        @tff.federated_computation(
            inner.initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            return inner.next(state, tff.federated_map(clip, value))

        return tff.templates.AggregationProcess(inner.initialize, next_fn)


def test_a_finite_update_that_makes_what_is_released_no_number_is_found():
    mechanism = mechanism_lib.Mechanism(tff_dpftrl.Identity(), 1.0, 1.0, 1.0)
    found = _probes(_ClipsInFloat32(), mechanism)
    assert found.not_finite(0.01).outcome == "consistent"
    finding = found.stays_finite()
    assert finding.outcome == "violated" and "1e+20" in finding.says


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
