"""Every model of the table, in a size that a test can afford."""

from __future__ import annotations

from tff_dpftrl.models import language_model, table

_SIZES = {
    "embedding_size": 6,
    "state_size": 5,
    "num_layers": 1,
    "num_heads": 3,
    "feed_forward_size": 7,
}


def build(name: str, **sizes: int) -> language_model.LanguageModel:
    """The model of a name; what may be larger than here is as given, or as the name has it."""
    small = {size: value for size, value in _SIZES.items() if size in table.MODELS[name].sizes}
    return table.build(name, **small, **sizes)
