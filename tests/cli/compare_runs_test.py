"""Tests of `tff-dpftrl compare-runs`."""

import json

import pytest

from tests.reports import made_up
from tff_dpftrl.cli import main


@pytest.fixture
def folders(tmp_path) -> list[str]:
    """Folders of two runs that differ in an option, which a terminal would obey."""
    values = ("a\x1b[2J", "b" * 100)
    runs = [made_up.write_run(tmp_path / f"run{i}", server=v) for i, v in enumerate(values)]
    return [str(run) for run in runs]


def test_tables_for_people(folders, capsys):
    assert main.main(["compare-runs", *folders]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].split() == ["run0", "run1"]
    (epsilon,) = [line.split() for line in lines if line.startswith("ε ")]
    assert epsilon[1] == epsilon[2]
    assert f"{'b' * 39}…" in printed and "\x1b" not in printed
    assert lines[lines.index("Top-1 accuracy on held-out users, by round:") + 5].split() == [
        *("4", "20.00%", "20.00%")
    ]


def test_json_for_scripts_and_a_page(folders, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main.main(["compare-runs", *folders, "--format", "json", "--html", str(page)]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["options"]["server"][1] == "b" * 100
    assert [run["name"] for run in found["runs"]] == ["run0", "run1"]
    assert "<h1>Comparison of 2 runs</h1>" in page.read_text() and str(page) in printed.err


def test_what_cannot_be_compared_is_refused_in_a_line(folders, tmp_path, capsys):
    for arguments, says in (
        (folders[:1], "two runs or more"),
        ([folders[0], folders[0] + "/"], "is named twice"),
        ([folders[0], str(tmp_path)], "has no results"),
        ([*folders, "--html", str(tmp_path)], "is a folder"),
    ):
        assert main.main(["compare-runs", *arguments]) == 2
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert says in line and not printed.out
