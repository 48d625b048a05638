"""Banded matrix factorisation with cyclic Poisson sampling: the amplified option.

The population is split, independently of its data, into at least as many groups as
the strategy has bands. Round t samples each client of group t mod groups with
probability q, in secret. No two rounds of one client share a row of C, so that the
run costs what ⌈n / groups⌉ Poisson-sampled Gaussians with noise z / (largest column
norm) cost (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization",
Theorem 4). This needs the server to choose cohorts; devices that decide by
themselves when to check in give no such guarantee.
"""

from __future__ import annotations

import dataclasses
import math

from tff_dpftrl import validation
from tff_dpftrl.accounting import dp_fedavg, mixture_of_gaussians, parts
from tff_dpftrl.mechanisms import noise_recipe
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib


def num_bands(strategy: strategy_lib.Strategy) -> int:
    """Counts the bands of C: C[i, j] = 0 for i − j >= num_bands. Refuses a C that is not banded."""
    recipe = strategy_lib.check_strategy(strategy).noise_recipe()
    if isinstance(recipe, noise_recipe.IdentityNoise):
        return 1
    if isinstance(recipe, noise_recipe.BandedNoise):
        return len(recipe.rows[0])
    raise validation.UsageError(
        f"Amplification by cyclic sampling needs a banded C, got the mechanism "
        f"{strategy.mechanism!r}; use a banded one, or account without amplification."
    )


@dataclasses.dataclass(frozen=True)
class AmplifiedBanded:
    """One run of a banded strategy with cyclic Poisson sampling; see `from_strategy`.

    Attributes:
      sampled: DP-FedAvg run that costs the same as this one, if `units_per_client` is 1.
      num_rounds: Number of rounds n.
      num_groups: Number of groups of clients that take turns.
      units_per_client: Largest number G of units of one client, each sampled by itself.
      strategy: The strategy itself; None if only its cost is known.
    """

    sampled: dp_fedavg.DpFedAvg
    num_rounds: int
    num_groups: int
    units_per_client: int = 1
    strategy: strategy_lib.Strategy | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    @classmethod
    def from_strategy(
        cls,
        strategy: strategy_lib.Strategy,
        *,
        noise_multiplier: float,
        num_rounds: int,
        num_groups: int,
        sampling_probability: float,
        units_per_client: int = 1,
    ) -> AmplifiedBanded:
        """Builds the run of a banded strategy with cyclic Poisson sampling.

        Args:
          strategy: Strategy whose C is banded.
          noise_multiplier: z, standard deviation of the noise per unit clip norm.
          num_rounds: Number of rounds n.
          num_groups: Number of groups of clients that take turns, at least the number of
            bands; a client's stride is at least this.
          sampling_probability: q, probability of a client to be in the cohort when it is
            its group's turn: clients per round · num_groups / population.
          units_per_client: Largest number G of units of one client that are sampled, and
            clipped, each by itself; 1 if clients are.

        Returns:
          The run.

        Raises:
          ValueError: If the strategy is not banded, or an argument is out of range.
        """
        bands = num_bands(strategy)
        if int(num_groups) != num_groups or num_groups < bands:
            raise validation.UsageError(
                f"num_groups must be at least the number of bands {bands}, got {num_groups!r}: "
                "otherwise one client's rounds share noise."
            )
        # One round of one client: the largest column norm of C.
        once = strategy.sensitivity(schema_lib.MinSep(num_rounds, num_rounds, 1))
        sampled = dp_fedavg.DpFedAvg(
            sampling_probability, noise_multiplier / once.value, math.ceil(num_rounds / num_groups)
        )
        units_per_client = validation.integer("units_per_client", units_per_client, minimum=1)
        return cls(sampled, num_rounds, int(num_groups), units_per_client, strategy)

    def epsilon(self, delta: float) -> float:
        """Computes epsilon at `delta`, by privacy loss distributions."""
        validation.delta(delta)
        if self.sampled.noise_multiplier == 0.0:
            return math.inf
        return mixture_of_gaussians.epsilon(
            self._mixture, num_steps=self.sampled.num_rounds, delta=delta
        )

    def delta(self, epsilon: float) -> float:
        """Computes delta at `epsilon`, by privacy loss distributions."""
        return mixture_of_gaussians.delta(
            self._mixture, num_steps=self.sampled.num_rounds, epsilon=epsilon
        )

    def profile(self, delta: float) -> tuple[tuple[float, float], ...]:
        """Computes points (ε, δ) from ε = 0 to ε at `delta`; see `parts.profile`."""
        return parts.profile(self.rounds, (), self.epsilon(delta))

    @property
    def rounds(self) -> parts.SampledRounds:
        """Sampled rounds that cost the same, to be composed with other parts of a budget."""
        return parts.SampledRounds(
            self.sampled.noise_multiplier,
            self.sampled.sampling_probability,
            self.sampled.num_rounds,
            self.units_per_client,
        )

    @property
    def _mixture(self) -> mixture_of_gaussians.MixtureOfGaussians:
        """The pair of one round."""
        return mixture_of_gaussians.els(
            self.sampled.noise_multiplier, self.sampled.sampling_probability, self.units_per_client
        )


def calibrate_noise_multiplier(
    strategy: strategy_lib.Strategy,
    *,
    num_rounds: int,
    num_groups: int,
    sampling_probability: float,
    target_epsilon: float,
    delta: float,
    units_per_client: int = 1,
) -> float:
    """Computes the smallest z, to a relative 1e-4, with which an amplified run meets a target.

    Args:
      strategy: Strategy whose C is banded.
      num_rounds: Number of rounds n.
      num_groups: Number of groups of clients that take turns, at least the number of bands.
      sampling_probability: q, probability of a client to be in the cohort when it is its
        group's turn.
      target_epsilon: Largest allowed epsilon.
      delta: Delta of the target.
      units_per_client: Largest number G of units of one client, each sampled by itself.

    Returns:
      The noise multiplier; its epsilon was evaluated and is not above the target.

    Raises:
      ValueError: If an argument is out of range.
    """
    run = AmplifiedBanded.from_strategy(
        strategy,
        noise_multiplier=1.0,
        num_rounds=num_rounds,
        num_groups=num_groups,
        sampling_probability=sampling_probability,
        units_per_client=units_per_client,
    )
    largest_norm = 1.0 / run.sampled.noise_multiplier
    calibrated = mixture_of_gaussians.calibrate_els(
        sampling_probability=sampling_probability,
        group_size=units_per_client,
        num_steps=run.sampled.num_rounds,
        target_epsilon=target_epsilon,
        delta=delta,
    )
    return largest_norm * calibrated * (1.0 + 1e-12)  # Rounding must not make it too small.
