import dataclasses
import sys

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("tensorflow_federated", reason="audits aggregators of TFF")

import tensorflow_federated as tff

import tff_dpftrl
from tests.auditing import planted_bugs
from tests.fixed_seeds import fixed_seeds  # noqa: F401
from tff_dpftrl import execution
from tff_dpftrl.accounting import display
from tff_dpftrl.auditing import aggregator as aggregator_lib
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing import mechanism as mechanism_lib
from tff_dpftrl.auditing import probes
from tff_dpftrl.private_round import clipping

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
@pytest.mark.parametrize("grid", [{"encoding": planted_bugs.encoding()}, {"bits": 20}])
def test_secure_aggregators_are_audited_on_a_grid_of_theirs_or_one_that_is_made(grid):
    with execution.compiled_only():
        aggregator = tff_dpftrl.build_secagg_dp_ftrl_aggregator(
            planted_bugs.blt(),
            noise_multiplier=2.0,
            clients_per_round=planted_bugs.CLIENTS_PER_ROUND,
            clip_norm=planted_bugs.CLIP_NORM,
            **grid,
        )
        report = tff_dpftrl.audit_aggregator(
            aggregator, schema=planted_bugs.SCHEMA, budget=_games(800)
        )
    assert report.verdict == "consistent with the claim", report.to_markdown()
    assert report.is_ours
    assert _outcomes(report)["distinguishing game, likelihood ratio"] == "consistent"


@pytest.mark.slow
def test_a_client_that_counts_in_full_is_weighed_to_do_so():
    inner = planted_bugs.CORRECT["identity"].build()
    report = tff_dpftrl.audit_aggregator(
        tff_dpftrl.WeightedFactory(inner, weight_cap=20.0),
        schema=tff_dpftrl.MinSep(6, 3, 2),
        budget=_games(800),
    )
    assert report.verdict == "consistent with the claim", report.to_markdown()
    # With a weight of 1, not 20, the canaries would reach a twentieth of μ.
    assert report.mu_at_least > 0.5 * report.claim.mu


@pytest.mark.slow
def test_fewer_rounds_are_held_to_what_the_claim_says_of_them():
    aggregator = planted_bugs.CORRECT["identity"].build()
    declared, played = tff_dpftrl.MinSep(12, 3, 4), tff_dpftrl.MinSep(6, 3, 4)
    report = tff_dpftrl.audit_aggregator(aggregator, schema=declared, budget=_games(200, rounds=6))
    claimed = aggregator.guarantee(played, report.claim.delta)
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


def test_a_mechanism_of_which_nothing_is_known_is_tested_without_numbers():
    process = (
        planted_bugs.CORRECT["identity"]
        .build()
        .create(tff.to_type([(np.float32, [80]), (np.float32, [3])]))
    )
    schema = tff_dpftrl.MinSep(6, 3, 2)
    claim = claim_lib.Claim(epsilon=8.0, delta=1e-6)
    report = tff_dpftrl.audit_aggregator(process, schema=schema, claim=claim, budget=_games(240))
    assert report.verdict == "consistent with the claim", report.to_markdown()
    assert not report.is_ours
    outcomes = _outcomes(report)
    assert outcomes["what one client adds"] == "not tested"
    # So few trials refute no ε = 8.
    assert outcomes["distinguishing game, learned classifier"] == "not tested"


class _NoiseOfAll(tff.aggregators.UnweightedAggregationFactory):
    """Adds one number to all coordinates: of no mechanism that keeps them apart."""

    def __init__(self, stddev):
        self._stddev = stddev

    def create(self, value_type):
        inner = tff.aggregators.SumFactory().create(value_type)
        stddev = self._stddev

        @tff.tensorflow.computation(value_type)
        def clip(value):
            return tf.clip_by_global_norm(value, 1.0)[0]

        @tff.tensorflow.computation(value_type)
        def with_noise(value):
            noise = tf.random.normal([], stddev=stddev)
            return tf.nest.map_structure(lambda x: x + noise, value)

        @tff.federated_computation(
            inner.initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            summed = inner.next(state, tff.federated_map(clip, value))
            released = tff.federated_map(with_noise, summed.result)
            return tff.templates.MeasuredProcessOutput(summed.state, released, summed.measurements)

        return tff.templates.AggregationProcess(inner.initialize, next_fn)


@pytest.mark.parametrize(
    "stddev, canaries_per_run, is_violated",
    [
        (1e-3, None, True),
        pytest.param(1e6, None, False, marks=pytest.mark.slow),
        pytest.param(1e-3, 1, True, marks=pytest.mark.slow),
    ],
)
def test_of_a_black_box_only_bounds_that_hold_for_every_mechanism_decide(
    monkeypatch, stddev, canaries_per_run, is_violated
):
    monkeypatch.setattr(probes, "_NOBODY_REPEATS", 20)  # It is the games that are looked at.
    report = tff_dpftrl.audit_aggregator(
        _NoiseOfAll(stddev),
        schema=tff_dpftrl.MinSep(3, 3, 1),
        claim=claim_lib.Claim(epsilon=1.0, delta=1e-6),
        budget=_games(240, canaries_per_run=canaries_per_run),
    )
    assert _outcomes(report)["a round repeated from its state"] == "not tested"
    (game,) = (finding for finding in report.findings if "learned" in finding.test)
    assert (game.outcome == "violated") == is_violated, game.says
    is_one_run = canaries_per_run is None
    assert ("It holds for every mechanism" in game.says) == is_one_run
    assert (game.mu_at_least is None) == is_one_run


@pytest.mark.slow
def test_that_somebody_else_s_rounds_are_repeated_has_to_be_said():
    arguments = planted_bugs.OF_TFF["TFF's gaussian_fixed"].arguments()
    arguments |= {"budget": _games(200), "schema": tff_dpftrl.MinSep(3, 3, 1)}
    for said, outcome in ((None, "not tested"), (True, "violated")):
        report = tff_dpftrl.audit_aggregator(**arguments, repeats_rounds=said)
        assert _outcomes(report)["a round repeated from its state"] == outcome
        assert "noise that is smaller by √2" in report.to_markdown()


def _weighted(estimator, weight_cap=1.0):
    return tff_dpftrl.SampledGaussianFactory(
        clipping=clipping.FlatClipping(0.5),
        noise_multiplier=0.5,
        estimator=estimator,
        weight_cap=weight_cap,
    )


def _half_precision():
    return tff_dpftrl.build_dp_ftrl_aggregator(
        tff_dpftrl.Identity(), noise_multiplier=0.5, clients_per_round=10, clip_norm=200.0
    )


_SHORT = tff_dpftrl.MinSep(4, 1, 4)
_GAME = "distinguishing game, likelihood ratio"


@pytest.mark.slow
@pytest.mark.parametrize(
    "aggregator, mu, options",
    [
        # Twice the noise that is needed where the denominator stays.
        (_weighted(tff_dpftrl.ClippedDenominator(0.1, 200.0)), 2.0, {}),
        (_weighted(tff_dpftrl.FixedDenominator(0.1, 100.0), weight_cap=100.0), 4.0, {}),
        (_half_precision(), 4.0, {"value_type": tff.to_type([(np.float16, [80])] * 2)}),
    ],
    ids=["clipped denominator", "weight cap", "half precision"],
)
def test_canaries_count_in_full_whatever_clients_are_weighted_with_or_made_of(
    aggregator, mu, options
):
    report = tff_dpftrl.audit_aggregator(aggregator, schema=_SHORT, budget=_games(400), **options)
    assert report.verdict == "consistent with the claim", report.to_markdown()
    (game,) = (finding for finding in report.findings if finding.test == _GAME)
    assert f"by that μ is {mu:.4g}." in game.says and game.outcome == "consistent"
    # Standard error of μ √(4 / 400 + μ² / 800) is 0.12 and 0.17.
    assert 0.7 * mu < report.mu_at_least < mu


@pytest.mark.slow
def test_games_whose_canaries_hardly_count_test_nothing():
    aggregator = _weighted(tff_dpftrl.FixedDenominator(0.1, 100.0), weight_cap=100.0)
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


@pytest.mark.parametrize("option", ["resume", "repeats_rounds", "canaries_per_run", "trials"])
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
        (object(), "must be an Aggregation, a TFF aggregation factory"),
        (type("Learning", (), {"get_model_weights": None})(), "audit_training"),
        (
            tff_dpftrl.build_dp_ftrl_aggregator(
                tff_dpftrl.Identity(),
                noise_multiplier=1.0,
                clients_per_round=1,
                clip_norm=1.0,
                deterministic_seed=3,
            ),
            "deterministic_seed",
        ),
        (tff.aggregators.SumFactory(), "claim must be given"),
    ],
)
def test_what_cannot_be_audited_is_refused(aggregator, message):
    with pytest.raises(ValueError, match=message):
        tff_dpftrl.audit_aggregator(aggregator, schema=planted_bugs.SCHEMA)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
