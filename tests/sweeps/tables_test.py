"""Tests of the tables of a sweep."""

import csv

import pytest

from tests.sweeps import made_up
from tff_dpftrl.sweeps import results, tables


def _results():
    noisy = {"mechanism": "blt", "noise_multiplier": 0.5}
    return [
        made_up.result({**noisy, "seed": 0}, 0.1, 8.12345),
        made_up.result({**noisy, "seed": 1}, 0.2, 8.12345),
        made_up.result({"mechanism": "none", "seed": 0}, 0.3, None),
        made_up.result(
            {"mechanism": "none", "seed": 1},
            0.3,
            None,
            state="failed",
            failure="no memory",
            rows=[],
        ),
    ]


def test_every_cell_has_a_row(tmp_path):
    tables.write(tmp_path, _results(), "Sweep over x")
    with open(tmp_path / "cells.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["finished"] * 3 + ["failed"]
    first, _, without, failed = rows
    assert (first["mechanism"], first["noise_multiplier"], first["seed"]) == ("blt", "0.5", "0")
    assert (first["epsilon"], first["delta"], first["rounds_done"]) == ("8.12345", "1e-05", "4")
    assert (first[results.ACCURACY], first["best_eval_top1_in_vocab"]) == ("0.1", "0.1")
    assert (without["epsilon"], without["noise_multiplier"]) == ("", "0.0")
    assert (failed[results.ACCURACY], failed["rounds_done"]) == ("", "0")


def test_every_setting_has_a_row(tmp_path):
    tables.write(tmp_path, _results(), "Sweep over x")
    with open(tmp_path / "summary.csv", newline="") as file:
        blt, none = csv.DictReader(file)
    assert "seed" not in blt
    assert (blt["cells"], none["cells"]) == ("2", "1")
    assert float(blt[results.ACCURACY]) == pytest.approx(0.15)
    assert float(blt[results.ACCURACY + "_se"]) == pytest.approx(0.05)
    assert none[results.ACCURACY + "_se"] == ""


def test_the_table_rounds_epsilon_up():
    text = tables.markdown(_results())
    assert "| blt | 2 | 8.124 | 1e-05 | 0.5 | 3.85 ± 0.05 | 15.00% ± 5.00 | 15.00% ± 5.00 |" in text
    assert "| none | 1 | no guarantee | – | 0 | 3.7 | 30.00% | 30.00% |" in text
    assert text.index("| none |") < text.index("| blt |")  # Though it comes last in the axes.
    assert "Settings with the lowest loss stand first." in text
    assert "perplexity" not in text and "bits per character" not in text
    assert "1 of 4 cells are not finished, 1 of them failed." in text
    assert "simulated" not in text
    assert "larger run" not in text


def test_the_table_has_the_epsilon_that_is_simulated_and_rounds_noise_down():
    found = made_up.result({"noise_multiplier": 1.23459}, 0.1, 900.0, simulated_epsilon=2.0)
    head, _, row, _, explained = tables.markdown([found]).splitlines()
    assert "| ε | ε, simulated run |" in head and "| 900 | 2 | 1e-05 | 1.234 |" in row
    assert "its ε protects nobody here" in explained


def test_cells_of_several_versions_are_not_averaged_in_silence():
    def text(*versions):
        values = ({"noise_multiplier": 1.0, "seed": seed} for seed in range(len(versions)))
        return tables.markdown(
            [made_up.result(v, 0.1, code_version=w) for v, w in zip(values, versions, strict=True)]
        )

    assert "begun by tff_dpftrl 0.3.0, 0.4.0, which may not count alike" in text("0.4.0", "0.3.0")
    assert "begun by" not in text("0.4.0", "0.4.0") + text("0.4.0", None)


def test_the_summary_says_what_no_epsilon_covers():
    text = tables.summary(_results(), "Sweep over x")
    assert "choosing among runs by their accuracy on held-out users is not covered" in text
    assert "bigrams 20.00%" in text
    assert "- mechanism=none, seed=1: no memory" in text


def test_before_the_first_cell_is_finished_there_is_a_line():
    begun = made_up.result({"noise_multiplier": 1.0}, 0.1, state="begun", rows=[])
    assert tables.markdown([begun]) == "1 of 1 cells are not finished, 0 of them failed."
