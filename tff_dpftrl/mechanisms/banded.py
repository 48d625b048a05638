"""General banded lower-triangular strategies (BandMF).

Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization"; a comparator in
McMahan, Xu & Zhang 2024, section 4. C[i, j] = 0 unless 0 <= i − j < bands. The matrix is
kept as [num_rounds, bands]; only methods that return a dense matrix make it dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.linalg
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import noise_recipe, strategy
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.mechanisms.numerics import banded_blocks, banded_models, banded_sensitivity
from tff_dpftrl.participation import schema as schema_lib


class Banded(strategy.Strategy):
    """Strategy whose lower-triangular C has few bands and any entries.

    Args:
      rows: Rows of C by lag, shape [num_rounds, bands]: rows[t, j] = C[t, t − j]. Entries
        with j > t lie outside the matrix and must be 0; rows[:, 0] must be positive.

    Raises:
      ValueError: If `rows` is not such a matrix.
    """

    mechanism = "banded"

    def __init__(self, rows: np.ndarray | Sequence[Sequence[float]]):
        rows = np.array(rows, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] < 1 or rows.shape[0] < rows.shape[1]:
            raise validation.UsageError(
                "rows must have the shape [num_rounds, bands] with 1 <= bands <= num_rounds, got "
                f"{rows.shape}."
            )
        if not np.all(np.isfinite(rows)) or np.min(rows[:, 0]) <= 0:
            raise validation.UsageError(
                "rows must be finite and rows[:, 0], the diagonal of C, positive; got a smallest "
                f"diagonal entry of {np.min(rows[:, 0])!r}."
            )
        bands = rows.shape[1]
        if np.any(np.triu(rows[:bands], 1)):
            raise validation.UsageError(
                "rows[t, j] must be 0 for j > t: C has no columns before the first. Set them to 0."
            )
        rows.setflags(write=False)
        self._rows = rows

    @property
    def rows(self) -> np.ndarray:
        """Rows of C by lag, read-only, shape [max_rounds, bands]: rows[t, j] = C[t, t − j]."""
        return self._rows

    @property
    @override
    def name(self) -> str:
        return f"{self.mechanism} ({strategy.counted(self.bands, 'band')})"

    @property
    def bands(self) -> int:
        """Number of diagonals that may be non-zero, the main one included."""
        return self._rows.shape[1]

    @property
    @override
    def max_rounds(self) -> int:
        """Number of rows of C."""
        return self._rows.shape[0]

    def _first_rows(self, num_rounds: int) -> np.ndarray:
        if not 1 <= num_rounds <= self.max_rounds:
            raise validation.UsageError(
                f"num_rounds must be in 1 ... {self.max_rounds}, got {num_rounds}: this C has "
                f"{self.max_rounds} rows. Optimise one for more rounds."
            )
        return self._rows[:num_rounds, : min(self.bands, num_rounds)]

    def columns(self, num_rounds: int) -> np.ndarray:
        """Returns the columns of C by lag.

        Args:
          num_rounds: Number of leading rows and columns to keep.

        Returns:
          Shape [num_rounds, bands or fewer]. Entry [t, j] is C[t + j, t], and 0 if
          t + j >= num_rounds.
        """
        rows = self._first_rows(num_rounds)
        columns = np.zeros_like(rows)
        for j in range(rows.shape[1]):
            columns[: num_rounds - j, j] = rows[j:, j]
        return columns

    @override
    def strategy_matrix(self, num_rounds: int) -> np.ndarray:
        rows = self._first_rows(num_rounds)
        matrix = np.zeros((num_rounds, num_rounds))
        for j in range(rows.shape[1]):
            np.fill_diagonal(matrix[j:, :], rows[j:, j])
        return matrix

    @override
    def noise_matrix(self, num_rounds: int) -> np.ndarray:
        matrix = self.strategy_matrix(num_rounds)
        return scipy.linalg.solve_triangular(matrix, np.eye(num_rounds), lower=True)

    @override
    def sensitivity(self, schema: schema_lib.MinSep) -> strategy.Sensitivity:
        """Computes the sensitivity under `schema`; exact if `min_sep >= bands`.

        Columns that are `bands` apart are orthogonal, and a dynamic program finds the
        largest sum of their squared norms. With a smaller `min_sep` the result is that of
        `banded_sensitivity.from_gram`, exact or a proven bound.
        """
        columns = self.columns(schema.num_rounds)
        bands = columns.shape[1]
        diagonals = np.zeros((bands if schema.min_sep < bands else 1, schema.num_rounds))
        diagonals[0] = np.sum(columns**2, axis=1)
        for distance in range(schema.min_sep, len(diagonals)):
            diagonals[distance, : schema.num_rounds - distance] = np.einsum(
                "tj,tj->t", columns[:-distance, distance:], columns[distance:, :-distance]
            )
        return banded_sensitivity.from_gram(diagonals, schema)

    @override
    def prefix_noise_variance(self, num_rounds: int) -> np.ndarray:
        return banded_blocks.noise_variances(self._first_rows(num_rounds))[1]

    @override
    def model_noise_variance(
        self, num_rounds: int, workload: workload_lib.Workload | None
    ) -> np.ndarray:
        if workload is None or workload.num_rounds != num_rounds:
            return super().model_noise_variance(num_rounds, workload)
        rows = self._first_rows(num_rounds)
        return banded_models.BandedModels(workload, rows.shape[1]).variances(rows)

    @override
    def round_noise_variance(self, num_rounds: int) -> np.ndarray:
        return banded_blocks.noise_variances(self._first_rows(num_rounds))[0]

    @override
    def noise_recipe(self) -> noise_recipe.BandedNoise:
        """Returns the rows of C, one for each round."""
        return noise_recipe.BandedNoise(tuple(tuple(row) for row in self._rows.tolist()))

    @override
    def memory_copies(self, num_rounds: int) -> int:
        """Counts the last outputs that are kept: bands − 1."""
        return min(self.bands, num_rounds) - 1

    @override
    def to_dict(self) -> dict[str, Any]:
        return {"mechanism": self.mechanism, "rows": self._rows.tolist()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Banded:
        """Reads what `to_dict` returned."""
        return cls(values["rows"])
