"""Sums that may lengthen what a client sends have to say by how much."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import aggregators
from tff_dpftrl.aggregators import inner_sum, secagg_sum
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import identity

_STEP = 0.5
_PAIR = tff.TensorType(np.float32, [2])


class _Quantised(tff.aggregators.UnweightedAggregationFactory):
    """Rounds away from zero to multiples of 1/2 on the clients, then sums."""

    def __init__(self, contribution_norm=None):
        if contribution_norm is not None:
            self.contribution_norm = contribution_norm

    def create(self, value_type):
        total = tff.aggregators.SumFactory().create(value_type)

        @tff.tensorflow.computation(value_type)
        def quantise(value):
            return tf.sign(value) * tf.math.ceil(tf.abs(value) / _STEP) * _STEP

        @tff.federated_computation(
            total.initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            return total.next(state, tff.federated_map(quantise, value))

        return tff.templates.AggregationProcess(total.initialize, next_fn)


class _MySum(tff.aggregators.SumFactory):
    """A subclass, that may do anything."""


_NOISE = {"noise_multiplier": 1.0, "clients_per_round": 1}


def _fixed(**arguments):
    return aggregators.build_dp_ftrl_aggregator(
        identity.Identity(), clip_norm=1.0, **_NOISE, **arguments
    )


def _adaptive(**arguments):
    clipping = aggregators.AdaptiveClipping(4.0, clipped_count_stddev=5.0, only_estimates=True)
    return aggregators.build_adaptive_dp_ftrl_aggregator(
        identity.Identity(), clipping=clipping, **_NOISE, **arguments
    )


def _secagg_sum(clip_norm=1.0):
    return secagg_sum.SecAggSumFactory(grid.for_bits(2, 3, 6), clip_norm)


@pytest.mark.parametrize("factory", [_Quantised(), _MySum()], ids=["quantised", "subclass"])
def test_undeclared_sums_are_refused_with_the_remedy(factory):
    with pytest.raises(ValueError, match="Give encoded_norm, the largest norm"):
        _fixed(sum_factory=factory)
    with pytest.raises(ValueError, match="Give unit_inflation, the largest norm"):
        _adaptive(sum_factory=factory)


def test_noise_covers_what_a_quantised_client_contributes():
    # A client of norm 1 becomes one of norm √2: half as private as charged until now.
    quantised = _fixed(sum_factory=_Quantised(), encoded_norm=2**0.5)
    process = _fixed(
        sum_factory=_Quantised(np.sqrt(2)), deterministic_seed=3, report_non_finite_clients=True
    ).create(_PAIR)
    state = process.initialize()
    without = process.next(state, []).result
    added = process.next(state, [np.float32([0.6, 0.8])]).result - without
    moved = np.linalg.norm(added.astype(np.float64))
    assert moved == pytest.approx(np.sqrt(2), rel=1e-6)
    assert process.next(state, []).measurements["noise_stddev"] == pytest.approx(np.sqrt(2))
    assert quantised.private_round.encoded_norm == 2**0.5
    with pytest.raises(ValueError, match="encoded_norm must be a finite number, at least 1.41"):
        _fixed(sum_factory=_Quantised(np.sqrt(2)), encoded_norm=1.0)


def test_adaptive_clipping_hands_over_units_and_covers_the_inflation():
    factory = _adaptive(sum_factory=_Quantised(), unit_inflation=1.5)
    assert factory.private_round.unit_inflation == 1.5
    process = factory.create(_PAIR)
    output = process.next(process.initialize(), [])
    assert output.measurements["noise_stddev"] == pytest.approx(
        factory.private_round.update_noise_multiplier * 1.5 * 4.0
    )
    assert _adaptive(sum_factory=_Quantised(1.5)).private_round.unit_inflation == 1.5
    assert _adaptive(sum_factory=tff.aggregators.SumFactory()).private_round.unit_inflation is None


def test_our_secure_sums_declare_themselves():
    encoding = grid.for_bits(2, 3, 6)
    assert _fixed(sum_factory=_secagg_sum()).private_round.encoded_norm == encoding.inflation
    assert _adaptive(sum_factory=_secagg_sum()).private_round.unit_inflation == encoding.inflation
    # A grid for smaller updates clips them anew, which does not lower what is charged.
    assert _fixed(sum_factory=_secagg_sum(1e-3)).private_round.encoded_norm == 1.0
    with pytest.raises(ValueError, match="encoded_norm must be a finite number, at least 2"):
        _fixed(sum_factory=_secagg_sum(2.0), encoded_norm=1.5)


@pytest.mark.parametrize("declared", [np.nan, -1.0, 0.0, np.inf, "x"])
def test_a_declared_norm_has_to_be_one(declared):
    # Until now NaN and negative norms were taken for the clip norm.
    factory = _Quantised(declared)
    for build in (_fixed, _adaptive):
        with pytest.raises(ValueError, match="contribution_norm of _Quantised must be a finite"):
            build(sum_factory=factory)
    with pytest.raises(ValueError, match="contribution_norm of _Quantised must be a finite"):
        _adaptive(count_sum_factory=factory)
    with pytest.raises(ValueError, match="contribution_norm of _Quantised must be a finite"):
        _fixed(sum_factory=factory, encoded_norm=2.0)


@pytest.mark.parametrize("dtype", [np.float16, np.int32])
def test_sums_of_coarse_numbers_are_refused(dtype):
    # In float16 a clipped update is longer than its clip norm by up to 5e-4.
    factory = _Quantised(1.5)
    factory.sum_dtype = dtype
    with pytest.raises(ValueError, match="sum_dtype, got"):
        _fixed(sum_factory=factory)


def test_counts_have_to_be_exact():
    for factory in (_Quantised(), _Quantised(0.75), _MySum()):
        with pytest.raises(ValueError, match="count_sum_factory .* is not known to sum"):
            _adaptive(count_sum_factory=factory)
    for factory in (None, tff.aggregators.SumFactory(), secagg_sum.SecAggHalfBitFactory()):
        _adaptive(count_sum_factory=factory)
    _adaptive(count_sum_factory=_Quantised(0.5))


def test_exact_sums_are_handed_float64_and_others_what_they_ask_for():
    assert inner_sum.InnerSum.of(None, 1.0).dtype == np.float64
    assert inner_sum.InnerSum.of(tff.aggregators.SumFactory(), 1.0).dtype == np.float64
    assert inner_sum.InnerSum.of(_secagg_sum(), 1.0).dtype == np.float64
    assert inner_sum.InnerSum.of(_Quantised(2.0), 1.0).dtype == np.float32


def test_sums_survive_what_float32_would_drop():
    # 2²⁵ + 1 - 2²⁵ is 0 in float32.
    process = aggregators.build_dp_ftrl_aggregator(
        identity.Identity(), clip_norm=1e9, noise_multiplier=0.0, clients_per_round=1
    ).create(tff.TensorType(np.float32))
    values = [np.float32(2**25), np.float32(1), np.float32(-(2**25))]
    assert process.next(process.initialize(), values).result == 1.0


def test_a_factory_checks_round_against_sum():
    loose = inner_sum.InnerSum.of(_Quantised(), 1.0, stated_norm=1.5)
    with pytest.raises(ValueError, match="encoded_norm must be at least 1.5"):
        aggregators.DPFTRLFactory(_fixed().private_round, inner_sum=loose)
    with pytest.raises(ValueError, match="unit_inflation must be at least 1.5"):
        aggregators.AdaptiveDPFTRLFactory(_adaptive().private_round, inner_sum=loose)
