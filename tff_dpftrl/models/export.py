"""Files of trained models: weights by name, and the description of their model.

The file is a NumPy archive (`.npz`) that `np.load` opens without pickle: an array for each
entry of the model's `weight_shapes`, and `model`, a string of JSON (`table.describe`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import numpy as np

from tff_dpftrl import array_files, durable_files, json_text, validation
from tff_dpftrl.models import language_model, table

_DESCRIPTION = "model"


def write(
    path: str | os.PathLike[str],
    model: language_model.LanguageModel,
    weights: Sequence[np.ndarray],
    *,
    private: bool = False,
) -> None:
    """Writes a model, whole or not at all; a `private` file can be read by its owner only."""
    named = _named(model, [np.asarray(weight) for weight in weights], str(path))
    description = json.dumps(table.describe(model))
    with durable_files.replacing(path, private=private) as file:
        np.savez(file, **{_DESCRIPTION: np.array(description)}, **named)


def read(
    path: str | os.PathLike[str],
) -> tuple[language_model.LanguageModel, tuple[np.ndarray, ...]]:
    """Reads a model and its weights, in the order of `weight_shapes`, as `write` wrote them.

    A custom model is returned as its `custom_model.Fingerprint`, which cannot compute.
    """
    try:
        arrays = array_files.read(path)
        model = table.from_description(json_text.parse(str(arrays.pop(_DESCRIPTION))))
    except (OSError, ValueError, KeyError) as error:
        raise validation.UsageError(
            f"{path} is not a model that `export.write` wrote: {error}."
        ) from error
    if set(arrays) != set(model.weight_shapes):
        raise validation.UsageError(
            f"{path} has the weights {sorted(arrays)}, but its model needs "
            f"{sorted(model.weight_shapes)}."
        )
    weights = [arrays[name] for name in model.weight_shapes]
    if not all(np.issubdtype(weight.dtype, np.floating) for weight in weights):
        raise validation.UsageError(f"{path} has weights that are no floating-point numbers.")
    return model, tuple(_named(model, weights, str(path)).values())


def _named(
    model: language_model.LanguageModel, weights: Sequence[np.ndarray], where: str
) -> dict[str, np.ndarray]:
    """Returns the weights by name, or refuses them if their shapes are not the model's."""
    shapes = [weight.shape for weight in weights]
    expected = list(model.weight_shapes.values())
    if shapes != expected:
        raise validation.UsageError(
            f"{where}: the model needs weights of shapes {expected}, got {shapes}."
        )
    return dict(zip(model.weight_shapes, weights, strict=True))
