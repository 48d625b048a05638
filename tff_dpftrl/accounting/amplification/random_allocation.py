"""Random allocation: each unit takes part in k of n rounds, drawn uniformly and in secret.

For independent noise (C = I). Neighbours differ in one unit, whose contributions are replaced by
zeros; units' rounds are drawn independently of each other and of all data. With addition or removal
in place of zeros the bound is the same, as long as nothing else depends on who else takes part.

One of t rounds: P = mean_j N(e_j, σ²I) against Q = N(0, σ²I), so that dP/dQ is the mean of t
independent ratios of one Gaussian (Feldman and Shenfeld 2026, arXiv 2602.17284), whose law
`likelihood_ratio` computes with roundings that only add privacy loss, in both directions.

k of n rounds: split the n rounds at random into k parts of ⌊n/k⌋ or ⌈n/k⌉ rounds and draw one round
of each part. All rounds are treated alike, so that every set of k rounds is equally likely. Telling
the adversary the split, which does not depend on data, can only help it (joint convexity). Given
the split the run is a composition of k allocations of one round (2025, arXiv 2502.08202).
"""

from __future__ import annotations

import dataclasses
import math

from tff_dpftrl import validation
from tff_dpftrl.accounting import gaussian
from tff_dpftrl.accounting.amplification import likelihood_ratio


@dataclasses.dataclass(frozen=True)
class RandomAllocation:
    """One run with independent noise and random allocation.

    Attributes:
      noise_multiplier: z, standard deviation of the noise per unit clip norm.
      num_rounds: Number of rounds n.
      rounds_per_client: Number k of rounds of each client, at most n.

    Raises:
      ValueError: If an argument is out of range.
    """

    noise_multiplier: float
    num_rounds: int
    rounds_per_client: int

    def __post_init__(self):
        validation.noise_multiplier(self.noise_multiplier)
        validation.integer("num_rounds", self.num_rounds, minimum=1)
        validation.integer("rounds_per_client", self.rounds_per_client, minimum=1)
        if self.rounds_per_client > self.num_rounds:
            raise validation.UsageError(
                f"rounds_per_client must be at most num_rounds={self.num_rounds}, got "
                f"{self.rounds_per_client}."
            )

    def epsilon(self, delta: float) -> float:
        """Computes epsilon at `delta`: a bound that holds, and never above the unamplified one."""
        validation.delta(delta)
        unamplified = self.unamplified_epsilon(delta)
        law = self._law(likelihood_ratio.NEGLIGIBLE_SHARE * delta / self.rounds_per_client)
        return unamplified if law is None else min(unamplified, law.epsilon(delta))

    def delta(self, epsilon: float) -> float:
        """Computes delta at `epsilon`: a bound that holds, never below 1e-30."""
        epsilon = validation.number("epsilon", epsilon, at_least=0)
        unamplified = gaussian.delta(self._largest_mu, epsilon)
        law = self._law(1e-40)
        return max(1e-30, unamplified if law is None else min(unamplified, law.delta(epsilon)))

    def unamplified_epsilon(self, delta: float) -> float:
        """Computes epsilon at `delta` of a unit whose rounds are known."""
        return gaussian.epsilon(self._largest_mu, delta)

    @property
    def _largest_mu(self) -> float:
        if self.noise_multiplier == 0.0:
            return math.inf
        return math.sqrt(self.rounds_per_client) / self.noise_multiplier

    def _law(self, negligible: float) -> likelihood_ratio.Ratio | None:
        """Computes the law of dP/dQ; None if there is too little noise for one."""
        if self.noise_multiplier <= likelihood_ratio.LARGEST_VARIANCE**-0.5:
            return None
        variance = self.noise_multiplier**-2
        shorter, longer = divmod(self.num_rounds, self.rounds_per_client)
        step = likelihood_ratio.grid_step(
            variance, self.rounds_per_client, math.expm1(variance) / shorter
        )
        law = likelihood_ratio.one(step, negligible)
        once = likelihood_ratio.lognormal(variance, step, negligible)
        for parts, rounds in ((self.rounds_per_client - longer, shorter), (longer, shorter + 1)):
            if parts:
                of_part = likelihood_ratio.mean(once, rounds)
                law = likelihood_ratio.product(law, likelihood_ratio.power(of_part, parts))
        return law
