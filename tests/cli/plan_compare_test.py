"""Tests of `tff-dpftrl plan --compare`."""

from __future__ import annotations

import argparse
import csv
import json

import pytest

from tff_dpftrl.cli import main, plan_compare
from tff_dpftrl.mechanisms import blt, blt_optimize, serialization, table, tree, workload, zoo
from tff_dpftrl.participation import schema as schema_lib


def _run(*arguments):
    return main.main(["plan", "--compare", *arguments])


def _table(capsys, *arguments):
    assert _run(*arguments, "--format", "csv") == 0
    return list(csv.DictReader(capsys.readouterr().out.splitlines()))


@pytest.mark.pictures
def test_fixed_strategies_over_separations(tmp_path, capsys):
    own = blt.Blt([0.9], [0.3])
    serialization.save(tmp_path / "own.json", own)
    rows = _table(
        capsys, "tree", str(tmp_path / "own.json"), "blt-gboard-b400", "--rounds", "100",
        "--min-sep", "20", "--max-participations", "3", "--vary", "min-sep", "--values", "10:30:10",
        "--plot", str(tmp_path / "figure.png"),
    )  # fmt: skip
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


def test_rounds_beyond_a_strategy_are_left_blank(tmp_path, capsys):
    flags = ["--rounds", "32", "--min-sep", "8", "--vary", "rounds", "--values", "16,32,64"]
    points = _table(capsys, "bandmf", "blt", *flags, "--plot", str(tmp_path / "x.png"))
    rows = {(row["strategy"], row["num_rounds"]): row for row in points}
    assert rows["bandmf", "64"]["rms_loss"] == ""
    assert float(rows["bandmf", "32"]["rms_loss"]) <= float(rows["blt", "32"]["rms_loss"])
    assert [rows["blt", n]["max_participations"] for n in ("16", "32", "64")] == ["2", "4", "8"]


def test_optimised_at_each_point(capsys):
    rows = _table(
        capsys, "blt", "--buffers", "2", "--error", "max", "--rounds", "100", "--min-sep", "20",
        "--vary", "participations", "--values", "1,2,5", "--optimize-at-each-point",
    )  # fmt: skip
    for row in rows:
        schema = schema_lib.MinSep(100, 20, int(row["max_participations"]))
        best = blt_optimize.search(schema, num_buffers=2)
        assert float(row["max_loss"]) == pytest.approx(best.max_loss, rel=1e-12)


@pytest.mark.parametrize("again", [(), ("--optimize-at-each-point",)])
def test_losses_are_those_of_the_models(again, capsys):
    text = "momentum=0.9,decay=cosine"
    rows = _table(
        capsys, "bandtoep", "tree", "--rounds", "60", "--min-sep", "20", "--vary", "rounds",
        "--values", "40,60", "--workload", text, *again,
    )  # fmt: skip
    for row in rows:
        num_rounds = int(row["num_rounds"])
        schema, made = schema_lib.MinSep.as_many_as_fit(num_rounds, 20), workload.parse(text)
        planned = schema if again else schema_lib.MinSep.as_many_as_fit(60, 20)
        options = table.Options(workload=made.workload(planned.num_rounds))
        strategy = table.build(row["strategy"], planned, table.fitting(row["strategy"], options))
        expected = strategy.rms_loss(schema, made.workload(num_rounds))
        assert float(row["rms_loss"]) == pytest.approx(expected, rel=1e-9)


def test_printed_as_text_and_json(capsys):
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


def test_a_table_says_what_was_built(capsys):
    flags = ["--rounds", "100", "--min-sep", "50", "--vary", "rounds", "--values", "100"]
    rows = _table(capsys, "bandtoep", "bisr", "tree", *flags)
    names = {row["strategy"]: row["mechanism"] for row in rows}
    assert names == {
        "bandtoep": "banded-toeplitz (50 bands)",
        "bisr": "inverse-banded (16 bands)",
        "tree": "tree",
    }


def test_the_legend_says_so_too():
    args = argparse.Namespace(error=None, vary="rounds", values=[9])

    def legend(*points):
        drawn = plan_compare._drawn([point | {"num_rounds": 9} for point in points], args)
        return [text.get_text() for text in drawn.axes[0].get_legend().get_texts()]

    point = {"strategy": "bisr", "mechanism": "inverse-banded (16 bands)", "rms_loss": 1.0}
    assert legend(point) == ["bisr: inverse-banded (16 bands)"]
    assert legend(point | {"strategy": point["mechanism"]}) == [point["mechanism"]]
    assert legend(point, point | {"mechanism": "inverse-banded (2 bands)"}) == ["bisr"]


_COMMON = ["--rounds", "9", "--min-sep", "3", "--vary", "rounds"]


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["magic", *_COMMON, "--values", "9"], "'magic' is no mechanism"),
        (["tree", *_COMMON, "--values", "9", "--plot", "missing/x.png"], "Cannot write the plot"),
        (["tree", *_COMMON, "--values", "9", "--plot", "x.docx"], "'docx' is no format of"),
        (["tree", *_COMMON], "required: --values"),
    ],
)
def test_mistakes_are_explained(arguments, message, capsys):
    assert _run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_name_is_refused_before_anything_is_optimised(capsys):
    assert _run("blt", "magic", *_COMMON, "--values", "9") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'magic' is no mechanism" in line


@pytest.mark.parametrize("values", ["a", "5:1:1", "0,1", "1:2:0", "1:2"])
def test_bad_values_are_refused(values, capsys):
    with pytest.raises(SystemExit) as ending:
        _run("tree", *_COMMON, "--values", values)
    assert ending.value.code == 2
    assert "--values" in capsys.readouterr().err


def test_a_folder_is_for_compare_runs(tmp_path, capsys):
    schema = ["--rounds", "10", "--min-sep", "2", "--vary", "rounds", "--values", "10"]
    assert _run(str(tmp_path), "blt", *schema) == 2
    assert "tff-dpftrl compare-runs compares results folders" in capsys.readouterr().err
