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

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import noise_recipe, strategy
from tff_dpftrl.mechanisms.numerics import toeplitz
from tff_dpftrl.participation import schema as schema_lib


@dataclasses.dataclass(frozen=True)
class InverseBanded(strategy.Strategy):
    """C⁻¹[i, j] = inverse_coefficients[i − j], zero from `bands` on.

    Attributes:
      inverse_coefficients: c'_0 ... c'_{bands−1}, finite, c'_0 > 0.
    """

    inverse_coefficients: tuple[float, ...]

    mechanism: ClassVar[str] = "inverse-banded"

    def __post_init__(self):
        values = toeplitz.checked_column("inverse_coefficients", self.inverse_coefficients)
        object.__setattr__(self, "inverse_coefficients", values)

    @classmethod
    def bifr(cls, bands: int, gamma: float) -> InverseBanded:
        """γ-BIFR: the first `bands` coefficients of (1 − x)^γ.

        Args:
          bands: Number of diagonals of C⁻¹.
          gamma: The exponent, in (0, 1]. At 1 and two bands or more, C is the
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
        """BISR: the first `bands` coefficients of (1 − x)^(1/2)."""
        return cls.bifr(bands, 0.5)

    @classmethod
    def lambda_cgd(cls, correlation: float) -> InverseBanded:
        """λ-CGD: every round takes back λ of the noise drawn in the round before.

        Args:
          correlation: λ, in [0, 1].

        Returns:
          The strategy with C⁻¹ = 1 − λ x.

        Raises:
          ValueError: If `correlation` is out of range.
        """
        validation.number("correlation", correlation, at_least=0, at_most=1)
        return cls((1.0, -correlation))

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.mechanism} ({strategy.counted(self.bands, 'band')})"

    @property
    def bands(self) -> int:
        """Number of diagonals of C⁻¹, the main one included."""
        return len(self.inverse_coefficients)

    def coefficients(self, num_rounds: int) -> np.ndarray:
        """First column of C, float64, shape [num_rounds]."""
        return toeplitz.inverse_coefficients(np.array(self.inverse_coefficients), num_rounds)

    def strategy_matrix(self, num_rounds: int) -> np.ndarray:  # noqa: D102
        return toeplitz.matrix(self.coefficients(num_rounds), num_rounds)

    def noise_matrix(self, num_rounds: int) -> np.ndarray:  # noqa: D102
        return toeplitz.matrix(np.array(self.inverse_coefficients), num_rounds)

    def sensitivity(self, schema: schema_lib.MinSep) -> strategy.Sensitivity:
        """Sensitivity under `schema`; exact if the coefficients of C do not increase.

        That is checked, on the `num_rounds` coefficients; if it fails, the result
        is an upper bound. See `toeplitz.sensitivity`.
        """
        return toeplitz.sensitivity(self.coefficients(schema.num_rounds), schema)

    def _padded(self, num_rounds: int) -> np.ndarray:
        return toeplitz.pad(np.array(self.inverse_coefficients), num_rounds)

    def prefix_noise_variance(self, num_rounds: int) -> np.ndarray:  # noqa: D102
        return toeplitz.prefix_noise_variance(self._padded(num_rounds))

    def round_noise_variance(self, num_rounds: int) -> np.ndarray:  # noqa: D102
        return toeplitz.round_noise_variance(self._padded(num_rounds))

    def noise_recipe(self) -> noise_recipe.InverseBandedNoise:  # noqa: D102
        return noise_recipe.InverseBandedNoise((self.inverse_coefficients,))

    def memory_copies(self, num_rounds: int) -> int:
        """None: past draws are made again from the seed."""
        return 0

    def to_dict(self) -> dict[str, Any]:  # noqa: D102
        return {
            "mechanism": self.mechanism,
            "inverse_coefficients": list(self.inverse_coefficients),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> InverseBanded:
        """Inverse of `to_dict`."""
        return cls(values["inverse_coefficients"])
