"""The one table of language models: what a name stands for, wherever a name can be given.

A name is an architecture with sizes of its own; a config may change the sizes, not the
architecture. To add a model, add a row to `MODELS`; a size that no other model has also
needs a field of `TrainingConfig`. The rows import what they need when they are built: names,
summaries and sizes are wanted by `--help`, which is to be quick.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tff_dpftrl import validation

if TYPE_CHECKING:
    from tff_dpftrl.models import language_model


OWN = "own"
"""Stands for a model that the caller made: see `own_model`."""


@dataclasses.dataclass(frozen=True)
class Model:
    """One row of the table.

    Attributes:
      summary: What it is, in a line.
      make: Makes the model of its sizes, given by keyword.
      sizes: The sizes that a config may change, and what they are if it does not.
    """

    summary: str
    make: Callable[..., language_model.LanguageModel]
    sizes: Mapping[str, int | bool]


def _word_lstm(**sizes: Any) -> language_model.LanguageModel:
    from tff_dpftrl.models import word_lstm

    return word_lstm.WordLstm(**sizes)


def _transformer(**sizes: Any) -> language_model.LanguageModel:
    from tff_dpftrl.models import transformer

    return transformer.Transformer(**sizes)


MODELS: Mapping[str, Model] = {
    "word-lstm": Model(
        "one layer of LSTM, for small machines",
        _word_lstm,
        {"embedding_size": 96, "state_size": 128, "tie_embeddings": True},
    ),
    "gboard-cifg": Model(
        "the LSTM of Gboard (Xu et al. 2023): coupled gates, recurrence over the projected state",
        functools.partial(_word_lstm, couple_gates=True, recurrent_projection=True),
        {"embedding_size": 96, "state_size": 670, "tie_embeddings": False},
    ),
    "dp-fedavg-lstm": Model(
        "the LSTM of McMahan et al. 2018: embeddings of norm 1",
        functools.partial(_word_lstm, unit_norm_embeddings=True),
        {"embedding_size": 96, "state_size": 256, "tie_embeddings": True},
    ),
    "transformer": Model(
        "a small decoder-only transformer, one embedding for input and output",
        _transformer,
        {"embedding_size": 96, "num_layers": 2, "num_heads": 4, "feed_forward_size": 384},
    ),
}


def takers(size: str) -> list[str]:
    """Names of the models that have a size."""
    return [name for name, model in MODELS.items() if size in model.sizes]


def build(name: str, **sizes: Any) -> language_model.LanguageModel:
    """Builds the model of a name.

    Args:
      name: A key of `MODELS`.
      **sizes: The fields of that model, at least `vocabulary_size`; where the row has a
        size and none is given, it is the row's.

    Returns:
      The model.

    Raises:
      ValueError: If there is no such model, or it has no such size or cannot take it.
    """
    if name not in MODELS:
        raise validation.UsageError(f"model must be one of {', '.join(MODELS)}; got {name!r}.")
    try:
        return MODELS[name].make(**{**MODELS[name].sizes, **sizes})
    except TypeError as error:
        raise validation.UsageError(
            f"model {name!r} cannot be built from {sizes}: {error}."
        ) from error


def describe(model: language_model.LanguageModel) -> dict[str, Any]:
    """Returns what `from_description` needs to build an equal model, fit for JSON.

    All fields are in it, so that no later default changes what it stands for; the name
    is the first one in `MODELS` that takes them.

    Args:
      model: A model that a row of `MODELS` makes, or one of a caller's own.

    Returns:
      The model's name, as "model", and its sizes.

    Raises:
      ValueError: If no entry of `MODELS` makes such a model.
    """
    from tff_dpftrl.models import own_model

    if isinstance(model, own_model.Record):
        return model.description()
    sizes = dataclasses.asdict(model)
    for name in MODELS:
        try:
            if build(name, **sizes) == model:
                return {"model": name, **sizes}
        except ValueError:  # The entry has other sizes.
            continue
    raise validation.UsageError(
        f"{type(model).__name__} has no entry in MODELS: add it to models/table.py."
    )


def from_description(description: Mapping[str, Any]) -> language_model.LanguageModel:
    """Builds the model that `describe` described.

    Args:
      description: "model", its name, and its sizes.

    Returns:
      The model; of a caller's own one, `own_model.Record`, which cannot compute.

    Raises:
      ValueError: If the description has no name, or names no model of ours.
    """
    sizes = dict(description)
    if "model" not in sizes:
        raise validation.UsageError(
            f"the description of a model must have the key 'model': {description}."
        )
    if sizes["model"] == OWN:
        from tff_dpftrl.models import own_model

        return own_model.Record.of_description(sizes)
    return build(sizes.pop("model"), **sizes)
