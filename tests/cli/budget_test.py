"""What all runs on a corpus have spent together, found in folders."""

import json
import shutil
import sys

import pytest

from tff_dpftrl.cli import budget, main


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "users.jsonl"
    path.write_text('{"user_id": "ada", "examples": ["so it is"]}\n')
    return path


def _run(folder, data, *, epsilon=2.0, facts=None, has_statement=True, unit="user"):
    folder.mkdir(parents=True)
    content = {"config": {"data": str(data)}, "facts": facts or {}}
    (folder / "config.json").write_text(json.dumps(content))
    if has_statement:
        stated = {"epsilon": epsilon, "delta": 1e-6, "rho_zcdp": None, "unit_of_privacy": unit}
        (folder / "privacy_statement.json").write_text(json.dumps(stated))


def _budget(data, results, *flags):
    return main.main(["budget", str(data), "--runs", str(results), *flags])


def test_the_runs_on_a_corpus_and_its_copies_are_composed(tmp_path, data, capsys):
    results, copy = tmp_path / "results", tmp_path / "copy.jsonl"
    shutil.copy(data, copy)
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    _run(results / "a", data)
    _run(results / "sweep" / "cells" / "b", copy, epsilon=0.5)
    _run(results / "c", other, epsilon=7.0)
    assert _budget(data, results, "--format", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in shown["runs"]] == ["a", "b"]
    assert shown["total"]["epsilon"] == 2.5 and shown["total"]["delta"] == 2e-6
    assert _budget(data, results) == 0
    out = capsys.readouterr()
    assert "For who is in all 2 of them: ε = 2.5 at δ = 2e-06" in out.out and not out.err


def test_a_run_that_has_lost_its_options_counts(tmp_path, data, capsys):
    _run(tmp_path / "results" / "a", data)
    (tmp_path / "results" / "a" / "private").mkdir()
    (tmp_path / "results" / "a" / "config.json").rename(
        tmp_path / "results" / "a" / "private" / "manifest.json"
    )
    assert _budget(data, tmp_path, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["total"]["epsilon"] == 2.0


def test_a_limit_decides_the_status(tmp_path, data):
    _run(tmp_path / "results" / "a", data)
    assert _budget(data, tmp_path, "--max-epsilon", "2") == 0
    assert _budget(data, tmp_path, "--max-epsilon", "1.9") == budget.ABOVE


@pytest.mark.parametrize(
    "plant, says",
    [
        (lambda folder, data: _run(folder, data, epsilon=None), "Not all of them have a guarantee"),
        (lambda folder, data: _run(folder, data, has_statement=False), "Without a statement: "),
        (lambda folder, data: _run(folder, "gone.jsonl"), "Not compared, since"),
        (
            lambda folder, data: _run(folder, data, unit="example"),
            "Not all of them protect the same",
        ),
        (lambda folder, data: _run(folder, data, unit="example"), "where ε is for single examples"),
        (
            lambda folder, data: _run(
                folder,
                data,
                facts={"earlier_runs": [{"name": "elsewhere", "epsilon": 1.0, "delta": 1e-6}]},
            ),
            "Not in these folders: elsewhere",
        ),
    ],
    ids=["no guarantee", "no statement", "data gone", "unit", "whose", "weights from elsewhere"],
)
def test_what_is_not_known_is_said_and_above_any_limit(tmp_path, data, capsys, plant, says):
    results = tmp_path / "results"
    _run(results / "a", data)
    plant(results / "b", data)
    assert _budget(data, results, "--max-epsilon", "1000") == budget.ABOVE
    out = capsys.readouterr()
    assert says in out.out + out.err


def test_a_model_that_was_pretrained_on_the_corpus_has_no_guarantee(tmp_path, data, capsys):
    results = tmp_path / "results"
    _run(results / "a", data)
    (results / "pretrained").mkdir()
    record = {"source": "it", "pretraining": {"data": str(data)}}
    (results / "pretrained" / "pretraining.json").write_text(json.dumps(record))
    assert _budget(data, results) == 0
    assert "Not all of them have a guarantee" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--runs", "nowhere"], "nowhere is no folder"),
        (["--runs", "."], "No run on users.jsonl is in ."),
        (["--runs", ".", "--max-epsilon", "-1"], "--max-epsilon"),
    ],
)
def test_mistakes_are_one_line(tmp_path, data, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert main.main(["budget", "users.jsonl", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
