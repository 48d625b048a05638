"""The page of costs shows the figures that were measured, and no others."""

from __future__ import annotations

import importlib
import json
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(name="figures")
def _figures(monkeypatch):
    monkeypatch.syspath_prepend(str(_ROOT / "benchmarks"))
    return importlib.import_module("figures")


def test_the_page_shows_the_figures_of_the_file(figures):
    page = figures.PAGE.read_text("utf-8")
    measured = json.loads(figures.FIGURES.read_text("utf-8"))
    places = re.findall(r"<!-- figures: (.+) -->", page)
    assert set(measured) <= set(places) and len(set(places)) == len(places)
    assert page.count("<!-- end of figures -->") == len(places)
    assert figures.filled(page, measured) == page


def test_another_figure_is_another_page(figures):
    measured = json.loads(figures.FIGURES.read_text("utf-8"))
    page = figures.PAGE.read_text("utf-8")
    name, table = sorted(measured.items())[0]
    table["rows"][0]["processor"] += 1.0
    assert figures.filled(page, {**measured, name: table}) != page


def test_a_table_takes_the_place_of_the_one_before_it(figures, tmp_path):
    path = tmp_path / "figures.json"
    row = {"what": "a", "over": "b", "processor": 0.8, "wall": 0.66, "wall quartiles": [0.6, 0.7]}
    table = {"cores": 2, "date": "2026-01-01", "rounds": 9, "rows": [row], "versions": {"x": "1"}}
    figures.record(path, [{**table, "title": "first: 1", "others": 0.0}])
    figures.record(path, [{**table, "title": "second: 2", "others": 0.0}])
    figures.record(path, [{**table, "title": "first: 3", "others": 0.5}])
    measured = json.loads(path.read_text("utf-8"))
    assert [table["title"] for table in measured.values()] == ["first: 3", "second: 2"]
    assert "| a | b | 0.80 | 0.66 (0.60 to 0.70) |" in figures.markdown(measured["second"])
    # By the clock of a busy machine nothing is told.
    assert "0.66" not in figures.markdown(measured["first"])
