import math
import sys

import pytest

pytest.importorskip("tensorflow_federated", reason="audits aggregators of TFF")

import tensorflow_federated as tff

import tff_dpftrl
from tests.auditing import planted_bugs
from tff_dpftrl.auditing import mechanism
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.private_round import aggregation, clipping, fixed_clip, secure_sums


def _of(name):
    return mechanism.Mechanism.of(planted_bugs.CORRECT[name].build())


def test_numbers_are_those_of_the_factory():
    plain = _of("BLT")
    assert (plain.noise_stddev, plain.clip_norm, plain.clients_per_round) == (2.0, 0.5, 10)
    secure = _of("secure sum")
    assert secure.noise_stddev == pytest.approx(2.0 * planted_bugs.encoding().inflation)
    assert secure.encoding == planted_bugs.encoding()
    adaptive = _of("adaptive")
    # z⁻² = z_Δ⁻² + (2 σ_b)⁻² with z = σ_b = 2.
    assert adaptive.noise_multiplier == pytest.approx(1 / math.sqrt(1 / 4 - 1 / 16))
    assert (adaptive.count_stddev, adaptive.starts) == (2.0, planted_bugs.STARTS)
    assert _of("sampled").clients_per_round == pytest.approx(10.0)


@pytest.mark.parametrize("weight, most", [(12.5, 12), (0.5, 1)])
def test_a_denominator_that_is_clipped_stays_where_it_is_for_some_clients(weight, most):
    factory = tff_dpftrl.SampledGaussianFactory(
        clipping=clipping.FlatClipping([0.5, 0.1]),
        noise_multiplier=2.0,
        estimator=tff_dpftrl.ClippedDenominator(0.1, 10.0 * weight),
        weight_cap=2.5,
    )
    found = mechanism.Mechanism.of(factory)
    assert (found.most_clients, found.contribution) == (most, 2.0)
    assert found.client_weight == 3.0 and found.clip_norm == 0.5
    assert (_of("sampled").most_clients, _of("sampled").client_weight) == (None, 1.0)


def test_nothing_is_known_of_other_factories():
    assert mechanism.Mechanism.of(tff.aggregators.SumFactory()) is None


def test_ours_is_what_has_no_foreign_part():
    assert all(mechanism.is_ours(case.build()) for case in planted_bugs.CORRECT.values())
    foreign = tff_dpftrl.build_dp_ftrl_aggregator(
        tff_dpftrl.Identity(),
        noise_multiplier=1.0,
        clients_per_round=1,
        clip_norm=1.0,
        sum_factory=tff.aggregators.clipping_factory(1.0, tff.aggregators.SumFactory()),
        encoded_norm=1.0,
    )
    assert not mechanism.is_ours(foreign)
    assert not mechanism.is_ours(planted_bugs.PLANTED["noise std × 0.8"].build())


def test_an_encoding_of_the_callers_own_is_not_ours():
    encoding = grid.for_bits(4, 3, 20)
    private_round = fixed_clip.FixedClipRound(
        identity.Identity(),
        noise_multiplier=1.0,
        clipping=clipping.FlatClipping(1.0),
        clients_per_round=3,
        encoded_norm=encoding.inflated_clip_norm(1.0),
    )

    class Own(secure_sums.VectorSum):
        pass

    for kind, expected in ((secure_sums.VectorSum, True), (Own, False)):
        made = aggregation.Aggregation(private_round, vector_sum=kind(encoding, 1.0))
        assert mechanism.is_ours(made) == expected


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
