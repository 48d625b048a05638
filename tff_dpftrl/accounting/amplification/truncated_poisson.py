"""Truncated Poisson sampling: Poisson cohorts of which, if too large, a random part is kept.

For independent noise (C = I) and N units. Neighbours differ in one unit, whose contributions are
replaced by zeros; who is sampled, and who is left out, does not depend on data.

*Bound.* Fix, for every round, the Poisson sample A of the other N − 1 units; it is independent of
whether the unit is sampled, with probability q. If |A| is below the largest cohort B, nobody is
left out either way, and the round is that of Poisson sampling. Otherwise a sampled unit may be kept
in another's place, which changes the sum by up to two contributions. So call a round bad if |A| >=
B *and* the unit is sampled. Some round is bad with probability τ = 1 − (1 − q P(|A| >= B))^n. Tell
the adversary of the rounds with |A| >= B, and there whether the unit is sampled (joint convexity;
none of it depends on data). If no round is bad, the unit does not matter to the rounds with |A| >=
B, and the others are at most n rounds of Poisson sampling with probability q. Hence

    δ(ε) <= (1 − τ) δ_Poisson(ε) + τ.

Ganesh 2025 (arXiv 2508.15089) has tighter bounds for a single round. If units are added or removed
in place of zeros, a unit that is not sampled changes nothing, so that the bound holds as well, with
N the larger number of units.
"""

from __future__ import annotations

import dataclasses
import math

from scipy import stats

from tff_dpftrl import validation
from tff_dpftrl.accounting import calibrate, dp_fedavg, mixture_of_gaussians


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson:
    """One run with independent noise and truncated Poisson sampling.

    Attributes:
      sampling_probability: q, probability of a client to be sampled in a round.
      noise_multiplier: z, standard deviation of the noise per unit clip norm.
      num_rounds: Number of rounds n.
      num_clients: Number of clients N in the population.
      largest_cohort: Largest number of clients B in a round.

    Raises:
      ValueError: If an argument is out of range.
    """

    sampling_probability: float
    noise_multiplier: float
    num_rounds: int
    num_clients: int
    largest_cohort: int

    def __post_init__(self):
        self._untruncated()  # Checks its arguments.
        validation.integer("num_clients", self.num_clients, minimum=1)
        validation.integer("largest_cohort", self.largest_cohort, minimum=1)

    def _untruncated(self) -> dp_fedavg.DpFedAvg:
        return dp_fedavg.DpFedAvg(self.sampling_probability, self.noise_multiplier, self.num_rounds)

    @property
    def penalty(self) -> float:
        """Probability τ that a cohort without the unit is full when the unit is sampled."""
        full = float(
            stats.binom.sf(self.largest_cohort - 1, self.num_clients - 1, self.sampling_probability)
        )
        bad = min(1.0, self.sampling_probability * full * (1.0 + _ROUNDING))
        return 1.0 if bad == 1.0 else -math.expm1(self.num_rounds * math.log1p(-bad))

    def epsilon(self, delta: float) -> float:
        """Computes epsilon at `delta`, a bound that holds; inf if δ does not exceed the penalty."""
        validation.delta(delta)
        rest = (delta - self.penalty) / (1.0 - self.penalty) if self.penalty < 1.0 else 0.0
        # The difference is rounded; δ_Poisson below 1e-280 is out of reach of its accountant.
        rest *= 1.0 - 1e-12
        if rest <= max(1e-280, 1e-12 * delta):
            return math.inf
        return self._untruncated().epsilon(rest)

    def delta(self, epsilon: float) -> float:
        """Computes delta at `epsilon`: a bound that holds."""
        validation.number("epsilon", epsilon, at_least=0)
        if self.noise_multiplier == 0.0:
            return 1.0
        mixture = mixture_of_gaussians.uls(self.noise_multiplier, self.sampling_probability)
        poisson = mixture_of_gaussians.delta(mixture, num_steps=self.num_rounds, epsilon=epsilon)
        return min(1.0, (1.0 - self.penalty) * poisson + self.penalty)


_ROUNDING = 1e-9
"""Relative error allowed for in a tail of the binomial distribution."""


def calibrate_noise_multiplier(
    *,
    sampling_probability: float,
    num_rounds: int,
    num_clients: int,
    largest_cohort: int,
    target_epsilon: float,
    delta: float,
) -> float:
    """Computes the smallest z, to a relative 1e-4, with which truncated sampling meets a target.

    Args:
      sampling_probability: q, probability of a client to be sampled in a round.
      num_rounds: Number of rounds n.
      num_clients: Number of clients N in the population.
      largest_cohort: Largest number of clients B in a round.
      target_epsilon: Largest allowed epsilon.
      delta: Delta of the target.

    Returns:
      The noise multiplier; its epsilon was evaluated and is not above the target.

    Raises:
      ValueError: If an argument is out of range, or the cohorts are truncated too often for δ.
    """
    run = TruncatedPoisson(sampling_probability, 1.0, num_rounds, num_clients, largest_cohort)
    if math.isinf(run.epsilon(delta)):
        raise validation.UsageError(
            f"largest_cohort must be larger, got {largest_cohort}: cohorts of up to {num_clients} "
            f"clients are truncated with a probability that costs δ = {run.penalty:.3g}, not below "
            f"delta={delta!r}."
        )
    return calibrate.smallest_noise(
        lambda noise: dataclasses.replace(run, noise_multiplier=noise).epsilon(delta),
        target_epsilon=target_epsilon,
    )
