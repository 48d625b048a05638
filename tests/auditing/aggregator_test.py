import dataclasses

import numpy as np
import pytest

import tff_dpftrl
from tests.auditing import planted_bugs
from tests.fixed_seeds import fixed_seeds  # noqa: F401
from tff_dpftrl.accounting import display, guarantee
from tff_dpftrl.auditing import aggregator as aggregator_lib
from tff_dpftrl.auditing import mechanism as mechanism_lib
from tff_dpftrl.private_round import (
    aggregation,
    clipping,
    estimators,
    fixed_clip,
    sampled_gaussian,
)

# Chance that a correct aggregator is called violated in a test, were its seeds not fixed.
_ERROR_RATE = 1e-3


def _games(trials, *, error_rate=_ERROR_RATE, **options):
    return aggregator_lib.GameBudget(trials, error_rate=error_rate, seed=1, **options)


def _audit(case, trials=800, *, error_rate=_ERROR_RATE, **options):
    budget = _games(trials, error_rate=error_rate)
    return tff_dpftrl.audit_aggregator(**case.arguments(), budget=budget, **options)


def _outcomes(report):
    return {finding.test: finding.outcome for finding in report.findings}


@pytest.mark.slow
def test_a_correct_aggregator_is_consistent_and_its_mu_nearly_reached():
    report = _audit(planted_bugs.CORRECT["BLT, restarted"], trials=1200)
    assert report.verdict == "consistent with the claim", report.to_markdown()
    assert report.is_ours
    # Standard error of μ √(4 / 1200) = 0.06; bounds at 1e-4 lie four of them below.
    assert report.claim.mu - 0.5 < report.mu_at_least < report.claim.mu
    assert report.confidence == pytest.approx(1 - _ERROR_RATE)
    assert "not tested" not in _outcomes(report).values()


@pytest.mark.slow
def test_fewer_rounds_are_held_to_what_the_claim_says_of_them():
    aggregator = planted_bugs.CORRECT["identity"].build()
    declared, played = tff_dpftrl.MinSep(12, 3, 4), tff_dpftrl.MinSep(6, 3, 4)
    report = tff_dpftrl.audit_aggregator(aggregator, schema=declared, budget=_games(200, rounds=6))
    claimed = guarantee.of_round(aggregator.private_round, played, report.claim.delta)
    assert report.claim.mu == pytest.approx(np.sqrt(2.0) * claimed.mu)
    for finding in report.findings:
        if finding.test.startswith("distinguishing game"):
            assert f"claimed is μ = {display.round_up(claimed.mu)}" in finding.says


@pytest.mark.parametrize(
    "name, test",
    [
        ("norms from C to 1.5 C not clipped", "what one client adds"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("same seed for two tensors", "noise: correlation of tensors and streams"),
                ("zero update contributing", "a client that sends zeros counts as nobody"),
                ("no fresh bits in a round", "a round executed again from its state"),
                ("exact norm among the measurements", "measurements: noised, or declared exact"),
                ("root seed of 24 bits", "entropy of the seed in the state"),
            )
        ),
    ],
)
def test_planted_bugs_are_found_where_they_are(name, test):
    report = _audit(planted_bugs.PLANTED[name], trials=400)
    assert _outcomes(report)[test] == "violated", report.to_markdown()
    assert not report.is_ours


@pytest.mark.slow
@pytest.mark.parametrize("name", planted_bugs.PLANTED)
def test_every_planted_bug_is_found_at_the_default_budget(name):
    report = _audit(planted_bugs.PLANTED[name], trials=8000, error_rate=0.05)
    assert report.is_violated, report.to_markdown()


@pytest.mark.slow
def test_a_buffer_that_is_lost_is_found_in_the_round_after_the_resume():
    report = _audit(planted_bugs.PLANTED["buffer reset at resume"], trials=400)
    assert _outcomes(report)["a run resumed from its state"] == "violated", report.to_markdown()


@pytest.mark.slow
@pytest.mark.parametrize("name", planted_bugs.CORRECT)
def test_correct_aggregators_of_every_kind_are_consistent(name):
    report = _audit(planted_bugs.CORRECT[name], trials=8000)
    assert report.verdict == "consistent with the claim", report.to_markdown()
    assert report.is_ours


def _weighted(estimator, weight_cap=1.0):
    return aggregation.Aggregation(
        sampled_gaussian.SampledGaussianRound(
            clipping=clipping.FlatClipping(0.5),
            noise_multiplier=0.5,
            estimator=estimator,
            weight_cap=weight_cap,
        )
    )


_SHORT = tff_dpftrl.MinSep(4, 1, 4)
_GAME = "distinguishing game, likelihood ratio"


@pytest.mark.slow
@pytest.mark.parametrize(
    "aggregator, mu",
    [
        # Twice the noise that is needed where the denominator stays.
        (_weighted(estimators.ClippedDenominator(0.1, 200.0)), 2.0),
        (_weighted(estimators.FixedDenominator(0.1, 100.0), weight_cap=100.0), 4.0),
    ],
    ids=["clipped denominator", "weight cap"],
)
def test_canaries_count_in_full_whatever_clients_are_weighted_with(aggregator, mu):
    report = tff_dpftrl.audit_aggregator(aggregator, schema=_SHORT, budget=_games(400))
    assert report.verdict == "consistent with the claim", report.to_markdown()
    (game,) = (finding for finding in report.findings if finding.test == _GAME)
    assert f"by that μ is {mu:.4g}." in game.says and game.outcome == "consistent"
    # Standard error of μ √(4 / 400 + μ² / 800) is 0.12 and 0.17.
    assert 0.7 * mu < report.mu_at_least < mu


@pytest.mark.slow
def test_games_whose_canaries_hardly_count_test_nothing():
    aggregator = _weighted(estimators.FixedDenominator(0.1, 100.0), weight_cap=100.0)
    believed = dataclasses.replace(mechanism_lib.Mechanism.of(aggregator), client_weight=1.0)
    report = tff_dpftrl.audit_aggregator(
        aggregator, schema=_SHORT, budget=_games(200), mechanism=believed
    )
    games = [one for one in report.findings if one.test.startswith("distinguishing game")]
    assert [game.outcome for game in games] == ["not tested"] * 2
    assert all("a canary adds 0.01 clip norms, where" in game.says for game in games)
    assert "each was seen to add 0.01 clip norms, and by that μ is 0.04." in games[0].says


@pytest.mark.parametrize(
    "num_rounds, rounds, message",
    [
        (2, None, r"schema\.num_rounds must be at least 3, got 2\. A saved state"),
        (2, 5, r"schema\.num_rounds must be at least 3, got 2\."),
        (8, 2, r"^rounds must be at least 3, got 2\. None plays all rounds"),
    ],
)
def test_too_few_rounds_are_refused_by_the_argument_that_is_too_small(num_rounds, rounds, message):
    with pytest.raises(ValueError, match=message):
        tff_dpftrl.audit_aggregator(
            planted_bugs.CORRECT["identity"].build(),
            schema=tff_dpftrl.MinSep(num_rounds, 1, 1),
            budget=aggregator_lib.GameBudget(rounds=rounds),
        )


@pytest.mark.parametrize("option", ["resume", "canaries_per_run", "trials"])
def test_options_of_another_type_are_refused(option):
    with pytest.raises(ValueError, match=f"^{option} must be .*got 'no'"):
        options = {option: "no"}
        if option in ("canaries_per_run", "trials"):
            options = {"budget": aggregator_lib.GameBudget(**options)}
        tff_dpftrl.audit_aggregator(
            planted_bugs.CORRECT["identity"].build(), schema=planted_bugs.SCHEMA, **options
        )


@pytest.mark.parametrize(
    "aggregator, message",
    [
        (type("Learning", (), {"get_model_weights": None})(), "audit_training"),
        (
            aggregation.Aggregation(
                planted_bugs.fixed(fixed_clip.FixedClipRound, deterministic_seed=3)
            ),
            "deterministic_seed",
        ),
    ],
)
def test_what_cannot_be_audited_is_refused(aggregator, message):
    with pytest.raises(ValueError, match=message):
        tff_dpftrl.audit_aggregator(aggregator, schema=planted_bugs.SCHEMA)
