"""Bounds, and an estimate, from one training run with many canaries.

The bounds are valid for any mechanism, whatever its noise: for ε by Steinke, Nasr & Jagielski
2023, "Privacy auditing with one (1) training run"; for μ, where a Gaussian mechanism is claimed,
by Mahloujifar, Melis & Chaudhuri 2024, "Auditing f-differential privacy in one run". The estimate
is by Andrew, Kairouz, Oh, Oprea, McMahan & Suriyakumar 2023, "One-shot empirical privacy
estimation for federated learning".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from scipy import optimize, special, stats

from tff_dpftrl import validation

FRACTIONS = (0.05, 0.2, 0.5)
"""Numbers of guesses that are tried, as shares of the canaries."""

_LARGEST_EPSILON = 700.0
_STEP = 0.05
_LARGEST_MU = 100.0
_HALVINGS = 30


@dataclasses.dataclass(frozen=True)
class Guesses:
    """Counts of an auditor's guesses which canaries took part.

    Each of m `canaries` took part or not by an independent fair coin. The auditor guessed r of them
    (`guesses`), left the others open, and was right v times (`correct`).
    """

    canaries: int
    guesses: int
    correct: int

    def __post_init__(self):
        if not 0 <= self.correct <= self.guesses <= self.canaries:
            raise validation.UsageError(
                "there must be 0 <= correct <= guesses <= canaries, got "
                f"{self.correct}, {self.guesses} and {self.canaries}."
            )

    def p_value(self, epsilon: float, delta: float) -> float:
        """Bounds the chance of as many correct guesses under an (ε, δ)-DP mechanism.

        Given what was released, and so the guesses, and the coins of other canaries, a pure
        ε-DP mechanism lets a guess be right with probability q = e^ε / (1 + e^ε) at most: W
        of r guesses, W ~ Binomial(r, q). With δ some guesses may be right beyond that; their
        number F has mean 2 m δ at most (Steinke et al. 2023, section 5 and its proof). The
        chance of v right guesses is then at most
        E P[W ≥ v − F] = P[W ≥ v] + Σ_i P[F = i] P[v − i ≤ W < v], a linear programme in the
        distribution of F, whose value is at most
        P[W ≥ v] + 2 m δ max_{1 ≤ i ≤ v} P[v − i ≤ W < v] / i (Theorem 5.2, Appendix D).
        """
        if not epsilon >= 0.0:
            raise validation.UsageError(f"epsilon must be at least 0, got {epsilon!r}.")
        if not 0.0 <= delta < 1.0:
            raise validation.UsageError(f"delta must be in [0, 1), got {delta!r}.")
        chance = special.expit(epsilon)
        tail = float(stats.binom.sf(self.correct - 1, self.guesses, chance))
        if delta == 0.0 or self.correct == 0:
            return tail
        below = stats.binom.pmf(np.arange(self.correct - 1, -1, -1), self.guesses, chance)
        steepest = np.max(np.cumsum(below) / np.arange(1, self.correct + 1))
        return min(1.0, tail + 2.0 * self.canaries * delta * float(steepest))

    def epsilon_at_least(self, delta: float, error_rate: float) -> float:
        """Computes a lower bound of ε at δ: any ε below has a p-value of `error_rate` at most.

        The bound exceeds the truth with chance `error_rate` at most. It is 0 if nothing is proven.
        """
        validation.number("error_rate", error_rate, above=0, below=1)
        if self.p_value(0.0, delta) > error_rate:
            return 0.0
        # Stops at the first ε that is not refused: with δ the p-value need not rise everywhere.
        low, high = 0.0, _STEP
        while high < _LARGEST_EPSILON and self.p_value(high, delta) <= error_rate:
            low, high = high, high + _STEP
        return _halved(low, high, lambda epsilon: self.p_value(epsilon, delta) <= error_rate)

    def contradicts(self, mu: float, error_rate: float) -> bool:
        """Returns whether a μ-GDP mechanism allows so many correct guesses only with chance < τ.

        Let p_i be the chance of i right guesses of r. Flipping the coin of canary j turns "j is
        guessed rightly, and c or more are" into "j is guessed wrongly, and c − 1 or more are
        guessed rightly" of the same output, so that the chance of the former is at most F(x) =
        Φ(Φ⁻¹(x) + μ) of that of the latter. F is concave: on average over canaries and coins, α_c ≤
        F(β_{c−1}) for all c, where α_c = Σ_{i ≥ c} i p_i / m and β_c = Σ_{i ≥ c} (r − i) p_i / m
        (Mahloujifar et al. 2024, Theorem 3.2 and Algorithm 3). Of the distributions with P[v or
        more] = τ the least mass is needed with all of τ at v, which leaves no condition for c > v,
        and then, from v − 1 downwards, with as little as the condition of c = i + 1 asks for at i:
        what is more may as well be one guess lower, where it raises β and lowers α of all
        conditions that remain. Where that is more mass than 1, no distribution keeps the
        conditions. τ is `error_rate`, and v the number of right guesses.
        """
        alpha = error_rate * self.correct / self.canaries
        beta = error_rate * (self.guesses - self.correct) / self.canaries
        whole = self.guesses / self.canaries
        for i in range(self.correct - 1, -1, -1):
            needed = float(special.ndtr(special.ndtri(alpha) - mu))
            if needed <= beta:
                return False  # And so it stays: α is what it was.
            alpha += (needed - beta) * i / (self.guesses - i)
            beta = needed
            if alpha + beta > whole:
                return True
        return False

    def mu_at_least(self, error_rate: float) -> float:
        """Bounds the smallest μ with which the mechanism can be μ-GDP, like `epsilon_at_least`."""
        validation.number("error_rate", error_rate, above=0, below=1)
        low, high = 0.0, 1.0
        while high < _LARGEST_MU and self.contradicts(high, error_rate):
            low, high = high, 2.0 * high
        return _halved(low, high, lambda mu: self.contradicts(mu, error_rate))


def _halved(low: float, high: float, is_refused: Callable[[float], bool]) -> float:
    """Finds the largest refused value by bisection; `low` is refused and `high` is not."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if is_refused(middle):
            low = middle
        else:
            high = middle
    return low


def guess(scores: np.ndarray, present: np.ndarray, guesses: int) -> Guesses:
    """Guesses "took part" of the highest scores and "did not" of the lowest, half of them each.

    The number of guesses must not be chosen by `present`.
    """
    scores, present = np.asarray(scores, float), np.asarray(present)
    if scores.ndim != 1 or scores.shape != present.shape or present.dtype != bool:
        raise validation.UsageError(
            "scores and present (bool) must have one entry a canary, got shapes "
            f"{scores.shape} and {present.shape}."
        )
    validation.integer("guesses", guesses, minimum=1)
    if guesses > len(scores):
        raise validation.UsageError(f"guesses must be at most {len(scores)}, got {guesses}.")
    order = np.argsort(scores, kind="stable")
    lowest, highest = order[: guesses // 2], order[len(order) - (guesses - guesses // 2) :]
    correct = int(np.sum(~present[lowest]) + np.sum(present[highest]))
    return Guesses(len(scores), guesses, correct)


def epsilon_at_least(
    scores: np.ndarray,
    present: np.ndarray,
    *,
    delta: float,
    error_rate: float,
) -> tuple[float, Guesses]:
    """Bounds ε by the best of a few numbers of guesses, with the error split between them.

    It holds for every mechanism, in one run, for canaries that took part by fair coins, independent
    of one another and of all else. (The bounds of `bounds` need trials that are independent given
    what is claimed.) `FRACTIONS` are the numbers of guesses, as shares of the canaries. The bound
    exceeds the truth with chance `error_rate` at most.
    """
    return _best(
        scores,
        present,
        lambda one, parts: one.epsilon_at_least(delta, error_rate / parts),
    )


def mu_at_least(
    scores: np.ndarray,
    present: np.ndarray,
    *,
    error_rate: float,
) -> tuple[float, Guesses]:
    """Bounds the smallest μ of μ-GDP, under the conditions of `epsilon_at_least`."""
    return _best(scores, present, lambda one, parts: one.mu_at_least(error_rate / parts))


def all_correct(canaries: int) -> tuple[Guesses, ...]:
    """Returns the best guesses that the bounds can get from so many canaries: all correct."""
    return tuple(Guesses(canaries, number, number) for number in _numbers(canaries))


def _best(
    scores: np.ndarray,
    present: np.ndarray,
    bound: Callable[[Guesses, int], float],
) -> tuple[float, Guesses]:
    """Returns the largest `bound` over numbers of guesses, and its guesses."""
    tried = [guess(scores, present, number) for number in _numbers(len(scores))]
    bounds = [bound(one, len(tried)) for one in tried]
    best = int(np.argmax(bounds))
    return bounds[best], tried[best]


def _numbers(canaries: int) -> list[int]:
    return sorted({max(1, round(fraction * canaries)) for fraction in FRACTIONS})


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimate from one run, which may be above or below the truth.

    `mu` is the difference of the mean statistics over their root mean square deviation, `epsilon` ε
    at δ between two Gaussians that are fitted to the statistics.
    """

    mu: float
    epsilon: float
    method: str


def estimate(seen: np.ndarray, fresh: np.ndarray, *, delta: float) -> Estimate:
    """Estimates μ and ε from a statistic of canaries, as in Andrew et al. 2023.

    Gaussians are fitted to the statistic of canaries that took part and of fresh ones that did
    not; ε is the one at which these Gaussians are δ apart. In the paper the statistic is the
    cosine of a canary's direction with the model's movement. There, the fresh statistic of the
    final model needs no canaries, as it is N(0, 1/d). Here it is always measured, since the
    model's movement is no random direction. The estimate proves nothing.
    """
    validation.delta(delta)
    seen, fresh = np.asarray(seen, float), np.asarray(fresh, float)
    if min(seen.size, fresh.size) < 2:
        raise validation.UsageError(
            f"seen and fresh must have two values each, got {seen.size} and {fresh.size}: add "
            "canaries."
        )
    spread, fresh_spread = seen.std(ddof=1), fresh.std(ddof=1)
    if not min(spread, fresh_spread) > 0.0:
        raise validation.UsageError(
            "seen and fresh must vary: give the canaries different directions."
        )
    shift = float(seen.mean() - fresh.mean())
    return Estimate(
        shift / math.sqrt((spread**2 + fresh_spread**2) / 2.0),
        epsilon_of_gaussians(shift / fresh_spread, spread / fresh_spread, delta),
        f"Gaussians fitted to {seen.size} canaries that took part and {fresh.size} fresh ones",
    )


def epsilon_of_gaussians(shift: float, scale: float, delta: float) -> float:
    """Computes the ε at which N(shift, scale²) and N(0, 1) are δ apart, in both directions."""

    def excess(epsilon: float) -> float:
        return (
            max(_beyond(shift, scale, epsilon), _beyond(-shift / scale, 1 / scale, epsilon)) - delta
        )

    if excess(0.0) <= 0.0:
        return 0.0
    high = 1.0
    while excess(high) > 0.0 and high < _LARGEST_EPSILON:
        high *= 2.0
    return math.inf if excess(high) > 0.0 else float(optimize.brentq(excess, 0.0, high))


def _beyond(shift: float, scale: float, epsilon: float) -> float:
    """Computes ∫ max(p − e^ε q, 0) for p = N(shift, scale²) and q = N(0, 1)."""
    # log p/q − ε = a x² + b x + c: its roots bound where p is above e^ε q.
    a = 0.5 - 0.5 / scale**2
    b = shift / scale**2
    c = -0.5 * (shift / scale) ** 2 - math.log(scale) - epsilon
    if abs(a) < 1e-12:
        if b == 0.0:
            return 0.0
        ends = [(-c / b, math.inf)] if b > 0 else [(-math.inf, -c / b)]
    else:
        discriminant = b * b - 4.0 * a * c
        if discriminant <= 0.0:
            ends = [(-math.inf, math.inf)] if a > 0.0 else []
        else:
            # The stable pair of roots.
            half = -0.5 * (b + math.copysign(math.sqrt(discriminant), b))
            first, second = sorted((half / a, c / half))
            outside = [(-math.inf, first), (second, math.inf)]
            ends = outside if a > 0.0 else [(first, second)]
    total = 0.0
    for low, high in ends:
        first_mass = _mass((low - shift) / scale, (high - shift) / scale)
        log_other = math.log(max(_mass(low, high), 5e-324)) + epsilon
        total += max(0.0, first_mass - math.exp(min(log_other, 700.0)))
    return total


def _mass(low: float, high: float) -> float:
    """Returns the probability of N(0, 1) between two values, from the nearer tail."""
    if low > 0.0:
        low, high = -high, -low
    return float(special.ndtr(high) - special.ndtr(low))
