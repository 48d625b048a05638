"""Banded lower-triangular Toeplitz strategies (BandToep, BandFHU)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import noise_recipe, strategy
from tff_dpftrl.mechanisms.numerics import banded_sensitivity, toeplitz
from tff_dpftrl.participation import schema as schema_lib

_MAX_GRAM_ENTRIES = 4_000_000


@dataclasses.dataclass(frozen=True)
class BandedToeplitz(strategy.Strategy):
    """Strategy with C[i, j] = coefficients[i − j], 0 from `bands` on; any number of rounds.

    Attributes:
      coefficients: Coefficients c_0 ... c_{bands−1}, finite, c_0 > 0.
    """

    coefficients: tuple[float, ...]

    mechanism: ClassVar[str] = "banded-toeplitz"

    def __post_init__(self):
        values = toeplitz.checked_column("coefficients", self.coefficients)
        object.__setattr__(self, "coefficients", values)

    @classmethod
    def fhu(cls, bands: int) -> BandedToeplitz:
        """Builds BandFHU: the first coefficients of (1 − x)^(−1/2), without optimisation.

        c_t = binom(2t, t) / 4^t (Fichtenberger, Henzinger & Upadhyay 2023), the
        square root of the prefix-sum matrix, cut off after `bands` diagonals.

        Args:
          bands: Number of diagonals.

        Returns:
          The strategy.

        Raises:
          ValueError: If `bands` is less than 1.
        """
        validation.integer("bands", bands, minimum=1)
        return cls(tuple(np.cumprod(np.append(1.0, 1.0 - 0.5 / np.arange(1, bands))).tolist()))

    @property
    @override
    def name(self) -> str:
        return f"{self.mechanism} ({strategy.counted(self.bands, 'band')})"

    @property
    def bands(self) -> int:
        """Number of diagonals, the main one included."""
        return len(self.coefficients)

    @override
    def toeplitz_inverse(self, num_rounds: int) -> np.ndarray:
        return toeplitz.inverse_coefficients(np.array(self.coefficients), num_rounds)

    @override
    def strategy_matrix(self, num_rounds: int) -> np.ndarray:
        return toeplitz.matrix(np.array(self.coefficients), num_rounds)

    @override
    def noise_matrix(self, num_rounds: int) -> np.ndarray:
        return toeplitz.matrix(self.toeplitz_inverse(num_rounds), num_rounds)

    @override
    def sensitivity(self, schema: schema_lib.MinSep) -> strategy.Sensitivity:
        """Computes the sensitivity under `schema`.

        It is exact if `min_sep >= bands` or the coefficients do not increase. Otherwise it is
        the smaller of two results, `toeplitz.sensitivity` and `banded_sensitivity.from_gram`.
        The latter is left out if the Gram matrix is large.
        """
        result = toeplitz.sensitivity(np.array(self.coefficients), schema)
        bands = min(self.bands, schema.num_rounds)
        if result.exact or bands * schema.num_rounds > _MAX_GRAM_ENTRIES:
            return result
        by_gram = banded_sensitivity.from_gram(self._gram_diagonals(schema.num_rounds), schema)
        return by_gram if by_gram.exact or by_gram.squared < result.squared else result

    def _gram_diagonals(self, num_rounds: int) -> np.ndarray:
        """Diagonals of CᵀC, shape [bands, num_rounds].

        Entry [d, t] is the sum of c_s c_{s+d} over s + d < min(bands, num_rounds − t).
        """
        c = toeplitz.pad(np.array(self.coefficients), min(self.bands, num_rounds))
        terms = np.minimum(np.arange(num_rounds, 0, -1), len(c))
        diagonals = np.zeros((len(c), num_rounds))
        for distance in range(len(c)):
            sums = np.append(0.0, np.cumsum(c[: len(c) - distance] * c[distance:]))
            diagonals[distance] = sums[np.maximum(terms - distance, 0)]
        return diagonals

    @override
    def prefix_noise_variance(self, num_rounds: int) -> np.ndarray:
        return toeplitz.prefix_noise_variance(self.toeplitz_inverse(num_rounds))

    @override
    def round_noise_variance(self, num_rounds: int) -> np.ndarray:
        return toeplitz.round_noise_variance(self.toeplitz_inverse(num_rounds))

    @override
    def prefix_noise(self, num_rounds: int) -> strategy.Extent:
        return toeplitz.prefix_noise(self._decayed_inverse(num_rounds), num_rounds)

    @override
    def round_noise(self, num_rounds: int) -> strategy.Extent:
        return toeplitz.round_noise(self._decayed_inverse(num_rounds), num_rounds)

    def _decayed_inverse(self, num_rounds: int) -> np.ndarray:
        return toeplitz.decayed_inverse(np.array(self.coefficients), num_rounds)

    @override
    def noise_recipe(self) -> noise_recipe.BandedNoise:
        return noise_recipe.BandedNoise((self.coefficients,))

    @override
    def memory_copies(self, num_rounds: int) -> int:
        return min(self.bands, num_rounds) - 1

    @override
    def to_dict(self) -> dict[str, Any]:
        return {"mechanism": self.mechanism, "coefficients": list(self.coefficients)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BandedToeplitz:
        """Reads what `to_dict` returned."""
        return cls(values["coefficients"])
