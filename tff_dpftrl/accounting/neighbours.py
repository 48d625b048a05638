"""Neighbouring data sets besides one user's zero-out: substitution, and groups of users.

All are chains of zero-outs and their reverse, one user after the other. `epsilon_by_changes`
follows the chain by the definition of (ε, δ), for any mechanism. Where a mechanism says more, the
chain is one step with a larger sensitivity: a Gaussian mechanism has the multiple of μ, and sampled
steps have a mixture of Gaussians (`mixture_of_gaussians`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from tff_dpftrl import validation

if TYPE_CHECKING:
    from tff_dpftrl.accounting import mixture_of_gaussians

RELATIONS = {
    "zero-out": "the contributions of a user are replaced by zeros",
    "add-or-remove": "a user is added or removed, and nothing else changes",
    "substitute": "the data of a user are replaced by other data",
}
"""Relations of neighbouring data sets, and what differs in them."""

# Smallest delta that is tried, and the relative excess of the logarithm of the one that is found.
_SMALLEST_LOG_DELTA, _TOLERANCE = math.log(1e-250), 1e-4


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """Relation of two neighbouring data sets in which `group_of` users differ together.

    With secret sampling in which each unit draws by itself, and a fixed denominator, the relation
    "add-or-remove" has the same pairs of distributions as "zero-out".
    """

    relation: str = "zero-out"
    group_of: int = 1

    def __post_init__(self):
        if self.relation not in RELATIONS:
            raise validation.UsageError(
                f"neighbours must be one of {', '.join(RELATIONS)}, got {self.relation!r}."
            )
        validation.integer("group_of", self.group_of, minimum=1)

    @property
    def is_substitution(self) -> bool:
        """Whether data are replaced by other data, rather than by none."""
        return self.relation == "substitute"

    @property
    def num_changes(self) -> int:
        """Number of zero-outs (or their reverse) that lead from one data set to the other."""
        return self.group_of * (2 if self.is_substitution else 1)

    @property
    def sentence(self) -> str:
        """Description of the difference, a clause."""
        text = RELATIONS[self.relation]
        if self.group_of == 1:
            return text
        return f"{text}, for {self.group_of} users together"

    def pair(
        self, noise_multiplier: float, sampling_probability: float, group_size: int = 1
    ) -> mixture_of_gaussians.MixtureOfGaussians:
        """Builds the pair that dominates a step in which each unit is sampled by itself.

        σ is the noise per unit of the clip norm, `group_size` the largest number G of units of one
        user. The worst units of all users who differ point the same way, so that they are those of
        one user with as many.
        """
        from tff_dpftrl.accounting import mixture_of_gaussians  # It takes long to import.

        mixture = mixture_of_gaussians.els(
            noise_multiplier, sampling_probability, group_size * self.group_of
        )
        return dataclasses.replace(mixture, is_substitution=self.is_substitution)


def epsilon_by_changes(
    epsilon_of_one: Callable[[float], float], num_changes: int, delta: float
) -> float:
    """Bounds epsilon of several changes in a row by that of one, for any mechanism.

    If one change costs (ε', δ') in both directions, k of them cost ε = k ε' and δ = δ'
    (1 + e^ε' + … + e^((k−1) ε')) (Vadhan 2017, lemma 7.2.2). `epsilon_of_one` maps δ' to an upper
    bound of ε'. The result is inf if no δ' down to 1e-250 is small enough.
    """
    validation.delta(delta)
    num_changes = validation.integer("num_changes", num_changes, minimum=1)
    if num_changes == 1:
        return epsilon_of_one(delta)

    def bound(log_one: float) -> float | None:
        """Returns ε if the δ of all changes is small enough for it, else None."""
        one = epsilon_of_one(math.exp(log_one))
        if not math.isfinite(one):
            return None
        log_sum = (num_changes - 1) * one + math.log(
            -math.expm1(-num_changes * one) / -math.expm1(-one) if one > 0.0 else num_changes
        )
        return num_changes * one if log_one + log_sum <= math.log(delta) else None

    # δ' falls until it is small enough, and then rises as far as it stays so.
    too_large = math.log(delta)
    step = math.log(num_changes)
    while (best := bound(max(too_large - step, _SMALLEST_LOG_DELTA))) is None:
        if too_large - step <= _SMALLEST_LOG_DELTA:
            return math.inf
        too_large, step = too_large - step, 2.0 * step
    enough = max(too_large - step, _SMALLEST_LOG_DELTA)
    while too_large - enough > _TOLERANCE * -enough:
        middle = (too_large + enough) / 2.0
        better = bound(middle)
        if better is None:
            too_large = middle
        else:
            best, enough = min(best, better), middle
    return best
