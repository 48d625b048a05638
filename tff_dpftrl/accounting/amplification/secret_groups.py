"""Cyclic Poisson sampling whose groups are secret, too: a mixture over groups.

`amplified_banded` bounds a run as if a unit's group were known. If each unit's group is drawn
uniformly and in secret, independently of all others' and of data, the run is dominated by
P = mean_g P_g against Q = N(0, σ²I), where P_g mixes over the turns of group g. Neighbours differ
in one unit, whose contributions are replaced by zeros; the bound for adding or removing one is the
same if no other unit's group depends on it. A unit must not learn the groups of others.

*Trap.* For a banded C the columns of neighbouring groups share rows, so that the ratios dP_g/dQ are
correlated under Q: to treat them as independent would understate ε. Groups whose turns are at least
`bands` rounds apart share none. So tell the adversary a group's rotation (joint convexity): uniform
groups are a mean of rotations of every bands-th group, ⌊groups / bands⌋ of them. Among these,
dP_g/dQ are independent, each a product of one sampled Gaussian's ratio for each turn, and the law
of their mean is computed with roundings that only add privacy loss. With fewer than 2 · bands
groups nothing is gained, and the bound with the group known is returned. It is also returned where
it is less.
"""

from __future__ import annotations

import dataclasses
import math

from tff_dpftrl import validation
from tff_dpftrl.accounting import amplified_banded, calibrate
from tff_dpftrl.accounting.amplification import likelihood_ratio
from tff_dpftrl.mechanisms import strategy as strategy_lib


@dataclasses.dataclass(frozen=True)
class SecretGroups:
    """One run of a banded strategy with cyclic Poisson sampling and secret groups.

    `known` is the run if groups were known, `num_apart` the number of groups without a common row,
    ⌊groups / bands⌋.
    """

    known: amplified_banded.AmplifiedBanded
    num_apart: int

    @classmethod
    def from_strategy(
        cls,
        strategy: strategy_lib.Strategy,
        *,
        noise_multiplier: float,
        num_rounds: int,
        num_groups: int,
        sampling_probability: float,
    ) -> SecretGroups:
        """Builds the run of a banded strategy with nonnegative entries and secret groups.

        `num_groups` is at least the number of bands. `sampling_probability` is that of a client to
        be in the cohort when it is its group's turn.
        """
        known = amplified_banded.AmplifiedBanded.from_strategy(
            strategy,
            noise_multiplier=noise_multiplier,
            num_rounds=num_rounds,
            num_groups=num_groups,
            sampling_probability=sampling_probability,
        )
        return cls(known, known.num_groups // amplified_banded.num_bands(strategy))

    def epsilon(self, delta: float) -> float:
        """Computes epsilon at `delta`: a bound that holds, never above that of known groups."""
        validation.delta(delta)
        known = self.known.epsilon(delta)
        sampled = self.known.sampled
        if (
            self.num_apart < 2
            or sampled.noise_multiplier <= likelihood_ratio.LARGEST_VARIANCE**-0.5
        ):
            return known
        probability, turns = sampled.sampling_probability, sampled.num_rounds
        variance = sampled.noise_multiplier**-2
        negligible = likelihood_ratio.NEGLIGIBLE_SHARE * delta / turns
        step = likelihood_ratio.grid_step(variance, turns, probability**2 * math.expm1(variance))
        turn = likelihood_ratio.lognormal(variance, step, negligible)
        if probability < 1.0:
            absent = likelihood_ratio.one(step, negligible)
            turn = likelihood_ratio.average(turn, absent, probability)
        group = likelihood_ratio.power(turn, turns)
        return min(known, likelihood_ratio.mean(group, self.num_apart).epsilon(delta))


def calibrate_noise_multiplier(
    strategy: strategy_lib.Strategy,
    *,
    num_rounds: int,
    num_groups: int,
    sampling_probability: float,
    target_epsilon: float,
    delta: float,
) -> float:
    """Computes the smallest z, to a relative 1e-4, with which secret groups meet a target.

    Epsilon of the result was evaluated and is not above the target.
    """
    return calibrate.smallest_noise(
        lambda noise: SecretGroups.from_strategy(
            strategy,
            noise_multiplier=noise,
            num_rounds=num_rounds,
            num_groups=num_groups,
            sampling_probability=sampling_probability,
        ).epsilon(delta),
        target_epsilon=target_epsilon,
    )
