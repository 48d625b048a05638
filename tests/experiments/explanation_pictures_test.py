"""Tests of the pictures, commands and words of docs/explanation/."""

import pathlib
import re
import shlex
import xml.etree.ElementTree

import numpy as np
import pytest

from experiments import explanation_pictures
from tff_dpftrl.cli import main
from tff_dpftrl.mechanisms import table

_PAGES = pathlib.Path(explanation_pictures.__file__).resolve().parents[1] / "docs" / "explanation"
_TERMS = (
    *("MinS", "MaxP", "min_sep", "stride", "gap", "ρ", "μ", "δ", "ε", "zCDP", "zero-out"),
    *("clip norm", "noise multiplier", "sensitivity", "cohort", "report goal", "BLT", "tree"),
    *("participation schema", "neighbouring data sets", "unit of privacy", "restart", "ledger"),
    *("secure sum", "trade-off curve", "prefix sum", "privacy statement", "population", "task"),
)


@pytest.mark.parametrize("name", ["neighbours", "participation_timeline", "trade_off"])
def test_pictures_are_the_same_at_every_run(name, tmp_path):
    first = explanation_pictures.draw(name, tmp_path).read_bytes()
    assert explanation_pictures.draw(name, tmp_path).read_bytes() == first
    xml.etree.ElementTree.fromstring(first)


@pytest.mark.parametrize("name", explanation_pictures.PICTURES)
def test_each_picture_is_committed_and_shown(name):
    assert (_PAGES / f"{name}.svg").exists()
    assert any(f"]({name}.svg)" in page.read_text("utf-8") for page in _PAGES.glob("*.md"))


def test_errors_at_the_same_privacy_are_in_the_order_that_the_page_says():
    errors = explanation_pictures.errors()
    # Independent noise: sensitivity √4 times √t.
    np.testing.assert_allclose(errors["identity (independent)"], 2 * np.sqrt(np.arange(1, 401)))
    last = {label: error.max() for label, error in errors.items()}
    assert last["BLT"] < last["BLT, restart every 100"] < last["tree"]
    assert last["tree"] < last["identity (independent)"]


def _commands() -> list[str]:
    text = (_PAGES / "which_mechanism.md").read_text("utf-8").replace("\\\n", " ")
    return re.findall(r"^ *tff-dpftrl (.+)$", text, re.MULTILINE)


@pytest.mark.parametrize("command", _commands())
def test_commands_of_the_decision_tree_parse(command):
    args = main._build_parser().parse_args(shlex.split(command))
    assert args.command == command.split()[0]


def test_the_decision_tree_and_its_page_name_the_same_commands():
    text = (_PAGES / "which_mechanism.md").read_text("utf-8")
    leaves = [leaf for _, _, leaf in explanation_pictures._QUESTIONS]
    for leaf in (*leaves, explanation_pictures._LAST_LEAF):
        for name in leaf.split("\n")[0].split(", "):
            assert f"tff-dpftrl {name} " in text
    for question, _, _ in explanation_pictures._QUESTIONS:
        assert question.replace("\n", " ").lower()[:-1].replace(",", "") in text.lower().replace(
            ",", ""
        )
    named = re.findall(r"^\| `([a-z].+)` \|", text, re.MULTILINE)
    assert {name for row in named for name in row.split("`, `")} <= set(table.runnable())


@pytest.mark.parametrize("term", _TERMS)
def test_the_glossary_has_each_term_once(term):
    lines = (_PAGES / "glossary.md").read_text("utf-8").splitlines()
    heads = [line.split(" | ")[0] for line in lines if line.startswith("| **")]
    assert sum(f"**{term}**" in head for head in heads) == 1
