"""Independent noise in every round: C is the identity."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from tff_dpftrl.mechanisms import noise_recipe as recipe_lib
from tff_dpftrl.mechanisms import strategy
from tff_dpftrl.participation import schema as schema_lib


@dataclasses.dataclass(frozen=True)
class Identity(strategy.Strategy):
    """C = I: the Gaussian mechanism of DP-FedAvg, without its sampling."""

    mechanism: ClassVar[str] = "identity"

    def strategy_matrix(self, num_rounds: int) -> np.ndarray:  # noqa: D102
        return np.eye(num_rounds)

    def noise_matrix(self, num_rounds: int) -> np.ndarray:  # noqa: D102
        return np.eye(num_rounds)

    def sensitivity(self, schema: schema_lib.MinSep) -> strategy.Sensitivity:  # noqa: D102
        return strategy.Sensitivity(
            float(schema.effective_participations), True, "columns do not overlap"
        )

    def prefix_noise_variance(self, num_rounds: int) -> np.ndarray:  # noqa: D102
        return np.arange(1.0, num_rounds + 1.0)

    def round_noise_variance(self, num_rounds: int) -> np.ndarray:  # noqa: D102
        return np.ones(num_rounds)

    def noise_recipe(self) -> recipe_lib.IdentityNoise:  # noqa: D102
        return recipe_lib.IdentityNoise()

    def memory_copies(self, num_rounds: int) -> int:  # noqa: D102
        return 0

    def to_dict(self) -> dict[str, Any]:  # noqa: D102
        return {"mechanism": self.mechanism}

    @classmethod
    def from_dict(cls, parameters: Mapping[str, Any]) -> Identity:
        """Inverse of `to_dict`; there are no parameters."""
        del parameters
        return cls()
