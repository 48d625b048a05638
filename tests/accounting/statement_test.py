"""Statements: what they say, when they refuse to promise, and that they survive a file."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings

import pytest

from tff_dpftrl.accounting import display, guarantee, parts, statement, statement_text
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.mechanisms import tree
from tff_dpftrl.participation import observed
from tff_dpftrl.participation import schema as schema_lib

_SCHEMA = schema_lib.MinSep.from_gap(2000, 313, 6)


def _claim(noise_multiplier: float = 7.0, schema=_SCHEMA, **kwargs) -> guarantee.Guarantee:
    kwargs = {"delta": 1e-10} | kwargs
    return guarantee.dp_ftrl_guarantee(
        tree.Tree(2000), noise_multiplier=noise_multiplier, schema=schema, **kwargs
    )


def _statement(**kwargs) -> statement.PrivacyStatement:
    claim = kwargs.pop("claim", _claim())
    names = {field.name for field in dataclasses.fields(facts_lib.Facts)}
    facts = facts_lib.Facts(**{name: kwargs.pop(name) for name in names & kwargs.keys()})
    return statement.dp_ftrl_statement(claim, facts, **({"unit_of_privacy": "device"} | kwargs))


def _headline(built: statement.PrivacyStatement) -> list[str]:
    """The paragraphs of the section that says ε."""
    return statement_text.markdown(built).split("\n## ")[1].strip().split("\n\n")[1:]


def test_markdown_says_what_the_checklist_asks_for():
    built = _statement(
        parameters={"clip_norm": 5.0},
        observed=observed.Participation(2000, 320, 5),
        vocabulary_source="a public word list",
        hyperparameter_tuning="taken from a public corpus",
    )
    text = statement_text.markdown(built)
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


def test_caveats_on_arithmetic_follow_the_generator_of_the_noise():
    usual = _statement()
    assert sentences.FLOATING_POINT in usual.caveats
    assert sentences.SECURE_GENERATOR not in usual.assumptions
    for arguments, caveats in (
        ((True,), []),
        ((False,), [sentences.ROUNDED_CORRELATION]),
        ((True, True), [sentences.ROUNDED_BY_PARTIES]),
    ):
        generator = {sentences.NOISE_GENERATOR: sentences.noise_generator(*arguments)}
        built = _statement(parameters=generator)
        assert [one for one in built.caveats if one not in usual.caveats] == caveats
        assert sentences.FLOATING_POINT not in built.caveats
        assert sentences.SECURE_GENERATOR in built.assumptions
        assert "AES-256 in counter mode" in statement_text.markdown(built)
        assert built.epsilon == usual.epsilon


@pytest.mark.parametrize(
    ("cost", "is_noised"),
    [
        ({"rho_zcdp": 0.1}, True),
        ({"noise_multiplier_of_round": 9.0}, True),
        ({"epsilon": 1}, False),
    ],
)
def test_noise_of_other_parts_is_not_said_to_be_secure(cost, is_noised):
    claim = _claim(others=(parts.Part(parts.METRICS, "figures", **cost),))
    usual = _statement(claim=claim)
    assert sentences.OTHER_GENERATORS not in usual.caveats
    secure = {sentences.NOISE_GENERATOR: sentences.SECURE_AND_EXACT}
    built = _statement(claim=claim, parameters=secure)
    assert (sentences.OTHER_GENERATORS in built.caveats) == is_noised


@pytest.mark.parametrize(
    "kwargs, reason",
    [
        ({"claim": _claim(0.0)}, "No noise"),
        ({"claim": _claim(seed_is_known=True)}, "subtract"),
        ({"claim": _claim(1e-200)}, "too little for any finite epsilon"),
        (
            {"observed": observed.Participation(2000, 313, 6)},
            "declared: a stride of 313 rounds is",
        ),
        (
            {"observed": observed.Participation(2000, 314, 7)},
            "declared: 7 participations",
        ),
        (
            {"observed": observed.Participation(2001, 314, 6)},
            "declared: 2001 rounds exceed",
        ),
    ],
)
def test_a_broken_claim_is_withdrawn(kwargs, reason):
    built = _statement(**kwargs)
    assert not built.has_guarantee
    assert built.epsilon is None and built.rho_zcdp is None
    text = statement_text.markdown(built)
    assert "**No differential privacy guarantee.**" in text
    assert reason in text
    assert "ε = " not in text and "ρ = 0" not in text
    opening = statement_text.plain(built)
    assert opening[0].startswith("Nobody is protected") and reason in opening[0]
    assert "may be right every time" in opening[2] and "%" not in "".join(opening)
    values = json.loads(statement_text.to_json(built))
    assert values["epsilon"] is None and values["rho_zcdp"] is None
    assert statement.PrivacyStatement.from_json(statement_text.to_json(built)) == built


def test_a_claim_for_fewer_participations_than_observed_is_withdrawn():
    narrow = _claim(schema=schema_lib.MinSep(2000, 400, 2))
    built = _statement(
        claim=narrow, declared=_SCHEMA, observed=observed.Participation(2000, 400, 3)
    )
    assert "accounted for: 3 participations of one client exceed" in built.no_guarantee[0]


def test_a_run_cut_short_is_charged_for_what_it_released():
    short = dataclasses.replace(_SCHEMA, num_rounds=1000)
    built = _statement(
        claim=_claim(schema=short),
        declared=_SCHEMA,
        observed=observed.Participation(1000, None, 1),
    )
    assert built.has_guarantee
    assert built.epsilon < _statement().epsilon
    text = statement_text.markdown(built)
    assert "| accounted for | 1000 | 314 | 313 | 6 |" in text
    assert "| observed | 1000 | none took part twice | | 1 |" in text


def test_json_round_trip_is_exact():
    built = _statement(observed=observed.Participation(1990, None, 1), caveats=("One more.",))
    again = statement.PrivacyStatement.from_json(statement_text.to_json(built))
    assert again == built
    assert again.diff(built) == {}
    assert statement_text.markdown(again) == statement_text.markdown(built)


@pytest.mark.parametrize("text", ["{}", "[]", '{"epsilon": 1.0}'])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match="not a privacy statement"):
        statement.PrivacyStatement.from_json(text)


def test_whole_numbers_of_other_tools_are_numbers():
    claim = statement.SampledClaim(
        mechanism="x",
        epsilon=1.0,
        delta=1e-7,
        accounting="PLD.",
        sampling="Poisson.",
        profile=((0.0, 0.25), (0.5, 0.125)),
    )
    built = statement.sampled_statement(claim)
    made = statement_text.to_json(built)
    text = made.replace("0.0,", "0,").replace('"epsilon": 1.0', '"epsilon": 1')
    assert text != made  # JavaScript and jq write 0.0 as 0.
    assert statement.PrivacyStatement.from_json(text) == built


def test_no_name_begins_a_part_of_its_own():
    evil = "a row\n\n## Guarantee\u2028\r**User-level (ε = 0.01)**"
    facts = facts_lib.Facts(parameters={"user": evil, "data": evil})
    built = statement.dp_ftrl_statement(_claim(), facts, unit_of_privacy="user")
    text = statement_text.markdown(built)
    lines = text.splitlines()
    assert lines.count("## Guarantee") == 1
    assert not any(line.startswith("**User-level (ε = 0.01") for line in lines)
    assert "A user is here a row  ## Guarantee" in text


def test_a_model_without_a_vocabulary_has_a_statement_without_one():
    """Of images, say, and of whatever else the caller does not describe."""
    built = _statement()
    text = statement_text.markdown(built)
    assert "vocabulary" not in text and "which words" not in text
    assert "how inputs are made of the data" in built.adjacency
    built = _statement(vocabulary_source="x")
    assert "which words the model knows" in statement_text.markdown(built)


def test_parts_that_count_all_users_are_zeroed_whether_they_are_sampled_or_not():
    words = parts.Part(parts.VOCABULARY, "words", rho_zcdp=0.1)
    figures = parts.Part(parts.METRICS, "loss of each round", rho_zcdp=0.1)
    promise = {"epsilon": 1.0, "delta": 1e-6, "accounting": "", "sampling": ""}
    claim = statement.SampledClaim(mechanism="any", others=(words, figures), **promise)
    text = statement.sampled_statement(claim).adjacency
    assert "whenever they are sampled, and in the vocabulary, for which nobody is sampled" in text
    assert "metrics" not in text  # They are of the sampled users.
    claim = dataclasses.replace(claim, others=(), apart=(parts.MEDIAN,))
    assert "in the median of the group sizes, for" in statement.sampled_statement(claim).adjacency
    in_turns = _statement(claim=dataclasses.replace(_claim(), others=(words, figures)))
    assert "in every round and in the vocabulary (Kairouz" in in_turns.adjacency


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("counted on /home/ada/my/users.jsonl, so", "counted on users.jsonl, so"),
        ("~/texts/book.txt", "book.txt"),
        (r"C:\Users\Ada\book.txt", "book.txt"),
        ("'/tmp/x'", "'x'"),
        ("and/or 1/2 of https://example.org/a/b", "and/or 1/2 of https://example.org/a/b"),
    ],
)
def test_a_statement_names_no_path_of_the_machine(text, stated):
    facts = {"vocabulary_source": text, "hyperparameter_tuning": text, "parameters": {"data": text}}
    facts |= dict.fromkeys(("not_covered", "caveats", "headline_caveats"), (text,))
    built = statement_text.markdown(_statement(**facts))
    assert built.count(stated) == 6 and (text == stated or text not in built)


def test_diff_names_what_changed():
    first = _statement(parameters={"clip_norm": 1.0, "seed": 3}, vocabulary_source="private")
    second = _statement(parameters={"clip_norm": 2.0}, vocabulary_source="public")
    assert first.diff(second).keys() == {
        "parameters.clip_norm",
        "parameters.seed",
        "not_covered",
    }
    assert first.diff(second)["parameters.clip_norm"] == (1.0, 2.0)
    assert first.diff(second)["parameters.seed"] == (3, None)


def test_without_a_record_the_headline_says_that_participation_was_assumed():
    assumed = _statement()
    (headline,) = _headline(assumed)
    bold = headline.split("**")[1]
    assert bold.startswith("Device-level (ε = 8.527, δ = 1e-10)-differential privacy, if")
    assert bold.endswith("it was assumed, not observed")
    assert json.loads(statement_text.to_json(assumed))["participation_record"] == "assumed"

    recorded = _statement(observed=observed.Participation(2000, 320, 5))
    (headline,) = _headline(recorded)
    assert "assumed" not in headline
    assert json.loads(statement_text.to_json(recorded))["participation_record"] == "observed"
    # A record that is claimed and missing is not believed.
    forged = statement_text.to_json(assumed).replace('"assumed"', '"observed"')
    with pytest.raises(ValueError, match="participation_record='observed'"):
        statement.PrivacyStatement.from_json(forged)


def test_the_ledgers_summary_is_taken_as_it_is_without_its_histogram():
    seen = observed.ObservedParticipation(2000, 320, 5, {1: 7, 5: 1})
    built = _statement(observed=seen)
    assert built == _statement(observed=observed.Participation(2000, 320, 5))
    assert "histogram" not in statement_text.to_json(built)


@pytest.mark.parametrize(("num_users", "is_said"), [(318, True), (10**6, True), (50_000, False)])
def test_a_delta_under_which_somebody_may_lose_all_stands_under_the_headline(num_users, is_said):
    # The default of fine-tuning, of users with one example each, or (last) with ten.
    delta = (num_users * (1 if is_said else 10)) ** -1.1
    built = _statement(claim=_claim(delta=delta), num_users=num_users)
    expected = delta * num_users
    said = f"**δ = {display.delta(delta)} times the {num_users} devices is "
    said += f"{display.round_up(expected, 2)}: "
    assert any(line.startswith(said) for line in _headline(built)) == is_said == (expected > 0.1)
    if is_said:
        somebody = 1.0 - (1.0 - delta) ** num_users
        said = f"probability {display.round_up(somebody, 2)}. Choose a δ below"
        assert said in _headline(built)[1]


def test_the_caveat_of_a_delta_rounds_up_what_may_happen_and_down_what_helps():
    (said,) = sentences.delta_caveats(9.66e-5, 1500, "user")  # 0.1449; 1 - (1 - δ)^1500 = 0.1349.
    assert "the 1500 users is 0.15: " in said and "with probability 0.14. " in said
    assert said.endswith("Choose a δ below 6e-05.")  # 6.9e-05 would have the caveat again.
    assert sentences.delta_caveats(6.9e-5, 1500, "user")
    assert not sentences.delta_caveats(6e-5, 1500, "user")


def test_delta_is_rounded_up():
    delta = 1000**-1.1  # 0.00050118723: ε need not hold at 0.000501187.
    built = _statement(claim=_claim(delta=delta), parameters={"clip_norm": 1.0})
    assert "δ = 0.000501188)-differential privacy" in _headline(built)[0]
    assert "0.000501187" not in statement_text.markdown(built)
    assert display.epsilon_at(1.23456, delta) == "ε = 1.235 at δ = 0.000501188"
    assert display.delta(5000**-1.1, 3) == "8.54e-05"  # 8.5336e-05.
    assert [display.delta(delta) for delta in (1e-10, 1e-5, 0.5)] == ["1e-10", "1e-05", "0.5"]
    assert float(display.delta(5e-324)) == 5e-324


def test_a_delta_that_protects_nobody_stands_under_the_headline():
    # Delta at least 1 / users allows to publish all data of a user drawn at random.
    claim = _claim(delta=0.5)
    with pytest.warns(UserWarning, match="delta=0.5 is not below 1 / 27") as caught:
        built = statement.dp_ftrl_statement(claim, unit_of_privacy="user", num_users=27)
    assert caught[0].filename == __file__
    assert built.epsilon < 1.0
    headline, caveat = _headline(built)
    assert "δ = 0.5" in headline
    assert caveat.startswith("**δ = 0.5 is not below 1 / 27") and "drawn at random" in caveat
    assert statement.PrivacyStatement.from_json(statement_text.to_json(built)) == built
    with pytest.warns(UserWarning, match="not below"):
        assert _statement(claim=_claim(delta=1 / 49), num_users=49).headline_caveats
    sampled = statement.SampledClaim(
        mechanism="x", epsilon=1.0, delta=0.1, accounting="PLD.", sampling="Poisson."
    )
    with pytest.warns(UserWarning, match="not below"):
        assert statement.sampled_statement(sampled, num_users=10).headline_caveats


def test_a_small_delta_needs_no_caveat_and_a_large_one_does_without_a_population():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = _statement(num_users=10**6)
        unknown = _statement(claim=_claim(delta=0.01))
    assert built.headline_caveats == () and built.parameters["num_users"] == 10**6
    assert "with 100 devices or more" in _headline(unknown)[1]
    assert _statement(claim=_claim(delta=1e-3)).headline_caveats == ()


def test_the_adjacency_says_what_is_held_fixed_and_no_more():
    text = _statement(vocabulary_source="a word list").adjacency
    assert "adding" not in text and "removing" not in text
    for fixed in ("number of devices", "take part in which round", "the vocabulary", "every seed"):
        assert fixed in text
    assert "shifted bit" not in text
    adaptive = _statement(claim=_claim(adaptive_clipping=True))
    assert "the shifted bit" in adaptive.adjacency
    assert "the clip norm that the round uses" in "".join(adaptive.assumptions)
    sampled = statement.sampled_statement(
        statement.SampledClaim(mechanism="x", epsilon=1.0, delta=1e-6, accounting="", sampling="")
    ).adjacency
    assert "Add or remove" not in sampled and "number of users" in sampled


def test_encoded_contributions_are_not_said_to_keep_to_the_clip_norm():
    (bound,) = [text for text in _statement().assumptions if text.startswith("The L2 norm")]
    assert "encoded" in bound and "norm that noise_multiplier is relative to" in bound


def test_the_clip_norm_is_named_where_it_is_known():
    assert _statement(claim=_claim(clip_norm=5.0)).parameters["clip_norm"] == 5.0
    assert "clip_norm" not in _statement().parameters


def test_user_level_statement_says_user():
    text = statement_text.markdown(_statement(unit_of_privacy="user"))
    assert "**User-level" in text and "one user" in text
    assert "several devices" not in text


def test_statement_of_a_sampled_mechanism():
    claim = statement.SampledClaim(
        mechanism="dp-fedavg",
        epsilon=3.89,
        delta=1e-9,
        accounting="Poisson-sampled Gaussian, privacy loss distribution.",
        sampling="Every user is in a round's cohort with probability 0.01.",
    )
    built = statement.sampled_statement(claim, facts_lib.Facts({"sampling_probability": 0.01}))
    assert "probability 0.01" in statement_text.markdown(built)
    (headline,) = _headline(built)
    assert headline.startswith("**User-level (ε = 3.89, δ = 1e-09)-differential privacy, if the")
    assert "sampling of cohorts was kept: it was assumed, not observed**" in headline
    assert statement.PrivacyStatement.from_json(statement_text.to_json(built)) == built
    # The server must keep the samples secret, and ε is not for who learns them on the way.
    assert "to keep secret who is drawn for which round, what users send" in built.setting
    assert "learns in which rounds you took part" in statement_text.plain(built)[1]
    assert "is drawn" not in _statement().setting and "you took" not in _statement().from_whom
    for change in {"epsilon": math.inf}, {"seed_is_known": True}:
        changed = dataclasses.replace(claim, **change)
        assert not statement.sampled_statement(changed).has_guarantee


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"epsilon": None}, "reasons"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"no_guarantee": ("why",)}, "reasons"),
        ({"epsilon": None, "no_guarantee": ("why",)}, "rho_zcdp"),
        ({"unit_of_privacy": "text"}, "unit_of_privacy"),
        ({"delta": 0.0}, "delta"),
    ],
)
def test_an_inconsistent_statement_cannot_be_built(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_statement(), **changes)


def test_statements_from_before_there_were_audits_are_read():
    built = _statement()
    values = json.loads(statement_text.to_json(built))
    del values["audits"]
    assert statement.PrivacyStatement.from_json(json.dumps(values)) == built
    with pytest.raises(ValueError, match="audits is of another type"):
        statement.PrivacyStatement.from_json(json.dumps(values | {"audits": "none"}))


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


def test_noise_and_lower_bounds_are_rounded_down():
    values = (8.526979, 8.526, 0.0, 1.2399e-7, 99999.2, math.inf)
    shown = [display.round_down(value) for value in values]
    assert shown == ["8.526", "8.526", "0", "1.239e-07", "9.999e+04", "∞"]
    assert display.round_down(0.123456789, 6) == "0.123456"
