"""Tests of metrics.csv, its private copy with exact figures, and the note beside it."""

import os
import stat

import pytest

from tff_dpftrl import durable_files
from tff_dpftrl.runs import metrics_log

_COLUMNS = (
    metrics_log.Column("round", "number of the round"),
    metrics_log.Column("loss", "of the training cohort", is_exact=True),
    metrics_log.Column("eval_loss", "of held-out users"),
)


_EXACT = metrics_log.EXACT_TABLE


def _log(folder, rounds_done):
    return metrics_log.MetricsLog(folder, _COLUMNS, rounds_done)


def test_rows_come_back_exactly_and_later_ones_are_dropped(tmp_path):
    log = _log(tmp_path, 0)
    for t in (1, 2, 3):
        log.append({"round": t, "loss": t / 3, "unknown": 5})
    assert log.append({"round": 3, "loss": 0.1, "eval_loss": 2}) == log.rows[-1]
    assert (tmp_path / _EXACT).read_text().splitlines()[0] == "round,loss,eval_loss"
    assert (tmp_path / "metrics.csv").read_text() == "round,eval_loss\n1,\n2,\n3,2\n"
    assert metrics_log.read_rows(tmp_path, 3) == log.rows
    assert [row["loss"] for row in _log(tmp_path, 2).rows] == [1 / 3, 2 / 3]
    assert _log(tmp_path, 0).rows == []


def test_a_row_is_appended_without_writing_the_others_again(tmp_path):
    log = _log(tmp_path, 0)
    log.append({"round": 1, "loss": 0.5})
    inode = (tmp_path / _EXACT).stat().st_ino
    log.append({"round": 2, "loss": 0.25})
    assert (tmp_path / _EXACT).stat().st_ino == inode
    assert (tmp_path / _EXACT).read_text() == "round,loss,eval_loss\n1,0.5,\n2,0.25,\n"


@pytest.mark.parametrize("part", ["1", "12,0.2", "12,0.25,0.5"])
def test_a_line_that_a_crash_cut_short_is_left_out_and_written_over(tmp_path, part):
    log = _log(tmp_path, 0)
    log.append({"round": 1, "loss": 0.5})
    with open(tmp_path / _EXACT, "a") as file:
        file.write(part)
    assert metrics_log.read_rows(tmp_path, 100) == log.rows
    _log(tmp_path, 100).append({"round": 2})
    assert (tmp_path / _EXACT).read_text() == "round,loss,eval_loss\n1,0.5,\n2,,\n"


def test_a_row_that_does_not_fit_the_disk_can_be_written_again(tmp_path, monkeypatch):
    log = _log(tmp_path, 0)
    log.append({"round": 1, "loss": 0.5})

    def half(path, content):
        with open(path, "ab") as file:
            file.write(content[:3])
        raise OSError("no space left")

    with monkeypatch.context() as patched, pytest.raises(OSError):
        patched.setattr(durable_files, "append", half)
        log.append({"round": 2, "loss": 0.25})
    log.append({"round": 2, "loss": 0.25})
    assert (tmp_path / _EXACT).read_text() == "round,loss,eval_loss\n1,0.5,\n2,0.25,\n"


def test_the_note_says_what_not_to_publish(tmp_path):
    _log(tmp_path, 0)
    note = (tmp_path / "metrics_README.md").read_text()
    public, _, exact = note.partition("**Do not publish** them")
    assert "- `eval_loss`: of held-out users" in public and "- `loss`" not in public
    assert "- `loss`: of the training cohort" in exact and "eval_loss" not in exact


def test_files_are_as_private_as_the_umask_makes_them(tmp_path):
    before = os.umask(0o077)
    try:
        _log(tmp_path, 0).append({"round": 1})
    finally:
        os.umask(before)
    for name in ("metrics.csv", "metrics_README.md", _EXACT):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_damaged_table_is_named(tmp_path):
    (tmp_path / "metrics.csv").write_text("round,loss\nx,y\n")
    with pytest.raises(ValueError, match="metrics.csv is not the table of a run"):
        metrics_log.read_rows(tmp_path, 1)


def test_the_table_of_an_earlier_version_is_read_and_then_taken_apart(tmp_path):
    (tmp_path / "metrics.csv").write_text("round,loss,eval_loss\n1,0.5,\n2,0.25,\n")
    assert metrics_log.is_of_earlier_version(tmp_path)
    assert [row["loss"] for row in metrics_log.read_rows(tmp_path, 2)] == [0.5, 0.25]
    _log(tmp_path, 2).append({"round": 3, "loss": 0.125})
    assert not metrics_log.is_of_earlier_version(tmp_path)
    assert (tmp_path / "metrics.csv").read_text() == "round,eval_loss\n1,\n2,\n3,\n"
    assert [row["loss"] for row in metrics_log.read_rows(tmp_path, 3)] == [0.5, 0.25, 0.125]
