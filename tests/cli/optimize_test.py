"""Tests of `tff-dpftrl optimize`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from tff_dpftrl.cli import optimize
from tff_dpftrl.mechanisms import serialization, table, workload
from tff_dpftrl.participation import schema as schema_lib

_PAPER = ["--rounds", "2052", "--min-sep", "342", "--max-participations", "6"]
_SMALL = ["--rounds", "40", "--min-sep", "10", "--max-participations", "3"]


def _run(*arguments, form="json"):
    parser = argparse.ArgumentParser()
    optimize.add_parser(parser.add_subparsers())
    args = parser.parse_args(["optimize", *arguments, "--format", form])
    return args.run(args)


def test_json_of_a_blt(capsys):
    assert _run("--mechanism", "blt", *_PAPER, "--buffers", "3", "--error", "rms") == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report)[:6] == [
        "mechanism", "num_rounds", "min_sep", "max_participations", "buf_decay", "output_scale",
    ]  # fmt: skip
    assert report["mechanism"] == "blt"
    assert (report["num_rounds"], report["min_sep"], report["max_participations"]) == (2052, 342, 6)
    assert len(report["buf_decay"]) == len(report["output_scale"]) == 3
    assert report["rms_loss"] <= 9.1714  # see blt_optimize_test
    assert report["rms_loss"] == pytest.approx(report["sensitivity"] * report["rms_error"])
    assert report["max_loss"] == pytest.approx(report["sensitivity"] * report["max_error"])
    assert report["seconds"] > 0


@pytest.mark.parametrize("mechanism", table.MECHANISMS)
def test_every_mechanism_is_optimised_and_kept(mechanism, tmp_path, capsys):
    path = tmp_path / "strategy.json"
    assert _run("--mechanism", mechanism, *_SMALL, "--output", str(path)) == 0
    report = json.loads(capsys.readouterr().out)
    strategy = serialization.load(path)
    claim = serialization.load_certificate(path)
    claim.verify(strategy)
    schema = schema_lib.MinSep(40, 10, 3)
    assert claim.schema == schema
    assert report["max_loss"] == claim.max_loss
    assert report["rms_loss"] == pytest.approx(strategy.rms_loss(schema))


def test_text_and_notes(capsys):
    flags = ["--mechanism", "blt", *_PAPER, "--buffers", "4", "--max-decay", "1"]
    assert _run(*flags, form="text") == 0
    captured = capsys.readouterr()
    assert "max_loss             10.734" in captured.out
    assert "ties this BLT to 2052 rounds" in captured.err
    assert _run("--mechanism", "blt", *_PAPER) == 0
    assert capsys.readouterr().err == ""
    assert (
        _run("--mechanism", "blt", *_PAPER, "--buffers", "5", "--error", "rms", "--max-decay", "1")
        == 0
    )
    assert "3 reach the same loss" in capsys.readouterr().err


def test_long_parameters_are_left_out_of_the_report(capsys):
    flags = ["--rounds", "300", "--min-sep", "100", "--bands", "100"]
    assert _run("--mechanism", "bandfhu", *flags) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["left_out"] == ["coefficients"]
    assert report["max_participations"] == 3  # as many as fit


def test_a_gap_is_one_less_than_a_stride(capsys):
    results = []
    for flags in (["--min-sep", "10"], ["--min-sep-gap", "9"]):
        assert _run("--mechanism", "identity", "--rounds", "40", *flags) == 0
        report = json.loads(capsys.readouterr().out)
        results.append({key: value for key, value in report.items() if key != "seconds"})
    assert results[0] == results[1]
    assert results[0]["min_sep"] == 10


def test_bandmf_reports_progress_and_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(table, "_SECONDS_BETWEEN_STEPS", 0.0)
    flags = ["--mechanism", "bandmf", *_SMALL, "--checkpoint", str(tmp_path / "search.npz")]
    assert _run(*flags) == 0
    captured = capsys.readouterr()
    assert "step 1, loss" in captured.err
    first = json.loads(captured.out)
    assert _run(*flags) == 0
    assert json.loads(capsys.readouterr().out)["rms_loss"] <= first["rms_loss"] * (1 + 1e-9)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--mechanism", "tree", *_SMALL, "--buffers", "2"], "buffers is for the mechanism blt"),
        (["--mechanism", "blt", *_SMALL, "--bands", "2"], "bands is for the mechanism bandmf"),
        (["--mechanism", "blt", *_SMALL, "--buffers", "20"], "num_buffers"),
        (["--mechanism", "blt", *_SMALL, "--max-decay", "1.5"], "max_decay"),
        (["--mechanism", "blt", "--rounds", "0", "--min-sep", "1"], "num_rounds"),
        (["--mechanism", "identity", *_SMALL, "--output", "missing/folder/x"], "Cannot write"),
        (["--mechanism", "lambda-cgd", *_SMALL, "--correlation", "2"], "correlation"),
    ],
)
def test_mistakes_are_explained(arguments, message):
    with pytest.raises(ValueError, match=message):
        _run(*arguments)


def test_help_teaches_and_needs_no_tensorflow(capsys):
    with pytest.raises(SystemExit) as ending:
        _run("--help")
    assert ending.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert all(name in text for name in table.MECHANISMS)
    code = (
        "import sys; from tff_dpftrl.cli import optimize, compare; "
        "sys.exit(any(name in sys.modules for name in ('numpy', 'tensorflow', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_workload_has_its_losses_and_those_of_the_prefix_optimum(tmp_path, capsys):
    path = tmp_path / "strategy.json"
    flags = ["--mechanism", "bandtoep", *_SMALL, "--workload", "momentum=0.9,decay=cosine"]
    _run(*flags, "--output", str(path))
    report = json.loads(capsys.readouterr().out)
    schema = schema_lib.MinSep(40, 10, 3)
    made, strategy = workload.parse(flags[-1]).workload(40), serialization.load(path)
    assert report["workload"] == "momentum 0.9, cosine decay"
    assert report["rms_loss"] == pytest.approx(strategy.rms_loss(schema, made))
    assert report["rms_loss"] < 0.97 * report["rms_loss_of_prefix_optimum"]
    assert report["max_loss_of_prefix_optimum"] > 0
    # What a file claims is of prefix sums, as for all strategies.
    serialization.load_certificate(path).verify(strategy)
    with pytest.raises(ValueError, match="workload is for the mechanism blt or"):
        _run("--mechanism", "tree", *flags[2:])
    with pytest.raises(ValueError, match="warmup must be below the 40 rounds, got 40"):
        _run(*flags[:-1], "warmup=40")
