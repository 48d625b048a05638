"""Runs that release more than their weights: the target is for the whole, which is recounted."""

import dataclasses
import json
import math
import types

import pytest

from tff_dpftrl.accounting import (
    budget_shares,
    composition,
    facts,
    parts,
    privacy_statement,
    statement_text,
)
from tff_dpftrl.auditing.recount import arithmetic
from tff_dpftrl.auditing.recount import terms as terms_lib
from tff_dpftrl.finetuning import example_sampling, run_privacy
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.mechanisms import table
from tff_dpftrl.participation import observed
from tff_dpftrl.runs import privacy, simulated_run

_DELTA, _TARGET = 1e-6, 3.0
_WORDS = parts.Part(parts.VOCABULARY, "some words", rho_zcdp=0.02, delta=1e-7)
_CHOICE = parts.Part(parts.SELECTION, "one run of several", epsilon=0.25)
_FIGURES = parts.Part(parts.METRICS, "accuracy of a round", noise_multiplier_of_round=15.0)
_PARTS = (_WORDS, _CHOICE, _FIGURES)
_SEEN = observed.ObservedParticipation(12, 4, 3, {3: 1})
_COMMON = {"num_rounds": 12, "clients_per_round": 5, "clip_norm": 0.5, "delta": _DELTA}
_ASKED = {
    "dp-ftrl": privacy.DpFtrl(mechanism="tree", min_sep=4, target_epsilon=_TARGET, **_COMMON),
    "dp-fedavg": privacy.DpFedAvg(algorithm="dp-fedavg", target_epsilon=_TARGET, **_COMMON),
    "cyclic": privacy.Amplified(
        sampling="cyclic",
        mechanism="bandtoep",
        options=table.Options(bands=2),
        target_epsilon=_TARGET,
        **_COMMON,
    ),
}


def _plan(kind, others=_PARTS):
    return dataclasses.replace(_ASKED[kind], others=others).plan(50, 1000)


def _state(plan, **told):
    return plan.statement(_SEEN, facts.Facts(**told), charge_all_rounds=True)


@pytest.fixture(scope="module", params=_ASKED)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def plan(kind):
    return _plan(kind)


@pytest.fixture(scope="module")
def statement(plan):
    return _state(plan)


def test_the_target_is_for_the_whole(kind, plan):
    assert 0.999 * _TARGET < plan.epsilon_after(12) <= _TARGET
    assert plan.noise_multiplier > _plan(kind, ()).noise_multiplier
    # What no round releases has been spent before the first one.
    alone = parts.compose(parts.GaussianRounds(0.0, 0), [_WORDS, _CHOICE], _DELTA)
    assert plan.epsilon_after(0) == alone < plan.epsilon_after(1) < plan.epsilon_after(12)
    assert plan.budget_guard(0.9 * _TARGET)(_SEEN).endswith("above max_epsilon=2.7.")


def test_a_resumed_plan_has_the_same_parts(kind, plan):
    derived = json.loads(json.dumps(plan.derived()))
    assert _ASKED[kind].resumed(50, 1000, derived) == plan
    assert "others" not in _plan(kind, ()).derived()


def test_the_statement_has_all_parts_and_the_whole(plan, statement):
    assert statement.epsilon == plan.epsilon_after(12) and statement.rho_zcdp is None
    assert [row.name for row in statement.parts] == [
        parts.WEIGHTS,
        *(part.name for part in _PARTS),
    ]
    alone = [row.epsilon_alone for row in statement.parts]
    assert max(alone) < statement.epsilon < sum(alone)
    text = statement_text.markdown(statement)
    assert "| training metrics | " in text and "| the whole run | 3 |" in text
    assert "Released with noise, too: vocabulary, training" in text
    again = privacy_statement.PrivacyStatement.from_json(statement_text.to_json(statement))
    assert again == statement
    # Every point of the profile has the δ of the vocabulary, and the last one comes to ε.
    assert all(_WORDS.delta < delta < 1.0 for _, delta in statement.profile)
    assert statement.profile[0][0] == _CHOICE.epsilon
    assert not any("Loss and accuracy on the training cohorts" in x for x in statement.not_covered)
    assert not any(x.startswith("Choice of the vocabulary") for x in statement.not_covered)


def test_losses_of_runs_with_parts_are_composed(kind, statement):
    spent = composition.Spent.from_json("a", json.loads(statement_text.to_json(statement)))
    assert (spent.rho_zcdp is None, spent.steps is None) == (kind != "dp-ftrl", kind == "dp-ftrl")
    assert composition.Spent(**json.loads(json.dumps(spent.to_json()))) == spent
    once, total = composition.compose([spent]), composition.compose([spent, spent])
    assert once.epsilon == pytest.approx(statement.epsilon, rel=1e-3)
    choice = _CHOICE.epsilon  # Added, and all else as a mechanism of √2 times the μ, about.
    assert total.epsilon - 2.0 * choice < 1.6 * (statement.epsilon - choice)
    assert total.epsilon > statement.epsilon and total.delta == _DELTA


def test_a_table_that_does_not_come_to_epsilon_is_added_up(statement):
    stated = json.loads(statement_text.to_json(statement))
    stated["parts"][1]["rho_zcdp"] *= 4.0
    spent = composition.Spent.from_json("a", stated)
    assert spent.steps is spent.rho_zcdp is None and not spent.others
    total = composition.compose([spent, spent])
    assert total.epsilon == 2.0 * statement.epsilon and total.delta == 2.0 * _DELTA


def test_a_recount_comes_to_the_same(kind, plan, statement):
    config = {"clients_per_round": 5, "num_rounds": 12, "delta": _DELTA}
    run = types.SimpleNamespace(config=config, derived=plan.derived(), num_users=50, folder=None)
    terms = terms_lib.of(run)
    schema = arithmetic.Schema(12, 4, 3) if kind == "dp-ftrl" else arithmetic.Schema(12, 1, 12)
    low, high = terms.epsilon(schema, _DELTA)
    assert low <= plan.epsilon_after(12) <= high
    without = dataclasses.replace(terms, others=(), other_epsilon=0.0)
    assert without.epsilon(schema, _DELTA)[1] < plan.epsilon_after(12)
    assert low <= terms.epsilon(schema._replace(rounds=0), _DELTA)[1] + plan.epsilon_after(12)
    if kind != "dp-ftrl":
        profile = statement.profile[3:5]
        epsilons = [epsilon - terms.other_epsilon for epsilon, _ in profile]
        for (_, stated), delta in zip(profile, terms.deltas(epsilons, 12), strict=True):
            assert stated == pytest.approx(delta, rel=2e-2)


def test_without_parts_a_statement_has_no_table():
    statement = _state(_plan("dp-ftrl", ()))
    assert statement.parts == () and "parts" not in json.loads(statement_text.to_json(statement))
    assert "## Parts" not in statement_text.markdown(statement)


def test_gaussian_parts_are_one_mechanism_with_the_weights():
    others = budget_shares.planned(_TARGET, _DELTA, {"metrics": 0.05})
    others += (
        dataclasses.replace(others[0], name=parts.VOCABULARY, rho_zcdp=2 * others[0].rho_zcdp),
    )
    statement = _state(_plan("dp-ftrl", others))
    assert statement.epsilon == pytest.approx(_TARGET) and not statement.profile
    rho = sum(row.rho_zcdp for row in statement.parts)
    assert statement.rho_zcdp == pytest.approx(rho, rel=1e-9)
    noise = _plan("dp-ftrl", ()).noise_multiplier
    assert _plan("dp-ftrl", others).noise_multiplier == pytest.approx(noise / math.sqrt(0.85))


def test_earlier_runs_stand_in_the_table():
    earlier = [composition.Spent("first", 1e-6, 2.0, 0.1)]
    statement = _state(_plan("dp-ftrl"), earlier_runs=earlier, same_users=True)
    assert [row.name for row in statement.parts][-1] == "earlier run first"
    assert statement.parts[-1].epsilon_alone == 2.0
    assert statement.parameters["epsilon_with_earlier_runs"] > statement.epsilon


def test_finetuning_counts_the_median_beside_other_parts():
    users = example_sampling.of_sizes([20] * 60)
    choice = plan_lib.group_sizes.Choice(4, "a private median", epsilon=0.125)
    made = plan_lib.make_plan(
        users,
        sampling="example",
        group_size=choice,
        expected_units=24,
        num_steps=20,
        target_epsilon=_TARGET,
        delta=_DELTA,
        others=(_WORDS,),
    )
    assert 0.999 * _TARGET < made.epsilon <= _TARGET
    with_figures = made.with_figures(0.1)
    assert with_figures.epsilon == pytest.approx(made.epsilon, rel=1e-4)
    assert with_figures.noise_multiplier > made.noise_multiplier
    plan = run_privacy.SampledFinetuning.of(with_figures, clip_norm=1.0, deterministic_seed=None)
    rows = [row.name for row in _state(plan).parts]
    assert rows == [parts.WEIGHTS, parts.VOCABULARY, parts.METRICS, parts.MEDIAN]
    derived = json.loads(json.dumps(plan.derived()))
    assert run_privacy.SampledFinetuning.resumed(derived, deterministic_seed=None) == plan
    run = types.SimpleNamespace(config={}, derived=plan.derived(), num_users=60, folder=None)
    low, high = terms_lib.of(run).epsilon(arithmetic.Schema(20, 1, 20), _DELTA)
    assert low <= with_figures.epsilon <= high


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([parts.Part(parts.EVALUATION, "", rho_zcdp=2.0)], "leaves nothing for the weights: evalu"),
        ([parts.Part(parts.SELECTION, "", epsilon=3.0)], "leaves nothing for the weights: selec"),
        ([parts.Part(parts.VOCABULARY, "", delta=_DELTA)], "raise delta"),
        ([parts.Part(parts.METRICS, "", noise_multiplier_of_round=0.3)], "training metrics cost"),
    ],
)
def test_parts_that_leave_nothing_are_refused_in_one_line(kind, others, says):
    with pytest.raises(ValueError, match=says) as error:
        _plan(kind, tuple(others))
    assert "\n" not in str(error.value)


def test_parts_that_do_not_fit_a_run_are_refused():
    simulated = dataclasses.replace(
        _ASKED["dp-ftrl"], others=_PARTS, deployment=simulated_run.Deployment(40, 1000)
    )
    with pytest.raises(ValueError, match="vocabulary of a run with simulate_report_goal"):
        simulated.check(50)
    bins = dataclasses.replace(
        _ASKED["cyclic"], sampling="bins", mechanism="identity", options=table.DEFAULTS
    )
    with pytest.raises(ValueError, match="sampling 'bins'.*'cyclic'"):
        dataclasses.replace(bins, others=(_FIGURES,)).plan(50, 1000)


@pytest.mark.slow
def test_bins_add_epsilon_of_other_parts():
    bins = dataclasses.replace(
        _ASKED["cyclic"], sampling="bins", mechanism="identity", options=table.DEFAULTS
    )
    plan = dataclasses.replace(bins, others=(_WORDS,)).plan(50, 1000)
    assert 0.999 * _TARGET < plan.epsilon_after(12) <= _TARGET
    statement = _state(plan)
    assert statement.parts[1].name == parts.VOCABULARY and not statement.profile
