"""Interface of the strategies of the matrix mechanism.

A strategy is the lower-triangular matrix C of the factorisation A = B C of the
prefix-sum matrix A. The server releases, round after round, the sum x_t of the
clipped updates plus (C⁻¹ z)_t, with z i.i.d. Gaussian
(McMahan, Xu & Zhang 2024, section 2; Denisov et al. 2022).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import noise_recipe
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.participation import schema as schema_lib


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """L2 sensitivity of `C x` when one client's contributions are zeroed out.

    It is stated for clip norm 1; multiply by the clip norm.

    Attributes:
      squared: Square S² of the sensitivity, or an upper bound of it.
      exact: Whether `squared` is exact; False if it is only an upper bound.
      method: Method by which it was computed, in a few words.
    """

    squared: float
    exact: bool
    method: str

    @property
    def value(self) -> float:
        """Sensitivity S."""
        return math.sqrt(self.squared)


class Extent(NamedTuple):
    """Largest value and mean of the variances of a run's rounds."""

    largest: float
    mean: float

    @classmethod
    def of(cls, variances: np.ndarray) -> Extent:
        """Returns the extent of the variances of all rounds."""
        return cls(float(np.max(variances)), float(np.mean(variances)))


def counted(number: int, noun: str) -> str:
    """Formats a number and its noun, such as "4 bands"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Strategy(abc.ABC):
    """Strategy matrix C, in float64, for one or for any number of rounds."""

    mechanism: ClassVar[str]
    """Name of the class in strategy files, like "inverse-banded"."""

    @property
    def name(self) -> str:
        """Name of this strategy in statements, tables and plots, like "blt"."""
        return self.mechanism

    @property
    def max_rounds(self) -> int | None:
        """Largest number of rounds for which this C is defined; None if any."""
        return None

    @abc.abstractmethod
    def strategy_matrix(self, num_rounds: int) -> np.ndarray:
        """Returns C, dense, shape [m, num_rounds]; m = num_rounds except for trees."""

    @abc.abstractmethod
    def noise_matrix(self, num_rounds: int) -> np.ndarray:
        """Returns the linear map from the i.i.d. draws z to the emitted noise.

        Args:
          num_rounds: Number of rounds n.

        Returns:
          A matrix of shape [n, m], lower triangular in time. It is C⁻¹ for a square C and a
          left inverse of C for a tree.
        """

    @abc.abstractmethod
    def sensitivity(self, schema: schema_lib.MinSep) -> Sensitivity:
        """Computes the sensitivity under `schema`, never understated."""

    @abc.abstractmethod
    def prefix_noise_variance(self, num_rounds: int) -> np.ndarray:
        """Computes the squared row norms of B = A C⁻¹, shape [num_rounds].

        Entry t is the variance of the noise in the sum of rounds 0 ... t, per
        coordinate, for clip norm and noise multiplier 1.
        """

    @abc.abstractmethod
    def round_noise_variance(self, num_rounds: int) -> np.ndarray:
        """Computes the squared row norms of C⁻¹, shape [num_rounds].

        Entry t is the variance of the noise emitted in round t, per coordinate,
        for clip norm and noise multiplier 1.
        """

    @abc.abstractmethod
    def noise_recipe(self) -> noise_recipe.NoiseRecipe:
        """Returns the numbers needed to stream C⁻¹ z."""

    @abc.abstractmethod
    def memory_copies(self, num_rounds: int) -> int:
        """Counts the model-sized tensors kept between rounds to stream C⁻¹ z."""

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Returns the parameters as JSON-compatible values, with the key "mechanism"."""

    def toeplitz_inverse(self, num_rounds: int) -> np.ndarray | None:
        """Computes the first column of C⁻¹, shape [num_rounds]; None if C is not Toeplitz."""
        del num_rounds
        return None

    def model_noise_variance(
        self, num_rounds: int, workload: workload_lib.Workload | None
    ) -> np.ndarray:
        """Computes the squared row norms of A C⁻¹ for the A of a workload.

        Args:
          num_rounds: Number of rounds n, that of the workload.
          workload: Workload A; None for the prefix sums.

        Returns:
          Shape [num_rounds]. Entry t is the variance of the noise in the model after round t, per
          coordinate, for clip norm, noise multiplier and learning rate 1.

        Raises:
          ValueError: If the workload is for another number of rounds, or for too many.
        """
        if workload is None:
            return self.prefix_noise_variance(num_rounds)
        if workload.num_rounds != num_rounds:
            raise validation.UsageError(
                f"workload is for {workload.num_rounds} rounds, got num_rounds={num_rounds}: make "
                "it for as many rounds."
            )
        inverse = self.toeplitz_inverse(num_rounds)
        if inverse is not None:
            return workload.noise_variance(inverse)
        workload_lib.check_size(num_rounds)
        return np.sum(np.square(workload.apply(self.noise_matrix(num_rounds))), axis=1)

    def prefix_noise(self, num_rounds: int) -> Extent:
        """Computes the largest value and the mean of `prefix_noise_variance`.

        Strategies whose figures do not depend on the number of rounds keep no array of them.
        """
        return Extent.of(self.prefix_noise_variance(num_rounds))

    def round_noise(self, num_rounds: int) -> Extent:
        """Computes the largest value and the mean of `round_noise_variance`; see `prefix_noise`."""
        return Extent.of(self.round_noise_variance(num_rounds))

    def _model_noise(self, num_rounds: int, workload: workload_lib.Workload | None) -> Extent:
        if workload is None:
            return self.prefix_noise(num_rounds)
        return Extent.of(self.model_noise_variance(num_rounds, workload))

    def max_error(self, num_rounds: int, workload: workload_lib.Workload | None = None) -> float:
        """Computes MaxError(B) = max_t ‖B[t, :]‖₂ (McMahan, Xu & Zhang 2024, section 2)."""
        return math.sqrt(self._model_noise(num_rounds, workload).largest)

    def rms_error(self, num_rounds: int, workload: workload_lib.Workload | None = None) -> float:
        """Computes RmsError(B) = ‖B‖_F / √n (McMahan, Xu & Zhang 2024, section 2)."""
        return math.sqrt(self._model_noise(num_rounds, workload).mean)

    def max_loss(
        self, schema: schema_lib.MinSep, workload: workload_lib.Workload | None = None
    ) -> float:
        """Computes MaxError times sensitivity under `schema`."""
        return self.sensitivity(schema).value * self.max_error(schema.num_rounds, workload)

    def rms_loss(
        self, schema: schema_lib.MinSep, workload: workload_lib.Workload | None = None
    ) -> float:
        """Computes RmsError times sensitivity under `schema`."""
        return self.sensitivity(schema).value * self.rms_error(schema.num_rounds, workload)


def check_strategy(value: Any, name: str = "strategy") -> Strategy:
    """Returns `value` if it is a `Strategy`; refuses it otherwise."""
    if isinstance(value, Strategy):
        return value
    factory = hasattr(value, "private_round")  # Of TFF aggregators.
    if isinstance(getattr(value.private_round if factory else value, "strategy", None), Strategy):
        attribute = "factory.private_round.strategy" if factory else "result.strategy"
        got, remedy = f"a {type(value).__name__}", f"pass its strategy, {name}={attribute}"
    elif isinstance(value, str):
        got, remedy = repr(value), "make one with mechanisms.table.build(name, schema)"
    else:
        got = repr(value) if value is None else f"a {type(value).__name__}"
        if isinstance(value, type):
            got = f"the class {value.__name__}"
        remedy = "make one with optimize_blt(schema) or mechanisms.table.build(name, schema)"
    raise validation.UsageError(
        f"{name} must be a strategy of tff_dpftrl.mechanisms, got {got}: {remedy}."
    )
