"""Tests of simulations: whose noise they have, and what is said of whom."""

import dataclasses
import json

import pytest

from tff_dpftrl.accounting import dp_fedavg, facts, guarantee, statement_text
from tff_dpftrl.mechanisms import tree
from tff_dpftrl.participation import observed, schema
from tff_dpftrl.runs import participants, privacy, simulated_run

_DEPLOYMENT = simulated_run.Deployment(report_goal=100, population=2000)
_COMMON = {
    "num_rounds": 40,
    "clients_per_round": 5,
    "clip_norm": 0.5,
    "delta": 1e-6,
    "deployment": _DEPLOYMENT,
}
_DP_FTRL = privacy.DpFtrl(mechanism="tree", noise_multiplier=6.0, **_COMMON)
_SAMPLED = privacy.DpFedAvg(algorithm="dp-fedavg", noise_multiplier=2.0, **_COMMON)
_REAL_SCHEMA = schema.MinSep(40, 20, 2)
_TURNS = participants.Turns(2000, 100, _REAL_SCHEMA)
_OWN_SCHEMA = schema.MinSep(40, 12, 4)  # 60 users, 5 a round.


def test_a_deployment_has_a_client_in_a_round_at_least():
    assert simulated_run.Deployment(report_goal=1, population=1).scale(1) == 1.0
    with pytest.raises(ValueError, match="report_goal"):
        simulated_run.Deployment(report_goal=0, population=1)


def _epsilon(noise_multiplier, of_schema):
    return guarantee.dp_ftrl_guarantee(
        tree.Tree(40), noise_multiplier=noise_multiplier, schema=of_schema, delta=1e-6
    ).epsilon


def _statement(plan, num_rounds=40):
    seen = observed.ObservedParticipation(num_rounds, 12, 4, {12: 1})
    return plan.statement(seen, facts.Facts(), charge_all_rounds=True)


def test_noise_is_scaled_with_the_cohort_and_each_epsilon_is_of_its_own_run():
    plan = _DP_FTRL.plan(60, 1000)
    # The same noise on the average of 5 as 6.0 is on that of 100.
    assert plan.noise_multiplier / 5 == pytest.approx(6.0 / 100, rel=1e-12)
    assert plan.declared == _OWN_SCHEMA and plan.simulated.participation.declared == _REAL_SCHEMA
    assert plan.simulated.epsilon == _epsilon(6.0, _REAL_SCHEMA)
    assert plan.epsilon_after(40) == pytest.approx(_epsilon(0.3, _OWN_SCHEMA), rel=1e-12)
    assert plan.epsilon_after(40) > 50 * plan.simulated.epsilon
    statement = _statement(plan)
    assert statement.epsilon == plan.epsilon_after(40)
    assert statement.parameters["simulated_epsilon"] == plan.simulated.epsilon
    assert statement.parameters["noise_multiplier"] == pytest.approx(0.3)
    assert statement.parameters["simulated_noise_multiplier"] == 6.0
    caveat = statement.headline_caveats[0]
    assert "100 users a round out of 2000, each at most 2 times, 20 rounds apart" in caveat
    assert "only the ε above" in caveat and caveat in statement_text.markdown(statement)


def test_the_mechanism_is_made_for_the_run_that_is_simulated():
    plan = privacy.DpFtrl(mechanism="bandmf", noise_multiplier=6.0, **_COMMON).plan(60, 1000)
    alone = privacy.DpFtrl(
        mechanism="bandmf",
        noise_multiplier=6.0,
        **_COMMON | {"clients_per_round": 100, "deployment": None},
    ).plan(2000, 1000)
    assert plan.strategy.to_dict() == alone.strategy.to_dict()
    assert plan.simulated.epsilon == alone.epsilon_after(40)


def test_a_target_and_a_stride_are_of_the_run_that_is_simulated():
    asked = privacy.DpFtrl(
        mechanism="tree", target_epsilon=3.0, min_sep=15, max_participations=3, **_COMMON
    )
    plan = asked.plan(60, 1000)
    assert (
        plan.simulated.participation.declared == schema.MinSep(40, 15, 3)
        and plan.declared == _OWN_SCHEMA
    )
    assert 2.99 < plan.simulated.epsilon <= 3.0
    assert plan.simulated.epsilon == _epsilon(
        plan.simulated.noise_multiplier, plan.simulated.participation.declared
    )


@pytest.mark.parametrize("privacy", [_DP_FTRL, _SAMPLED], ids=["dp-ftrl", "dp-fedavg"])
def test_a_resumed_plan_is_the_same(privacy):
    plan = privacy.plan(60, 1000)
    derived = json.loads(json.dumps(plan.derived()))
    resumed = privacy.resumed(60, 1000, derived)
    assert resumed.derived() == plan.derived()
    assert (resumed.noise_multiplier, resumed.simulated) == (plan.noise_multiplier, plan.simulated)
    assert resumed.declared == plan.declared


def test_sampled_cohorts_are_scaled_alike():
    plan = _SAMPLED.plan(60, 1000)
    assert plan.noise_multiplier == pytest.approx(2.0 * 5 / 100)
    assert plan.participation.sampling_probability == 5 / 60
    real = dp_fedavg.DpFedAvg(100 / 2000, 2.0, 40).epsilon(1e-6)
    assert plan.simulated.epsilon == real
    assert _statement(plan).parameters["simulated_epsilon"] == real
    assert _statement(plan).epsilon > 10 * real
    target = privacy.DpFedAvg(algorithm="dp-fedavg", target_epsilon=2.0, **_COMMON)
    assert 1.95 < target.plan(60, 1000).simulated.epsilon <= 2.0


def test_a_promise_has_no_more_noise_and_no_smaller_delta_than_the_run():
    run = simulated_run.SimulatedRun(_DEPLOYMENT, _TURNS, 2 / 3, 1.0, 1000**-1.1)
    said = "noise multiplier 0.666666 would have ε = 1 at δ = 0.000501188"
    assert run.promise().endswith(said)


@pytest.mark.parametrize("privacy", [_DP_FTRL, _SAMPLED], ids=["dp-ftrl", "dp-fedavg"])
def test_without_noise_neither_run_has_a_guarantee(privacy):
    plan = dataclasses.replace(privacy, noise_multiplier=0.0).plan(60, 1000)
    assert plan.simulated.promise().endswith("would have no privacy guarantee")
    written = json.loads(statement_text.to_json(_statement(plan)))  # JSON has no infinity.
    assert written["epsilon"] is None and written["parameters"]["simulated_epsilon"] is None


def test_a_delta_too_large_for_the_population_is_said():
    caveats = privacy.DpFtrl(
        mechanism="tree", noise_multiplier=6.0, **_COMMON | {"delta": 1e-3}
    ).plan(60, 1000)
    with pytest.warns(UserWarning, match="not below 1 / 2000"):
        found = caveats.simulated.caveats()
    assert "δ = 0.001 is not below 1 / 2000" in found[1]


def test_refusals():
    with pytest.raises(ValueError, match="population must be at least 100, got 99"):
        simulated_run.Deployment(100, 99)
    with pytest.raises(ValueError, match="clients_per_round=101 exceeds the report goal"):
        _DEPLOYMENT.scale(101)
    assert _DEPLOYMENT.scale(100) == 1.0
    asked = privacy.DpFtrl(mechanism="tree", noise_multiplier=6.0, min_sep=21, **_COMMON)
    for refuse in (asked.check, lambda n: asked.plan(n, 1000)):
        with pytest.raises(ValueError, match="simulate_population .* min_sep=21 is impossible"):
            refuse(60)
    with pytest.raises(ValueError, match="exceeds the 4 training users"):
        _DP_FTRL.check(4)
