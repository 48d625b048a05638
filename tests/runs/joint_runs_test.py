"""Tests of tff_dpftrl.runs.joint_runs."""

import json

import pytest

from tff_dpftrl import validation
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.runs import earlier_runs, joint_runs


def _write(folder, *, caveats=None, facts=None):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": {}, "facts": facts or {}}))
    if caveats is not None:
        stated = {"headline_caveats": caveats, "epsilon": 1.0, "delta": 1e-6, "rho_zcdp": None}
        (folder / "privacy_statement.json").write_text(json.dumps(stated))
    return folder


@pytest.mark.parametrize(
    "place, written",
    [
        ("out/private/cells/run=0", {"caveats": []}),  # Of an earlier version.
        ("copy", {"caveats": [sentences.ONE_OF_A_CHOICE]}),
        ("copy", {"facts": {joint_runs.IS_ONE: True}}),
    ],
)
def test_a_run_that_was_not_chosen_is_no_model_for_anything(tmp_path, place, written):
    folder = _write(tmp_path / place, **written)
    for read in (
        lambda: joint_runs.refuse_unreleased(folder),
        lambda: earlier_runs.of_caller(folder, ["ada"]),
    ):
        with pytest.raises(validation.UsageError, match="one of the runs that sweep --select"):
            read()


def test_the_run_that_was_chosen_is_one(tmp_path):
    # Its options are those of the run, and its statement is that of the choice.
    folder = _write(tmp_path / "winner", caveats=[], facts={joint_runs.IS_ONE: True})
    joint_runs.refuse_unreleased(folder)
    assert earlier_runs.statement_of(folder).epsilon == 1.0
    lost = _write(tmp_path / "copy", caveats=[sentences.ONE_OF_A_CHOICE])
    assert earlier_runs.statement_of(lost).epsilon is None


def test_only_the_private_part_and_the_winner_of_a_choice_belong_to_it(tmp_path):
    (tmp_path / "out" / "private").mkdir(parents=True)
    (tmp_path / "out" / "private" / "selection.json").write_text("{}")
    out = tmp_path / "out"
    for name in ("private/cells/run=0", "private/winner", "winner"):
        assert joint_runs.choice_of(out / name) == out
    for name in ("other", "cells/a", "winner/deeper/still/more"):
        assert joint_runs.choice_of(out / name) is None
