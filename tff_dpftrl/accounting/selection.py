"""Privacy of releasing the best of a random number of runs, and nothing of the others.

The number of runs K is geometric with stopping probability γ, the truncated negative binomial
distribution with η = 1 of Papernot & Steinke 2022 (Definition 1), given K ≤ N. Each run draws its
setting and its noise anew. The best run is the one with the best score, computed from what that run
releases; ties are broken at random. So runs are independent of each other and alike, whatever the
data; where K, or another run, or its seed, is known, nothing here holds.

The bound is in terms of each run's (ε, δ) in both directions of neighbouring data (after Koskela,
Redberg & Wang 2024), and not by Rényi divergences. Let F(y) be the probability that a run scores at
most y, and f the generating function of K. The best run then has density f'(F) relative to one run.
If every run is (ε₁, δ₁)-DP with δ₁ = γ (e^ε₁ − 1) / (1 − γ), then 1 − (1 − γ) F' = γ + (1 − γ) (1 −
F') ≤ e^ε₁ (1 − (1 − γ) F) for neighbouring data. Without N, f'(F) is proportional to (1 − (1 − γ)
F)^−2, so f'(F) ≤ e^(2 ε₁) f'(F') (if F ≤ F', it is no larger without any factor). Ties are broken
by a further uniform number of each run, which makes F continuous. Given K ≤ N the factor is no
larger: the slope of log f' at x is the mean of (K − 1) / x under weights k P(K = k) x^(k − 1),
which is smaller without the large k. With f' ≤ E[K], the density p f'(F) is at most e^(ε₀ + 2 ε₁)
p' f'(F') plus E[K] times the excess of p over e^ε₀ p', which is δ₀ in all. So the choice is (ε₀ + 2
ε₁, E[K] δ₀)-DP if each run is (ε₀, δ₀)-DP, too. A run of settings drawn at random, which are
released, keeps what all of the settings keep. A run that diverges is an outcome of its own, with
the worst score: whether weights are finite follows from noised sums. If it is the best one, that is
what is released.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scipy import optimize

from tff_dpftrl import validation
from tff_dpftrl.accounting import gaussian

EpsilonOfRun = Callable[[float], float]
"""Function from δ to an upper bound of a run's ε, in both directions of neighbouring data."""

_TOLERANCE = 1e-5  # Largest relative excess of ε₁.
_SLACK = 1e-9  # Relative, so that rounding of a calibrated noise does not miss the target.


@dataclasses.dataclass(frozen=True)
class NumRuns:
    """Distribution of the number of runs: geometric of mean 1 / γ, given that it is at most N."""

    mean: float
    largest: int

    def __post_init__(self):
        validation.number(
            "the expected number of runs (--select-runs)",
            self.mean,
            above=1,
            remedy="A single run is chosen among nothing: train it by itself.",
        )
        validation.integer("the largest number of runs (--select-largest)", self.largest, minimum=1)
        if self.largest < self.mean:
            raise validation.UsageError(
                f"The largest number of runs (--select-largest), {self.largest}, is below the "
                f"expected one, {self.mean:g}: raise it."
            )

    @property
    def stopping(self) -> float:
        """γ, the probability that a run is the last one, but for `largest`."""
        return 1.0 / self.mean

    @property
    def expected(self) -> float:
        """E[K | K ≤ N], a little below `mean`."""
        left = math.exp(self.largest * math.log1p(-self.stopping))  # P(K > N).
        return self.mean - self.largest * left / (1.0 - left)

    def draw(self) -> int:
        """Draws the number of runs with the operating system's randomness."""
        coin = secrets.SystemRandom()
        while True:
            number = 1
            while number <= self.largest and coin.random() >= self.stopping:
                number += 1
            if number <= self.largest:
                return number

    def delta_of_ratio(self, epsilon: float) -> float:
        """Returns δ₁ for an ε₁: what each run has to meet for the factor e^(2 ε₁)."""
        return math.expm1(epsilon) / (self.mean - 1.0)


class Targets(NamedTuple):
    """Two promises of every run that make one of the best of them.

    They are (ε₀, δ₀), the tail, and (ε₁, δ₁) with a large δ₁: the factor by which the choice weighs
    runs follows.
    """

    tail: tuple[float, float]
    ratio: tuple[float, float]

    @property
    def epsilon(self) -> float:
        """ε of the choice."""
        return self.tail[0] + 2.0 * self.ratio[0]

    def epsilon_at(self, runs: Sequence[EpsilonOfRun], num_runs: NumRuns, delta: float) -> float:
        """Computes ε of the choice among runs that keep the second promise, at another δ."""
        return max(run(delta / num_runs.expected) for run in runs) + 2.0 * self.ratio[0]

    def are_met_by(self, run: EpsilonOfRun) -> bool:
        """Returns whether a run keeps both promises; δ₁ ≥ 1 needs no noise."""
        return all(delta >= 1.0 or run(delta) <= epsilon for epsilon, delta in self)


def account(runs: Sequence[EpsilonOfRun], num_runs: NumRuns, delta: float) -> Targets:
    """Computes what all settings promise, and so ε of the choice at `delta`.

    `runs` has a function from δ to ε for each setting. ε is inf if a run has no guarantee.
    """
    validation.delta(delta)

    def worst(at: float) -> float:
        return max(run(at) for run in runs)

    low, high = 0.0, math.log(num_runs.mean)  # δ₁ is 1 there, whatever the noise.
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2.0
        if worst(num_runs.delta_of_ratio(middle)) <= middle:
            high = middle
        else:
            low = middle
    tail = delta / num_runs.expected
    return Targets((worst(tail), tail), (high, num_runs.delta_of_ratio(high)))


def targets(target_epsilon: float, delta: float, num_runs: NumRuns) -> Targets:
    """Computes what every run has to promise so that the choice meets a target.

    Both promises cost a Gaussian mechanism the same noise, so that one that is calibrated to the
    first keeps the second.
    """
    validation.positive("target_epsilon", target_epsilon)
    validation.delta(delta)
    wanted, tail = target_epsilon * (1.0 - 2.0 * _SLACK), delta / num_runs.expected

    def excess(ratio: float) -> float:
        """Returns δ₁ of the Gaussian run that meets (ε₀, δ₀), over the δ₁ that it may have."""
        mu = gaussian.mu(wanted - 2.0 * ratio, tail)
        return gaussian.log_delta(mu, ratio) - math.log(num_runs.delta_of_ratio(ratio))

    high = min(math.log(num_runs.mean), wanted / 2.0) * (1.0 - _SLACK)
    ratio = high
    if excess(high) < 0.0:
        low = high
        while excess(low) < 0.0:
            low /= 2.0
        root: float = optimize.brentq(excess, low, high)  # pyright: ignore[reportAssignmentType]
        ratio = root
    tail_epsilon = wanted - 2.0 * ratio
    ratio *= 1.0 + _SLACK
    return Targets((tail_epsilon, tail), (ratio, num_runs.delta_of_ratio(ratio)))
