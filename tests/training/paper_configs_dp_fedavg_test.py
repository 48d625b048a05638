"""The package's config of McMahan et al. 2018: its numbers are those printed, and it runs."""

from __future__ import annotations

import json
import math

import pytest

from tests.training import sqlite_file, toy_run
from tff_dpftrl.accounting import dp_fedavg
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.cli import main
from tff_dpftrl.models import table as model_table
from tff_dpftrl.participation import observed
from tff_dpftrl.training import opening, run
from tff_dpftrl.training import options as options_lib

_USERS = 763_430
# Options beside those of the config; printed σ, and ε of all rounds by the moments accountant.
_PRINTED = {
    "Table 2, 5000": ({}, 0.003, 4.634),
    "Table 2, 1667": ({"clients_per_round": 1667, "clip_norm": 10.0}, 10 / 1667, 2.314),
    "Table 2, 1250": ({"clients_per_round": 1250}, 0.012, 2.038),
    "section 3, 1250": ({"clients_per_round": 1250, "num_rounds": 3000}, 0.012, 1.97),
    "appendix D, 3000": ({"algorithm": "dp-fedsgd", "num_rounds": 3000}, 0.003, 3.81),
    "appendix D, 20000": ({"algorithm": "dp-fedsgd", "num_rounds": 20_000}, 0.003, 8.92),
}


def _config(**given):
    options = options_lib.overrule(options_lib.read_toml("dp_fedavg"), given)
    return options_lib.config_from_mapping(options, "dp_fedavg")


def _stated(plan):
    seen = observed.ObservedParticipation(plan.num_rounds, 1, plan.num_rounds, {})
    return plan.statement(seen, facts_lib.Facts(), charge_all_rounds=True)


@pytest.mark.parametrize("row", _PRINTED)
def test_noise_and_epsilon_are_those_of_the_paper(row):
    given, stddev, printed = _PRINTED[row]
    plan = _config(**given).request().plan(_USERS, 1_350_000)
    assert plan.noise_multiplier * plan.clip_norm / plan.clients_per_round == stddev
    rounds = dp_fedavg.DpFedAvg(plan.sampling_probability, plan.noise_multiplier, plan.num_rounds)
    by_moments = rounds.epsilon_moments_accountant(plan.delta)
    if row.startswith("Table"):
        assert round(by_moments, 3) == printed
    else:  # The text cuts off: it has 1.97 for 1.976, and 3.81 for 3.816.
        assert math.floor(100.0 * by_moments) / 100.0 == printed


@pytest.mark.slow
def test_account_plan_and_statement_agree(capsys):
    stated = _stated(_config().request().plan(_USERS, 1_350_000))
    assert not main.main([
        "account", "--sampling", "poisson", "--sampling-probability", str(5000 / _USERS),
        "--noise-multiplier", "1", "--rounds", "5000", "--delta", "1e-9", "--format", "json",
    ])  # fmt: skip
    accounted = json.loads(capsys.readouterr().out)["epsilon"]
    assert accounted < 4.634
    assert accounted == pytest.approx(stated.epsilon, rel=1e-9)
    assert not main.main([
        "plan", "--sampling", "poisson", "--population", str(_USERS), "--report-goals", "5000",
        "--target-epsilon", str(accounted), "--rounds", "5000", "--delta", "1e-9",
        "--format", "json",
    ])  # fmt: skip
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["noise_multiplier"] == pytest.approx(1.0, rel=1e-3)


def test_utility_is_estimated_from_cohorts_of_100_with_the_noise_of_5000():
    given = {"simulate_report_goal": 5000, "simulate_population": _USERS}
    plan = _config(clients_per_round=100, **given).request().plan(50_000, 1_350_000)
    assert plan.noise_multiplier * plan.clip_norm / 100 == pytest.approx(0.003)
    whole = _config().request().plan(_USERS, 1_350_000)
    assert plan.simulated.epsilon == whole.epsilon_after(5000)
    assert plan.epsilon_after(1) > 100.0


def test_the_change_of_figure_8_costs_nothing():
    given = {"clients_per_round": 1667, "num_rounds": 10_885, "clip_norm": 20.0}
    changed = _config(**given, clip_norm_schedule="4885:7.9").request().plan(_USERS, 1_350_000)
    norms = changed.clip_norms
    assert (norms[4884], norms[4885], len(norms)) == (20.0, 7.9, 10_885)
    stddevs = [round(changed.noise_multiplier * norms[i] / 1667, 4) for i in (4884, 4885)]
    assert stddevs == [0.012, 0.0047]
    constant = _config(**given).request().plan(_USERS, 1_350_000)
    assert changed.epsilon_after(10_885) == constant.epsilon_after(10_885)


def test_the_model_has_the_papers_size():
    language = _config().with_defaults().language
    model = model_table.build(
        language.model, vocabulary_size=language.vocabulary_size + 4, **language.model_sizes
    )
    assert model.num_parameters == pytest.approx(1.35e6, rel=0.01)


def _small(folder, **given):
    """Returns the config of a run of two rounds on data in TFF's layout."""
    texts = {f"author{i}": [" ".join(toy_run.WORDS[i % 7 : i % 7 + 12])] * 3 for i in range(40)}
    (folder / "words.txt").write_text("\n".join(toy_run.WORDS))
    sizes = {"vocabulary_size": 30, "embedding_size": 4, "lstm_size": 5, "num_rounds": 2}
    return _config(
        data=str(sqlite_file.write(folder / "reddit.sqlite", texts)),
        vocabulary=str(folder / "words.txt"),
        clients_per_round=5,
        eval_every=2,
        **sizes,
        **given,
    )


def test_data_in_tffs_layout_are_read(tmp_path):
    opened = opening.open_run(_small(tmp_path), tmp_path / "run", progress=lambda line: None)
    assert len(opened.text.train) > 30 and opened.text.words.size > 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"estimator": "clipped-denominator"},
        {"algorithm": "dp-fedsgd", "batch_size": 160},
    ],
    ids=["fixed", "clipped", "fedsgd"],
)
def test_it_runs(given, tmp_path):
    config = _small(tmp_path, **given)
    stated = run.train(config, tmp_path / "run", progress=lambda line: None).statement
    assert stated.mechanism == config.privacy.algorithm and stated.epsilon > 0.0
    assert stated.parameters["clip_norm"] == 15.0 and stated.parameters["clipping"] == "flat"
    assert stated.parameters["estimator"].startswith(config.privacy.estimator.replace("-", " "))
    assert stated.parameters["sampling_probability"] == 5 / stated.parameters["num_users"]
