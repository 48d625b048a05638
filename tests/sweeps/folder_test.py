"""Tests of the folder of a sweep: whose it is, what may change, who may run it."""

import json
import os

import pytest

from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import folder, kinds

_OPTIONS = {"num_rounds": 7, "data": "users.jsonl"}
_AXES = {"noise_multiplier": (0.5, 1.0), "seed": (0, 1)}


@pytest.fixture
def begun(tmp_path):
    """The folder of a sweep."""
    assert folder.check(tmp_path / "new", _OPTIONS, _AXES) == _AXES
    folder.write(tmp_path / "new", _OPTIONS, _AXES)
    return tmp_path / "new"


def test_the_same_sweep_goes_on(begun):
    assert folder.exists(begun)
    assert folder.check(begun, _OPTIONS, _AXES) == _AXES
    assert folder.read(begun) == (
        {"num_rounds": 7, "data": os.path.abspath("users.jsonl")},
        _AXES,
        kinds.TRAINING,
    )
    assert "kind" not in json.loads((begun / "sweep.json").read_text())  # As earlier versions.


def test_what_an_axis_overrules_and_defaults_do_not_matter(begun):
    options = {**_OPTIONS, "noise_multiplier": 3.0, "seed": 9, "batch_size": 8}
    assert folder.check(begun, options, _AXES) == _AXES


def test_values_can_be_added_and_cells_keep_their_names(begun):
    more = {"seed": (2, 0, 1), "noise_multiplier": (0.25, 0.5, 1.0)}
    found = folder.check(begun, _OPTIONS, more)
    assert list(found) == ["noise_multiplier", "seed"]
    before = {cell.name for cell in cells_lib.grid(_OPTIONS, _AXES)}
    assert before < {cell.name for cell in cells_lib.grid(_OPTIONS, found)}


@pytest.mark.parametrize(
    "options, axes, difference",
    [
        ({**_OPTIONS, "num_rounds": 8}, _AXES, "num_rounds: 7 → 8"),
        ({"data": "users.jsonl"}, _AXES, "num_rounds: 7 → 100"),
        ({**_OPTIONS, "data": "x.jsonl"}, _AXES, "data: .*users.jsonl → .*x.jsonl"),
        (_OPTIONS, {"noise_multiplier": (0.5, 1.0)}, "axes: noise_multiplier, seed → noise_mult"),
        (_OPTIONS, {**_AXES, "clip_norm": (1.0,)}, "axes: noise_multiplier, seed → .*, clip_norm"),
        (_OPTIONS, {**_AXES, "seed": (1, 2)}, "seed without 0"),
        (_OPTIONS, {**_AXES, "noise_multiplier": (2.0,)}, "noise_multiplier without 0.5, 1"),
    ],
)
def test_another_sweep_is_refused_with_what_differs(begun, options, axes, difference):
    with pytest.raises(ValueError, match=f"holds another sweep \\(.*{difference}"):
        folder.check(begun, options, axes)


def test_a_sweep_keeps_its_kind(tmp_path):
    options, axes = {"num_steps": 7}, {"group_size": (1, 2)}
    folder.write(tmp_path, options, axes, kinds.FINETUNING)
    assert folder.read(tmp_path) == (options, axes, kinds.FINETUNING)
    assert folder.check(tmp_path, options, axes, kinds.FINETUNING) == axes
    with pytest.raises(ValueError, match="num_steps: 7 → 500"):
        folder.check(tmp_path, {}, axes, kinds.FINETUNING)
    with pytest.raises(ValueError, match="its runs: finetune → train"):
        folder.check(tmp_path, {}, {"seed": (1,)})


def test_the_definition_of_a_sweep_is_in_its_folder(tmp_path):
    folder.write(tmp_path / "sweep", {}, {"seed": (1,)})
    (tmp_path / "sweep" / "sweep.json").rename(tmp_path / "elsewhere")
    (tmp_path / "sweep" / "sweep.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="leads out of the folder"):
        folder.read(tmp_path / "sweep")


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "cannot be read as a sweep"),
        ("[]", "cannot be read as a sweep"),
        ('{"format": 1, "kind": "odd", "options": {}, "axes": {}}', "cannot be read as a sweep"),
        ('{"format": 1, "kind": [], "options": {}, "axes": {}}', "cannot be read as a sweep"),
        ('{"format": 99, "options": {}, "axes": {}}', "is of format 99"),
    ],
)
def test_a_damaged_definition_is_refused(begun, content, message):
    (begun / "sweep.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        folder.check(begun, _OPTIONS, _AXES)


def test_folders_of_other_things_are_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    with pytest.raises(ValueError, match="holds a single run"):
        folder.check(tmp_path / "run", _OPTIONS, _AXES)
    (tmp_path / "other" / "cells").mkdir(parents=True)
    with pytest.raises(ValueError, match="has a folder cells"):
        folder.check(tmp_path / "other", _OPTIONS, _AXES)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="not a folder"):
        folder.check(tmp_path / "file", _OPTIONS, _AXES)


def test_the_lock_is_free_when_the_last_holder_is_gone(begun):
    said = []
    with folder.lock(begun, said.append) as held:
        child = os.dup(held)  # As a cell's process has it.
        with pytest.raises(ValueError, match="Another sweep runs in"):
            with folder.lock(begun, said.append, seconds_to_wait=0.0):
                pass
    with pytest.raises(ValueError, match="a cell of it has not ended yet"):
        with folder.lock(begun, said.append, seconds_to_wait=0.0):
            pass
    assert not said
    os.close(child)
    with folder.lock(begun, said.append, seconds_to_wait=0.0):
        pass


def test_the_state_of_a_cell_is_read_from_its_files(tmp_path):
    assert folder.state(tmp_path) == "new"
    (tmp_path / "config.json").touch()
    assert folder.state(tmp_path) == "begun"
    folder.write_ending(tmp_path, folder.Ending(2, "no memory"))
    assert folder.state(tmp_path) == "failed"
    assert folder.read_ending(tmp_path).last_line == "no memory"
    folder.forget_ending(tmp_path)
    assert folder.state(tmp_path) == "begun"
    folder.write_ending(tmp_path, folder.Ending(0))
    assert folder.state(tmp_path) == "finished"
    (tmp_path / "cell.json").write_text("half of i")
    assert folder.state(tmp_path) == "begun"


def test_a_cell_that_was_trained_with_other_options_is_refused(begun):
    grid = cells_lib.grid(_OPTIONS, _AXES)
    of_cell = folder.cell_folder(begun, grid[0])
    of_cell.mkdir()
    values = grid[0].config.with_defaults().to_dict()
    (of_cell / "config.json").write_text(json.dumps({"config": values}))
    folder.check_cells(begun, grid)
    (of_cell / "config.json").write_text(json.dumps({"config": {**values, "seed": 5}}))
    with pytest.raises(ValueError, match="other options than the cell's .seed: 5 → 0.: move"):
        folder.check_cells(begun, grid)
    (of_cell / "private").mkdir()
    (of_cell / "config.json").rename(of_cell / "private" / "manifest.json")
    assert folder.state(of_cell) == "begun"  # It goes on, and is not begun again.
    with pytest.raises(ValueError, match="other options than the cell's .seed: 5 → 0.: move"):
        folder.check_cells(begun, grid)
    (of_cell / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="Move .* away"):
        folder.check_cells(begun, grid)
