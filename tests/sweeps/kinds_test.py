"""Tests of tff_dpftrl.sweeps.kinds: the privacy of runs that have not begun."""

import sys

import pytest

from tests.finetuning import toy_finetuning
from tests.finetuning.toy_finetuning import toy  # noqa: F401
from tests.training import toy_run
from tff_dpftrl import validation
from tff_dpftrl.runs import manifest
from tff_dpftrl.sweeps import kinds
from tff_dpftrl.training import corpus, placement, warm_start


def test_the_plan_of_a_training_run_is_kept_for_all_its_cells(tmp_path, monkeypatch):
    toy_run.write_corpus(tmp_path)
    seen, read = [], corpus.read_users
    monkeypatch.setattr(corpus, "read_users", lambda users: seen.append(users) or read(users))
    planned = kinds.TRAINING.planner()
    config = toy_run.config(tmp_path, deterministic_noise_seed=None)
    plan = planned(config)
    faster = config.changed(client_learning_rate=0.1)
    assert planned(faster) is plan and len(seen) == 1
    noisier = planned(config.changed(noise_multiplier=2.0))
    assert noisier.epsilon_after(6) < plan.epsilon_after(6)
    assert plan.at_delta(1e-12).epsilon_after(6) > plan.epsilon_after(6)


@pytest.mark.parametrize("kind", [kinds.TRAINING, kinds.FINETUNING])
@pytest.mark.parametrize(
    "package, option", [("cryptography", {"noise": "secure"}), ("pyarrow", {"data": "a.parquet"})]
)
def test_a_cell_is_refused_for_lack_of_a_package(toy, kind, package, option, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, package, None)
    options = {"sampling": "user", "group_size": 2, "noise_multiplier": 1.0, "delta": 1e-4}
    config = (
        toy_run.config(toy, **option)
        if kind is kinds.TRAINING
        else toy_finetuning.config(toy, **options, **option)
    )
    with pytest.raises(validation.UsageError, match=f"need[^ ]* {package}, which is not installed"):
        kind.check(config, placement.Placement())


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["user", "passes"])
def test_the_plan_of_fine_tuning_is_that_of_its_run(toy, sampling):  # noqa: F811
    planned = kinds.FINETUNING.planner()
    options = {"sampling": sampling, "group_size": 2, "cohort_size": 4, "clip_norm": 1.0}
    options |= {"delta": 1e-4, "target_epsilon": 2.0, "deterministic_noise_seed": None}
    config = toy_finetuning.config(toy, **options)
    plan = planned(config)
    assert planned(config.changed(learning_rate=0.5)) is plan
    epsilon = plan.epsilon_after(plan.num_rounds)
    assert 1.9 < epsilon <= 2.0
    assert plan.at_delta(1e-6).epsilon_after(plan.num_rounds) > epsilon
    # And that of the run's manifest, by which a release looks at the run again.
    users = len(corpus.read_users(config.text).train.user_ids)
    size = warm_start.find(config.initial_folder).load().model.num_parameters
    derived = {"group_size": 2, "clip_norm": 1.0} | plan.derived()
    facts = {"training_users": users, "num_parameters": size}
    known = manifest.Manifest(config.to_dict(), derived, facts, {})
    again = kinds.FINETUNING.begun_plan(known, toy)
    assert again.epsilon_after(again.num_rounds) == pytest.approx(epsilon)
