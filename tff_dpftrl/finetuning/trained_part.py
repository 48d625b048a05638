"""The trained part of a model: all of its weights, or low-rank adapters of its kernels."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from tff_dpftrl import durable_files
from tff_dpftrl.accounting import statement
from tff_dpftrl.data import vocabulary_file
from tff_dpftrl.finetuning import config
from tff_dpftrl.models import export, hugging_face, language_model, low_rank, table
from tff_dpftrl.runs import checkpoint, manifest
from tff_dpftrl.training import trained_model

_FIXED = "pretrained_model.npz"


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedPart:
    """Weights that are trained, and how they make a model.

    The state of a run has these weights only. With adapters, the rest is the model it began with,
    which the run's folder keeps: that of `initial_weights` may be gone. An average of the steps'
    models (`iterate_averaging`) is then one of A and one of B, which are what the state has; their
    product is not the average of the products.
    """

    initial: trained_model.TrainedModel
    model: language_model.LanguageModel
    weights: Sequence[np.ndarray]

    @classmethod
    def of(
        cls, initial: trained_model.TrainedModel, adapter_rank: int | None, *, seed: int
    ) -> TrainedPart:
        """Selects the trained part of a model: adapters of a rank, or all weights if it is None."""
        if adapter_rank is None:
            return cls(initial, initial.model, initial.weights)
        adapted = low_rank.LowRank(initial.model, initial.weights, adapter_rank)
        return cls(initial, adapted, adapted.initial_weights(seed))

    @classmethod
    def begun(
        cls,
        options: config.InitialModel,
        output: pathlib.Path,
        known: manifest.Manifest,
        *,
        seed: int,
    ) -> TrainedPart:
        """Selects the trained part of a run that has begun, of the model that its folder keeps.

        The weights are zero where all of them are in its checkpoint.
        """
        words = output / vocabulary_file.NAME
        if not words.exists():  # It crashed before step 1.
            initial = options.load()
        elif options.adapter_rank is None:
            model = table.from_description(known.facts["model"])
            weights = [np.zeros(shape, np.float32) for shape in model.weight_shapes.values()]
            initial = trained_model.TrainedModel(model, weights, *vocabulary_file.read(words))
        elif (output / _FIXED).exists():
            kept = export.read(output / _FIXED)
            initial = trained_model.TrainedModel(*kept, *vocabulary_file.read(words))
        else:
            initial = options.load()
        return cls.of(initial, options.adapter_rank, seed=seed)

    @property
    def _adapters(self) -> low_rank.LowRank | None:
        return self.model if isinstance(self.model, low_rank.LowRank) else None

    def whole(self, weights: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns all weights of the model for weights of this part."""
        return list(weights) if self._adapters is None else self._adapters.merged(weights)

    def keep(self, output: pathlib.Path) -> None:
        """Writes the fixed weights, and a checkpoint's config and tokenizer, to a run's folder."""
        if self.initial.checkpoint is not None:
            hugging_face.copy_rest(self.initial.checkpoint, output / hugging_face.FOLDER)
        if self._adapters is not None:
            export.write(output / _FIXED, self.initial.model, self.initial.weights)

    def publish(
        self, output: pathlib.Path, weights: Sequence[np.ndarray], *, base: pathlib.Path
    ) -> None:
        """Writes the model to a run's folder in Hugging Face's layout, if it began in that.

        Adapters are written besides, as peft loads them onto the model in `base`, which the run
        began with. The privacy statement, which has been written, is copied beside the weights.
        """
        folders = [output / hugging_face.FOLDER]
        if not (folders[0] / hugging_face.CONFIG).exists():
            return
        if self._adapters is not None:
            folders.append(output / hugging_face.ADAPTERS_FOLDER)
        for folder in folders:  # First, so that a kill leaves no weights without a statement.
            folder.mkdir(exist_ok=True)
            for name in ("privacy_statement.json", "privacy_statement.md"):
                durable_files.write(folder / name, (output / name).read_bytes())
        hugging_face.write(folders[0], self.initial.model, self.whole(weights))
        if self._adapters is not None:
            hugging_face.write_adapters(folders[1], self._adapters, weights, base=str(base))

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
