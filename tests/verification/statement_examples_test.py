"""Tests of the examples of statements: what they look like, and that the page has them."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest

from verification import statement_examples

_EXAMPLES = dict(statement_examples.examples())
_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "statements.md"


def _to_seven_digits(text: str) -> str:
    """Rounds long numbers, whose last digits depend on the machine."""
    return re.sub(r"\d+\.\d{8,}", lambda number: f"{float(number[0]):.7g}", text)


def test_the_page_has_the_examples():
    page = _PAGE.read_text(encoding="utf-8")
    assert _to_seven_digits(page) == _to_seven_digits(statement_examples.page())


@pytest.mark.parametrize("kind", _EXAMPLES)
def test_the_text_of_a_statement_is_well_formed(kind):
    text = _EXAMPLES[kind].to_markdown()
    for fault in ("  ", " .", " ,", " ;", "..", ",.", "( ", " )", "None", "nan", "inf,", "{", "}"):
        assert fault not in text, fault
    for line in text.splitlines():
        assert line == line.rstrip()
        assert line.count("(") == line.count(")"), line


@pytest.mark.parametrize("kind", _EXAMPLES)
def test_the_sentences_of_a_statement_end(kind):
    example = _EXAMPLES[kind]
    sentences = [
        *(example.headline_caveats, example.covered, example.not_covered, example.assumptions),
        *(example.caveats, (example.setting, example.output, example.adjacency)),
        (example.accounting,),
    ]
    for sentence in (one for group in sentences for one in group):
        assert sentence[0].isupper() or sentence.startswith(("δ", "ε", "rho")), sentence
        assert sentence.endswith("."), sentence


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
