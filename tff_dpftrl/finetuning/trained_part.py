"""The trained part of a model: all of its weights, or low-rank adapters of its kernels."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from tff_dpftrl.accounting import statement
from tff_dpftrl.models import export, language_model, low_rank
from tff_dpftrl.runs import checkpoint
from tff_dpftrl.training import trained_model

_FIXED = "pretrained_model.npz"


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedPart:
    """Weights that are trained, and how they make a model.

    The state of a run has these weights only. With adapters, the rest is the model it began
    with, which the run's folder keeps: that of `initial_weights` may be gone. An average of
    the steps' models (`iterate_averaging`) is then one of A and one of B, which are what the
    state has; their product is not the average of the products.

    Attributes:
      initial: The model to begin with.
      model: Model whose weights are the trained ones.
      weights: Initial values of the trained weights.
    """

    initial: trained_model.TrainedModel
    model: language_model.LanguageModel
    weights: Sequence[np.ndarray]

    @classmethod
    def of(
        cls, initial: trained_model.TrainedModel, adapter_rank: int | None, *, seed: int
    ) -> TrainedPart:
        """Selects the trained part of a model.

        Args:
          initial: The model to begin with.
          adapter_rank: Rank of the adapters; None to train all weights.
          seed: Seed of the first adapters.

        Returns:
          The part.

        Raises:
          ValueError: If the model cannot have adapters of that rank.
        """
        if adapter_rank is None:
            return cls(initial, initial.model, initial.weights)
        adapted = low_rank.LowRank(initial.model, initial.weights, adapter_rank)
        return cls(initial, adapted, adapted.initial_weights(seed))

    @property
    def _adapters(self) -> low_rank.LowRank | None:
        return self.model if isinstance(self.model, low_rank.LowRank) else None

    def whole(self, weights: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns all weights of the model for weights of this part."""
        return list(weights) if self._adapters is None else self._adapters.merged(weights)

    def keep(self, output: pathlib.Path) -> None:
        """Writes the fixed weights, if there are any, to a run's folder, where `kept` reads them.

        Raises:
          OSError: If the file cannot be written.
        """
        if self._adapters is not None:
            export.write(output / _FIXED, self.initial.model, self.initial.weights)

    def identities(self) -> dict[str, Sequence[str]]:
        """Returns what must not change while a run lasts, by name."""
        if self._adapters is None:
            return {}
        fixed = checkpoint.Snapshot.of(tuple(self.initial.weights))
        return {f"fixed weights ({_FIXED})": [fixed.fingerprint()]}

    def facts(self) -> Mapping[str, statement.Scalar]:
        """Returns the parameters that the statement reports of the trained part."""
        if self._adapters is None:
            return {}
        return {
            "adapter_rank": self._adapters.adapter_rank,
            "trained_weights": self.model.num_parameters,
            "model_weights": self.initial.model.num_parameters,
        }

    def describe(self) -> list[str]:
        """Returns progress lines about the trained part, before the first step."""
        if self._adapters is None:
            return []
        return [
            f"Trained are low-rank adapters of {len(self.model.weight_shapes) // 2} kernels, of "
            f"rank {self._adapters.adapter_rank}: {self.model.num_parameters} weights, which get "
            f"the noise; the {self.initial.model.num_parameters} stay as they are."
        ]


def kept(
    output: pathlib.Path,
) -> tuple[language_model.LanguageModel, Sequence[np.ndarray]] | None:
    """Reads the model that a run with adapters began with from its folder; None if it is gone.

    Raises:
      ValueError: If it is damaged.
    """
    path = output / _FIXED
    return export.read(path) if path.exists() else None
