"""Tests of `tff-dpftrl compare`."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json

import pytest

from tff_dpftrl.cli import compare
from tff_dpftrl.cli import main as main_lib
from tff_dpftrl.mechanisms import blt, blt_optimize, serialization, table, tree, workload, zoo
from tff_dpftrl.participation import schema as schema_lib


def _run(*arguments):
    parser = argparse.ArgumentParser()
    compare.add_parser(parser.add_subparsers())
    args = parser.parse_args(["compare", *arguments])
    return args.run(args)


def _table(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_fixed_strategies_over_separations(tmp_path):
    own = blt.Blt([0.9], [0.3])
    serialization.save(tmp_path / "own.json", own)
    out = tmp_path / "table.csv"
    status = _run(
        "tree", str(tmp_path / "own.json"), "blt-gboard-b400", "--rounds", "100", "--min-sep", "20",
        "--max-participations", "3", "--vary", "min-sep", "--values", "10:30:10",
        "--csv", str(out), "--png", str(tmp_path / "figure.png"),
    )  # fmt: skip
    assert status == 0
    rows = _table(out)
    assert len(rows) == 9
    known = {
        "tree": tree.Tree(100),
        "own.json": own,
        "blt-gboard-b400": zoo.load("blt-gboard-b400"),
    }
    for row in rows:
        schema = schema_lib.MinSep(100, int(row["min_sep"]), 3)
        strategy = known[row["strategy"]]
        assert float(row["rms_loss"]) == pytest.approx(strategy.rms_loss(schema), rel=1e-12)
        assert float(row["max_loss"]) == pytest.approx(strategy.max_loss(schema), rel=1e-12)
        assert row["sensitivity_exact"] == "True"
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_beyond_a_strategy_are_left_blank(tmp_path):
    out = tmp_path / "table.csv"
    flags = ["--rounds", "32", "--min-sep", "8", "--vary", "rounds", "--values", "16,32,64"]
    assert _run("bandmf", "blt", *flags, "--csv", str(out), "--png", str(tmp_path / "x.png")) == 0
    rows = {(row["strategy"], row["num_rounds"]): row for row in _table(out)}
    assert rows["bandmf", "64"]["rms_loss"] == ""
    assert float(rows["bandmf", "32"]["rms_loss"]) <= float(rows["blt", "32"]["rms_loss"])
    assert [rows["blt", n]["max_participations"] for n in ("16", "32", "64")] == ["2", "4", "8"]


def test_optimised_at_each_point(tmp_path):
    out = tmp_path / "table.csv"
    _run(
        "blt", "--buffers", "2", "--error", "max", "--rounds", "100", "--min-sep", "20",
        "--vary", "participations", "--values", "1,2,5", "--optimize-at-each-point",
        "--csv", str(out),
    )  # fmt: skip
    for row in _table(out):
        schema = schema_lib.MinSep(100, 20, int(row["max_participations"]))
        best = blt_optimize.search(schema, num_buffers=2)
        assert float(row["max_loss"]) == pytest.approx(best.max_loss, rel=1e-12)


@pytest.mark.parametrize("again", [(), ("--optimize-at-each-point",)])
def test_losses_are_those_of_the_models(tmp_path, again):
    out, text = tmp_path / "table.csv", "momentum=0.9,decay=cosine"
    _run(
        "bandtoep", "tree", "--rounds", "60", "--min-sep", "20", "--vary", "rounds", "--values",
        "40,60", "--workload", text, *again, "--csv", str(out),
    )  # fmt: skip
    for row in _table(out):
        num_rounds = int(row["num_rounds"])
        schema, made = schema_lib.MinSep.as_many_as_fit(num_rounds, 20), workload.parse(text)
        planned = schema if again else schema_lib.MinSep.as_many_as_fit(60, 20)
        options = table.Options(workload=made.workload(planned.num_rounds))
        strategy = table.build(row["strategy"], planned, table.fitting(row["strategy"], options))
        expected = strategy.rms_loss(schema, made.workload(num_rounds))
        assert float(row["rms_loss"]) == pytest.approx(expected, rel=1e-9)


def test_printed_as_text_json_and_csv(tmp_path, capsys):
    flags = ["tree", "blt", "--rounds", "32", "--min-sep", "8", "--vary", "rounds"]
    flags += ["--values", "16,64"]
    assert _run(*flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["strategy", "rounds", "min-sep"]
    assert lines[2].split()[4:] == ["-"] * 5  # this tree ends after 63 rounds
    tree_loss = tree.Tree(32).rms_loss(schema_lib.MinSep(16, 8, 2))
    assert lines[1].split() == ["tree", "16", "8", "2", *lines[1].split()[4:8], f"{tree_loss:.5g}"]
    assert _run(*flags, "--format", "json") == 0
    points = json.loads(capsys.readouterr().out)
    assert points[0]["rms_loss"] == tree_loss and points[1]["rms_loss"] is None
    out = tmp_path / "table.csv"
    assert _run(*flags, "--csv", str(out)) == 0
    assert capsys.readouterr().out == ""
    assert _run(*flags, "--format", "csv") == 0
    assert capsys.readouterr().out == out.read_text(encoding="utf-8")


def test_a_table_says_what_was_built(tmp_path):
    out = tmp_path / "table.csv"
    flags = ["--rounds", "100", "--min-sep", "50", "--vary", "rounds", "--values", "100"]
    _run("bandtoep", "bisr", "tree", *flags, "--csv", str(out))
    names = {row["strategy"]: row["mechanism"] for row in _table(out)}
    assert names == {
        "bandtoep": "banded-toeplitz (50 bands)",
        "bisr": "inverse-banded (16 bands)",
        "tree": "tree",
    }


def test_the_legend_says_so_too():
    point = compare.Point("bisr", "inverse-banded (16 bands)", 9, 3, 3, 1.0, True, *[1.0] * 4)
    assert compare._legend([point]) == "bisr: inverse-banded (16 bands)"
    assert compare._legend([dataclasses.replace(point, strategy=point.mechanism)]) == (
        point.mechanism
    )
    other = dataclasses.replace(point, mechanism="inverse-banded (2 bands)")
    assert compare._legend([point, other]) == "bisr"


_COMMON = ["--rounds", "9", "--min-sep", "3", "--vary", "rounds"]


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["magic", *_COMMON, "--values", "9", "--csv", "x.csv"], "'magic' is no mechanism"),
        (["tree", *_COMMON, "--values", "9", "--csv", "missing/x.csv"], "Cannot write the table"),
        (["tree", *_COMMON, "--values", "9", "--png", "missing/x.png"], "Cannot write the figure"),
    ],
)
def test_mistakes_are_explained(arguments, message):
    with pytest.raises(ValueError, match=message):
        _run(*arguments)


def test_an_unknown_name_is_refused_before_anything_is_optimised(capsys):
    with pytest.raises(ValueError, match="'magic' is no mechanism"):
        _run("blt", "magic", *_COMMON, "--values", "9")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("values", ["a", "5:1:1", "0,1", "1:2:0", "1:2"])
def test_bad_values_are_refused(values, capsys):
    with pytest.raises(SystemExit) as ending:
        _run("tree", *_COMMON, "--values", values, "--csv", "x.csv")
    assert ending.value.code == 2
    assert "--values" in capsys.readouterr().err


def test_a_folder_is_for_compare_runs(tmp_path, capsys):
    schema = ["--rounds", "10", "--min-sep", "2", "--vary", "rounds", "--values", "10"]
    assert main_lib.main(["compare", str(tmp_path), "blt", *schema]) == 2
    assert "tff-dpftrl compare-runs compares results folders" in capsys.readouterr().err
