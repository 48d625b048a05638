"""Every model of the table, in a size that a test can afford."""

import dataclasses

import numpy as np
import tensorflow as tf

from tff_dpftrl.models import language_model, table

_SIZES = {
    "embedding_size": 6,
    "state_size": 5,
    "num_layers": 1,
    "num_heads": 3,
    "num_key_value_heads": 1,
    "feed_forward_size": 7,
}


def build(name: str, **sizes: int) -> language_model.LanguageModel:
    """The model of a name; what may be larger than here is as given, or as the name has it."""
    small = {size: value for size, value in _SIZES.items() if size in table.MODELS[name].sizes}
    return table.build(name, **small, **sizes)


@dataclasses.dataclass(frozen=True)
class Bigrams(language_model.LanguageModel):
    """One row of scores for each last word."""

    vocabulary_size: int
    sequence_length: int

    @property
    def weight_shapes(self):
        return {"scores": (self.vocabulary_size, self.vocabulary_size)}

    def initial_weights(self, seed):
        rng = np.random.default_rng(seed)
        return (rng.standard_normal(self.weight_shapes["scores"]).astype(np.float32),)

    def logits(self, weights, words):
        return tf.gather(weights[0], words)
