"""Tests of `tff-dpftrl report`."""

import contextlib
import csv
import dataclasses
import json
import math
import pathlib
import shutil

import pytest

from tests.reports import listed_files
from tests.training import toy_run
from tff_dpftrl.accounting import statement, statement_text
from tff_dpftrl.auditing.recount import run_folder
from tff_dpftrl.cli import main, report
from tff_dpftrl.models import export
from tff_dpftrl.participation import ledger_file
from tff_dpftrl.runs import statement_subject
from tff_dpftrl.training import report as report_lib

corpus = toy_run.corpus
trained = toy_run.trained


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory) -> pathlib.Path:
    """A run that was killed after four of its six rounds."""
    return pathlib.Path(shutil.copytree(trained.killed, tmp_path_factory.mktemp("report") / "run"))


def test_it_states_what_was_committed_and_writes_the_model(folder, capsys):
    assert main.main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert (
        f"4 of 6 rounds are done; go on with tff-dpftrl train --resume --output {folder}" in printed
    )
    assert f"Statement, curves and model are in {folder}/" in printed
    written = statement.PrivacyStatement.from_json((folder / "privacy_statement.json").read_text())
    # When a person stops it may depend on the data: all declared rounds are charged.
    assert (written.observed.num_rounds, written.accounted.num_rounds) == (5, 6)
    model, weights = export.read(folder / "model.npz")
    assert sum(weight.size for weight in weights) == model.num_parameters


def test_json_has_null_for_what_is_not_finite():
    values = [report._finite(value) for value in (math.inf, math.nan, 1.5, None, 2)]
    assert values == [None, None, 1.5, None, 2]


def test_json_for_scripts(folder, capsys):
    assert main.main(["report", str(folder), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    written = json.loads((folder / "privacy_statement.json").read_text())
    assert found["statement"] == written
    assert found["held_out"] is None  # It is measured after the last round.
    assert found["last_round"]["eval_top5_oov_wrong"] <= found["last_round"]["eval_top5_in_vocab"]
    assert found["last_round"]["round"] == 4 and "4 of 6 rounds" in found["summary"]


def test_head_words_are_printed_as_a_table(folder, capsys):
    found = {"users": 3, "sequences": 9, "words": 20}
    found["accuracy_by_user"] = {"top1_in_vocab": {"users": 0, "quantiles": {}}}
    found["head_words"] = {"top": 2, "histograms": {"10": [0.25, 0.75, 0.0], "50": [0.0, 0.0, 1.0]}}
    for rounds, is_shown in ((4, True), (3, False)):  # Of the last round, and of an earlier one.
        report_lib.write_held_out(folder, rounds, found)
        assert main.main(["report", str(folder)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert ("50              0.0%   0.0%  100.0%" in lines) == is_shown
        assert any("on average 0.8 among the 10, 2.0 among the 50" in i for i in lines) == is_shown
    (folder / "held_out.json").unlink()


def test_a_run_under_way_is_refused(folder, capsys):
    ledger = folder / "private" / "ledger.sqlite"
    with contextlib.closing(ledger_file.connect(ledger, exclusive=True)):
        assert main.main(["report", str(folder)]) == 2
    assert "in use by another process" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main.main(["report", str(tmp_path)]) == 2
    assert "There is no run in" in capsys.readouterr().err


def _copy_without_private(folder: pathlib.Path, copy: pathlib.Path) -> pathlib.Path:
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("private", "README.md"))
    return copy


def test_the_page_and_the_readme_have_no_exact_figures(corpus, folder, capsys):
    assert main.main(["report", str(folder), "--html"]) == 0
    assert f"The page is in {folder}/report.html" in capsys.readouterr().err
    figures = {
        text
        for row in csv.DictReader((folder / "private" / "metrics.csv").read_text().splitlines())
        for text in (row["loss"], row["seconds"])  # A share, like 1/9, may be that of others, too.
    }
    assert len(figures) > 3
    for name in ("report.html", "README.md"):
        text = (folder / name).read_text()
        assert not [one for one in figures if one in text]
        assert "ε = 30.38" in text
    assert str(corpus) not in (folder / "README.md").read_text()
    found = run_folder.recount_run(str(folder))
    assert not found.is_violated, found.findings


def _content(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_looking_at_a_run_writes_the_page_alone(folder, tmp_path, monkeypatch, capsys):
    assert main.main(["report", str(folder)]) == 0
    before = _content(folder)
    monkeypatch.setattr(statement_subject, "now", lambda: "2035-01-01T00:00:00Z")
    page = tmp_path / "page.html"
    assert main.main(["report", str(folder), "--html", str(page)]) == 0
    assert _content(folder) == before and page.exists()
    # Nor has what is derived again another date, if it says the same.
    assert main.main(["report", str(folder)]) == 0
    assert _content(folder) == before
    (folder / "privacy_statement.json").unlink()
    assert main.main(["report", str(folder), "--html", str(page)]) == 0  # There is none to show.
    assert "2035-01-01" in (folder / "privacy_statement.json").read_text()


def test_an_edited_statement_is_found_by_whatever_reads_it(corpus, folder, tmp_path, capsys):
    copy = pathlib.Path(shutil.copytree(folder, tmp_path / "run"))
    assert main.main(["report", str(copy)]) == 0
    path = copy / "privacy_statement.json"
    stated = json.loads(path.read_text())
    data, words = (str(corpus / name) for name in ("users.jsonl", "words.txt"))
    options = {
        **{"data": data, "vocabulary": words, "output": tmp_path / "new", "rounds": 4},
        **{"sequence-length": 6, "embedding-size": 4, "lstm-size": 5, "vocabulary-size": 30},
        **{"clients-per-round": 3, "mechanism": "tree", "noise-multiplier": 1.0},
    }
    new_run = [f"--{name}={value}" for name, value in options.items()]
    for changed in (
        {"epsilon": 0.1},
        {"code_version": "9.9"},
        {"subject": stated["subject"] | {"date": "2020-01-01T00:00:00Z"}},
    ):
        path.write_text(json.dumps(stated | changed))
        for command in (
            ["report", str(copy)],
            ["report", str(copy), "--html"],
            ["compare-runs", str(folder), str(copy)],
            ["budget", data, "--runs", str(copy)],
            ["train", "--initial-weights", str(copy), *new_run],
            ["audit", "--run", str(copy), "--state"],
        ):
            capsys.readouterr()
            assert main.main(command) != 0, command
            said = "".join(capsys.readouterr())
            assert "edited after it was written" in said or "statement_sha256" in said, command


def test_the_private_page_is_the_owners_alone(corpus, folder):
    assert main.main(["report", str(folder), "--html", "--private"]) == 0
    path = folder / "private" / "report.html"
    assert path.stat().st_mode & 0o777 == 0o600
    assert "Do not publish it." in path.read_text() and str(corpus) in path.read_text()


def test_a_report_keeps_the_audits_of_its_claim(folder, capsys):
    path = folder / "privacy_statement.json"
    assert main.main(["report", str(folder)]) == 0
    stated = statement.PrivacyStatement.from_json(path.read_text())
    refuted = stated.with_audit("audited: VIOLATED", is_refuted=True)
    path.write_text(statement_text.to_json(refuted))
    for flags in ([], ["--format", "json"], ["--html"]):
        capsys.readouterr()
        assert main.main(["report", str(folder), *flags]) == 0
        assert "audited: VIOLATED" in capsys.readouterr().out
        kept = statement.PrivacyStatement.from_json(path.read_text())
        assert kept.audits == refuted.audits and kept.headline_caveats == refuted.headline_caveats
    assert "audited: VIOLATED" in (folder / "report.html").read_text()
    other = dataclasses.replace(refuted, epsilon=1.0)  # Another claim.
    path.write_text(statement_text.to_json(other))
    assert main.main(["report", str(folder)]) == 0
    anew = statement.PrivacyStatement.from_json(path.read_text())
    assert (anew.audits, anew.epsilon) == ((), stated.epsilon)


def test_of_a_folder_without_private_it_tells_what_is_left(folder, tmp_path, capsys):
    assert main.main(["report", str(folder)]) == 0
    copy = _copy_without_private(folder, tmp_path / "copy")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main.main(["report", str(copy), "--html", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert "There is no private/" in printed and "Privacy: ε = 30.38" in printed
    assert "After 4 rounds: top-1 accuracy on held-out users" in printed
    assert "<h1>Training run: users.jsonl</h1>" in (tmp_path / "page.html").read_text()
    assert all(path.read_bytes() == content for path, content in before.items())
    assert {path for path in copy.rglob("*") if path.is_file()} == set(before)
    assert main.main(["report", str(copy), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["statement"] == json.loads((copy / "privacy_statement.json").read_text())
    assert found["missing"] and "loss" not in found["last_round"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--private"], "add --html"),
        (["--html", "--private"], "name one behind --html"),
        (["--html", "none/page.html"], "there is no folder none"),
        (["--html", "."], "is a folder"),
        (["--html", __file__], "exists and is no page"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused_in_a_line(flags, says, folder, tmp_path, capsys):
    copy = _copy_without_private(folder, tmp_path / "copy")
    assert main.main(["report", str(copy), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_the_docs_explain_every_file(trained, tmp_path):
    folder = pathlib.Path(shutil.copytree(trained.output, tmp_path / "run"))
    assert main.main(["report", str(folder)]) == 0
    assert "n-gram baselines" in (folder / "privacy_statement.md").read_text()
    assert listed_files.check(folder)["vocabulary.json"] == "yes, but"
    modes = {path: path.stat().st_mode & 0o777 for path in (folder / "private").rglob("*")}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items())
