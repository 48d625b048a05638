"""Tests of the plan of sampled runs: what is derived, claimed, stated and resumed."""

import dataclasses
import json
import math

import pytest

from tff_dpftrl.accounting import dp_fedavg, facts, statement_text
from tff_dpftrl.participation import cohorts, observed, schema
from tff_dpftrl.runs import mechanism_plan, privacy

_PRIVACY = privacy.DpFedAvg(
    algorithm="dp-fedavg",
    num_rounds=20,
    clients_per_round=10,
    clip_norm=0.5,
    delta=1e-6,
    noise_multiplier=2.0,
)
_SEEN = observed.ObservedParticipation(15, 1, 6, {6: 1})


def _plan(num_clients=100, **changes) -> mechanism_plan.MechanismPlan:
    return dataclasses.replace(_PRIVACY, **changes).plan(num_clients, 1000)


def _state(plan, seen=_SEEN, *, charge_all_rounds=False, **told):
    return plan.statement(seen, facts.Facts(**told), charge_all_rounds=charge_all_rounds)


def test_no_schema_is_promised_but_the_number_of_rounds():
    plan = _plan()
    assert plan.declared == schema.MinSep.unrestricted(20)
    statement = _state(plan)
    assert statement.declared is statement.accounted is None
    assert "schema" not in plan.derived()


def test_a_statement_rounds_the_probability_up_wherever_it_stands():
    text = statement_text.markdown(_state(_plan(300)))
    assert "cohort with probability 0.0333334, independently" in text  # 1 / 30.
    assert "- sampling_probability: 0.0333334\n" in text
    assert "to keep secret who is drawn for which round" in text


def test_cohorts_are_poisson_samples_and_secret():
    plan = _plan()
    sampler = plan.sampler(seed=5)
    assert isinstance(sampler, cohorts.PoissonSampler)
    assert plan.needs_secret_cohorts and plan.participation.sampling_probability == 0.1
    assert len({len(sampler.cohort(t)) for t in range(20)}) > 1


def test_epsilon_is_that_of_the_composition():
    plan = _plan()
    assert plan.epsilon_after(0) == 0.0
    assert plan.epsilon_after(7) == dp_fedavg.DpFedAvg(0.1, 2.0, 7).epsilon(1e-6)
    assert _state(plan).epsilon == plan.epsilon_after(15) < plan.epsilon_after(20)
    assert _state(plan, charge_all_rounds=True).epsilon == plan.epsilon_after(20)


def test_the_statement_names_estimator_and_clipping():
    plain, other = _plan(), _plan(estimator="clipped-denominator", per_layer_clipping=True)
    assert _state(plain).parameters["estimator"].startswith("fixed denominator")
    assert _state(plain).parameters["clipping"] == "flat"
    assert _state(other).parameters["estimator"].startswith("clipped denominator")
    assert _state(other).parameters["clipping"] == "per layer"
    # The noise multiplier is relative to the estimator's sensitivity.
    assert _state(other).epsilon == _state(plain).epsilon
    assert other.noise_to_signal(1000) == 2 * plain.noise_to_signal(1000)


def test_the_statement_has_every_clip_norm_and_epsilon_is_that_of_one():
    one, later = _plan(), _plan(later_clip_norms=((5, 0.25), (12, 0.1)))
    assert later.clipping.norms(20) == (0.5,) * 5 + (0.25,) * 7 + (0.1,) * 8
    assert one.clipping.norms(20) == 0.5
    assert _state(later).epsilon == _state(one).epsilon
    said = _state(later).parameters["clip_norm_by_round"]
    assert said.startswith("0.5, 0.25 after 5 rounds, 0.1 after 12 rounds; the noise is")
    assert "clip_norm_by_round" not in _state(one).parameters
    assert any("0.25 after 5 rounds" in line for line in later.describe())
    norms = 5 * 0.5**2 + 7 * 0.25**2 + 8 * 0.1**2, 5 * 0.5 + 7 * 0.25 + 8 * 0.1
    expected = 2.0 * math.sqrt(1000 * norms[0]) / (10 * norms[1])
    assert later.noise_to_signal(1000) == pytest.approx(expected)
    asked = dataclasses.replace(_PRIVACY, later_clip_norms=((5, 0.25),))
    assert (
        asked.resumed(100, 1000, asked.plan(100, 1000).derived()).clipping.norms(20)[5:]
        == (0.25,) * 15
    )


def test_a_target_is_kept():
    plan = _plan(noise_multiplier=None, target_epsilon=3.0)
    assert 2.9 < plan.epsilon_after(20) <= 3.0


def test_a_known_seed_is_no_guarantee():
    plan = _plan(deterministic_seed=1)
    assert plan.epsilon_after(20) is None and not _state(plan).has_guarantee


def test_the_budget_guard_counts_rounds():
    plan = _plan()
    guard = plan.budget_guard(plan.epsilon_after(15))
    assert guard(_SEEN) is None
    assert "above max_epsilon" in guard(observed.ObservedParticipation(16, 1, 6, {6: 1}))


def test_a_resumed_plan_is_the_same():
    privacy = dataclasses.replace(_PRIVACY, noise_multiplier=None, target_epsilon=3.0)
    plan = privacy.plan(100, 1000)
    assert privacy.resumed(100, 1000, json.loads(json.dumps(plan.derived()))) == plan


def test_independent_noise_keeps_nothing():
    assert _plan().memory_copies == 0


def test_noise_to_signal_is_that_of_the_sum_of_all_rounds():
    # 20 rounds of independent noise in 1000 weights, against 20 cohorts of 10.
    expected = 2.0 * math.sqrt(20 * 1000) / (20 * 10)
    assert _plan().noise_to_signal(1000) == pytest.approx(expected)


def test_too_few_users_are_refused():
    with pytest.raises(ValueError, match="clients_per_round=10 exceeds the 9 training users"):
        _plan(num_clients=9)
    with pytest.raises(ValueError, match="lower it to 9 or less"):
        _PRIVACY.check(9)
    _PRIVACY.check(10)


def test_a_cohort_larger_than_the_population_is_refused_at_once():
    _PRIVACY.check(10)
    with pytest.raises(ValueError, match="exceeds the 9 training users"):
        _PRIVACY.check(9)


def test_what_nobody_should_quote_epsilon_without_stands_under_the_headline():
    statement = _state(_plan(), _SEEN, headline_caveats=("Not the vocabulary.",))
    assert statement.headline_caveats[-1] == "Not the vocabulary."
    headline = statement_text.markdown(statement).partition("## Guarantee")[2].partition("## ")[0]
    assert "**Not the vocabulary.**" in headline
    assert "sentences in bold below belong to it" in statement_text.plain(statement)[2]
