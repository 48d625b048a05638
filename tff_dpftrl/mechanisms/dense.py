"""General lower-triangular strategies, given by their matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.linalg
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import noise_recipe, strategy
from tff_dpftrl.mechanisms.numerics import banded_sensitivity
from tff_dpftrl.participation import schema as schema_lib

_MAX_RUN_ROUNDS = 4096


class Dense(strategy.Strategy):
    """Strategy with a general lower-triangular C (Denisov et al. 2022), of up to 4,096 rounds.

    The noise of round t needs the draws of all t rounds before. The draws are not kept: each is
    made again from the seed of its round. So n rounds take as many draws as n² / 2 rounds of
    independent noise. With blocks of B rounds it is n² / (2 B), but B copies of the model are kept.
    See `draws_per_round`. A larger C can be compared, but not run.

    Args:
      matrix: Matrix C, shape [num_rounds, num_rounds], zero above the diagonal, positive
        on it.
      rounds_at_once: Number B of rounds whose noise is computed together; it changes time and
        memory, but not a bit of the noise.

    Raises:
      ValueError: If `matrix` is not such a matrix, or has fewer than `rounds_at_once` rows.
    """

    mechanism = "dense"

    def __init__(self, matrix: np.ndarray | Sequence[Sequence[float]], *, rounds_at_once: int = 1):
        matrix = np.array(matrix, dtype=np.float64)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] < 1:
            raise validation.UsageError(
                f"matrix must be square and not empty, got shape {matrix.shape}."
            )
        if not np.all(np.isfinite(matrix)) or np.any(np.triu(matrix, 1)):
            raise validation.UsageError(
                "matrix must be finite, and zero above the diagonal: the noise of a round must "
                "not depend on later rounds. Use the Cholesky factor of CᵀC reversed in time."
            )
        if np.min(np.diagonal(matrix)) <= 0:
            raise validation.UsageError(
                "matrix must have a positive diagonal, got a smallest entry of "
                f"{np.min(np.diagonal(matrix))!r}. Flip the signs of whole rows."
            )
        matrix.setflags(write=False)
        self._matrix = matrix
        validation.integer("rounds_at_once", rounds_at_once, minimum=1)
        if rounds_at_once > len(matrix):
            raise validation.UsageError(
                f"rounds_at_once must be at most {len(matrix)}, the rows of this C, got "
                f"{rounds_at_once}: lower it."
            )
        self._rounds_at_once = rounds_at_once

    @property
    def rounds_at_once(self) -> int:
        """Number of rounds whose noise is computed together."""
        return self._rounds_at_once

    @property
    @override
    def max_rounds(self) -> int:
        """Number of rows of C."""
        return len(self._matrix)

    @override
    def strategy_matrix(self, num_rounds: int) -> np.ndarray:
        """Returns the leading block of C, shape [num_rounds, num_rounds], read-only."""
        if not 1 <= num_rounds <= self.max_rounds:
            raise validation.UsageError(
                f"num_rounds must be in 1 ... {self.max_rounds}, got {num_rounds}: this C has "
                f"{self.max_rounds} rows. Give a larger one."
            )
        return self._matrix[:num_rounds, :num_rounds]

    @override
    def noise_matrix(self, num_rounds: int) -> np.ndarray:
        matrix = self.strategy_matrix(num_rounds)
        return scipy.linalg.solve_triangular(matrix, np.eye(num_rounds), lower=True)

    @override
    def sensitivity(self, schema: schema_lib.MinSep) -> strategy.Sensitivity:
        """Computes the sensitivity by `banded_sensitivity.from_gram`: exact or a proven bound."""
        matrix = self.strategy_matrix(schema.num_rounds)
        return banded_sensitivity.from_gram(banded_sensitivity.gram_diagonals(matrix), schema)

    @override
    def prefix_noise_variance(self, num_rounds: int) -> np.ndarray:
        return np.sum(np.square(np.cumsum(self.noise_matrix(num_rounds), axis=0)), axis=1)

    @override
    def round_noise_variance(self, num_rounds: int) -> np.ndarray:
        return np.sum(np.square(self.noise_matrix(num_rounds)), axis=1)

    @override
    def noise_recipe(self) -> noise_recipe.InverseBandedNoise:
        """Returns the rows of C⁻¹, each up to its diagonal; all past draws are made again.

        Raises:
          ValueError: If C has more than 4,096 rows.
        """
        if self.max_rounds > _MAX_RUN_ROUNDS:
            raise validation.UsageError(
                f"A dense C of {self.max_rounds} rounds cannot be run: {_MAX_RUN_ROUNDS} is the "
                "most, because each round draws the noise of all rounds before again. Make one "
                "for fewer rounds and begin it anew with restarts, or take blt, bandmf or bandinv."
            )
        inverse = self.noise_matrix(self.max_rounds)
        return noise_recipe.InverseBandedNoise(
            tuple(tuple(row[t::-1].tolist()) for t, row in enumerate(inverse)),
            self._rounds_at_once,
        )

    @override
    def memory_copies(self, num_rounds: int) -> int:
        """Counts the rounds of a block, whose noise is kept; none for single rounds."""
        return self._rounds_at_once if self._rounds_at_once > 1 else 0

    def draws_per_round(self, num_rounds: int) -> float:
        """Computes the mean number of model-sized draws of a round; independent noise has 1."""
        ends = np.minimum(
            np.arange(0, num_rounds, self._rounds_at_once) + self._rounds_at_once, self.max_rounds
        )
        return float(np.sum(ends)) / num_rounds

    @override
    def to_dict(self) -> dict[str, Any]:
        """Returns the rows of C up to the diagonal as JSON-compatible values."""
        values: dict[str, Any] = {
            "mechanism": self.mechanism,
            "rows": [row[: t + 1].tolist() for t, row in enumerate(self._matrix)],
        }
        if self._rounds_at_once > 1:
            values["rounds_at_once"] = self._rounds_at_once
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Dense:
        """Reads what `to_dict` returned.

        Raises:
          ValueError: If row t does not have t + 1 entries, or a value is out of range.
        """
        rows = values["rows"]
        if any(len(row) != t + 1 for t, row in enumerate(rows)):
            raise validation.UsageError(
                "rows must have 1, 2, 3 ... entries: those up to the diagonal."
            )
        return cls(
            [[*row, *[0.0] * (len(rows) - len(row))] for row in rows],
            rounds_at_once=values.get("rounds_at_once", 1),
        )
