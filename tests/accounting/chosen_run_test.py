"""Tests of tff_dpftrl.accounting.chosen_run."""

import dataclasses

from tff_dpftrl.accounting import chosen_run, guarantee, parts, selection, statement, statement_text
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.participation import schema as schema_lib

_RUNS = selection.NumRuns(10, 50)


def _one(noise=4.0, **fields):
    claim = guarantee.dp_ftrl_guarantee(
        identity.Identity(), noise_multiplier=noise, schema=schema_lib.MinSep(8, 2, 4), delta=1e-7
    )
    seen = schema_lib.MinSep(8, 8, 1)
    one = statement.dp_ftrl_statement(claim, unit_of_privacy="user", num_users=100_000)
    return dataclasses.replace(one, accounted=seen, subject={"date": "now", "run": "a"}, **fields)


def _chosen(one, delta=1e-6, **fields):
    return chosen_run.statement(
        one,
        epsilon=3.0,
        delta=delta,
        run_epsilon=2.0,
        profile=[(2.5, 0.01)],
        num_runs=_RUNS,
        num_settings=6,
        score="bits per character of news.jsonl",
        **fields,
    )


def test_the_statement_is_of_the_choice_and_says_what_it_rests_on():
    one = _one(headline_caveats=("One of its own.", sentences.ONE_OF_A_CHOICE))
    found = _chosen(one)
    assert sentences.ONE_OF_A_CHOICE in statement_text.markdown(one)
    assert found.headline_caveats == ("One of its own.",)
    assert (found.epsilon, found.delta, found.rho_zcdp) == (3.0, 1e-6, None)
    assert found.accounted == found.declared  # What another run did is not that of this one.
    assert found.parameters["epsilon_of_one_run"] == 2.0
    assert found.parameters["delta_of_one_run"] == 1e-7
    assert found.parameters[sentences.EXPECTED_RUNS] == 10
    assert [(row.name, row.epsilon_alone) for row in found.parts] == [
        ("weights", 2.0),
        ("selection among runs", 1.0),
    ]
    assert "sensitivity_squared" not in found.parameters
    assert found.subject == {"run": "a"}  # The date tells how many runs there were before.
    text = statement_text.markdown(found)
    assert "best of a random number of runs" in text and "stay secret" in text
    assert "Tuning of hyperparameters" in statement_text.markdown(one)
    assert "Tuning of hyperparameters" not in text and "choice of settings" not in text
    assert "Of the other runs nothing is released." in statement_text.plain(found)[3]
    assert statement.PrivacyStatement.from_json(statement_text.to_json(found)) == found


def test_the_secret_of_the_choice_stands_where_people_look_first():
    one = _one()
    found = _chosen(one)
    trusted = "trusted to keep secret how many runs there were"
    assert found.setting.startswith(one.setting) and trusted in found.setting
    _, from_whom, odds, *_ = statement_text.plain(found)
    assert from_whom.startswith(one.from_whom) and trusted in from_whom
    assert "This holds if the number of runs" in odds
    assert not any("how many runs" in said for said in statement_text.plain(one))
    assert trusted in statement_text.plain(_chosen(_one(from_whom="")))[1]
    assert "each with ε = 2 at δ = 1.24e-07" in _chosen(_one(delta=1.2341e-7)).parts[-1].says


def test_parts_cost_what_was_planned_whatever_was_observed_of_the_run():
    of_run = (parts.Cost("weights", "tree", 0.5), parts.Cost("vocabulary", "words", 0.25))
    planned = (parts.Cost("weights", "", 1.5), parts.Cost("vocabulary", "words", 0.75))
    rows = _chosen(_one(parts=of_run), costs=planned).parts
    assert [(row.name, row.epsilon_alone) for row in rows] == [
        ("weights", 1.5),
        ("vocabulary", 0.75),
        ("selection among runs", 1.0),
    ]
    assert rows[0].says == _one().mechanism


def test_the_caveat_of_delta_is_that_of_the_choice():
    assert not _one().headline_caveats
    assert "δ = 5e-06 times the 100000 users" in _chosen(_one(), delta=5e-6).headline_caveats[0]


def test_without_a_guarantee_of_the_run_the_choice_has_none():
    broken = _one(epsilon=None, rho_zcdp=None, no_guarantee=("The ledger is damaged.",))
    found = _chosen(broken)
    assert found.epsilon is None and found.profile == () and not found.has_guarantee
