"""Privacy of DP-FedAvg and DP-FedSGD: the Poisson-sampled Gaussian mechanism.

In each round every user is in the cohort with probability q, independently and in
secret; the estimate of the average update gets noise of z times its sensitivity
(McMahan et al. 2018, Theorem 1). Neighbours differ in one user, whose contributions
are zeroed out; the number of users, and so q, is the same. Clip norm and noise may
change together while z stays. Three accountants: privacy loss distributions (tight),
Rényi divergences, and the moments accountant of 2016 for comparison with the paper.
"""

from __future__ import annotations

import dataclasses
import math

import dp_accounting
import numpy as np
from dp_accounting import rdp
from scipy import special

from tff_dpftrl import validation
from tff_dpftrl.accounting import mixture_of_gaussians, noise_search, parts

_MOMENTS = np.arange(1, 33)
# Noise multipliers whose squares, and inverse squares, are far from overflowing. The looser
# accountants take less noise for none, and more noise for the larger of these.
_LITTLE_NOISE, _MUCH_NOISE = 1e-100, 1e100


@dataclasses.dataclass(frozen=True)
class DpFedAvg:
    """One run of DP-FedAvg or DP-FedSGD.

    Attributes:
      sampling_probability: q, probability of a user to be in a round's cohort.
      noise_multiplier: z, standard deviation of the noise over the sensitivity of
        the estimator (which is clip norm / (qW), or twice that with the clipped
        denominator); 0 means no privacy.
      num_rounds: Number of rounds.
    """

    sampling_probability: float
    noise_multiplier: float
    num_rounds: int

    def __post_init__(self):
        validation.probability("sampling_probability", self.sampling_probability)
        validation.noise_multiplier(self.noise_multiplier)
        validation.integer("num_rounds", self.num_rounds, minimum=1)

    def to_dp_event(self) -> dp_accounting.DpEvent:
        """Describes the run as an event for dp_accounting's accountants."""
        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(
                self.sampling_probability, dp_accounting.GaussianDpEvent(self.noise_multiplier)
            ),
            self.num_rounds,
        )

    def epsilon(self, delta: float) -> float:
        """Computes epsilon at `delta` by privacy loss distributions, within 1e-4 of tight."""
        validation.delta(delta)
        if self.noise_multiplier == 0.0:
            return math.inf
        return mixture_of_gaussians.epsilon(
            mixture_of_gaussians.uls(self.noise_multiplier, self.sampling_probability),
            num_steps=self.num_rounds,
            delta=delta,
        )

    def profile(self, delta: float) -> tuple[tuple[float, float], ...]:
        """Computes points (ε, δ) from ε = 0 to ε at `delta`; see `parts.profile`."""
        rounds = parts.SampledRounds(
            self.noise_multiplier, self.sampling_probability, self.num_rounds
        )
        return parts.profile(rounds, (), self.epsilon(delta))

    def epsilon_rdp(self, delta: float) -> float:
        """Computes epsilon at `delta` by Rényi divergences, with dp_accounting's orders."""
        validation.delta(delta)
        if self.noise_multiplier < _LITTLE_NOISE:
            return math.inf
        run = dataclasses.replace(self, noise_multiplier=min(self.noise_multiplier, _MUCH_NOISE))
        return rdp.RdpAccountant().compose(run.to_dp_event()).get_epsilon(delta)

    def epsilon_moments_accountant(self, delta: float) -> float:
        """Computes epsilon at `delta` by the moments accountant, to compare with papers.

        The log moments λ = 1 ... 32 of the privacy loss and Markov's inequality
        (Abadi et al. 2016, Theorem 2), as McMahan et al. 2018 used them.
        """
        validation.delta(delta)
        if self.noise_multiplier < _LITTLE_NOISE:
            return math.inf
        bounds = (self.num_rounds * self._log_moments() - math.log(delta)) / _MOMENTS
        return float(np.min(bounds))

    def _log_moments(self) -> np.ndarray:
        """Returns log E[(mixture / Gaussian)^(λ+1)] under the Gaussian, for λ in `_MOMENTS`."""
        order = _MOMENTS[:, None] + 1
        taken = np.arange(int(order.max()) + 1)
        log_binomial = (
            special.gammaln(order + 1)
            - special.gammaln(taken + 1)
            - special.gammaln(np.maximum(order - taken, 0) + 1)
        )
        q = self.sampling_probability
        terms = (
            log_binomial
            + special.xlogy(taken, q)
            + special.xlog1py(order - taken, -q)
            + taken * (taken - 1) / (2 * min(self.noise_multiplier, _MUCH_NOISE) ** 2)
        )
        return np.asarray(special.logsumexp(np.where(taken <= order, terms, -np.inf), axis=1))


def calibrate_noise_multiplier(
    *, sampling_probability: float, num_rounds: int, target_epsilon: float, delta: float
) -> float:
    """Computes the smallest z, to a relative 1e-4, with which DP-FedAvg meets a target.

    Args:
      sampling_probability: q, probability of a user to be in a round's cohort.
      num_rounds: Number of rounds.
      target_epsilon: Largest allowed epsilon.
      delta: Delta of the target.

    Returns:
      The noise multiplier; its epsilon was evaluated and is not above the target.

    Raises:
      ValueError: If an argument is out of range.
    """
    return noise_search.smallest_noise(
        lambda noise: DpFedAvg(sampling_probability, noise, num_rounds).epsilon(delta),
        target_epsilon=target_epsilon,
    )
