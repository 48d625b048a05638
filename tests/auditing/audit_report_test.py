"""Reports of audits: what they say, in which form, and what they never make of a claim."""

import dataclasses
import json
import math

import numpy as np
import pytest

from tff_dpftrl.accounting import facts, guarantee, statement, statement_text
from tff_dpftrl.auditing import audit_report
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.participation import schema as schema_lib

_GAME = audit_report.Finding(
    "game",
    "consistent",
    "10000 trials of 8 rounds.",
    error_rate=0.02,
    trials=10000,
    mu_at_least=0.91237,
    epsilon_at_least=2.34567,
    power="noise smaller by 4%",
)
_EXACT = audit_report.Finding("zero update", "consistent", "It counts as nobody.")
_UNTESTED = audit_report.Finding("restarts", "not tested", "There are none.")
_ESTIMATE = audit_report.Finding("estimate", "estimate", "About μ = 9.")
_COVERED = audit_report.Covered.of
_PARTLY = dataclasses.replace(
    _GAME, covers=(_COVERED("rounds", range(200), 400), _COVERED("tensors", range(6), 6))
)
_CURVE = audit_report.TradeOff((0.0, 0.1, 1.0), (1.0, 0.7, 0.0))


def _report(*findings, **kwargs):
    return audit_report.AuditReport(
        **{
            "subject": "a factory",
            "claim": claim_lib.Claim.gaussian(1.0, 1e-6),
            "findings": findings or (_GAME, _EXACT, _UNTESTED),
            "is_ours": True,
            "trade_off": _CURVE,
            **kwargs,
        }
    )


def _violated(**kwargs):
    changes = {"outcome": "violated", "mu_at_least": 1.25, "epsilon_at_least": 7.77777} | kwargs
    return _report(dataclasses.replace(_GAME, **changes), _EXACT)


def test_a_consistent_report_says_what_was_shown_and_by_what_chance():
    found = _report()
    assert found.verdict == "consistent with the claim"
    text = found.to_markdown()
    assert "**consistent with the claim (2 of 3 tests could be done)**" in text
    assert "at least ε = 2.345 at δ = 1e-06, μ = 0.9123, with 98% confidence" in text
    assert "at most 2%" in text and "noise smaller by 4%" in text
    assert "| restarts | not tested | 0 |  |  |  |" in text
    assert "shows no guarantee" in text
    assert "2 of 3 tests" in found.entry()
    assert "; at least ε = 2.345 at δ = 1e-06, with 98% confidence; tff_dpftrl" in found.entry()


@pytest.mark.parametrize(
    "indices, said",
    [
        (range(200), "rounds 1 to 200 of 400"),
        ((399, 0, 2, 1, 397, 398), "rounds 1 to 3 and 398 to 400 of 400"),
        ((0, 1, 9), "rounds 1, 2 and 10 of 400"),
        ((4,), "round 5 of 400"),
        (range(400), "all 400 rounds"),
        ((), "none of 400 rounds"),
    ],
)
def test_what_was_looked_at_is_named(indices, said):
    covered = _COVERED("rounds", indices, 400)
    assert str(covered) == said and covered.indices == set(indices)


def test_the_headline_counts_what_no_test_looked_at():
    late = dataclasses.replace(_EXACT, covers=(_COVERED("rounds", range(394, 400), 400),))
    found = _report(_PARTLY, late, _UNTESTED)
    assert found.headline.endswith(
        "(2 of 3 tests could be done; no test looked at 194 of 400 rounds)"
    )
    untested = dataclasses.replace(late, outcome="not tested")
    assert "200 of 400 rounds" in _report(_PARTLY, untested).headline
    assert found.powers == ("game: noise smaller by 4% (rounds 1 to 200 of 400; all 6 tensors)",)
    text = found.to_markdown()
    assert "10000 trials of 8 rounds. Looked at: rounds 1 to 200 of 400; all 6 tensors." in text


@pytest.mark.parametrize("only", [(_UNTESTED,), (_UNTESTED, _ESTIMATE)])
def test_a_report_without_a_test_is_consistent_with_nothing(only):
    for found in (_report(*only), _report(*only, missing="private/")):
        assert found.verdict == "nothing was tested"
        assert found.headline == "nothing was tested (0 of 1 tests could be done)"


def test_without_the_records_nothing_is_consistent_with_the_claim():
    found = dataclasses.replace(_report(), missing="private/")
    said = "nothing contradicts the claim, which cannot be derived without private/"
    assert found.verdict == said and found.headline == f"{said} (2 of 3 tests could be done)"
    assert said in found.entry() and "consistent with" not in found.to_markdown()
    assert audit_report.AuditReport.from_json(found.to_json()) == found
    refuted = dataclasses.replace(_violated(), missing="private/")
    assert refuted.verdict == _violated().verdict


def test_a_violation_is_said_with_its_confidence():
    said = "VIOLATED: at least ε = 7.777 with 98% confidence, where ε = 4.887 is claimed"
    assert _violated().verdict == said
    no_bound = _violated(epsilon_at_least=None, mu_at_least=None)
    assert no_bound.verdict == "VIOLATED with 98% confidence: game"
    by_sight = _report(dataclasses.replace(_EXACT, outcome="violated"))
    assert by_sight.verdict == "VIOLATED: zero update"


@pytest.mark.parametrize(
    ("error_rate", "confidence", "chance", "cell"),
    [
        (1e-6, "99.99", "0.0001", "1e-06"),
        (2.0**-60, "99.99", "8.674e-17", "8.68e-19"),
        (0.05 / 7, "99.28", "0.7143", "0.00715"),
    ],
)
def test_confidence_is_rounded_down_and_chance_up(error_rate, confidence, chance, cell):
    found = _violated(error_rate=error_rate)
    assert f"at least ε = 7.777 with {confidence}% confidence" in found.verdict
    text = found.to_markdown()
    assert f"at most {chance}%" in text and f"| game | violated | {cell} |" in text


def test_what_is_no_matter_of_chance_has_no_confidence():
    exact = dataclasses.replace(_EXACT, outcome="violated")
    assert _report(_GAME, exact).verdict == "VIOLATED: zero update"
    assert _report(_GAME).confidence < 1.0


def test_estimates_are_no_tests():
    assert _report(_GAME, _EXACT, _ESTIMATE).verdict == "consistent with the claim"
    assert "2 of 2 tests" in _report(_GAME, _EXACT, _ESTIMATE).entry()


def test_lower_bounds_are_never_rounded_up():
    for value in np.random.default_rng(1).lognormal(0.0, 3.0, 200).tolist():
        (line,) = [
            line
            for line in _violated(epsilon_at_least=value).to_markdown().splitlines()
            if line.startswith("| game")
        ]
        shown = float(line.split("|")[5])
        assert value * (1 - 2e-3) <= shown <= value


@pytest.mark.parametrize(
    "found",
    [
        _report(),
        _report(_PARTLY),
        _violated(),
        _report(trade_off=None, is_ours=False),
        _report(claim=claim_lib.Claim(math.inf, 1e-5)),
        _report(claim=claim_lib.Claim(1.5, 1e-5)),
    ],
)
def test_json_comes_back(found):
    again = audit_report.AuditReport.from_json(found.to_json())
    assert again == found and again.verdict == found.verdict


def test_reports_of_earlier_versions_are_read():
    values = json.loads(_report().to_json())
    for finding in values["findings"]:
        del finding["covers"]
    assert audit_report.AuditReport.from_json(json.dumps(values)) == _report()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        _report().to_json().replace('"consistent"', '"fine"'),
        _report().to_json().replace('"says"', '"tells"'),
        _report().to_json().replace('"delta": 1e-06', '"delta": 2'),
    ],
)
def test_what_is_no_report_is_refused(text):
    with pytest.raises(ValueError):
        audit_report.AuditReport.from_json(text)


@pytest.mark.pictures
def test_a_folder_gets_text_numbers_and_picture(tmp_path):
    folder = tmp_path / "new" / "audit"
    _report().save(folder)
    assert {file.name for file in folder.iterdir()} == {"audit.md", "audit.json", "trade_off.png"}
    assert (folder / "audit.md").read_text() == _report().to_markdown()
    assert audit_report.AuditReport.from_json((folder / "audit.json").read_text()) == _report()
    assert (folder / "trade_off.png").read_bytes()[1:4] == b"PNG"
    without = _report(trade_off=None)
    without.save(folder)  # No picture of another audit stays.
    assert {file.name for file in folder.iterdir()} == {"audit.md", "audit.json"}


def test_the_picture_has_all_curves():
    def lines(found):
        axes = found.draw().axes[0]
        return {line.get_label(): line for line in axes.get_lines()}

    drawn = lines(_report())
    assert set(drawn) == {"guessing", "claimed", "lower bound found", "tests that were tried"}
    np.testing.assert_array_equal(drawn["tests that were tried"].get_ydata(), [1.0, 0.7, 0.0])
    rates = drawn["claimed"].get_xdata()
    assert (rates[0], rates[-1]) == (0.0, 1.0) and np.all(np.diff(rates) > 0)
    claimed = _report().claim.least_false_negative_rate(rates)
    np.testing.assert_allclose(drawn["claimed"].get_ydata(), claimed)
    below = claim_lib.Claim.gaussian(0.91237, 1e-6).least_false_negative_rate(rates)
    np.testing.assert_allclose(drawn["lower bound found"].get_ydata(), below)


def test_the_bound_in_the_picture_is_what_was_found():
    def bound(**found):
        axes = _report(dataclasses.replace(_GAME, **found)).draw().axes[0]
        return [x for x in axes.get_lines() if x.get_label() == "lower bound found"]

    (line,) = bound(mu_at_least=None, epsilon_at_least=2.0)
    expected = claim_lib.Claim(2.0, 1e-6).least_false_negative_rate(line.get_xdata())
    np.testing.assert_allclose(line.get_ydata(), expected)
    assert not bound(mu_at_least=None, epsilon_at_least=None)
    with pytest.raises(ValueError, match="No game was played"):
        _report(trade_off=None).draw()


def test_somebodys_own_code_is_named_as_such():
    theirs = _report(is_ours=False)
    assert "its author answers" in theirs.to_markdown() and "not of this package" in theirs.entry()
    assert "its author answers" not in _report().to_markdown()


def _stated(**kwargs):
    claim = guarantee.dp_ftrl_guarantee(
        identity.Identity(),
        noise_multiplier=2.0,
        schema=schema_lib.MinSep(8, 2, 4),
        delta=1e-6,
        **kwargs,
    )
    return statement.dp_ftrl_statement(
        claim, facts.Facts(headline_caveats=("Toy.",)), unit_of_privacy="user"
    )


def test_an_audit_enters_a_statement_and_never_lowers_its_claim():
    before = _stated()
    after = before.with_audit(_report().entry(), is_refuted=False)
    assert before.audits == () and "## Audits" not in statement_text.markdown(before)
    assert set(after.diff(before)) == {"audits"}
    assert after.with_audit("audited: again", is_refuted=False).audits[0] == _report().entry()
    assert f"## Audits\n\n- {_report().entry()}\n" in statement_text.markdown(after)
    assert statement.PrivacyStatement.from_json(statement_text.to_json(after)) == after


def test_a_refuted_claim_says_so_beside_epsilon():
    found = _violated()
    after = _stated().with_audit(found.entry(), is_refuted=found.is_violated)
    assert set(after.diff(_stated())) == {"audits", "headline_caveats"}
    headline = statement_text.markdown(after).split("\n## ")[1]
    assert "An audit has refuted this claim" in headline and "at least ε = 7.777" in headline
    assert after.headline_caveats[1:] == ("Toy.",)


def test_no_audit_gives_a_statement_a_guarantee():
    after = _stated(seed_is_known=True).with_audit(_report().entry(), is_refuted=False)
    assert not after.has_guarantee and after.epsilon is None
    assert "## Guarantee\n\n**No differential privacy" in statement_text.markdown(after)
