"""Tests of the plan of correlated noise with secret samples: derived, claimed, stated, resumed."""

import dataclasses
import json

import numpy as np
import pytest

from tff_dpftrl.accounting import (
    amplified_banded,
    composition,
    facts,
    statement_sentences,
    statement_text,
)
from tff_dpftrl.mechanisms import serialization, table
from tff_dpftrl.participation import observed, sampling, schema
from tff_dpftrl.runs import amplified_privacy, dp_ftrl_privacy, sampled_privacy, simulated_run

_CYCLIC = amplified_privacy.AmplifiedPrivacy(
    sampling="cyclic",
    num_rounds=20,
    clients_per_round=10,
    clip_norm=0.5,
    delta=1e-6,
    options=table.Options(bands=3),
    noise_multiplier=2.0,
)
_SEEN = observed.ObservedParticipation(15, 3, 4, {4: 1})


def _plan(num_clients=100, **changes) -> amplified_privacy.AmplifiedPlan:
    return dataclasses.replace(_CYCLIC, **changes).plan(num_clients, 1000)


def _state(plan, seen=_SEEN, *, charge_all_rounds=False):
    return plan.statement(seen, facts.Facts(), charge_all_rounds=charge_all_rounds)


def test_as_many_groups_as_bands_take_turns():
    plan = _plan()
    assert plan.sampling == sampling.CyclicPoisson(20, 3, 0.1 * 3)
    assert plan.needs_secret_cohorts and plan.clients_per_round == pytest.approx(10)
    assert plan.declared == schema.MinSep(20, 3, 7)
    assert plan.memory_copies == 2
    assert _plan(min_sep=5).sampling == sampling.CyclicPoisson(20, 5, 0.5)


def test_epsilon_is_that_of_the_first_rounds():
    plan = _plan()

    def alone(rounds):
        return amplified_banded.AmplifiedBanded.from_strategy(
            plan.strategy,
            noise_multiplier=2.0,
            num_rounds=rounds,
            num_groups=3,
            sampling_probability=plan.sampling.sampling_probability,
        ).epsilon(1e-6)

    assert plan.epsilon_after(0) == 0.0
    # Rounds are charged in whole turns of all groups.
    assert plan.epsilon_after(1) == plan.epsilon_after(3) == alone(3)
    spent, whole = alone(15), alone(20)
    assert plan.epsilon_after(13) == plan.epsilon_after(15) == spent < whole
    assert _state(plan).epsilon == spent
    assert plan.epsilon_after(20) == _state(plan, charge_all_rounds=True).epsilon == whole


def test_one_band_is_dp_fedavg():
    one = _plan(mechanism="identity", options=table.DEFAULTS, min_sep=None)
    other = sampled_privacy.SampledPrivacy("dp-fedavg", 20, 10, 0.5, 1e-6, 2.0).plan(100, 1000)
    assert one.epsilon_after(20) == other.epsilon_after(20)
    assert one.noise_to_signal(1000) == pytest.approx(other.noise_to_signal(1000))
    assert _state(one).profile == _state(other).profile != ()


def test_certain_turns_cost_what_the_stride_costs():
    # q = 1: whoever is in a group comes at each turn, as in passes with the stride as declared.
    # In 21 rounds the last turn of the first group has a whole column.
    plan = _plan(num_clients=30, num_rounds=21)
    assert plan.sampling.sampling_probability == pytest.approx(1.0)
    passes = dp_ftrl_privacy.DpFtrlPrivacy(
        21, 10, 0.5, 1e-6, "bandtoep", noise_multiplier=2.0, min_sep=3
    ).plan(30, 1000)
    of_passes = dataclasses.replace(passes, strategy=plan.strategy)
    exact = of_passes.epsilon_after(21)
    assert exact <= plan.epsilon_after(21) <= exact + 2e-3


def test_a_target_is_kept_and_a_resumed_plan_is_the_same():
    privacy = dataclasses.replace(_CYCLIC, noise_multiplier=None, target_epsilon=3.0)
    plan = privacy.plan(100, 1000)
    assert 2.99 < plan.epsilon_after(20) <= 3.0
    assert privacy.resumed(100, 1000, json.loads(json.dumps(plan.derived()))) == plan


def test_cohorts_expect_the_denominator_and_differ_in_size():
    plan = _plan(num_rounds=60)
    sizes = [len(plan.sampler(7).cohort(t)) for t in range(60)]
    assert len(set(sizes)) > 3
    # Groups are drawn, too, but each three rounds have all of them.
    assert np.mean(sizes) == pytest.approx(10.0, abs=1.2)


def test_a_larger_run_is_simulated_with_its_sampling():
    deployment = simulated_run.Deployment(40, 1000)
    plan = _plan(deployment=deployment)
    alone = dataclasses.replace(_CYCLIC, clients_per_round=40).plan(1000, 1000)
    assert plan.simulated.epsilon == alone.epsilon_after(20)
    assert plan.wanted_sampling == alone.sampling != plan.sampling
    assert (plan.noise_multiplier, plan.wanted_noise_multiplier) == (pytest.approx(0.5), 2.0)
    assert plan.epsilon_after(20) > alone.epsilon_after(20)
    again = dataclasses.replace(_CYCLIC, deployment=deployment).resumed(100, 1000, plan.derived())
    assert again == plan


def test_bins_that_are_simulated_have_the_noise_on_their_averages():
    # 19 clients have one bin of 19, not of 10; 990 have 24 bins of 41.25, not of 40.
    plan = _plan(
        num_clients=19,
        sampling="bins",
        mechanism="identity",
        options=table.DEFAULTS,
        num_rounds=24,
        deployment=simulated_run.Deployment(40, 990),
    )
    assert (plan.sampling.num_bins, plan.wanted_sampling.num_bins) == (1, 24)
    assert plan.noise_multiplier / plan.clients_per_round == pytest.approx(2.0 / 41.25)


def test_the_statement_says_who_drew_and_how():
    statement = _state(_plan())
    assert statement.data_in_one_place and statement.declared is None
    (drawn, *_) = statement.assumptions
    for said in ("one of 3 groups", "probability 0.3", "One party", "in the field", "seed"):
        assert said in drawn
    assert "between data with a user and data without" in statement.adjacency
    assert statement.parameters["num_groups"] == 3 and statement.parameters["sampling"] == "cyclic"
    assert statement.profile
    assert "if the sampling of cohorts was kept" in statement_text.markdown(statement)


def test_statements_of_turns_and_of_dp_fedavg_compose_by_their_loss():
    plan, plain = _plan(), sampled_privacy.SampledPrivacy("dp-fedavg", 20, 10, 0.5, 1e-6, 1.0)
    states = [_state(plan), _state(plain.plan(100, 1000))]
    cyclic, rounds = (
        composition.Spent.from_json("a", json.loads(statement_text.to_json(state)))
        for state in states
    )
    turn = plan.strategy.sensitivity(schema.MinSep(20, 20, 1)).value
    assert cyclic.steps == composition.SampledSteps(
        pytest.approx(2.0 / turn), pytest.approx(0.3), 1, 5
    )
    assert rounds.steps == composition.SampledSteps(1.0, 0.1, 1, 15)
    total = composition.compose([cyclic, rounds])
    assert max(cyclic.epsilon, rounds.epsilon) < total.epsilon
    assert total.epsilon < 0.9 * (cyclic.epsilon + rounds.epsilon)
    assert total.delta == 1e-6
    # Bins have no steps: ε and δ are added.
    bins = _state(_plan(sampling="bins", mechanism="identity", options=table.DEFAULTS))
    bins = composition.Spent.from_json("b", json.loads(statement_text.to_json(bins)))
    assert bins.steps is None
    assert composition.compose([bins, rounds]).delta == 2e-6


def test_bins_take_any_mechanism_and_cost_less_than_turns_that_are_known():
    options = {"sampling": "bins", "mechanism": "blt", "options": table.DEFAULTS}
    plan = _plan(num_clients=53, **options)
    # As many bins as have ten clients at least.
    assert plan.sampling == sampling.BallsInBins(20, 5)
    assert plan.clients_per_round == pytest.approx(10.6)
    known = dp_ftrl_privacy.DpFtrlPrivacy(
        20, 10, 0.5, 1e-6, "blt", noise_multiplier=2.0, min_sep=5
    ).plan(53, 1000)
    assert plan.strategy == known.strategy
    spent = [plan.epsilon_after(t) for t in (1, 5, 6, 20)]
    assert spent[0] == spent[1] < spent[2] < spent[3] < known.epsilon_after(20)
    statement = _state(plan, charge_all_rounds=True)
    assert statement.parameters["num_bins"] == 5 and len(statement.profile) == 4
    assert all(0.0 < delta < 1.0 for _, delta in statement.profile)
    assert "one of 5 bins" in statement.assumptions[0]
    again = dataclasses.replace(_CYCLIC, **options).resumed(53, 1000, plan.derived())
    assert again == plan


def test_b_min_sep_draws_whoever_is_free():
    options = {"sampling": "b-min-sep", "mechanism": "blt", "options": table.DEFAULTS, "min_sep": 4}
    plan = _plan(**options)
    # 10 % of all in a round: of the 70 % who were in none of the last three.
    assert plan.sampling == sampling.MinSepPoisson(20, 4, 0.1 / (1.0 - 3 * 0.1))
    assert plan.clients_per_round == pytest.approx(10) and plan.declared == schema.MinSep(20, 4, 5)
    assert 0.0 < plan.epsilon_after(4) < plan.epsilon_after(20)
    assert "none of the last 3 rounds" in _state(plan).assumptions[0]
    again = dataclasses.replace(_CYCLIC, **options).resumed(100, 1000, plan.derived())
    assert again == plan


def _noise(plan, n=20):
    return plan.noise_multiplier * plan.strategy.rms_error(n) / plan.clients_per_round


def test_bands_that_are_left_open_are_those_of_least_noise():
    left_open = {"options": table.DEFAULTS, "noise_multiplier": None, "target_epsilon": 4.0}
    chosen = _plan(80, **left_open)
    given = [
        _noise(_plan(80, **{**left_open, "options": table.Options(bands=bands)}))
        for bands in (1, 3, 5, 7)
    ]
    assert _noise(chosen) <= min(given) * (1 + 2e-3) < given[0]
    assert chosen.sampling.num_groups > 1 and chosen.epsilon_after(20) <= 4.0
    # With min_sep there are as many bands as groups.
    assert _plan(80, **left_open, min_sep=4).memory_copies == 3
    # Of a run that is simulated it is the larger run whose noise counts.
    larger = simulated_run.Deployment(100, 800)
    simulated = dataclasses.replace(_CYCLIC, **left_open, deployment=larger).plan(500, 0)
    assert simulated.strategy == chosen.strategy


def test_a_known_seed_is_no_guarantee():
    plan = _plan(deterministic_seed=1)
    assert plan.epsilon_after(20) is None
    assert "with a known seed" in plan.describe()[0]
    # There was noise, and only it is said to be missing where it is.
    assert _state(plan).no_guarantee == (statement_sentences.KNOWN_SEED,)
    bins = {"sampling": "bins", "mechanism": "identity", "options": table.DEFAULTS}
    for options in ({}, bins, {"sampling": "b-min-sep"}):
        without = _state(_plan(noise_multiplier=0.0, **options))
        assert without.no_guarantee == (statement_sentences.TOO_LITTLE_NOISE,)


def test_what_the_author_of_a_mechanism_claims_is_said(monkeypatch):
    monkeypatch.setattr(serialization, "is_built_in", lambda strategy: False)
    statement = _state(_plan())
    assert statement_sentences.CLAIMED_BY_AUTHOR in statement.assumptions
    assert "the author of the mechanism" in statement.headline_caveats[0]


def test_the_budget_guard_counts_rounds():
    plan = _plan()
    guard = plan.budget_guard(plan.epsilon_after(15))
    assert guard(_SEEN) is None
    assert "above max_epsilon" in guard(observed.ObservedParticipation(16, 3, 4, {4: 1}))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mechanism": "blt", "options": table.DEFAULTS}, "banded matrix, which mechanism 'blt'"),
        ({"options": table.DEFAULTS}, "needs bands of the mechanism, or min_sep"),
        ({"min_sep": 2}, "raise min_sep to 3, or lower bands"),
        ({"options": table.Options(bands=11)}, "lower it to 10, or clients_per_round to 9"),
        ({"sampling": "bins", "min_sep": 3}, "min_sep has no meaning with sampling 'bins'"),
        (
            {"sampling": "bins", "num_rounds": 9},
            "10 bins of 10 clients and only 9 rounds.* raise num_rounds to 10, or .* to 11",
        ),
        ({"sampling": "b-min-sep", "min_sep": 11}, "lower it to 10, or clients_per_round to 9"),
        ({"clients_per_round": 101}, "exceeds the 100 training users"),
        ({"deployment": simulated_run.Deployment(40, 100)}, "In the run that is simulated"),
    ],
)
def test_what_cannot_be_is_refused_before_the_long_computations(changes, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(_CYCLIC, **changes).check(100)
