"""Balls in bins: each unit draws one of b bins, once and in secret, and comes at its turns.

A unit of bin j takes part in rounds j, j + b, j + 2b, … (Choquette-Choo et al. 2024, arXiv
2410.06266, section 2). Any strategy with C >= 0 will do, such as a BLT. Neighbours differ in one
unit, whose contributions are replaced by zeros; bins are drawn independently of each other and of
all data. If units are added or removed instead, the bound is the same as long as no other unit's
bin and no denominator depends on how many there are.

With C >= 0 the worst unit sends the same vector in all its rounds (there, Lemma 3.2), so that the
run is dominated by P = mean_j N(m_j, σ²I) against Q = N(0, σ²I), where m_j is the sum of the
columns of bin j. `likelihood_ratio` has the tools, and the proofs of what is used here:

* Inner products G_jl = <m_j, m_l>/σ² are raised to K(distance of j and l on the circle), the
  largest of all pairs that are at least so far apart (Kahane).
* The bins are the mean of b rotations of a subset A of them, so the adversary may be told which
  rotation it is (joint convexity): bins of A alone count.
* A consists of n₃ blocks of n₂ blocks of n₁ bins, with distances d₁ <= d₂ <= d₃ between neighbours
  in a level. Within a level inner products are raised to K(d) (Kahane). Then u is a sum of
  independent Gaussians, one for each bin, block, block of blocks, and one for all; dP/dQ is a mean
  of products of means, whose law is computed with roundings that only spread it.

Every subset gives a bound of ε that holds; the least one counts, or that of one Gaussian with the
largest |m_j| if it is less, which is never above the bound without amplification. Rényi
divergences, by dynamic programming (Schuchardt and Kalinin 2026, arXiv 2601.21636), were 6 to 35 %
above these at 25 bins and δ = 1e-5, also where correlations are exact.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
from scipy import special

from tff_dpftrl import validation
from tff_dpftrl.accounting import gaussian, noise_search
from tff_dpftrl.accounting.amplification import estimate as estimate_lib
from tff_dpftrl.accounting.amplification import likelihood_ratio, patterns
from tff_dpftrl.mechanisms import strategy as strategy_lib

_COARSE, _FINE = 0.02, 0.0025
"""Intervals of the grid, in standard deviations of one bin's privacy loss."""
_REFINED = 3
"""Number of subsets whose bound is computed on the fine grid."""

Levels = tuple[tuple[int, int], ...]
"""Subset of the bins: pairs (number, distance) of its levels, from single bins to the circle."""


def _round_numbers(largest: int) -> list[int]:
    """Returns 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, … up to `largest`."""
    numbers = [1, 2, 3, 4, 5, 6]
    while numbers[-1] < largest:
        numbers.append(numbers[-1] + 2 ** max(1, int(math.log2(numbers[-1])) - 2))
    return [number for number in numbers if number <= largest]


def _two_levels(num_bins: int, near: int) -> Iterator[Levels]:
    """Lists subsets of two levels whose blocks are about `near` bins apart."""
    for outer in sorted(
        {max(2, near + round(near * shift)) for shift in (-0.5, -0.25, 0, 0.25, 0.5)}
    ):
        for inner in (1, 2, 4):
            for count in (2, 3, 4, 6, 10, 16, 32):
                blocks = num_bins // ((count - 1) * inner + outer)
                if inner < outer and blocks > 1:
                    yield ((count, inner), (blocks, outer))


def _three_levels(levels: Levels, num_bins: int) -> Iterator[Levels]:
    """Lists subsets whose blocks consist of blocks, about as large as those of `levels`."""
    (count, inner), (_, outer) = levels
    for first, second in itertools.product((2, 3, 4), repeat=2):
        for middle in _round_numbers(outer - 1):
            span = second * (first - 1) * inner + (second - 1) * middle
            blocks = num_bins // (span + outer)
            if middle > inner and blocks > 1 and abs(first * second - count) <= 3:
                yield ((first, inner), (second, middle), (blocks, outer))


@dataclasses.dataclass(frozen=True)
class BallsInBins:
    """One run of a strategy with balls-in-bins sampling; see `from_strategy`.

    `kernel` has the largest inner products of bins' sums of columns, from `patterns.bin_kernel`.
    """

    strategy: strategy_lib.Strategy
    noise_multiplier: float
    num_rounds: int
    num_bins: int
    kernel: np.ndarray = dataclasses.field(repr=False, compare=False)

    @classmethod
    def from_strategy(
        cls,
        strategy: strategy_lib.Strategy,
        *,
        noise_multiplier: float,
        num_rounds: int,
        num_bins: int,
    ) -> BallsInBins:
        """Builds the run of a strategy whose C has no negative entries; `num_bins` is b."""
        noise = validation.noise_multiplier(noise_multiplier)
        num_rounds = validation.integer("num_rounds", num_rounds, minimum=1)
        num_bins = validation.integer("num_bins", num_bins, minimum=1)
        if num_bins > num_rounds:
            raise validation.UsageError(
                f"num_bins must be at most num_rounds={num_rounds}, got {num_bins}: the units of "
                "the last bins would never take part."
            )
        kernel = patterns.bin_kernel(strategy, num_rounds, num_bins)
        return cls(strategy, noise, num_rounds, num_bins, kernel)

    @property
    def variances(self) -> np.ndarray:
        """Covariance of two bins' privacy losses by distance, an upper bound; [b // 2 + 1]."""
        if self.noise_multiplier == 0.0:
            return np.full(len(self.kernel), math.inf)
        with np.errstate(over="ignore"):
            return self.kernel / self.noise_multiplier / self.noise_multiplier

    def epsilon(self, delta: float) -> float:
        """Computes epsilon at `delta`: a bound that holds, and never above the unamplified one."""
        validation.delta(delta)
        unamplified = self.unamplified_epsilon(delta)
        laws = self._laws(lambda law: law.epsilon(delta), likelihood_ratio.NEGLIGIBLE_SHARE * delta)
        return min([unamplified, *laws])

    def delta(self, epsilon: float) -> float:
        """Computes delta at `epsilon`: a bound that holds, never below 1e-30."""
        epsilon = validation.number("epsilon", epsilon, at_least=0)
        unamplified = gaussian.delta(self._mu, epsilon)
        laws = self._laws(lambda law: law.delta(epsilon), 1e-40)
        return max(min([unamplified, *laws]), 1e-30)

    def unamplified_epsilon(self, delta: float) -> float:
        """Computes epsilon at `delta` of a unit whose bin is known."""
        return gaussian.epsilon(self._mu, delta)

    @property
    def _mu(self) -> float:
        return math.sqrt(self.variances[0])

    def estimate(self, delta: float, num_samples: int, seed: int) -> estimate_lib.Estimate:
        """Estimates epsilon by simulated privacy losses, with a 99 % interval: no guarantee."""
        sums = patterns.bin_sums(self.strategy, self.num_rounds, self.num_bins)
        with np.errstate(divide="ignore", invalid="ignore"):
            gram = sums @ sums.T / self.noise_multiplier**2
        half = np.diag(gram) / 2.0
        average = np.asarray(gram.mean(axis=1))
        values, vectors = np.linalg.eigh(np.nan_to_num(gram, posinf=0.0))
        root = vectors * np.sqrt(np.maximum(values, 0.0))

        def noise(rng: np.random.Generator, count: int) -> np.ndarray:
            return rng.standard_normal((count, len(root))) @ root.T

        def log_ratio(u: np.ndarray, scale: float) -> np.ndarray:
            exponents = scale * u - scale**2 * half
            return np.asarray(special.logsumexp(exponents, axis=1)) - math.log(self.num_bins)

        def remove(rng: np.random.Generator, count: int, tilt: float) -> estimate_lib.Draws:
            scale = 1.0 + tilt
            u = scale * gram[rng.integers(self.num_bins, size=count)] + noise(rng, count)
            losses = log_ratio(u, 1.0)
            return estimate_lib.Draws(losses, losses - log_ratio(u, scale))

        def add(rng: np.random.Generator, count: int, tilt: float) -> estimate_lib.Draws:
            u = noise(rng, count) - tilt * average
            weights = tilt * u.mean(axis=1) + tilt**2 * average.mean() / 2.0
            return estimate_lib.Draws(-log_ratio(u, 1.0), weights)

        # Where the loss exceeds ε the weights are bounded. Removing: a mean of powers is at least
        # the power of the mean. Adding: dP/dQ >= exp(mean u − mean of half the variances).
        largest, mean_half = 2.0 * float(half.max()), float(half.mean())
        spread = float(average.mean())

        def log_most_of_remove(tilt: float, epsilon: float) -> float:
            return tilt * ((1.0 + tilt) * largest / 2.0 - epsilon)

        def log_most_of_add(tilt: float, epsilon: float) -> float:
            return tilt * (mean_half - epsilon) + tilt**2 * spread / 2.0

        return estimate_lib.estimate(
            estimate_lib.Direction(
                remove, log_most_of_remove, lambda epsilon: epsilon / largest - 0.5
            ),
            estimate_lib.Direction(
                add, log_most_of_add, lambda epsilon: (epsilon - mean_half) / spread
            ),
            delta=delta,
            bound=self.epsilon(delta),
            num_samples=num_samples,
            seed=seed,
        )

    def _laws(
        self, bound: Callable[[likelihood_ratio.Ratio], float], negligible: float
    ) -> list[float]:
        """Computes bounds by the laws of the best subsets of bins."""
        if not 0.0 < self.variances[0] <= likelihood_ratio.LARGEST_VARIANCE or self.num_bins == 1:
            return []

        def rough(levels: Levels) -> float:
            return bound(self._law(levels, _COARSE, negligible))

        # Farther distances than where bins hardly overlap any more help little.
        least = self.variances[-1] + 1e-3 * self.variances[0]
        overlapping = sum(variance > least for variance in self.variances)
        found: dict[Levels, float] = {}
        for distance in _round_numbers(max(1, min(overlapping, self.num_bins // 2))):
            levels = ((self.num_bins // distance, distance),)
            found[levels] = rough(levels)
        if overlapping > 1:
            near = min(found, key=found.__getitem__)[0][1]
            pairs = {two: rough(two) for two in _two_levels(self.num_bins, near)}
            found |= pairs
            for two in sorted(pairs, key=pairs.__getitem__)[:1]:
                found |= {three: rough(three) for three in _three_levels(two, self.num_bins)}
        best = sorted(found, key=found.__getitem__)[:_REFINED]
        return [bound(self._law(levels, _FINE, negligible)) for levels in best]

    def _law(self, levels: Levels, interval: float, negligible: float) -> likelihood_ratio.Ratio:
        """Computes the law of dP/dQ of a subset of the bins."""
        step = interval * math.sqrt(self.variances[0])
        variance, law = self.variances[0], None
        for count, distance in levels:
            # Two bins of a level are at least `distance` apart.
            common = self.variances[distance] if count > 1 else variance
            own = likelihood_ratio.lognormal(variance - common, step, negligible)
            law = own if law is None else likelihood_ratio.product(law, own)
            law = likelihood_ratio.mean(law, count)
            variance = common
        assert law is not None
        if variance > 0.0:
            common = likelihood_ratio.lognormal(variance, step, negligible)
            law = likelihood_ratio.product(law, common)
        return law


def calibrate_noise_multiplier(
    strategy: strategy_lib.Strategy,
    *,
    num_rounds: int,
    num_bins: int,
    target_epsilon: float,
    delta: float,
) -> float:
    """Computes the smallest z, to a relative 1e-3, with which balls in bins meets a target.

    Args:
      strategy: Strategy with a C without negative entries.
      num_rounds: Number of rounds n.
      num_bins: Number of bins b.
      target_epsilon: Largest allowed epsilon.
      delta: Delta of the target.

    Returns:
      The noise multiplier; its epsilon was evaluated and is not above the target.

    Raises:
      ValueError: If an argument is out of range.
    """
    run = BallsInBins.from_strategy(
        strategy, noise_multiplier=1.0, num_rounds=num_rounds, num_bins=num_bins
    )
    validation.positive("target_epsilon", target_epsilon)
    return noise_search.smallest_noise(
        lambda noise: dataclasses.replace(run, noise_multiplier=noise).epsilon(delta),
        target_epsilon=target_epsilon,
        initial=math.sqrt(run.kernel[0]) / gaussian.mu(target_epsilon, delta),
        relative_tolerance=1e-3,
    )
