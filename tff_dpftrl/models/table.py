"""The language models that a config can name. A new architecture is an entry here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tff_dpftrl.models import language_model, word_lstm

MODELS: Mapping[str, Callable[..., language_model.LanguageModel]] = {
    "word-lstm": word_lstm.WordLstm,
}
"""Name → what makes the model of its sizes, given by keyword."""


def build(name: str, **sizes: Any) -> language_model.LanguageModel:
    """Builds the model of a name.

    Args:
      name: A key of `MODELS`.
      **sizes: The fields of that model; at least `vocabulary_size`.

    Returns:
      The model.

    Raises:
      ValueError: If there is no such model, or it has no such size or cannot take it.
    """
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}; got {name!r}.")
    try:
        return MODELS[name](**sizes)
    except TypeError as error:
        raise ValueError(f"model {name!r} cannot be built from {sizes}: {error}.") from error


def describe(model: language_model.LanguageModel) -> dict[str, Any]:
    """Returns what `from_description` needs to build an equal model, fit for JSON.

    Args:
      model: A model of one of the classes in `MODELS`.

    Returns:
      The model's name, as "model", and its sizes.

    Raises:
      ValueError: If no entry of `MODELS` makes such a model.
    """
    sizes = dataclasses.asdict(model)
    for name in MODELS:
        try:
            if build(name, **sizes) == model:
                return {"model": name, **sizes}
        except ValueError:  # The entry has other sizes.
            continue
    raise ValueError(f"{type(model).__name__} has no entry in MODELS: add it to models/table.py.")


def from_description(description: Mapping[str, Any]) -> language_model.LanguageModel:
    """Builds the model that `describe` described.

    Args:
      description: "model", its name, and its sizes.

    Returns:
      The model.

    Raises:
      ValueError: If the description has no name, or names no model of ours.
    """
    sizes = dict(description)
    if "model" not in sizes:
        raise ValueError(f"the description of a model must have the key 'model': {description}.")
    return build(sizes.pop("model"), **sizes)
