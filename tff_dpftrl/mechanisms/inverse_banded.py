"""Toeplitz strategies whose inverse has few bands: noise without any state.

The noise of round t is a combination of the draws of the last `bands` rounds, and a
counter-based generator draws those again: nothing model-sized is kept. The family:
BISR (Kalinin et al. 2025) cuts (1 − x)^(1/2) off after p coefficients; λ-CGD is 1 − λ x;
γ-BIFR cuts (1 − x)^γ off, with γ tuned by
`inverse_banded_optimize`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import noise_recipe, strategy
from tff_dpftrl.mechanisms.numerics import toeplitz
from tff_dpftrl.participation import schema as schema_lib


@dataclasses.dataclass(frozen=True)
class InverseBanded(strategy.Strategy):
    """Strategy with C⁻¹[i, j] = inverse_coefficients[i − j], 0 from `bands` on.

    Attributes:
      inverse_coefficients: Coefficients c'_0 ... c'_{bands−1} of C⁻¹, finite, c'_0 > 0.
    """

    inverse_coefficients: tuple[float, ...]

    mechanism: ClassVar[str] = "inverse-banded"

    def __post_init__(self):
        values = toeplitz.checked_column("inverse_coefficients", self.inverse_coefficients)
        object.__setattr__(self, "inverse_coefficients", values)

    @classmethod
    def bifr(cls, bands: int, gamma: float) -> InverseBanded:
        """Builds γ-BIFR: the first `bands` coefficients of (1 − x)^γ.

        Args:
          bands: Number of diagonals of C⁻¹.
          gamma: Exponent γ, in (0, 1]. At 1 and two bands or more, C is the
            prefix-sum matrix; towards 0 it becomes the identity.

        Returns:
          The strategy.

        Raises:
          ValueError: If an argument is out of range.
        """
        validation.integer("bands", bands, minimum=1)
        validation.probability("gamma", gamma)
        steps = np.arange(1, bands)
        return cls(tuple(np.cumprod(np.append(1.0, (steps - 1 - gamma) / steps)).tolist()))

    @classmethod
    def bisr(cls, bands: int) -> InverseBanded:
        """Builds BISR: the first `bands` coefficients of (1 − x)^(1/2)."""
        return cls.bifr(bands, 0.5)

    @classmethod
    def lambda_cgd(cls, correlation: float) -> InverseBanded:
        """Builds λ-CGD: every round subtracts λ of the noise drawn in the round before.

        Args:
          correlation: Share λ that is subtracted, in [0, 1].

        Returns:
          The strategy with C⁻¹ = 1 − λ x.

        Raises:
          ValueError: If `correlation` is out of range.
        """
        validation.number("correlation", correlation, at_least=0, at_most=1)
        return cls((1.0, -correlation))

    @property
    @override
    def name(self) -> str:
        return f"{self.mechanism} ({strategy.counted(self.bands, 'band')})"

    @property
    def bands(self) -> int:
        """Number of diagonals of C⁻¹, the main one included."""
        return len(self.inverse_coefficients)

    def coefficients(self, num_rounds: int) -> np.ndarray:
        """Computes the first column of C, float64, shape [num_rounds]."""
        return toeplitz.inverse_coefficients(np.array(self.inverse_coefficients), num_rounds)

    @override
    def strategy_matrix(self, num_rounds: int) -> np.ndarray:
        return toeplitz.matrix(self.coefficients(num_rounds), num_rounds)

    @override
    def noise_matrix(self, num_rounds: int) -> np.ndarray:
        return toeplitz.matrix(np.array(self.inverse_coefficients), num_rounds)

    @override
    def sensitivity(self, schema: schema_lib.MinSep) -> strategy.Sensitivity:
        """Computes the sensitivity; exact if the coefficients of C do not increase.

        That is checked on all coefficients that are not negligible. If they increase, the result is
        the upper bound of `toeplitz.sensitivity`.
        """
        column = toeplitz.decayed_inverse(np.array(self.inverse_coefficients), schema.num_rounds)
        return toeplitz.sensitivity(column, schema)

    @override
    def toeplitz_inverse(self, num_rounds: int) -> np.ndarray:
        return toeplitz.pad(np.array(self.inverse_coefficients), num_rounds)

    @override
    def prefix_noise_variance(self, num_rounds: int) -> np.ndarray:
        return toeplitz.prefix_noise_variance(self.toeplitz_inverse(num_rounds))

    @override
    def round_noise_variance(self, num_rounds: int) -> np.ndarray:
        return toeplitz.round_noise_variance(self.toeplitz_inverse(num_rounds))

    @override
    def prefix_noise(self, num_rounds: int) -> strategy.Extent:
        return toeplitz.prefix_noise(np.array(self.inverse_coefficients), num_rounds)

    @override
    def round_noise(self, num_rounds: int) -> strategy.Extent:
        return toeplitz.round_noise(np.array(self.inverse_coefficients), num_rounds)

    @override
    def noise_recipe(self) -> noise_recipe.InverseBandedNoise:
        return noise_recipe.InverseBandedNoise((self.inverse_coefficients,))

    @override
    def memory_copies(self, num_rounds: int) -> int:
        """Counts no tensors: past draws are made again from their seeds."""
        return 0

    @override
    def to_dict(self) -> dict[str, Any]:
        return {
            "mechanism": self.mechanism,
            "inverse_coefficients": list(self.inverse_coefficients),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> InverseBanded:
        """Reads what `to_dict` returned."""
        return cls(values["inverse_coefficients"])
