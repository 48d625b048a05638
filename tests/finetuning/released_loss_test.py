"""Fine-tuning that releases the loss of its steps with noise, within the budget."""

import csv
import json
import math

import numpy as np
import pytest
from scipy import stats

from tests.finetuning import toy_finetuning
from tff_dpftrl import validation
from tff_dpftrl.auditing.recount import run_folder
from tff_dpftrl.finetuning import example_sampling, run, run_privacy, step_trainer
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.runs import privacy, released_metrics

toy = toy_finetuning.toy


def test_no_unit_counts_for_more_than_a_norm_of_one():
    losses = np.array([0.0, 3.0, 1e30, np.nan, np.inf])
    sums = step_trainer.bounded_sums(losses, 3.0)
    expected = np.array([0.0, 1.0]) + np.array([1.0, 1.0]) / math.sqrt(2) + np.array([1.0, 0.0])
    np.testing.assert_allclose(sums, expected, atol=1e-8)
    for loss in (0.0, 1e-30, 2.0, 1e300, -1e8):
        assert np.linalg.norm(step_trainer.bounded_sums(np.array([loss]), 0.5)) <= 1.0
    np.testing.assert_array_equal(step_trainer.bounded_sums(np.zeros(0), 1.0), [0.0, 0.0])


def _sampled(**options):
    users = example_sampling.Users(tuple(f"u{i}" for i in range(60)), np.full(60, 3))
    plan = plan_lib.make_plan(
        users, sampling="user", group_size=2, expected_units=8, num_steps=6, delta=1e-4, **options
    )
    return run_privacy.SampledFinetuning.of(plan, clip_norm=1.0, deterministic_seed=None)


def test_sampled_steps_cost_the_same_with_a_share_for_the_loss():
    before = _sampled(target_epsilon=6.0)
    plan = run_privacy.with_figures(before, None, 0.2, meets_target=True)
    assert plan.plan.num_steps == 6 and plan.others == plan.plan.others != ()
    # Update and loss of a step are one Gaussian vector, as precise as the update was.
    both = plan.noise_multiplier**-2 + released_metrics.noise_of(plan) ** -2
    assert both == pytest.approx(before.noise_multiplier**-2, rel=1e-9)
    assert plan.epsilon_after(6) == pytest.approx(before.epsilon_after(6), rel=1e-6)
    derived = json.loads(json.dumps(plan.derived()))
    again = run_privacy.SampledFinetuning.resumed(derived, deterministic_seed=None)
    assert again == plan
    without = run_privacy.with_figures(before, 1.0, None, meets_target=False)
    assert without.noise_multiplier == before.noise_multiplier
    assert without.epsilon_after(6) > before.epsilon_after(6)
    with pytest.raises(validation.UsageError, match="leaves nothing of target_epsilon"):
        run_privacy.with_figures(before, 5.999999, None, meets_target=True)


def test_passes_cost_the_same_with_an_epsilon_for_the_loss():
    asked = privacy.DpFtrl(
        num_rounds=12,
        clients_per_round=6,
        clip_norm=1.0,
        delta=1e-5,
        target_epsilon=6.0,
        mechanism="blt",
        min_sep=4,
        max_participations=2,
        data_in_one_place=True,
    )
    before = asked.plan(24, 10)
    plan = run_privacy.with_figures(before, 1.5, None, meets_target=True)
    mu = math.hypot(plan.rounds.mu, math.sqrt(2) / released_metrics.noise_of(plan))
    assert mu == pytest.approx(before.rounds.mu, rel=1e-9)
    epsilon = plan.epsilon_after(12)
    assert epsilon == pytest.approx(before.epsilon_after(12), rel=1e-6) and epsilon <= 6.0
    delta = stats.norm.cdf(mu / 2 - epsilon / mu)
    delta -= math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"metrics_epsilon": -1.0}, "metrics_epsilon must be"),
        ({"budget_shares": "metrics=0.1"}, "is a share of target_epsilon"),
        (
            {"budget_shares": "vocabulary=0.1", "target_epsilon": 6.0, "noise_multiplier": None},
            "this run releases no vocabulary",
        ),
    ],
)
def test_options_that_release_nothing_are_refused(options, says, tmp_path):
    with pytest.raises(validation.UsageError, match=says):
        toy_finetuning.config(tmp_path, **options)


def _check_held_out_figures(folder, results, is_protected):
    """Checks that exact figures of held-out users are private if they are protected."""
    exact = [f"{row['eval_loss']!r}" for row in results.rows if row["eval_loss"] is not None]
    exact.append(repr(results.baselines["pretrained"]))
    texts = [p.read_text() for p in folder.iterdir() if p.suffix in (".json", ".md", ".csv")]
    is_told = [any(figure in text for text in texts) for figure in exact]
    assert len(exact) > 1 and is_told == [not is_protected] * len(exact)
    assert (folder / "best_model.npz").exists() != is_protected
    assert (folder / "private" / "held_out.json").exists() == is_protected
    if is_protected:
        assert any("protected too" in entry for entry in results.statement.not_covered)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            **{"sampling": "passes", "delta": 1e-3, "group_size": 2, "cohort_size": 8},
            "held_out_users": "protected",
        },
        {"sampling": "cyclic", "bands": 2, "group_size": 2, "cohort_size": 8},
    ],
    ids=["user", "passes", "cyclic"],
)
def test_a_run_releases_the_loss_and_states_it(options, toy, tmp_path):
    asked = {"noise_multiplier": None, "target_epsilon": 40.0, "deterministic_noise_seed": None}
    asked |= {"budget_shares": "metrics=0.3"}
    config = toy_finetuning.config(toy, **(asked | options))
    results = run.finetune(config, tmp_path / "run", progress=lambda line: None)
    assert results.statement.epsilon <= 40.0
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == toy_finetuning.NUM_STEPS and "loss" not in rows[0]
    _check_held_out_figures(tmp_path / "run", results, config.held_out_users == "protected")
    assert all(row["noised_sum_loss_sum"] and row["noised_sum_num_units"] for row in rows)
    exact = np.array([row["loss"] for row in results.rows])
    told = [(row["noised_loss"], row["noised_loss_se"]) for row in results.rows]
    errors = [(a - b[0]) / b[1] for a, b in zip(exact, told, strict=True) if b[0] is not None]
    assert errors and max(map(abs, errors)) < 6.0
    assert run_folder.recount_run(tmp_path / "run").verdict == "consistent with the claim"
    again = run.write_report(tmp_path / "run")
    assert again.statement.epsilon == results.statement.epsilon
