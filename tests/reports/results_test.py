"""Tests of `reports.results`."""

import json
import os

import pytest

from tests.reports import made_up
from tff_dpftrl import validation
from tff_dpftrl.reports import results


def test_private_facts_are_not_even_read_unless_asked_for(tmp_path):
    folder = made_up.write_run(tmp_path / "run")
    found = results.read(folder)
    assert {name for row in found.rows for name in row} == {
        *("round", "epsilon", "eval_loss", "eval_top1_in_vocab")
    }
    assert set(found.baselines) == {"model with earlier text"}  # None of the training users.
    assert found.options["data"] == "users.csv"
    (folder / "private" / "baselines.json").write_text("damaged")
    results.read(folder)
    with pytest.raises(validation.UsageError, match="baselines.json cannot be read"):
        results.read(folder, private=True)


def test_all_facts_are_read_for_the_operator(tmp_path):
    found = results.read(made_up.write_run(tmp_path / "run"), private=True)
    assert found.rows[0]["loss"] == float(made_up.EXACT_LOSS)
    assert found.baselines["bigrams"] == made_up.BIGRAMS
    assert found.options["data"] == "/home/secret/users.csv"
    assert not any("clients" in row or "seconds" in row for row in found.rows)


def test_the_last_model_with_earlier_text_is_read_if_held_out_users_are_public(tmp_path):
    folder = made_up.write_run(tmp_path / "run")
    name = "model with earlier text"
    assert results.read(folder).baselines[name] == 0.444
    assert name not in results.levels(results.read(folder).baselines)
    held_out = (folder / "held_out.json").rename(folder / "private" / "held_out.json")
    assert name not in results.read(folder).baselines  # The held-out users are protected.
    assert results.read(folder, private=True).baselines[name] == 0.444
    held_out.write_text(held_out.read_text().replace('"round": 4', '"round": 3'))
    assert name not in results.read(folder, private=True).baselines


@pytest.mark.parametrize("name", ["privacy_statement.json", "config.json", "metrics.csv"])
def test_files_are_regular_ones_of_the_folder(tmp_path, name):
    folder = made_up.write_run(tmp_path / "run")
    elsewhere = (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(validation.UsageError, match="leads out of the folder"):
        results.read(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(validation.UsageError, match="is no regular file"):
        results.read(folder)


def test_a_private_folder_is_not_one_elsewhere(tmp_path):
    folder = made_up.write_run(tmp_path / "run")
    (folder / "private").rename(tmp_path / "elsewhere")
    (folder / "private").symlink_to(tmp_path / "elsewhere")
    results.read(folder)
    with pytest.raises(validation.UsageError, match="'private/.* leads out of the folder"):
        results.read(folder, private=True)


def test_of_a_task_only_columns_that_may_be_published_are_read(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "round,committed_at,privacy/epsilon,client_work/train/loss,devices/reports\n1,9,0.5,3.5,4\n"
    )
    assert results.read(tmp_path).kind == "task"
    assert results.read(tmp_path).rows == [{"round": 1.0, "epsilon": 0.5}]
    assert results.read(tmp_path, private=True).rows[0]["loss"] == 3.5


def test_a_sweep_is_read_without_times_and_paths(tmp_path):
    made_up.write_run(tmp_path / "cells" / "a")
    (tmp_path / "sweep.json").write_text(json.dumps({"options": {"data": "/home/x/users.csv"}}))
    (tmp_path / "summary.csv").write_text(
        "strategy,epsilon,eval_top1_in_vocab,seconds,seconds_se\n/home/x/blt.json,1.0,0.25,9,1\n"
    )
    found = results.read(tmp_path)
    assert found.settings == [
        {"strategy": "blt.json", "epsilon": "1.0", "eval_top1_in_vocab": "0.25"}
    ]
    assert list(found.cells) == ["a"] and "loss" not in found.cells["a"][0]
    assert found.data == "users.csv"


def test_what_a_crash_cut_short_and_what_is_not_finite_is_left_out(tmp_path):
    folder = made_up.write_run(tmp_path / "run")
    with open(folder / "metrics.csv", "a") as file:
        file.write(f"5,{made_up.EXACT_LOSS},,5,inf,nan,37,1\n6,1.0,0.")
    last = results.read(folder).rows[-1]
    assert last == {"round": 5.0, "epsilon": 5.0}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", "[1]", "config.json"),
        ("privacy_statement.json", "{}", "tff-dpftrl report writes it again"),
        ("metrics.csv", "round\n\ud800\n", "metrics.csv cannot be read"),
    ],
)
def test_a_damaged_file_is_named(name, content, says, tmp_path):
    folder = made_up.write_run(tmp_path / "run")
    (folder / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(validation.UsageError, match=says):
        results.read(folder)


def test_what_is_no_results_folder_is_refused(tmp_path):
    for path, says in ((tmp_path, "has no results"), (tmp_path / "none", "does not exist")):
        with pytest.raises(validation.UsageError, match=says):
            results.read(path)
