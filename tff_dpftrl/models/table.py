"""The table of language models by name.

A name stands for an architecture with default sizes; a config may change the sizes, not the
architecture. To add a model, add a row to `MODELS`; a size that no other model has also
needs a field of `TrainingConfig`. A row imports its architecture when the model is built, so that
`--help`, which shows names, summaries and sizes, is quick.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tff_dpftrl import validation

if TYPE_CHECKING:
    from tff_dpftrl.models import language_model


CUSTOM = "own"
"""Name of every custom model in configs and files (`custom_model`)."""


@dataclasses.dataclass(frozen=True)
class Model:
    """One row of the table.

    Attributes:
      summary: Description of the model in one line.
      make: Function from sizes, given by keyword, to the model.
      sizes: Defaults of the sizes that a config may change.
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


def _gpt2(**sizes: Any) -> language_model.LanguageModel:
    from tff_dpftrl.models import gpt2

    return gpt2.Gpt2(**sizes)


def _llama(**sizes: Any) -> language_model.LanguageModel:
    from tff_dpftrl.models import llama

    return llama.Llama(**sizes)


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
    "gpt2": Model(
        "GPT-2's architecture (Radford et al. 2019), whose checkpoints can be fine-tuned",
        _gpt2,
        {"embedding_size": 96, "num_layers": 2, "num_heads": 4, "feed_forward_size": 384},
    ),
    "llama": Model(
        "Llama's architecture (Touvron et al. 2023): RMSNorm, rotary positions, gated layers",
        _llama,
        {
            "embedding_size": 96,
            "num_layers": 2,
            "num_heads": 4,
            "num_key_value_heads": 2,
            "feed_forward_size": 256,
            "tie_embeddings": True,
        },
    ),
}


def takers(size: str) -> list[str]:
    """Returns the names of the models that have a size."""
    return [name for name, model in MODELS.items() if size in model.sizes]


def build(name: str, **sizes: Any) -> language_model.LanguageModel:
    """Builds the model of a name; `sizes` are its fields, at least `vocabulary_size`."""
    if name not in MODELS:
        raise validation.UsageError(f"model must be one of {', '.join(MODELS)}; got {name!r}.")
    try:
        return MODELS[name].make(**{**MODELS[name].sizes, **sizes})
    except TypeError as error:
        raise validation.UsageError(
            f"model {name!r} cannot be built from {sizes}: {error}."
        ) from error


def describe(model: language_model.LanguageModel) -> dict[str, Any]:
    """Returns a description, fit for JSON, from which `from_description` builds an equal model.

    It has all fields, so that no later default changes its meaning; the name is the first one in
    `MODELS` that takes them.
    """
    from tff_dpftrl.models import custom_model

    if isinstance(model, custom_model.Fingerprint):
        return {"model": CUSTOM, **model.description()}
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
    """Builds the model that `describe` described; of a custom model, only its fingerprint."""
    sizes = dict(description)
    if "model" not in sizes:
        raise validation.UsageError(
            f"the description of a model must have the key 'model': {description}."
        )
    if sizes["model"] == CUSTOM:
        from tff_dpftrl.models import custom_model

        return custom_model.Fingerprint.from_description(sizes)
    return build(sizes.pop("model"), **sizes)
