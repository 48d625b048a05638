"""Independent noise in every round: C is the identity."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from tff_dpftrl.mechanisms import noise_recipe as recipe_lib
from tff_dpftrl.mechanisms import strategy
from tff_dpftrl.participation import schema as schema_lib


@dataclasses.dataclass(frozen=True)
class Identity(strategy.Strategy):
    """Strategy with C = I: the Gaussian mechanism of DP-FedAvg, without its sampling."""

    mechanism: ClassVar[str] = "identity"

    @override
    def strategy_matrix(self, num_rounds: int) -> np.ndarray:
        return np.eye(num_rounds)

    @override
    def noise_matrix(self, num_rounds: int) -> np.ndarray:
        return np.eye(num_rounds)

    @override
    def sensitivity(self, schema: schema_lib.MinSep) -> strategy.Sensitivity:
        return strategy.Sensitivity(
            float(schema.effective_participations), True, "columns do not overlap"
        )

    @override
    def toeplitz_inverse(self, num_rounds: int) -> np.ndarray:
        return np.eye(1, num_rounds)[0]

    @override
    def prefix_noise_variance(self, num_rounds: int) -> np.ndarray:
        return np.arange(1.0, num_rounds + 1.0)

    @override
    def prefix_noise(self, num_rounds: int) -> strategy.Extent:
        return strategy.Extent(float(num_rounds), 0.5 * (num_rounds + 1))

    @override
    def round_noise(self, num_rounds: int) -> strategy.Extent:
        return strategy.Extent(1.0, 1.0)

    @override
    def round_noise_variance(self, num_rounds: int) -> np.ndarray:
        return np.ones(num_rounds)

    @override
    def noise_recipe(self) -> recipe_lib.IdentityNoise:
        return recipe_lib.IdentityNoise()

    @override
    def memory_copies(self, num_rounds: int) -> int:
        return 0

    @override
    def to_dict(self) -> dict[str, Any]:
        return {"mechanism": self.mechanism}

    @classmethod
    def from_dict(cls, parameters: Mapping[str, Any]) -> Identity:
        """Reads what `to_dict` returned; there are no parameters."""
        del parameters
        return cls()
