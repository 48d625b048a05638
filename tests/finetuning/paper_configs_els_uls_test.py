"""The package's configs of Charles et al. 2024: their numbers are those printed, and they run."""

from __future__ import annotations

import json

import pytest

from tests.finetuning import toy_finetuning
from tests.training import sqlite_file
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.cli import main
from tff_dpftrl.data import jsonl
from tff_dpftrl.finetuning import (
    choosing,
    example_sampling,
    group_size,
    opening,
    proxies,
    run,
)
from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.participation import observed
from tff_dpftrl.training import options as options_lib

toy = toy_finetuning.toy

# Users, examples, T, and how many times the examples δ is of (section 5).
_PRINTED = {
    "els_uls_stackoverflow": (342_477, 135_818_730, 10_000, 1),
    "els_uls_ccnews": (8_759, 708_241, 2_000, 10),
}
_ELS = {
    "els_uls_stackoverflow": {"sampling": "example", "group_size": 2**7},
    "els_uls_ccnews": {
        "sampling": "example", "group_size": 2**4, "group_size_looked_at_users": True
    },
}  # fmt: skip


def _config(name, **given):
    options = {"initial_weights": "x", **options_lib.read_toml(name)}
    options = options_lib.overrule(options, given)
    return options_lib.config_from_mapping(options, name, config_lib.FinetuningConfig)


def _chosen(name, **given):
    """Returns what is chosen for as many users as in the paper, all of one size."""
    num_users, num_examples, _, _ = _PRINTED[name]
    users = example_sampling.of_sizes([num_examples // num_users] * num_users)
    norms = group_size.GradientNorms((1, 2, 4, 8, 16, 32), (8.8, 6.6, 5.1, 4.0, 3.4, 3.0))
    options = _config(name, clip_norm=1.0, **given).part(choosing.SamplingOptions)
    return choosing.choose(options, users, proxies.Proxies(norms, 128, "public text"), 1000)


@pytest.mark.parametrize("name", _PRINTED)
def test_steps_and_delta_are_those_printed(name):
    _, num_examples, num_steps, scale = _PRINTED[name]
    config = _config(name)
    assert config.num_steps == num_steps
    assert f"{plan_lib.default_delta(scale * num_examples):.2e}" == f"{config.delta:.2e}"
    assert _config(name, **_ELS[name]).compute_budget == config.compute_budget


@pytest.mark.parametrize(
    ("name", "given", "group", "units"),
    [
        pytest.param("els_uls_stackoverflow", {}, 64, 4096, marks=pytest.mark.slow),
        pytest.param("els_uls_stackoverflow", _ELS, 2**7, 2**18, marks=pytest.mark.slow),
        pytest.param("els_uls_ccnews", {}, None, None, marks=pytest.mark.slow),
        pytest.param("els_uls_ccnews", _ELS, 2**4, 2**12, marks=pytest.mark.slow),
    ],
    ids=["ULS, Stack Overflow", "ELS, Stack Overflow", "ULS, CC-News", "ELS, CC-News"],
)
def test_account_and_statement_agree(name, given, group, units, capsys):
    chosen = _chosen(name, **given.get(name, {}))
    plan = chosen.privacy
    assert plan.group_size * plan.clients_per_round == _config(name).compute_budget or given
    assert group is None or (plan.group_size, plan.clients_per_round) == (group, units)
    seen = observed.ObservedParticipation(plan.num_rounds, 1, plan.num_rounds, {})
    stated = chosen.privacy.statement(seen, facts_lib.Facts(), charge_all_rounds=True)
    assert 0.999 * 4.0 < stated.epsilon <= 4.0
    assert not main.main([
        "account", "--sampling", "poisson", "--noise-multiplier", str(plan.noise_multiplier),
        "--sampling-probability", str(plan.sampling_probability), "--rounds", str(plan.num_rounds),
        "--group-size", str(plan.group_size if given else 1), "--delta", str(plan.delta),
        "--format", "json",
    ])  # fmt: skip
    accounted = json.loads(capsys.readouterr().out)["epsilon"]
    assert accounted == pytest.approx(stated.epsilon, rel=1e-9)
    # The paper's sizes were found by runs on these users, Estimate-and-Double's by public text.
    looked = any("with the training users in view" in line for line in stated.not_covered)
    assert looked == (group is not None)


_SMALL = {
    "els_uls_stackoverflow": {"group_size": 2, "compute_budget": 16},
    "els_uls_ccnews": {"sampling": "example", "group_size": 2, "compute_budget": 8},
}


def _small(name, toy, folder):
    """Returns the config of a run of two steps on data in its layout."""
    data = toy / "users.jsonl"
    if name == "els_uls_stackoverflow":
        users = jsonl.read(data)
        texts = {user: users.examples(user) for user in users.user_ids}
        data = sqlite_file.write(folder / "stackoverflow.sqlite", texts)
    given = {"num_steps": 2, "clip_norm": 1.0, "eval_every": 2, "noise_multiplier": 0.7}
    given |= {"delta": 1e-3, "initial_weights": str(toy / "pretrained"), **_SMALL[name]}
    return _config(name, data=str(data), **given)


@pytest.mark.parametrize("name", _SMALL)
def test_data_in_their_layout_are_read(name, toy, tmp_path):
    opened = opening.open_run(_small(name, toy, tmp_path), tmp_path / "run", progress=_silent)
    assert len(opened.text.train) > 30


@pytest.mark.slow
@pytest.mark.parametrize("name", _SMALL)
def test_they_run(name, toy, tmp_path):
    run_of = run.finetune(_small(name, toy, tmp_path), tmp_path / "run", progress=_silent)
    stated = run_of.statement
    assert stated.has_guarantee and stated.parameters["optimizer"] == "adafactor"
    assert stated.parameters["group_size"] == 2


def _silent(line):
    del line
