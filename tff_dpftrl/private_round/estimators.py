"""The two estimators of the average update of a sampled cohort.

Clients join a round independently with probability q. With weights w_k in
[0, 1] and updates of norm at most S, a division by the cohort's actual weight has
no useful sensitivity. These two estimators have one (McMahan et al. 2018, section 2
and Lemma 1).
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import tensorflow as tf

from tff_dpftrl import validation

_PUBLIC = "It is a sum of client weights that is public knowledge."


@dataclasses.dataclass(frozen=True)
class FixedDenominator:
    """Estimator f̃_f = Σ w_k Δ_k / (q W), which divides by the expected weight of a cohort.

    Attributes:
      sampling_probability: Probability q with which each client joins a round.
      total_weight: Sum W of w_k over the population, or an estimate of it; with equal
        weights the number of clients. It must be public. Neither the noise nor the
        sensitivity depends on the true value.
    """

    sampling_probability: float
    total_weight: float

    def __post_init__(self):
        validation.probability("sampling_probability", self.sampling_probability)
        validation.positive("total_weight", self.total_weight, remedy=_PUBLIC)

    @property
    def expected_weight(self) -> float:
        """The expected sum of weights of a cohort, q W."""
        return self.sampling_probability * self.total_weight

    @property
    def unit_sensitivity(self) -> float:
        """L2 change of the estimate when a client of clip norm 1 comes or goes."""
        return 1 / self.expected_weight

    def divisor(self, cohort_weight: tf.Tensor) -> tf.Tensor:
        """Returns the divisor of the sum, q W, whatever the cohort's weight is."""
        return tf.constant(self.expected_weight, cohort_weight.dtype)


@dataclasses.dataclass(frozen=True)
class ClippedDenominator:
    """Estimator f̃_c = Σ w_k Δ_k / max(q W_min, Σ w_k): a mean, but for small cohorts.

    It needs twice the noise of `FixedDenominator` with W = W_min, and adapts to
    the cohort's actual weight.

    Attributes:
      sampling_probability: Probability q with which each client joins a round.
      min_total_weight: Public number W_min that the sum of w_k over the population is
        believed to exceed; the privacy does not depend on whether it does.
    """

    sampling_probability: float
    min_total_weight: float

    def __post_init__(self):
        validation.probability("sampling_probability", self.sampling_probability)
        validation.positive("min_total_weight", self.min_total_weight, remedy=_PUBLIC)

    @property
    def min_expected_weight(self) -> float:
        """Smallest divisor, q W_min."""
        return self.sampling_probability * self.min_total_weight

    @property
    def unit_sensitivity(self) -> float:
        """L2 change of the estimate when a client of clip norm 1 comes or goes."""
        return 2 / self.min_expected_weight

    def divisor(self, cohort_weight: tf.Tensor) -> tf.Tensor:
        """Returns the divisor of the sum, max(q W_min, Σ w_k)."""
        return tf.maximum(tf.constant(self.min_expected_weight, cohort_weight.dtype), cohort_weight)


Estimator: TypeAlias = FixedDenominator | ClippedDenominator
