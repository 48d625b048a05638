import math

import pytest

from tests.auditing import planted_bugs
from tff_dpftrl.auditing import mechanism
from tff_dpftrl.private_round import aggregation, clipping, estimators, sampled_gaussian


def _of(name):
    return mechanism.Mechanism.of(planted_bugs.CORRECT[name].build())


def test_numbers_are_those_of_the_aggregation():
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
    sampled = sampled_gaussian.SampledGaussianRound(
        clipping=clipping.FlatClipping([0.5, 0.1]),
        noise_multiplier=2.0,
        estimator=estimators.ClippedDenominator(0.1, 10.0 * weight),
        weight_cap=2.5,
    )
    found = mechanism.Mechanism.of(aggregation.Aggregation(sampled))
    assert (found.most_clients, found.contribution) == (most, 2.0)
    assert found.client_weight == 3.0 and found.clip_norm == 0.5
    assert (_of("sampled").most_clients, _of("sampled").client_weight) == (None, 1.0)


def test_nothing_is_known_of_other_aggregations():
    assert mechanism.Mechanism.of(aggregation.PlainMean()) is None


def test_ours_is_what_has_no_foreign_part():
    assert all(mechanism.is_ours(case.build()) for case in planted_bugs.CORRECT.values())
    for name in ("noise std × 0.8", "inflation forgotten"):
        assert not mechanism.is_ours(planted_bugs.PLANTED[name].build())
