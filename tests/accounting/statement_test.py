"""Statements: what they say, when they refuse to promise, and that they survive a file."""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import pytest

from tff_dpftrl.accounting import display, guarantee, statement
from tff_dpftrl.mechanisms import tree
from tff_dpftrl.participation import schema as schema_lib

_SCHEMA = schema_lib.MinSep.from_gap(2000, 313, 6)


def _claim(noise_multiplier: float = 7.0, schema=_SCHEMA) -> guarantee.Guarantee:
    return guarantee.dp_ftrl_guarantee(
        tree.Tree(2000), noise_multiplier=noise_multiplier, schema=schema, delta=1e-10
    )


def _statement(**kwargs) -> statement.PrivacyStatement:
    claim = kwargs.pop("claim", _claim())
    return statement.dp_ftrl_statement(claim, **({"unit_of_privacy": "device"} | kwargs))


def test_markdown_says_what_the_checklist_asks_for():
    text = _statement(
        parameters={"clip_norm": 5.0},
        observed=statement.Participation(2000, 320, 5),
        vocabulary_source="a public word list",
        hyperparameter_tuning="taken from a public corpus",
    ).to_markdown()
    # es-ES of 2022 (McMahan & Thakurta): S² = 79, rho = 79 / 98, epsilon 8.5261; both rounded up.
    assert "ε = 8.527, δ = 1e-10" in text
    assert "ρ = 0.8062 zCDP" in text
    assert "| declared | 2000 | 314 | 313 | 6 |" in text
    assert "| observed | 2000 | 320 | 319 | 5 |" in text
    for expected in (
        "Device-level",
        "Central differential privacy",
        "Zero-out",
        "a public word list",
        "taken from a public corpus",
        "- clip_norm: 5.0",
        "floating-point",
        "several devices",
        "tff_dpftrl 0.",
    ):
        assert expected in text
    assert "No differential privacy" not in text


@pytest.mark.parametrize(
    "kwargs, reason",
    [
        ({"claim": _claim(0.0)}, "No noise"),
        ({"deterministic_seed": True}, "subtract"),
        ({"observed": statement.Participation(2000, 313, 6)}, "313 apart (stride), 314 declared"),
        ({"observed": statement.Participation(2000, 314, 7)}, "took part 7 times, 6 declared"),
        ({"observed": statement.Participation(2001, 314, 6)}, "2001 rounds were run"),
    ],
)
def test_a_broken_claim_is_withdrawn(kwargs, reason):
    found = _statement(**kwargs)
    assert not found.has_guarantee
    assert found.epsilon is None and found.rho_zcdp is None
    text = found.to_markdown()
    assert "**No differential privacy guarantee.**" in text
    assert reason in text
    assert "ε =" not in text and "ρ =" not in text
    values = json.loads(found.to_json())
    assert values["epsilon"] is None and values["rho_zcdp"] is None
    assert statement.PrivacyStatement.from_json(found.to_json()) == found


def test_a_claim_for_fewer_participations_than_observed_is_withdrawn():
    narrow = _claim(schema=schema_lib.MinSep(2000, 400, 2))
    found = _statement(
        claim=narrow, declared=_SCHEMA, observed=statement.Participation(2000, 400, 3)
    )
    assert "took part 3 times, 2 accounted for" in found.no_guarantee[0]


def test_a_run_cut_short_is_charged_for_what_it_released():
    short = dataclasses.replace(_SCHEMA, num_rounds=1000)
    found = _statement(
        claim=_claim(schema=short),
        declared=_SCHEMA,
        observed=statement.Participation(1000, None, 1),
    )
    assert found.has_guarantee
    assert found.epsilon < _statement().epsilon
    text = found.to_markdown()
    assert "| accounted for | 1000 | 314 | 313 | 6 |" in text
    assert "| observed | 1000 | none took part twice | | 1 |" in text


def test_json_round_trip_is_exact():
    found = _statement(observed=statement.Participation(1990, None, 1), caveats=("One more.",))
    again = statement.PrivacyStatement.from_json(found.to_json())
    assert again == found
    assert again.diff(found) == {}
    assert again.to_markdown() == found.to_markdown()


@pytest.mark.parametrize("text", ["{}", "[]", '{"epsilon": 1.0}'])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match="not a privacy statement"):
        statement.PrivacyStatement.from_json(text)


def test_diff_names_what_changed():
    first = _statement(parameters={"clip_norm": 1.0, "seed": 3})
    second = _statement(parameters={"clip_norm": 2.0}, vocabulary_source="public")
    assert first.diff(second).keys() == {
        "parameters.clip_norm",
        "parameters.seed",
        "not_covered",
    }
    assert first.diff(second)["parameters.clip_norm"] == (1.0, 2.0)
    assert first.diff(second)["parameters.seed"] == (3, None)


def test_user_level_statement_says_user():
    text = _statement(unit_of_privacy="user").to_markdown()
    assert "**User-level" in text and "one user" in text
    assert "several devices" not in text


def test_statement_of_a_sampled_mechanism():
    kwargs = {
        "mechanism": "dp-fedavg",
        "delta": 1e-9,
        "accounting": "Poisson-sampled Gaussian, privacy loss distribution.",
        "sampling": "Every user is in a round's cohort with probability 0.01.",
        "parameters": {"sampling_probability": 0.01},
    }
    found = statement.sampled_statement(epsilon=3.89, **kwargs)
    assert "probability 0.01" in found.to_markdown()
    assert "**User-level (ε = 3.89, δ = 1e-09)" in found.to_markdown()
    assert statement.PrivacyStatement.from_json(found.to_json()) == found
    assert not statement.sampled_statement(epsilon=math.inf, **kwargs).has_guarantee
    seeded = statement.sampled_statement(epsilon=3.89, deterministic_seed=True, **kwargs)
    assert not seeded.has_guarantee


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"epsilon": None}, "reasons"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"no_guarantee": ("why",)}, "reasons"),
        ({"epsilon": None, "no_guarantee": ("why",)}, "rho_zcdp"),
        ({"unit_of_privacy": "example"}, "unit_of_privacy"),
        ({"delta": 0.0}, "delta"),
    ],
)
def test_an_inconsistent_statement_cannot_be_built(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_statement(), **changes)


@pytest.mark.parametrize(
    "value, text",
    [
        (8.526079, "8.527"),
        (8.527, "8.527"),
        (0.8061224, "0.8062"),
        (0.0, "0"),
        (99999.2, "1e+05"),
        (1.23e-7, "1.23e-07"),
        (math.inf, "unbounded"),
        (None, "unbounded"),
    ],
)
def test_numbers_are_rounded_up(value, text):
    assert display.round_up(value) == text


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
