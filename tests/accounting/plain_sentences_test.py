"""Tests of the plain opening of a statement: it says no more than the rest of it promises."""

from __future__ import annotations

import dataclasses

import pytest

from tff_dpftrl.accounting import composition, guarantee, statement, statement_text
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.mechanisms import restarts, tree
from tff_dpftrl.participation import observed
from tff_dpftrl.participation import schema as schema_lib

_SCHEMA = schema_lib.MinSep(100, 20, 5)
_SEEN = observed.Participation(100, 20, 5)
_NO_FACTS = facts_lib.Facts()


def _statement(facts=_NO_FACTS, unit="user", seen=_SEEN, **kwargs):
    claim = guarantee.dp_ftrl_guarantee(
        tree.Tree(100), schema=_SCHEMA, delta=1e-7, noise_multiplier=5.0, **kwargs
    )
    return statement.dp_ftrl_statement(claim, facts, unit_of_privacy=unit, observed=seen)


def _sampled(facts=_NO_FACTS, **changes):
    claim = statement.SampledClaim(
        mechanism="x", epsilon=1.0, delta=1e-7, accounting="PLD.", sampling="Poisson."
    )
    return statement.sampled_statement(dataclasses.replace(claim, **changes), facts)


def test_the_odds_are_those_of_the_gaussian_and_not_of_epsilon():
    # S² = 50 and z = 5: mu = √2, whose best guess is Φ(mu / 2) = 0.7602.
    odds = statement_text.plain(_statement())[2]
    assert "is right at most 77 % of the time, where 50 % would be chance." in odds
    assert "The attacker already knows who takes part and when, and how much data there is." in odds
    # e^ε / (1 + e^ε) would say 99.97 %. Without ρ, it is all that is known.
    without = dataclasses.replace(_statement(), rho_zcdp=None)
    assert "at most 99.97 % of the time" in statement_text.plain(without)[2]


def test_the_odds_of_a_sampled_run_come_from_its_profile():
    odds = statement_text.plain(_sampled())[2]
    assert "at most 74 % of the time" in odds  # e / (1 + e) = 0.731
    assert "already knows who may be drawn and with what chance, and how much" in odds
    better = _sampled(profile=((0.0, 0.29), (0.5, 0.1)))
    assert "at most 65 % of the time" in statement_text.plain(better)[2]  # 0.645, of ε = 0
    assert better.trade_off().points == ((1.0, 1e-7), (0.0, 0.29), (0.5, 0.1))


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        (_statement(seen=None), "if nobody took part more often, or sooner again, than declared: "),
        (_sampled(), "if what each round used was drawn at random and in secret: that was assumed"),
        (_statement(clipped_by_caller=True), "It rests on code outside this package, which nothin"),
        (_statement(facts_lib.Facts(headline_caveats=["But."])), "The sentences in bold below bel"),
        (
            _statement(facts_lib.Facts(earlier_runs=[composition.Spent("a", 1e-7, 7.0, 0.8)])),
            "From it together with the runs that its initial weights come from, the guess is right",
        ),
        (
            _statement(facts_lib.Facts(earlier_runs=[composition.Spent("a", None, None)])),
            "other runs that are named below: the guess may be right every time.",
        ),
        (
            _statement(facts_lib.Facts(headline_caveats=[sentences.INITIAL_WEIGHTS])),
            "This counts this run alone, and nothing else that was trained on your data.",
        ),
    ],
)
def test_what_the_odds_rest_on_is_said_with_them(stated, says):
    assert says in statement_text.plain(stated)[2]
    assert says not in statement_text.plain(_statement())[2]


def test_a_refuted_claim_has_no_odds():
    refuted = _statement().with_audit("audit of 2026", is_refuted=True)
    who, _, odds, *_ = statement_text.plain(refuted)
    assert who.startswith("Take nobody to be protected: an audit has f")
    assert "a guess may be right every time" in odds and "%" not in odds
    upheld = _statement().with_audit("audit of 2026", is_refuted=False)
    assert statement_text.plain(upheld) == statement_text.plain(_statement())


class _OfAnAuthor(tree.Tree):
    """A mechanism of code outside the package, which may change what it likes."""

    mechanism = "of-an-author"


def test_a_sensitivity_that_its_author_claims_is_called_so():
    def stated(strategy):
        claim = guarantee.dp_ftrl_guarantee(
            strategy, schema=_SCHEMA, delta=1e-7, noise_multiplier=5.0
        )
        return statement.dp_ftrl_statement(claim, unit_of_privacy="user", observed=_SEEN)

    for strategy in (_OfAnAuthor(100), restarts.Restarted(_OfAnAuthor(50), (0, 50))):
        theirs = stated(strategy)
        assert "what the author of the mechanism says of it" in statement_text.plain(theirs)[2]
        assert any("tff_dpftrl.check_strategy" in line for line in theirs.assumptions)
        assert "author of the mechanism" in theirs.headline_caveats[0]
    ours = stated(restarts.Restarted(tree.Tree(50), (0, 50)))
    assert "author" not in statement_text.markdown(ours)


def test_the_opening_is_about_the_unit_of_privacy():
    user, device, example = (statement_text.plain(_statement(unit=u)) for u in _units())
    assert user[0].startswith("Every single user is protected, with all of its data")
    assert "A person with several devices is protected less" in device[0]
    assert "All examples of one person together are protected less" in example[0]
    assert "your device's data" in device[2] and "one example of yours" in example[2]
    of_author = _statement(facts_lib.Facts({"user": "one author of commits"}))
    assert statement_text.plain(of_author)[0].endswith("A user is here one author of commits.")


def _units():
    return ("user", "device", "example")


def test_the_opening_of_a_statement_of_an_earlier_version_sends_to_its_setting():
    earlier = dataclasses.replace(_statement(), from_whom="")
    assert "said below, under Trust" in statement_text.plain(earlier)[1]
