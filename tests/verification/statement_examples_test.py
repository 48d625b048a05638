"""Tests of the examples of statements: what they look like, and that the page has them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import jsonschema
import pytest

from tff_dpftrl.accounting import display, gaussian, statement_text, trade_off
from verification import statement_examples

_REFERENCE = pathlib.Path(__file__).parents[2] / "docs" / "reference"
_PAGE = _REFERENCE / "statements.md"
_KINDS = re.findall("^## (.+)$", _PAGE.read_text(encoding="utf-8"), re.MULTILINE)
_SCHEMA = json.loads((_REFERENCE / "privacy_statement.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def examples():
    """The examples by their kinds, which every worker would make if the module made them."""
    return dict(statement_examples.examples())


def _to_seven_digits(text: str) -> str:
    """Rounds long numbers, whose last digits depend on the machine."""
    return re.sub(r"\d+\.\d{8,}", lambda number: f"{float(number[0]):.7g}", text)


def test_the_page_has_the_examples(examples, monkeypatch):
    assert list(examples) == _KINDS
    monkeypatch.setattr(statement_examples, "examples", examples.items)
    page = _PAGE.read_text(encoding="utf-8")
    assert _to_seven_digits(page) == _to_seven_digits(statement_examples.page())


@pytest.mark.parametrize("kind", _KINDS)
def test_the_text_of_a_statement_is_well_formed(kind, examples):
    text = statement_text.markdown(examples[kind])
    for fault in ("  ", " .", " ,", " ;", "..", ",.", "( ", " )", "None", "nan", "inf,", "{", "}"):
        assert fault not in text, fault
    for line in text.splitlines():
        assert line == line.rstrip()
        assert line.count("(") == line.count(")"), line


@pytest.mark.parametrize("kind", _KINDS)
def test_the_sentences_of_a_statement_end(kind, examples):
    example = examples[kind]
    sentences = [
        *(example.headline_caveats, example.covered, example.not_covered, example.assumptions),
        *(example.caveats, (example.setting, example.output, example.adjacency)),
        (example.accounting,),
    ]
    for sentence in (one for group in sentences for one in group):
        assert sentence[0].isupper() or sentence.startswith(("δ", "ε", "rho")), sentence
        assert sentence.endswith("."), sentence


@pytest.mark.parametrize("kind", _KINDS)
def test_a_statement_calls_whoever_takes_part_by_one_word(kind, examples):
    example = examples[kind]
    others = {"client", "device", "user"} - {example.unit_of_privacy}
    for line in statement_text.markdown(example).splitlines():
        if re.match(r"- \w+: ", line) or "in names of parameters" in line:
            continue
        if "person with several devices" not in line:
            assert not re.search(rf"\b({'|'.join(others)})", line, re.IGNORECASE), line


@pytest.mark.parametrize("kind", _KINDS)
def test_a_statement_explains_the_symbols_that_it_uses_and_no_others(kind, examples):
    text, _, legend = statement_text.markdown(examples[kind]).partition("## Legend")
    for symbol in ("ρ", "μ", "S", "σ", "clip_norm_inflation", "MinS", "MaxP", "stride", "gap"):
        is_used = re.search(rf"(?<!\w){symbol}(?![a-zA-Z_])", text) is not None
        assert (f"\n- {symbol}: " in legend) == is_used, symbol
    assert "\n- ε, δ: " in legend


def test_the_odds_of_published_deployments_follow_from_their_rho():
    page = (_REFERENCE.parent / "explanation" / "published_deployments.md").read_text()
    rows = re.findall(r"\| ([\d.]+) \| ([\d.]+) \| (\d+ %) \|", page)
    assert len(rows) == 4
    for epsilon, rho, odds in rows:
        mu = gaussian.mu_from_rho(float(rho))
        guess = trade_off.TradeOff(((float(epsilon), 1e-10),), mu).best_guess()
        assert display.percent_up(guess) == odds
        # The papers round rho up before or after they compute epsilon.
        assert gaussian.epsilon(mu, 1e-10) == pytest.approx(float(epsilon), rel=0.03)


def _written(example):
    """Returns the JSON of an example as a run writes it."""
    subject = {
        "date": "2026-11-24T19:00:00Z",
        "run": "0123456789abcdef",
        **dict.fromkeys(("model_sha256", "config_sha256", "data_hmac_sha256"), "0" * 64),
        "tensorflow": "2.14.1",
    }
    return json.loads(statement_text.to_json(dataclasses.replace(example, subject=subject)))


@pytest.mark.parametrize("kind", _KINDS)
def test_the_published_schema_describes_the_json(kind, examples):
    jsonschema.Draft202012Validator.check_schema(_SCHEMA)
    of_schema = jsonschema.Draft202012Validator(_SCHEMA)
    of_schema.validate(json.loads(statement_text.to_json(examples[kind])))
    of_schema.validate(_written(examples[kind]))
    refused = dataclasses.replace(
        examples[kind], epsilon=None, rho_zcdp=None, profile=(), no_guarantee=("No noise.",)
    )
    of_schema.validate(json.loads(statement_text.to_json(refused)))


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"epsilon": None},
        {"epsilon": -1.0},
        {"delta": 1.0},
        {"no_guarantee": ["why"]},
        {"unit_of_privacy": "client"},
        {"plain_sentences": []},
        {"profile": [[1.0, 2.0]]},
        {"accounted": {"num_rounds": 3}},
        {"subject": {"model_sha256": "short"}},
        {"another": "entry"},
    ],
)
def test_the_schema_refuses_what_no_statement_says(changes, examples):
    written = _written(examples["`train` (DP-FTRL)"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(written | changes, _SCHEMA)
    del written["caveats"]
    with pytest.raises(jsonschema.ValidationError, match="caveats"):
        jsonschema.validate(written, _SCHEMA)
