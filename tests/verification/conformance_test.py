"""The contract, against our factories, TFF's where they share it, and broken ones."""

from __future__ import annotations

import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import aggregators
from tff_dpftrl.aggregators import updates
from tff_dpftrl.mechanisms import blt, identity, tree
from verification import conformance

_BLT = blt.Blt((0.99, 0.8), (0.05, 0.2))


def _fixed(strategy):
    def make(noise_multiplier, clip_norm, clients_per_round):
        return aggregators.build_dp_ftrl_aggregator(
            strategy,
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            clients_per_round=clients_per_round,
        )

    return make


def _adaptive(strategy):
    def make(noise_multiplier, clip_norm, clients_per_round):
        # Noise on the counts so large that the updates get all but 1e-6 of the budget.
        return aggregators.build_adaptive_dp_ftrl_aggregator(
            strategy,
            noise_multiplier=noise_multiplier,
            clients_per_round=clients_per_round,
            clipping=aggregators.AdaptiveClipping(
                clip_norm, clipped_count_stddev=1e3, only_estimates=True
            ),
        )

    return make


def _tff_gaussian(noise_multiplier, clip_norm, clients_per_round):
    return tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
        noise_multiplier, clients_per_round, clip_norm
    )


class _TffTree(tff.aggregators.UnweightedAggregationFactory):
    """TFF's tree aggregation, told the updates' type when the process is created."""

    def __init__(self, noise_multiplier, clip_norm, clients_per_round):
        self._arguments = {
            "noise_multiplier": noise_multiplier,
            "l2_norm_clip": clip_norm,
            "clients_per_round": clients_per_round,
        }

    def create(self, value_type):
        specs = tff.types.type_to_tf_tensor_specs(value_type)
        return tff.aggregators.DifferentiallyPrivateFactory.tree_aggregation(
            record_specs=specs, **self._arguments
        ).create(value_type)


_SHARED_WITH_TFF = (
    conformance.check_type_signature,
    conformance.check_zero_noise_is_the_sum_over_the_fixed_denominator,
    conformance.check_one_client_is_bounded,
    conformance.check_noise,
    conformance.check_noise_is_fresh,
)


@pytest.mark.parametrize("check", conformance.ALL_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(_fixed(_BLT), id="blt"),
        pytest.param(_adaptive(_BLT), id="adaptive-blt", marks=pytest.mark.slow),
        pytest.param(_fixed(identity.Identity()), id="identity", marks=pytest.mark.slow),
        pytest.param(_fixed(tree.Tree(10)), id="tree", marks=pytest.mark.slow),
        pytest.param(_adaptive(tree.Tree(10)), id="adaptive-tree", marks=pytest.mark.slow),
    ],
)
def test_our_factories_keep_the_contract(make, check):
    check(make)


@pytest.mark.parametrize("check", _SHARED_WITH_TFF, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(_tff_gaussian, id="gaussian", marks=pytest.mark.slow),
        pytest.param(_TffTree, id="tree", marks=pytest.mark.slow),
    ],
)
def test_factories_of_tff_keep_the_part_they_share(make, check):
    check(make)


class _BroadBits(tff.aggregators.UnweightedAggregationFactory):
    """Counts clients of norm 0 as unclipped, as this package once did; sums in float32."""

    def __init__(self, clip_norm):
        self._clip_norm = clip_norm

    def create(self, value_type):
        @tff.tensorflow.computation(value_type)
        def is_small(value):
            norm = tf.linalg.global_norm(updates.UpdateType(value_type).flatten(value))
            return tf.cast(norm <= self._clip_norm, tf.float32)

        total = tff.aggregators.SumFactory().create(value_type)

        @tff.federated_computation(
            total.initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            output = total.next(state, value)
            count = tff.federated_sum(tff.federated_map(is_small, value))
            measured = tff.federated_zip({"unclipped": count})
            return tff.templates.MeasuredProcessOutput(output.state, output.result, measured)

        return tff.templates.AggregationProcess(total.initialize, next_fn)


def test_a_count_that_zeroing_out_moves_breaks_the_contract():
    with pytest.raises(AssertionError, match="unclipped"):
        conformance.check_a_client_that_sends_zeros_counts_as_none(
            lambda noise_multiplier, clip_norm, clients_per_round: _BroadBits(clip_norm)
        )


def test_a_sum_in_float32_breaks_the_contract():
    with pytest.raises(AssertionError):
        conformance.check_sums_are_exact_enough(
            lambda noise_multiplier, clip_norm, clients_per_round: tff.aggregators.SumFactory()
        )


def test_noise_that_follows_from_the_state_breaks_the_contract():
    with pytest.raises(AssertionError):
        conformance.check_a_round_executed_again_has_other_noise(_TffTree)


class _Broken(tff.aggregators.UnweightedAggregationFactory):
    """A plain mean that ignores noise, clip norm and denominator."""

    def create(self, value_type):
        return tff.aggregators.UnweightedMeanFactory().create(value_type)


@pytest.mark.parametrize(
    "check",
    [
        conformance.check_zero_noise_is_the_sum_over_the_fixed_denominator,
        conformance.check_one_client_is_bounded,
        conformance.check_non_finite_clients_count_as_zero,
        conformance.check_noise_is_fresh,
    ],
    ids=lambda check: check.__name__,
)
def test_a_plain_mean_breaks_the_contract(check):
    with pytest.raises(AssertionError):
        check(lambda noise_multiplier, clip_norm, clients_per_round: _Broken())
