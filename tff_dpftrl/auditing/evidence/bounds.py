"""Lower confidence bounds of μ and ε from the scores of trials.

There are two kinds. Bounds from counts: a threshold makes a test of the scores. Any test of a
μ-GDP mechanism has Φ⁻¹(TPR) − Φ⁻¹(FPR) ≤ μ, any test of an (ε, δ)-DP one TPR ≤ e^ε FPR + δ and
1 − FPR ≤ e^ε (1 − TPR) + δ (Dong, Roth & Su 2022, Proposition 2.5 and Definition 2.6; Kairouz,
Oh & Viswanath 2015). They assume only that trials are independent. Bounds from a Gaussian family
also assume that the scores are Gaussian of one variance, which is tested first.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import optimize, special, stats

from tff_dpftrl import validation
from tff_dpftrl.accounting import display, gaussian
from tff_dpftrl.auditing import audit_report
from tff_dpftrl.auditing import claim as claim_lib

CHOOSING_FRACTION = 0.15
"""Share of the trials that only choose the threshold."""

_NUM_THRESHOLDS = 100
_NUM_CORNERS = 64
_FIT_LEVEL = 0.01


@dataclasses.dataclass(frozen=True)
class Bound:
    """Lower bounds of μ and of ε at the given δ, with probability 1 − error_rate for both at once.

    `mu_at_least` bounds the smallest μ for which the mechanism can be μ-GDP. `method` is in words;
    `trials` counts those that chose thresholds, too.
    """

    mu_at_least: float
    epsilon_at_least: float
    error_rate: float
    method: str
    trials: int

    def __str__(self) -> str:
        mu, epsilon = map(display.round_down, (self.mu_at_least, self.epsilon_at_least))
        return f"μ = {mu}, ε = {epsilon}"


def from_counts(
    scores: np.ndarray,
    present: np.ndarray,
    *,
    delta: float,
    error_rate: float,
    seed: int,
    choosing_fraction: float = CHOOSING_FRACTION,
) -> Bound:
    """Computes bounds from counts beyond a threshold; half of the error is for μ, half for ε.

    Thresholds are chosen on a random part of the trials and used on the others, so that the search
    costs no error. `rates_region` has the confidence region of the two rates. `error_rate` is the
    largest chance that either bound exceeds the truth. Scores are larger where the canary seems to
    have taken part.
    """
    without, with_ = _two_samples(scores, present, error_rate)
    validation.delta(delta)
    rng = np.random.default_rng(seed)
    choosing_without, without = _cut(rng, without, choosing_fraction)
    choosing_with, with_ = _cut(rng, with_, choosing_fraction)
    candidates = np.unique(np.concatenate([choosing_without, choosing_with]))
    if len(candidates) > _NUM_THRESHOLDS:
        places = np.linspace(0, len(candidates) - 1, _NUM_THRESHOLDS).round().astype(int)
        candidates = candidates[places]
    largest = []
    for bound in (mu_of_rates, lambda low, high: epsilon_of_rates(low, high, delta)):
        counts = _counts(candidates, choosing_without, choosing_with)
        # A few corners are enough to choose by.
        expected = bound(*rates_region(*counts, error_rate / 2.0, num_corners=8))
        # Too few to prove anything may still show where the rates are furthest apart.
        apart = counts[2] / counts[3] - counts[0] / counts[1]
        best = np.argmax(expected if np.any(expected > 0.0) else apart)
        counts = _counts(candidates[[best]], without, with_)
        largest.append(float(bound(*rates_region(*counts, error_rate / 2.0))[0]))
    return Bound(
        *largest,
        error_rate,
        f"counts beyond thresholds that {choosing_fraction:.0%} of the trials chose",
        len(present),
    )


def from_gaussian_family(
    scores: np.ndarray, present: np.ndarray, *, delta: float, error_rate: float
) -> Bound | None:
    """Computes bounds for Gaussian scores of one variance; None where that is rejected.

    The difference of the means over the pooled standard deviation is a noncentral t, whose
    noncentrality is μ √(n₀ n₁ / (n₀ + n₁)), and its lower bound is exact. The tests of the
    fit look at the residuals over the pooled standard deviation alone, which are independent
    of the means and of that deviation (Basu 1955), so that bounds given only where the fit is
    not rejected hold with the same probability.

    A Gaussian bulk does not prove Gaussian tails: ε at a small δ is that of the family. It is
    rejected if skewness or kurtosis of either kind of trials, or the ratio of their variances, is
    at 1 %, or if a kind has fewer than 20 trials. The bounds exceed the truth both or neither, with
    chance `error_rate`.
    """
    without, with_ = _two_samples(scores, present, error_rate)
    if min(len(without), len(with_)) < 20 or not _looks_gaussian(without, with_):
        return None
    degrees = len(without) + len(with_) - 2
    pooled = math.sqrt((without.var() * len(without) + with_.var() * len(with_)) / degrees)
    weight = math.sqrt(len(without) * len(with_) / (degrees + 2))
    statistic = weight * (with_.mean() - without.mean()) / pooled
    mu = max(0.0, _noncentrality(degrees, statistic, 1.0 - error_rate) / weight)
    return Bound(
        mu,
        gaussian.epsilon(mu, delta),
        error_rate,
        "Gaussian family, noncentral t",
        len(present),
    )


def for_claim(
    scores: np.ndarray,
    present: np.ndarray,
    claim: claim_lib.Claim,
    *,
    error_rate: float,
    seed: int,
) -> Bound:
    """Computes the bounds that may refute a claim, at the claim's δ.

    If a Gaussian mechanism is claimed, they are the larger bounds of both kinds, each with half of
    the error. If only (ε, δ) is claimed, they are those from counts: scores of a mechanism that
    keeps its claim without Gaussian tails, as after truncation, may still look Gaussian.
    `error_rate` is the largest chance that either bound exceeds the truth.
    """
    delta = claim.delta
    if claim.mu is None:
        return from_counts(scores, present, delta=delta, error_rate=error_rate, seed=seed)
    counts = from_counts(scores, present, delta=delta, error_rate=error_rate / 2.0, seed=seed)
    family = from_gaussian_family(scores, present, delta=delta, error_rate=error_rate / 2.0)
    if family is None:
        return dataclasses.replace(
            counts,
            error_rate=error_rate,
            method=f"{counts.method}; scores do not look Gaussian of one variance",
        )
    return Bound(
        max(counts.mu_at_least, family.mu_at_least),
        max(counts.epsilon_at_least, family.epsilon_at_least),
        error_rate,
        f"{family.method}, or {counts.method}",
        len(present),
    )


def rates_region(
    false_positives: np.ndarray,
    negatives: int,
    true_positives: np.ndarray,
    positives: int,
    error_rate: float,
    num_corners: int = _NUM_CORNERS,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes corners of confidence regions of the two rates of tests.

    Clopper–Pearson bounds at level 1 − a contain the rates whose p-value is p ≥ a. With z = Φ⁻¹(1 −
    p) of the two independent samples, max(z₀, 0)² + max(z₁, 0)² exceeds c² with probability P(χ²₁ >
    c²) / 2 + P(χ²₂ > c²) / 4 at most. c is chosen such that this is `error_rate`; the region
    contains the rates where the sum does not exceed c². Two separate bounds at half the error each
    would allow both rates to be at their worst at once: that region is a quarter wider. Returns
    lower bounds of the true positive rate and upper bounds of the false positive rate, shape [...,
    corners]: in at least one corner TPR ≥ the first and FPR ≤ the second. `error_rate` is the
    largest chance that it is in none.
    """
    false_positives = np.asarray(false_positives, float)[..., np.newaxis]
    true_positives = np.asarray(true_positives, float)[..., np.newaxis]
    radius = _radius(error_rate)
    angles = np.linspace(0.0, math.pi / 2.0, num_corners + 1)
    # The arc between two angles lies within the larger cosine and the larger sine.
    level_positive = special.ndtr(-radius * np.cos(angles[:-1]))
    level_negative = special.ndtr(-radius * np.sin(angles[1:]))
    lowest = special.betaincinv(
        np.maximum(true_positives, 1), positives - true_positives + 1, level_positive
    )
    highest = special.betaincinv(
        false_positives + 1, np.maximum(negatives - false_positives, 1), 1.0 - level_negative
    )
    return (
        np.where(true_positives > 0, lowest, 0.0),
        np.where(false_positives < negatives, highest, 1.0),
    )


def mu_of_rates(lowest: np.ndarray, highest: np.ndarray) -> np.ndarray:
    """Returns the smallest Φ⁻¹(TPR) − Φ⁻¹(FPR) over corners (TPR, FPR), at least 0, [...]."""
    return np.maximum(0.0, np.min(special.ndtri(lowest) - special.ndtri(highest), axis=-1))


def epsilon_of_rates(lowest: np.ndarray, highest: np.ndarray, delta: float) -> np.ndarray:
    """Returns the smallest ε at δ that corners (TPR, FPR) leave possible, at least 0, [...]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        first = np.log(np.maximum(lowest - delta, 0.0)) - np.log(highest)
        second = np.log(np.maximum(1.0 - highest - delta, 0.0)) - np.log(1.0 - lowest)
    return np.maximum(0.0, np.min(np.fmax(first, second), axis=-1))


def trade_off(
    scores: np.ndarray, present: np.ndarray, num_points: int = 200
) -> audit_report.TradeOff:
    """Computes the trade-off curve of the tests "score above a threshold", for a plot."""
    without, with_ = np.sort(scores[~present]), np.sort(scores[present])
    thresholds = np.quantile(scores, np.linspace(0.0, 1.0, num_points))
    false_positives = 1.0 - np.searchsorted(without, thresholds, "right") / len(without)
    false_negatives = np.searchsorted(with_, thresholds, "right") / len(with_)
    return audit_report.TradeOff((1.0, *false_positives.tolist()), (0.0, *false_negatives.tolist()))


def _two_samples(
    scores: np.ndarray, present: np.ndarray, error_rate: float
) -> tuple[np.ndarray, np.ndarray]:
    scores, present = np.asarray(scores, float), np.asarray(present, bool)
    if not 0.0 < error_rate < 1.0:
        raise validation.UsageError(
            f"error_rate must be strictly between 0 and 1, got {error_rate!r}."
        )
    if scores.ndim != 1 or scores.shape != present.shape or not np.all(np.isfinite(scores)):
        raise validation.UsageError(
            "scores must be finite, one for each entry of present, got shapes "
            f"{scores.shape} and {present.shape}."
        )
    if not 2 <= present.sum() <= len(present) - 2:
        raise validation.UsageError(
            "present must have two trials of either kind at least, got "
            f"{int(present.sum())} True of {len(present)}."
        )
    return scores[~present], scores[present]


def _cut(
    rng: np.random.Generator, sample: np.ndarray, fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    shuffled = rng.permutation(sample)
    cut = min(max(1, round(fraction * len(sample))), len(sample) - 1)
    return shuffled[:cut], shuffled[cut:]


def _counts(
    thresholds: np.ndarray, without: np.ndarray, with_: np.ndarray
) -> tuple[np.ndarray, int, np.ndarray, int]:
    """Counts false positives, negatives, true positives and positives of "score ≥ threshold"."""
    false_positives = len(without) - np.searchsorted(np.sort(without), thresholds)
    true_positives = len(with_) - np.searchsorted(np.sort(with_), thresholds)
    return false_positives, len(without), true_positives, len(with_)


def _radius(error_rate: float) -> float:
    def excess(radius: float) -> float:
        return special.ndtr(-radius) + math.exp(-(radius**2) / 2.0) / 4.0 - error_rate

    return 0.0 if error_rate >= 0.75 else float(optimize.brentq(excess, 0.0, 40.0))


def _looks_gaussian(without: np.ndarray, with_: np.ndarray) -> bool:
    if not (without.var() > 0.0 and with_.var() > 0.0):
        return False
    ratio = with_.var(ddof=1) / without.var(ddof=1)
    larger = stats.f.sf(ratio, len(with_) - 1, len(without) - 1)
    same_variance = 2.0 * min(larger, 1.0 - larger)
    shapes = (stats.normaltest(sample).pvalue for sample in (without, with_))
    return bool(min(same_variance, *shapes) >= _FIT_LEVEL)


def _noncentrality(degrees: int, statistic: float, probability: float) -> float:
    """Returns the noncentrality at which a noncentral t is below `statistic` with `probability`.

    SciPy 1.18's function is NaN for some arguments. Here P(Z + noncentrality ≤ statistic · S), with
    normal Z and S² = χ² / degrees, is integrated over S, or over Z where that spreads less. The
    trapezoid rule is as good as exact then.
    """
    if stats.t.cdf(statistic, degrees) <= probability:
        return 0.0
    spread, grid = (2.0 * degrees) ** -0.5, np.linspace(-12.0, 12.0, 2001)
    over_s = statistic * spread < 1.0
    if over_s:
        s = 1.0 + spread * grid[grid > -1.0 / spread]
        weights = np.exp((degrees - 1) * np.log(s) - degrees * (s**2 - 1.0) / 2.0)
    else:
        weights = np.exp(-(grid**2) / 2.0)
    weights /= weights.sum()

    def excess(noncentrality: float) -> float:
        if over_s:
            below = special.ndtr(statistic * s - noncentrality)
        else:
            least = np.maximum(grid + noncentrality, 0.0) / statistic
            below = special.chdtrc(degrees, degrees * least**2)
        return float(weights @ below) - probability

    # At the upper end, the statistic is below the mean by far more than the spread.
    return float(optimize.brentq(excess, 0.0, statistic + 10.0, xtol=1e-9))
