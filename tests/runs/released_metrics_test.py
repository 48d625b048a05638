"""Figures of the training cohorts that are released with noise: bounds, noise, accounting."""

import dataclasses
import hashlib
import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from scipy import stats

from tff_dpftrl import validation
from tff_dpftrl.accounting import budget_shares, display, parts
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.runs import mechanism_plan, privacy, released_metrics

_FIGURES = released_metrics.Figures(
    bounds={"loss_sum": 8.0, "num": 2.0, "right": 2.0},
    means=(
        released_metrics.Mean("noised_loss", "loss", "loss_sum", "num"),
        released_metrics.Mean("noised_top1", "accuracy", "right", "num"),
    ),
)
_COMMON = {"num_rounds": 12, "clients_per_round": 4, "clip_norm": 1.0, "delta": 1e-5}


def _planned(asked, num_clients=24, **options):
    given = {"target_epsilon": None, "share": None, "what": "loss"} | options
    return released_metrics.planned(asked, num_clients, 10, **given)


def _in_turns(**options):
    return privacy.DpFtrl(**_COMMON, mechanism="blt", min_sep=4, max_participations=2, **options)


def test_the_noise_is_a_function_of_seed_and_round():
    # Written anew, with Python's own integers and floats.
    seed, round_index = 2**255 + 12345, 7
    content = b"tff_dpftrl released metrics 1" + seed.to_bytes(32, "little") + b"\7" + b"\0" * 7
    stream = hashlib.shake_256(content).digest(32)
    words = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(4)]
    radii = [math.sqrt(-2.0 * math.log((word + 0.5) / 2**64)) for word in words[:2]]
    angles = [2.0 * math.pi * (word + 0.5) / 2**64 for word in words[2:]]
    expected = [r * math.cos(a) for r, a in zip(radii, angles, strict=True)]
    expected += [r * math.sin(a) for r, a in zip(radii, angles, strict=True)]
    found = released_metrics.gaussians(seed, round_index, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_array_equal(found[:3], released_metrics.gaussians(seed, round_index, 3))


def test_the_noise_is_gaussian_and_independent_of_other_rounds_and_seeds():
    drawn = np.array([released_metrics.gaussians(5, t, 4) for t in range(5000)])
    assert stats.kstest(drawn.ravel(), "norm").pvalue > 1e-3
    others = np.array([released_metrics.gaussians(6, t, 4) for t in range(5000)])
    columns = [*drawn.T, *others.T, *np.roll(drawn, 1, axis=0).T]
    correlations = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlations).max() < 6 / math.sqrt(len(drawn))
    # Power: a round's noise that is another one's shifted would be seen.
    assert np.corrcoef(drawn[:, 0], drawn[:, 0])[0, 1] > 0.99


def test_a_round_releases_sums_with_noise_and_their_means():
    release, sums = released_metrics.Release(_FIGURES, 0.5, seed=3), np.array([30.0, 40.0, 10.0])
    row = release.of_round(2, sums)
    assert row == release.of_round(2, sums) != release.of_round(3, sums)
    assert row.keys() == {column.name for column in _FIGURES.columns}
    noised = np.array([row[f"noised_sum_{name}"] for name in _FIGURES.bounds])
    np.testing.assert_allclose(
        noised, sums + 0.5 * released_metrics.gaussians(3, 2, 3), atol=0.5 * 2.0**-13
    )
    np.testing.assert_array_equal(noised % (0.5 * 2.0**-12), 0.0)  # On the grid.
    assert row["noised_loss"] == pytest.approx(4.0 * noised[0] / noised[1])
    assert row["noised_top1"] == pytest.approx(noised[2] / noised[1])


def test_two_releases_of_a_round_have_independent_noise():
    release = released_metrics.Release(_FIGURES, 0.5, seed=None)
    rows = [release.of_round(2, np.zeros(3)) for _ in range(4000)]
    drawn = np.array([[row[f"noised_sum_{name}"] for name in _FIGURES.bounds] for row in rows])
    assert stats.kstest(drawn.ravel() / 0.5, "norm").pvalue > 1e-6
    correlations = np.corrcoef([*drawn[1:].T, *drawn[:-1].T]) - np.eye(6)
    assert np.abs(correlations).max() < 6 / math.sqrt(len(drawn))


def test_standard_errors_are_those_of_the_means():
    stddev, sums = 0.5, np.array([30.0, 40.0, 10.0])
    release = released_metrics.Release(_FIGURES, stddev, seed=3)
    rows = [release.of_round(t, sums) for t in range(4000)]
    for name, mean in (("noised_loss", 3.0), ("noised_top1", 0.25)):
        errors = np.array([row[name] for row in rows]) - mean
        told = np.mean([row[f"{name}_se"] for row in rows])
        assert np.std(errors) == pytest.approx(told, rel=0.06)
        assert abs(np.mean(errors)) < 6 * told / math.sqrt(len(rows))
    sentence = _FIGURES.of_last_rounds(rows, stddev)
    assert "of the last 1000 rounds, by the noised sums: loss 2.997 ± 0.002, top1" in sentence


def test_a_mean_that_noise_outweighs_is_left_out():
    values = _FIGURES.values(np.array([1.0, 1.5, 1.0]), 0.5)
    assert set(values.values()) == {None}
    rows = [
        {"round": 1, "noised_sum_loss_sum": 1.0, "noised_sum_num": 1.5, "noised_sum_right": 1.0}
    ]
    assert _FIGURES.of_last_rounds(rows, 0.5) is None
    assert _FIGURES.of_last_rounds([{"round": 1, "loss": 2.0}], 0.5) is None


def _gaussian_delta(mu, epsilon):
    """Balle & Wang 2018, theorem 8."""
    upper = stats.norm.cdf(mu / 2 - epsilon / mu)
    return upper - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)


def test_in_turns_all_rounds_cost_what_is_asked_for():
    plan = _planned(_in_turns(noise_multiplier=2.0), target_epsilon=1.5)
    noise = released_metrics.noise_of(plan)
    mu = math.sqrt(2) / noise  # Two participations, each changing the sums by a norm of 1.
    assert _gaussian_delta(mu, 1.5) == pytest.approx(1e-5, rel=2e-3)
    assert _gaussian_delta(mu, 1.5) <= 1e-5
    weights = _in_turns(noise_multiplier=2.0).plan(24, 10)
    rho = parts.compose(weights.rounds, (), 1e-5)
    assert plan.epsilon_after(12) > max(rho, 1.5)
    whole = math.hypot(weights.rounds.mu, mu)
    assert _gaussian_delta(whole, plan.epsilon_after(12)) == pytest.approx(1e-5, rel=1e-4)


def test_a_target_is_for_weights_and_metrics_together():
    for given in ({"target_epsilon": 2.0}, {"share": 0.2}):
        plan = _planned(_in_turns(target_epsilon=6.0), **given)
        assert 5.99 < plan.epsilon_after(12) <= 6.0
        alone = _in_turns(target_epsilon=6.0).plan(24, 10)
        assert plan.noise_multiplier > alone.noise_multiplier
        if "share" in given:  # A fifth of μ² is that of the metrics.
            mu = math.sqrt(2) / released_metrics.noise_of(plan)
            assert mu**2 == pytest.approx(0.2 * alone.rounds.mu**2, rel=1e-3)
    assert _planned(_in_turns(target_epsilon=6.0)) == _in_turns(target_epsilon=6.0).plan(24, 10)


def _epsilon_of_gaussians(noise, times, delta):
    accountant = pld_privacy_accountant.PLDAccountant()
    event = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(noise), times)
    return accountant.compose(event).get_epsilon(delta)


@pytest.mark.parametrize("given", [{"target_epsilon": 1.5}, {"share": 0.2}])
def test_evaluations_on_held_out_users_cost_them_as_much_and_nobody_else_anything(given):
    plan = _planned(_in_turns(target_epsilon=6.0), **given, evaluations=5)
    without = _planned(_in_turns(target_epsilon=6.0), **given)
    noise = released_metrics.noise_of_evaluation(plan, 5)
    assert released_metrics.noise_of_evaluation(without, 5) is None
    of_evaluations = _epsilon_of_gaussians(noise, 5, 1e-5)
    if "share" in given:  # A fifth of μ² of all of ε = 6, which 1/5 of the precision has.
        whole = _epsilon_of_gaussians(noise * math.sqrt(0.2), 5, 1e-5)
        assert whole == pytest.approx(6.0, rel=2e-3)
    else:
        assert of_evaluations == pytest.approx(1.5, rel=2e-3)
    said = [
        f"deviation {display.round_down(one, 6)} in"
        for one in (released_metrics.noise_of(plan), noise)
    ]
    assert all(text in one.says for text, one in zip(said, plan.others, strict=True))
    assert plan.noise_multiplier == without.noise_multiplier
    assert plan.epsilon_after(12) == without.epsilon_after(12) > of_evaluations
    # Before the first round, evaluations that are to come are all that is charged.
    assert plan.epsilon_after(0) == pytest.approx(of_evaluations, rel=2e-3)


def test_if_evaluations_cost_more_they_are_what_the_run_costs():
    plan = _planned(_in_turns(noise_multiplier=50.0), target_epsilon=2.0, evaluations=3)
    figures = dataclasses.replace(plan.others[0], noise_multiplier_of_round=1e3)
    cheap = dataclasses.replace(plan, others=(figures, plan.others[1]))
    noise = released_metrics.noise_of_evaluation(cheap, 3)
    of_evaluations = _epsilon_of_gaussians(noise, 3, 1e-5)
    assert cheap.epsilon_after(12) == pytest.approx(of_evaluations, rel=2e-3)
    alone = dataclasses.replace(plan, others=(figures,)).epsilon_after(12)
    assert 0.1 < alone < 0.5 * of_evaluations
    for epsilon, delta in parts.profile(cheap.rounds, cheap.others, cheap.epsilon_after(12)):
        assert delta == pytest.approx(_gaussian_delta(math.sqrt(3) / noise, epsilon), rel=1e-6)


def test_a_share_is_one_of_the_whole_beside_a_vocabulary():
    vocabulary = budget_shares.planned(6.0, 1e-5, {"vocabulary": 0.3})
    asked = _in_turns(target_epsilon=6.0)
    asked = dataclasses.replace(asked, others=vocabulary)
    plan = _planned(asked, share=0.2)
    planned = budget_shares.planned(6.0, 1e-5, {"vocabulary": 0.3, "metrics": 0.2})
    mu = math.sqrt(2) / released_metrics.noise_of(plan)
    assert mu**2 / 2 == pytest.approx(planned[1].rho_zcdp, rel=1e-3)  # As `plan` splits it.
    noises = [
        (1 / plan.rounds.mu, 1),
        (1 / math.sqrt(2 * vocabulary[0].rho_zcdp), 1),
        (released_metrics.noise_of(plan), 2),
    ]
    accountant = pld_privacy_accountant.PLDAccountant()
    for noise, times in noises:
        accountant.compose(dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(noise), times))
    whole = accountant.get_epsilon(1e-5 - vocabulary[0].delta)
    assert whole == pytest.approx(6.0, rel=2e-3) and plan.epsilon_after(12) <= 6.0


def test_a_unit_counts_for_a_norm_of_one():
    values = np.array([[8.0, 0.0, 0.0], [800.0, 200.0, 0.0], [np.nan, 1.0, 1.0], [0.0, 0.0, 1.0]])
    clipped = np.array([100.0, 100.0, 0.0]) / math.hypot(100.0, 100.0)
    expected = np.array([1.0, 0.0, 0.0]) + clipped + np.array([0.0, 0.0, 0.5])
    found = _FIGURES.bounded_sums(values)
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    one = np.linalg.norm([_FIGURES.bounded_sums(values[i : i + 1]) for i in range(4)], axis=1)
    assert np.all(one <= 1.0) and one[1] > 1.0 - 1e-8
    assert not _FIGURES.bounded_sums(values[:0]).any()


def test_a_known_seed_changes_no_noise():
    for given in ({"target_epsilon": 2.0}, {"share": 0.2}):
        known = _planned(_in_turns(target_epsilon=6.0, deterministic_seed=7), **given)
        secret = _planned(_in_turns(target_epsilon=6.0), **given)
        assert known.with_noise(deterministic_seed=None) == secret
        assert known.epsilon_after(12) is None


def test_sampled_rounds_pay_for_update_and_metrics_as_one_release():
    asked = privacy.DpFedAvg(algorithm="dp-fedavg", **_COMMON, noise_multiplier=1.5)
    plan = _planned(asked, target_epsilon=1.0)
    noise = released_metrics.noise_of(plan)
    accountant = pld_privacy_accountant.PLDAccountant()
    both = 1.0 / math.hypot(1.0 / 1.5, 1.0 / noise)
    sampled = dp_event.PoissonSampledDpEvent(4 / 24, dp_event.GaussianDpEvent(both))
    accountant.compose(dp_event.SelfComposedDpEvent(sampled, 12))
    assert plan.epsilon_after(12) == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
    alone = pld_privacy_accountant.PLDAccountant()
    sampled = dp_event.PoissonSampledDpEvent(4 / 24, dp_event.GaussianDpEvent(noise))
    alone.compose(dp_event.SelfComposedDpEvent(sampled, 12))
    assert alone.get_epsilon(1e-5) == pytest.approx(1.0, rel=2e-3)


def test_a_run_without_noise_and_a_sampling_without_a_bound_are_refused():
    without = privacy.DpFtrl(**_COMMON, mechanism=None)
    with pytest.raises(validation.UsageError, match="within the budget of a run without noise"):
        _planned(without, target_epsilon=1.0)
    bins = privacy.Amplified(**_COMMON, sampling="bins", mechanism="bandtoep", noise_multiplier=2.0)
    with pytest.raises(validation.UsageError, match="cannot be accounted for"):
        _planned(bins, target_epsilon=1.0)


def test_the_statement_says_what_stays_private():
    plan = _planned(_in_turns(noise_multiplier=2.0), target_epsilon=1.5)
    assert mechanism_plan.not_covered("exact", plan.others) == sentences.EXACT_BESIDE_RELEASED
    assert mechanism_plan.not_covered("exact", ()) == "exact"
