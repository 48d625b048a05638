"""Tests that cells are held against their text before any of them runs."""

import json

import pytest

from tff_dpftrl.finetuning import opening as finetuning_opening
from tff_dpftrl.runs import joint_runs, manifest
from tff_dpftrl.sweeps import cells, folder, kinds, population_check
from tff_dpftrl.training import corpus, warm_start
from tff_dpftrl.training import opening as training_opening


@pytest.fixture
def options(tmp_path):
    """Forty users, 27 of whom train."""
    lines = [json.dumps({"user_id": f"u{user}", "examples": ["one two"]}) for user in range(40)]
    (tmp_path / "users.jsonl").write_text("\n".join(lines))
    (tmp_path / "words.txt").write_text("one\ntwo")
    return {
        "data": str(tmp_path / "users.jsonl"),
        "vocabulary": str(tmp_path / "words.txt"),
        "noise_multiplier": 1.0,
        "clients_per_round": 3,
        "num_rounds": 9,
    }


def test_a_cell_with_too_few_users_is_named(options):
    grid = cells.grid(options, {"clients_per_round": (3, 1000)})
    with pytest.raises(ValueError, match="The cell clients_per_round=1000: .* exceeds the 27"):
        population_check.check(grid)


@pytest.mark.parametrize(
    "axes, message",
    [
        ({"min_sep": (None, 30)}, "min_sep"),
        ({"vocabulary": ("docs", "/nowhere.txt")}, "nowhere.txt"),
        ({"data": ("docs", "/nowhere.jsonl")}, "nowhere.jsonl"),
        ({"strategy": (None, "/nowhere.json")}, "nowhere.json"),
    ],
)
def test_files_and_schemas_are_checked(options, axes, message):
    (name,) = axes
    grid = cells.grid(options | {"num_rounds": 99}, {name: axes[name][1:]})
    found = population_check.first_error([cell.config for cell in grid])
    assert found["cell"] == 0 and message in found["error"]


def test_a_text_is_read_once(options, monkeypatch):
    seen = []
    read = corpus.read
    monkeypatch.setattr(corpus, "read", lambda text: seen.append(text) or read(text))
    grid = cells.grid(options, {"max_users": (10, 20), "delta": (1e-5, 1e-6), "batch_size": (4, 8)})
    assert population_check.first_error([cell.config for cell in grid]) is None
    assert [text.max_users for text in seen] == [10, 20]


def test_text_and_weights_of_fine_tuning_are_checked(options, tmp_path, monkeypatch):
    compared = []
    monkeypatch.setattr(warm_start, "refuse_protected", lambda *args: compared.append(args))
    given = {"data": options["data"], "group_size": 1, "noise_multiplier": 1.0}
    given |= {"sampling": "user", "initial_weights": str(tmp_path)}
    axes = {"seed": (0, 1), "cohort_size": (3, 28)}
    grid = cells.grid(given, axes, kinds.FINETUNING)
    found = population_check.first_error([cell.config for cell in grid])
    assert found["cell"] == 1 and "cohort_size=28 exceeds the 27 users" in found["error"]
    assert population_check.first_error([cell.config for cell in grid[::2]]) is None
    assert [len(users[0]) for *_, users in compared] == [27, 27]  # Once in each of two checks.


def _open(kind, config, output):
    opening = {kinds.TRAINING: training_opening, kinds.FINETUNING: finetuning_opening}[kind]
    return opening.open_run(config, output, progress=lambda line: None)


@pytest.mark.parametrize("record", [joint_runs.RECORD, joint_runs.PLANNED])
@pytest.mark.parametrize("kind", [kinds.TRAINING, kinds.FINETUNING])
def test_no_run_begins_on_other_data_than_its_sweep_was_planned_with(
    options, tmp_path, monkeypatch, kind, record
):
    for name in ("find", "source", "refuse_protected"):
        monkeypatch.setattr(warm_start, name, lambda *args: None)
    (tmp_path / "weights").mkdir()
    file = "words.txt"
    if kind is kinds.FINETUNING:
        file = "weights/model.npz"
        (tmp_path / file).write_text("a model")
        options = {"data": options["data"], "group_size": 1, "noise_multiplier": 1.0}
        options |= {"sampling": "user", "cohort_size": 3}
        options["initial_weights"] = str(tmp_path / "weights")
    (cell,) = cells.grid(options, {"seed": (0,)}, kind)
    out = tmp_path / "out"
    content = {"digests": population_check.digests([cell.config])}
    (out / "private").mkdir(parents=True)
    path = out / record
    path.write_text(json.dumps({"plan": content} if record == joint_runs.RECORD else content))
    folder = (path.parent if record == joint_runs.RECORD else out) / "cells" / "seed=0"
    _open(kind, cell.config, folder)
    for name in ("users.jsonl", file):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before.replace("u7", "v7").replace("o", "a"))
        with pytest.raises(ValueError, match="planned with other data: .*has changed"):
            _open(kind, cell.config, folder)
        _open(kind, cell.config, tmp_path / "alone")
        (tmp_path / name).write_text(before)
    _open(kind, cell.config, folder)
    path.unlink()
    if record == joint_runs.RECORD:
        folder.mkdir(parents=True)
        with pytest.raises(ValueError, match="selection.json is missing"):
            _open(kind, cell.config, folder)


def test_a_sweep_is_bound_to_what_its_first_cells_read(tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a sweep, which the same tff-dpftrl sweep command"):
        manifest.check_is_free(tmp_path)  # A run there would empty the folder `private`.
    folder.bind(tmp_path, {"/words": "1", "/users": "2"})
    folder.bind(tmp_path, {})
    folder.bind(tmp_path, {"/words": "1", "/more": "3"})
    with pytest.raises(ValueError, match="/users has changed since"):
        folder.bind(tmp_path, {"/users": "4"})
    found = json.loads((tmp_path / "private" / "planned.json").read_text())
    assert found == {"digests": {"/words": "1", "/users": "2", "/more": "3"}}


def test_a_vocabulary_that_no_option_names_is_found(options):
    del options["vocabulary"]
    grid = cells.grid(options, {"seed": (0,)})
    assert population_check.first_error([cell.config for cell in grid]) is None
