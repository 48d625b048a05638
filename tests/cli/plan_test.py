"""Tests of `tff-dpftrl plan`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys

import pytest

from tff_dpftrl.cli import main, plan
from tff_dpftrl.training import config

_KNOWN = ["--population", "4000000", "--rounds", "2000", "--delta", "1e-10"]
_TARGET = [*_KNOWN, "--target-epsilon", "5", "--report-goals", "3000,5000,6500"]


def _out(capsys, *arguments):
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *arguments])
    assert args.run(args) == 0
    return capsys.readouterr().out


def test_text_has_a_table_the_hypothesis_and_commands(capsys):
    text = _out(capsys, *_TARGET)
    lines = text.splitlines()
    assert lines[0].split()[:3] == ["goal", "mechanism", "min-sep"]
    assert "Recommended: blt with 5000 clients a round" in text
    assert "Hypothesis, not theorem" in text
    assert "If devices come back after 400 rounds: epsilon 7.703" in text


def test_the_printed_commands_run_and_keep_the_target(capsys, tmp_path, monkeypatch):
    commands = [
        shlex.split(line) for line in _out(capsys, *_TARGET).splitlines() if "  tff-dpftrl" in line
    ]
    assert [command[1] for command in commands] == ["optimize", "account", "train"]
    monkeypatch.chdir(tmp_path)
    assert main.main(commands[0][1:]) == 0
    capsys.readouterr()
    assert main.main([*commands[1][1:], "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 5 * (1 - 1e-5) <= report["epsilon"] <= 5
    # `train` knows every flag, and its config accepts them.
    args = main._build_parser().parse_args(commands[2][1:])
    known = {field: getattr(args, field) for field in _CONFIG_FIELDS if hasattr(args, field)}
    parsed = config.config_from_mapping(known, "the command line")
    assert (parsed.clients_per_round, parsed.num_rounds, parsed.min_sep) == (5000, 2000, 800)
    assert parsed.strategy == "strategy.json"


_CONFIG_FIELDS = set(config.TrainingConfig.__dataclass_fields__)


def test_json(capsys):
    report = json.loads(_out(capsys, *_TARGET, "--format", "json"))
    assert report["recommended"]["mechanism"] == report["recommended"]["strategy"]["mechanism"]
    assert "Hypothesis" in report["hypothesis"]
    for row in report["plans"]:
        assert row["epsilon"] <= 5
        assert row["min_sep"] * row["report_goal"] <= 4_000_000
        assert {"noise_multiplier", "noise_in_sum", "memory_bytes", "upload_bytes"} <= row.keys()
    everything = json.loads(_out(capsys, *_TARGET, "--format", "json", "--all"))
    assert len(everything["plans"]) == 27 > len(report["plans"])


def test_what_if(capsys):
    arguments = [*_TARGET, "--what-if-rounds", "3000", "--what-if-min-sep", "300"]
    arguments += ["--mechanisms", "tree,blt", "--format", "json", "--all"]
    rows = json.loads(_out(capsys, *arguments))["plans"]
    for row in rows:
        if row["mechanism"] == "tree":
            # A tree for 2000 rounds has no level for more than 2047.
            assert "2047" in row["what_if"]["impossible"]
        else:
            assert row["what_if"]["num_rounds"] == 3000
            assert row["what_if"]["epsilon"] > row["epsilon"]
    text = _out(capsys, *arguments[:-3], "--all")
    assert "what if: epsilon" in text.splitlines()[0]


def test_keeping_the_noise_of_a_known_run(capsys):
    report = json.loads(
        _out(
            capsys, *_KNOWN, "--keep-noise-of", "tree:7:6500", "--report-goals", "6500",
            "--format", "json", "--all",
        )
    )  # fmt: skip
    rows = {row["mechanism"]: row for row in report["plans"]}
    assert rows["tree"]["noise_multiplier"] == pytest.approx(7.0)
    assert rows["blt"]["epsilon"] < rows["tree"]["epsilon"] < rows["identity"]["epsilon"]


def test_timer_sets_the_separation(capsys):
    report = json.loads(
        _out(
            capsys, *_TARGET, "--timer-hours", "24", "--rounds-per-day", "314", "--format", "json",
        )
    )  # fmt: skip
    assert {row["min_sep"] for row in report["plans"]} == {314}


def test_secure_aggregation_is_in_the_commands(capsys):
    text = _out(capsys, *_TARGET, "--secagg-inflation", "1.01", "--mechanisms", "blt")
    assert "--secagg-bits" in text


def test_plot(capsys, tmp_path):
    path = tmp_path / "plans.png"
    _out(capsys, *_TARGET, "--mechanisms", "identity,tree", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([*_TARGET, "--mechanisms", "magic"], "magic"),
        ([*_TARGET, "--timer-hours", "3"], "--rounds-per-day"),
        ([*_TARGET, "--min-sep", "9000"], "no report goal"),
        ([*_KNOWN, "--keep-noise-of", "magic:7:6500"], "magic"),
        ([*_KNOWN, "--target-epsilon", "0"], "target_epsilon"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    assert main.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [*_KNOWN, "--target-epsilon", "5", "--report-goals", "1,x"],
        [*_KNOWN, "--target-epsilon", "5", "--report-goals", "0"],
        [*_KNOWN, "--keep-noise-of", "tree:7"],
    ],
)
def test_unreadable_flags_are_refused(arguments):
    with pytest.raises(SystemExit) as error:
        main.main(["plan", *arguments])
    assert error.value.code == 2


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
