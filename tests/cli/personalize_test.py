"""Tests of `tff-dpftrl personalize`."""

import csv
import io
import json
import sys

import pytest

from tests.training import toy_model
from tff_dpftrl.cli import main
from tff_dpftrl.runs import manifest


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run whose users have two or ten texts each."""
    folder = tmp_path_factory.mktemp("run")
    with open(folder / "users.jsonl", "w") as file:
        for user in range(80):
            texts = ["the front end", "the end ."] * (5 if user % 3 else 1)
            file.write(json.dumps({"user_id": f"u{user}", "examples": texts}) + "\n")
    toy_model.write(folder)
    (folder / "private").mkdir()
    manifest.Manifest({"data": str(folder / "users.jsonl")}, {}, {}, {}).keep(folder)
    return folder


def _printed(capsys, *arguments):
    assert main.main(["personalize", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_table_has_the_model_and_the_users_custom_models(run, capsys):
    lines = _printed(capsys, run, "--learning-rates", "0.001,0.1", "--max-users", "3").splitlines()
    heading, before, low, high = lines[:4]
    assert heading.split() == "learning rate loss gain top-1 accuracy gain".split()
    assert before.startswith("none  ") and low.startswith("0.001  ")
    assert high.startswith("0.1 *") and high.count("±") == 4 and before.count("±") == 2
    rest = "\n".join(lines[4:])
    assert f"over 3 held-out users of {run}/users.jsonl" in rest
    assert "On others: --users test --learning-rates 0.1" in rest
    assert "try higher --learning-rates" in rest and "no statement covers them" in rest
    # Of one rate there is no best.
    assert "*" not in _printed(capsys, run, "--learning-rates", "0.1", "--max-users", "2")


def test_a_table_and_a_document_have_the_same_numbers(run, capsys):
    flags = (run, "--learning-rates", "0.01,0.1", "--max-users", "3", "--epochs", "2")
    report = json.loads(_printed(capsys, *flags, "--format", "json"))
    rows = list(csv.DictReader(io.StringIO(_printed(capsys, *flags, "--format", "csv"))))
    assert report["users"] == 3 and report["part"] == "held-out" and report["epochs"] == 2
    assert report["best_learning_rate"] == 0.1 and len(rows) == 3
    for row, outcome in zip(rows, [report["before"], *report["after"]], strict=True):
        for name, value in outcome.items():
            assert row[name] == ("" if value is None else str(value))
    gain = report["before"]["loss"] - report["after"][1]["loss"]
    assert report["after"][1]["loss_gain"] == pytest.approx(gain) and gain > 0


@pytest.mark.slow
def test_other_text_and_users_can_be_named(run, tmp_path, capsys):
    copy = toy_model.write(tmp_path / "copy")
    flags = ("--learning-rates", "0.1", "--max-users", "2", "--format", "json")
    text = ("--data", run / "users.jsonl", "--users", "test")
    found = json.loads(_printed(capsys, copy, *flags, *text))
    expected = json.loads(_printed(capsys, run, *flags, "--users", "test"))
    assert found["part"] == "test" and found["after"] == expected["after"]
    held_out = json.loads(_printed(capsys, run, *flags))
    assert held_out["before"] == expected["before"]  # The same texts, of other users.


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--learning-rates", "0"), "learning_rates must be a finite number, at least 1e-37"),
        (("--learning-rates", "fast"), "must look like 0.01,0.03,0.1, got 'fast'"),
        (("--min-examples", "11"), "none of whom has min_examples = 11 examples with a word"),
        (("--min-examples", "1"), "min_examples must be at least 2, got 1"),
        (("--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--model", "best"), "has no best_model.npz yet"),
        (("--users", "everybody"), "invalid choice: 'everybody'"),
    ],
)
def test_bad_input_gets_one_line(run, capsys, flags, message):
    try:
        status = main.main(["personalize", str(run), *flags])
    except SystemExit as error:
        status = error.code
    assert status == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and error.startswith("tff-dpftrl personalize: ")


def test_users_whom_pretraining_took_are_no_test_users(run, tmp_path, capsys):
    copy = toy_model.write(tmp_path / "copy")
    other = tmp_path / "renamed.jsonl"
    other.write_bytes((run / "users.jsonl").read_bytes())
    flags = ("--learning-rates", "0.1", "--max-users", "2", "--data", run / "users.jsonl")
    for known in (run / "users.jsonl", other):
        record = {"pretraining": {"data": str(known)}}
        (copy / "pretraining.json").write_text(json.dumps(record))
        assert main.main(["personalize", str(copy), *map(str, flags), "--users", "test"]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert "take users 'held-out', or other text" in error
    assert _printed(capsys, copy, *flags)  # Held out from pretraining, too.
    (copy / "pretraining.json").write_text('{"pretraining": {"data": "standard-library"}}')
    assert _printed(capsys, copy, *flags, "--users", "test")


def test_a_folder_without_model_or_text_is_refused(run, tmp_path, capsys):
    assert main.main(["personalize", str(tmp_path)]) == 2
    assert "There is no trained model in" in capsys.readouterr().err
    copy = toy_model.write(tmp_path / "copy")
    assert main.main(["personalize", str(copy)]) == 2
    assert "name text with data" in capsys.readouterr().err


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
