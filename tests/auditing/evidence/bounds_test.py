"""Lower bounds: wrong as seldom as stated, and close to the truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from tff_dpftrl.accounting import gaussian
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing.evidence import bounds

_DELTA = 1e-5


def _scores(mu, trials, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    present = np.arange(trials) % 2 == 0
    return rng.normal(size=trials) * np.where(present, scale, 1.0) + mu * present, present


def _most(repetitions, rate):
    """More than this many errors have a chance of 1e-6 if each has a chance of `rate`."""
    return stats.binom.isf(1e-6, repetitions, rate)


def test_bounds_are_shown_rounded_down():
    assert str(bounds.Bound(0.99996, 1.23459, 0.01, "toys", 10)) == "μ = 0.9999, ε = 1.234"


@pytest.mark.parametrize("positives, negatives", [(30, 30), (400, 100)])
@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.69, 0.31), (0.02, 0.0005), (0.999, 0.9)])
def test_the_region_of_two_rates_covers(rates, positives, negatives):
    """By summing the probabilities of all counts whose region misses the rates."""
    truth_positive, truth_negative = rates
    true_positives = np.arange(positives + 1)[:, np.newaxis]
    false_positives = np.arange(negatives + 1)[np.newaxis, :]
    chance = stats.binom.pmf(true_positives, positives, truth_positive) * stats.binom.pmf(
        false_positives, negatives, truth_negative
    )
    likely = chance > 1e-9  # All others together have a chance of 5e-5 at most.
    true_positives, false_positives = (
        np.broadcast_to(counts, likely.shape)[likely]
        for counts in (true_positives, false_positives)
    )
    low, high = bounds.rates_region(false_positives, negatives, true_positives, positives, 0.05, 16)
    missed = ~np.any((truth_positive >= low) & (truth_negative <= high), axis=-1)
    assert chance[likely][missed].sum() + 5e-5 <= 0.05


def test_the_region_is_narrower_than_two_separate_bounds():
    low, high = bounds.rates_region(310, 1000, 690, 1000, 0.05)
    apart = special.ndtri(special.betaincinv(690, 311, 0.025)) - special.ndtri(
        special.betaincinv(311, 690, 0.975)
    )
    assert bounds.mu_of_rates(low, high) > apart + 0.02


@pytest.mark.parametrize(
    "mu, repetitions",
    [(1.0, 100), *(pytest.param(mu, 2000, marks=pytest.mark.slow) for mu in (0.0, 1.0, 3.0))],
)
def test_bounds_from_counts_are_wrong_as_seldom_as_stated(mu, repetitions):
    rate = 0.2
    truth = gaussian.epsilon(mu, 0.01) if mu else 0.0
    wrong = 0
    for seed in range(repetitions):
        scores, present = _scores(mu, 400, seed)
        found = bounds.from_counts(scores, present, delta=0.01, error_rate=rate, seed=seed)
        wrong += found.mu_at_least > mu or found.epsilon_at_least > truth
    assert wrong <= _most(repetitions, rate)


def test_trials_that_are_too_few_to_choose_by_still_prove_what_they_show():
    present = np.arange(120) % 2 == 0
    scores = present + np.random.default_rng(0).normal(scale=0.01, size=120)
    found = bounds.from_counts(scores, present, delta=1e-6, error_rate=2e-4, seed=1)
    # Of either kind 51 trials, all told rightly: more than two bounds apart, less than one of both.
    apart, both = special.logit((1e-4 / 2) ** (1 / 51)), special.logit(1e-4 ** (1 / 102))
    assert apart < found.epsilon_at_least < both


def test_bounds_from_counts_hold_for_randomized_response():
    """Scores of two values, where ε is exact at δ = 0 and the family of Gaussians is wrong."""
    epsilon, rate, repetitions = 1.0, 0.2, 100
    chance = special.expit(epsilon)
    wrong = 0
    for seed in range(repetitions):
        rng = np.random.default_rng(seed)
        present = np.arange(1000) % 2 == 0
        scores = np.where(rng.random(1000) < chance, present, ~present).astype(float)
        found = bounds.from_counts(scores, present, delta=1e-9, error_rate=rate, seed=seed)
        wrong += found.epsilon_at_least > epsilon
        assert bounds.from_gaussian_family(scores, present, delta=1e-9, error_rate=rate) is None
    assert wrong <= _most(repetitions, rate)


@pytest.mark.parametrize(
    "mu, trials, repetitions",
    [
        (1.0, 100, 300),
        *(
            pytest.param(mu, trials, 2000, marks=pytest.mark.slow)
            for mu in (0.0, 0.6, 3.0)
            for trials in (40, 1000)
        ),
    ],
)
def test_the_bound_of_the_gaussian_family_is_exact(mu, trials, repetitions):
    """Also given that the fit was not rejected: as often wrong as stated, not more or less."""
    rate = 0.1
    wrong = given = 0
    for seed in range(repetitions):
        found = bounds.from_gaussian_family(
            *_scores(mu, trials, seed), delta=_DELTA, error_rate=rate
        )
        given += found is not None
        wrong += found is not None and found.mu_at_least > mu
    assert given >= 0.94 * repetitions  # Three tests at 1 %.
    margin = 5.0 * np.sqrt(given * rate * (1.0 - rate))
    assert abs(wrong - rate * given) <= margin


def test_the_noncentrality_is_that_of_the_noncentral_t():
    for degrees, statistic in ((38, 5.0), (38, 90.0), (3998, 2.9), (3998, 60.0), (3998, 200.0)):
        found = bounds._noncentrality(degrees, statistic, 0.99)
        below = special.nctdtr(degrees, found, statistic)
        assert np.isnan(below) or below == pytest.approx(0.99, abs=1e-7)
    # SciPy's function may be no number at small noncentralities and at huge statistics.
    for statistic in np.linspace(3.0, 3.2, 50):
        assert 0.0 <= bounds._noncentrality(3998, statistic, 0.9985) < 0.5
    # Such a statistic is the noncentrality over S, which is 1 ± 1 / √(2 · 3998).
    huge = bounds._noncentrality(3998, 4.5e5, special.ndtr(3.0))
    assert huge == pytest.approx(4.5e5 * (1.0 - 3.0 / np.sqrt(2 * 3998)), rel=1e-3)


@pytest.mark.parametrize("scale", [0.8, 1.25])
def test_the_gaussian_family_is_refused_where_it_is_wrong(scale):
    scores, present = _scores(1.0, 4000, 0, scale)
    assert bounds.from_gaussian_family(scores, present, delta=_DELTA, error_rate=0.05) is None
    scores, present = _scores(1.0, 4000, 0)
    heavy = np.sign(scores) * np.abs(scores) ** 1.3
    assert bounds.from_gaussian_family(heavy, present, delta=_DELTA, error_rate=0.05) is None


@pytest.mark.parametrize("mu, least", [(0.6, 0.88), (1.0, 0.9), (2.0, 0.9), (3.0, 0.9)])
def test_bounds_reach_most_of_the_truth_in_four_thousand_trials(mu, least):
    both, family = [], []
    for seed in range(8):
        scores, present = _scores(mu, 4000, seed)
        arguments = {"delta": _DELTA, "error_rate": 0.05}
        claimed = claim_lib.Claim.gaussian(mu, _DELTA)
        both.append(
            bounds.for_claim(scores, present, claimed, error_rate=0.05, seed=seed).mu_at_least
        )
        found = bounds.from_gaussian_family(scores, present, **arguments)
        if found is not None:
            family.append(found.mu_at_least)
            assert found.epsilon_at_least == pytest.approx(
                gaussian.epsilon(found.mu_at_least, _DELTA)
            )
    assert len(family) >= 6
    # Standard error of a mean of eight of deviation √(4/4000 (1 + μ²/8)), five times.
    margin = 5.0 * np.sqrt(4.0 / 4000 * (1.0 + mu**2 / 8.0) / 8.0)
    assert np.mean(family) >= 0.9 * mu - margin / 2
    assert np.mean(both) >= least * mu - margin / 2


def test_a_claim_without_gaussian_tails_is_not_refuted_by_them():
    # Beyond -3 and 4 nothing is told apart: log Φ(-3) / Φ(-4) is the largest log ratio.
    scores, present = _scores(1.0, 4000, 0)
    scores = np.clip(scores, -3.0, 4.0)
    kept = claim_lib.Claim(stats.norm.logsf(3.0) - stats.norm.logsf(4.0), _DELTA)
    family = bounds.from_gaussian_family(scores, present, delta=_DELTA, error_rate=0.05)
    assert family.epsilon_at_least > kept.epsilon
    found = bounds.for_claim(scores, present, kept, error_rate=0.05, seed=0)
    assert 1.0 < found.epsilon_at_least <= kept.epsilon


def test_of_a_test_without_noise_the_bound_grows_with_the_trials():
    present = np.arange(2000) % 2 == 0
    found = bounds.from_counts(
        present.astype(float), present, delta=_DELTA, error_rate=0.05, seed=0
    )
    assert found.epsilon_at_least > 4.5 and found.mu_at_least > 4.5


def test_the_curve_for_a_picture_is_that_of_the_scores():
    scores, present = _scores(1.0, 20_000, 0)
    curve = bounds.trade_off(scores, present)
    first, second = np.array(curve.false_positive_rate), np.array(curve.false_negative_rate)
    assert first[0] == 1.0 and second[0] == 0.0 and first[-1] == 0.0 and second[-1] == 1.0
    # Six standard errors of a rate of 10,000 trials, and what the slope makes of another.
    expected = special.ndtr(-special.ndtri(np.clip(first, 1e-12, 1.0)) - 1.0)
    inside = (first > 0.02) & (first < 0.98)
    assert np.max(np.abs(second - expected)[inside]) < 0.06


def test_arguments_that_make_no_sense_are_refused():
    scores, present = _scores(1.0, 100, 0)
    with pytest.raises(ValueError, match="error_rate"):
        bounds.from_counts(scores, present, delta=_DELTA, error_rate=0.0, seed=0)
    with pytest.raises(ValueError, match="two trials of either kind"):
        bounds.from_counts(scores, np.ones(100, bool), delta=_DELTA, error_rate=0.1, seed=0)
    with pytest.raises(ValueError, match="finite"):
        bounds.from_counts(scores * np.nan, present, delta=_DELTA, error_rate=0.1, seed=0)
    with pytest.raises(ValueError, match="delta"):
        bounds.from_counts(scores, present, delta=1.0, error_rate=0.1, seed=0)
