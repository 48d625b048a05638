"""The guarantee a factory gives of itself, and the statement made of it."""

from __future__ import annotations

import math

import pytest

from tff_dpftrl import aggregators
from tff_dpftrl.accounting import guarantee, statement
from tff_dpftrl.aggregators import secagg_sum
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import blt
from tff_dpftrl.participation import schema as schema_lib

_BLT = blt.Blt((0.99, 0.8), (0.05, 0.2))
_SCHEMA = schema_lib.MinSep(100, 20, 5)
_DELTA = 1e-6


def _fixed(**arguments):
    return aggregators.build_dp_ftrl_aggregator(
        _BLT, noise_multiplier=6.0, clip_norm=0.5, clients_per_round=100, **arguments
    )


def _adaptive(**arguments):
    return aggregators.build_adaptive_dp_ftrl_aggregator(
        _BLT,
        noise_multiplier=6.0,
        clients_per_round=200,
        clipping=aggregators.AdaptiveClipping(only_estimates=True),
        **arguments,
    )


def _secure_sum():
    # The builders of `secagg` try a secure sum first; the factories are the same without.
    return secagg_sum.SecAggSumFactory(grid.for_bits(10, 200, 12), 0.5)


_FACTORIES = {
    "fixed": _fixed,
    "adaptive": _adaptive,
    "secagg": lambda **arguments: _fixed(sum_factory=_secure_sum(), **arguments),
}


_CLIP_FACTS = {
    "fixed": {"clip_norm": 0.5},
    "adaptive": {"adaptive_clipping": True},
    "secagg": {"clip_norm": 0.5},
}


@pytest.mark.parametrize("name", _FACTORIES)
def test_it_is_the_guarantee_of_strategy_and_total_noise(name):
    claim = _FACTORIES[name]().guarantee(_SCHEMA, _DELTA)
    assert claim == guarantee.dp_ftrl_guarantee(
        _BLT, noise_multiplier=6.0, schema=_SCHEMA, delta=_DELTA, **_CLIP_FACTS[name]
    )
    assert 0 < claim.epsilon < 20


@pytest.mark.parametrize("build", _FACTORIES.values(), ids=_FACTORIES)
def test_a_statement_is_one_line_and_a_known_seed_leaves_no_guarantee(build):
    stated = statement.dp_ftrl_statement(
        build().guarantee(_SCHEMA, _DELTA), unit_of_privacy="device"
    )
    assert stated.has_guarantee and stated.mechanism == "blt"
    known = statement.dp_ftrl_statement(
        build(deterministic_seed=1).guarantee(_SCHEMA, _DELTA), unit_of_privacy="device"
    )
    assert not known.has_guarantee and known.epsilon is None
    assert any("seed" in reason for reason in known.no_guarantee)


def test_adaptive_clipping_is_charged_for_both_streams():
    factory = _adaptive()
    made = factory.private_round
    total = 1 / math.hypot(1 / made.update_noise_multiplier, 0.5 / made.clipped_count_stddev)
    assert factory.guarantee(_SCHEMA, _DELTA).noise_multiplier == pytest.approx(total)
    assert factory.private_round.update_noise_multiplier > total


def test_the_noise_itself_covers_the_encoding():
    secure = _FACTORIES["secagg"]()
    inflation = secure.private_round.encoded_norm / secure.private_round.clipping.constant_norm
    assert inflation == grid.for_bits(10, 200, 12).inflation > 1.01
    assert secure.guarantee(_SCHEMA, _DELTA).clip_norm_inflation == 1.0


def test_accounting_of_sampled_rounds():
    factory = aggregators.SampledGaussianFactory(
        clipping=aggregators.FlatClipping(1.0),
        noise_multiplier=1.1,
        estimator=aggregators.ClippedDenominator(0.01, 1000),
    )
    run = factory.run_of(50)
    assert (run.sampling_probability, run.noise_multiplier, run.num_rounds) == (0.01, 1.1, 50)
    assert 0 < run.epsilon(1e-5) < 2
