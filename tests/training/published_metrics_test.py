"""Whole runs that release metrics with noise, and that keep those of held-out users private."""

import csv
import json
import math

import numpy as np
import pytest

from tests.training import toy_run
from tff_dpftrl import validation
from tff_dpftrl.auditing.recount import run_folder
from tff_dpftrl.runs import manifest, released_metrics
from tff_dpftrl.training import report, run, trained_model

corpus = toy_run.corpus

_SUMS = tuple(f"noised_sum_{n}" for n in ("loss_sum", "num_targets", "num_top1", "num_in_vocab"))


def _table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.pictures
def test_nothing_outside_of_private_tells_of_protected_held_out_users(corpus, tmp_path):
    output = tmp_path / "run"
    config = toy_run.config(
        corpus,
        num_rounds=4,
        eval_every=2,
        noise_multiplier=None,
        target_epsilon=60.0,
        delta=1e-5,
        budget_shares="metrics=0.3",
        stop_at_accuracy=0.99,
        held_out_users="protected",
        deterministic_noise_seed=None,
    )
    results = run.train(config, output)
    assert {path.name for path in output.iterdir()} == {
        *("README.md", "config.json", "curves.png", "metrics.csv", "metrics_README.md"),
        *("model.npz", "privacy.png", "privacy_statement.json", "privacy_statement.md"),
        *("private", "vocabulary.json", "best_model.npz"),
    }
    public, exact = _table(output / "metrics.csv"), _table(output / "private" / "metrics.csv")
    assert not [name for name in public[0] if name.startswith("eval_")]
    assert exact[3]["eval_loss"] and public[3]["noised_sum_loss_sum"]
    is_released = [bool(row["noised_eval_sum_num_targets"]) for row in public]
    assert is_released == [False, True, False, True]
    rows = {row.name: row for row in results.statement.parts}
    # All cost a third part of μ²; held-out users are other people, in two evaluations.
    noise = math.sqrt(2 * 0.5 / rows["evaluation of held-out users"].rho_zcdp)
    task = results.held_out["users"]
    assert abs(float(public[3]["noised_eval_sum_num_targets"])) <= task + 6 * noise
    hidden = [row[name] for row in exact for name in row if name not in public[0]]
    hidden += [str(number) for number in results.held_out["head_words"]["histograms"]["10"]]
    hidden += [str(one) for one in results.held_out["earlier_text"]["all"].values()]
    for path in output.iterdir():
        if path.suffix in (".json", ".md", ".csv"):
            text = path.read_text()
            assert not [figure for figure in hidden if len(figure) > 7 and figure in text], path
    assert results.statement.epsilon <= 60.0
    assert any("protected too" in entry for entry in results.statement.not_covered)
    assert run_folder.recount_run(output).verdict == "consistent with the claim"
    assert report.report(output).held_out == results.held_out  # For the operator.
    trained_model.find(output, which="best")  # It is found in private/.


@pytest.mark.slow
def test_released_sums_are_of_bounded_contributions(corpus, tmp_path):
    run.train(toy_run.config(corpus, metrics_epsilon=2.0, num_rounds=2), tmp_path / "run")
    found = [
        [float(row[name]) for name in _SUMS] for row in _table(tmp_path / "run" / "metrics.csv")
    ]
    noise = manifest.read(tmp_path / "run").derived["others"][0]["noise_multiplier_of_round"]
    drawn = np.array([released_metrics.gaussians(7, t, 4) for t in range(2)])
    sums = np.array(found) - noise * drawn
    # Five users in a round, each of a norm of at most 1, all of whose entries are positive.
    assert np.all(np.linalg.norm(sums, axis=1) <= 5.0 + noise * 1e-3)
    assert np.all(sums > -noise * 1e-3) and np.all(sums[:, 1] > 1.0)
    statement = json.loads((tmp_path / "run" / "privacy_statement.json").read_text())
    assert statement["epsilon"] is None  # Its seed is known.


def test_an_accuracy_of_protected_users_ends_no_run(corpus):
    with pytest.raises(validation.UsageError, match="leave one of them out"):
        toy_run.config(corpus, held_out_users="protected", stop_at_accuracy=0.2)
