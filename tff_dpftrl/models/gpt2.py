"""GPT-2 (Radford et al. 2019) and its family, as pure TensorFlow functions.

Embeddings of tokens and positions, blocks of causal self-attention and a feed-forward layer, each
behind a layer norm, and scores against the embedding of every token. The weights of a checkpoint
are these weights (`checkpoint`). There is no dropout.
"""

from __future__ import annotations

import collections
import dataclasses

import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.models import decoder


@dataclasses.dataclass(frozen=True)
class Gpt2(decoder.TokenDecoder):
    """A model of GPT-2's family.

    Attributes:
      vocabulary_size: Number of ids V, one more than there are tokens.
      sequence_length: Number of positions T in a batch.
      embedding_size: Width E of the embeddings and of the states between blocks, a multiple of
        `num_heads`. Inputs and outputs share the embedding.
      num_layers: Number of blocks.
      num_heads: Number of attention heads in a block, each of width E / num_heads.
      feed_forward_size: Width of the feed-forward layers between E and E.
      num_positions: Number of positions that have an embedding, at least T; T if None.
      norm_epsilon: Number that is added to the variance in layer norms.
    """

    vocabulary_size: int
    sequence_length: int = 20
    embedding_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    feed_forward_size: int = 384
    num_positions: int | None = None
    norm_epsilon: float = 1e-5

    def __post_init__(self):
        validation.integer("vocabulary_size", self.vocabulary_size, minimum=2)
        for name in ("sequence_length", "embedding_size", "num_layers", "num_heads"):
            validation.integer(name, getattr(self, name), minimum=1)
        validation.integer("feed_forward_size", self.feed_forward_size, minimum=1)
        validation.positive("norm_epsilon", self.norm_epsilon)
        if self.num_positions is not None:
            decoder.check_positions(self.sequence_length, self.num_positions)
        if self.embedding_size % self.num_heads:
            raise validation.UsageError(
                f"embedding_size must be a multiple of num_heads={self.num_heads}, got "
                f"{self.embedding_size}."
            )

    @property
    def weight_shapes(self) -> collections.OrderedDict[str, tuple[int, ...]]:
        """Names and shapes of the weights, in order."""
        size, inner = self.embedding_size, self.feed_forward_size
        shapes = collections.OrderedDict(
            embedding=(self.num_tokens, size),
            position_embedding=(self.num_positions or self.sequence_length, size),
        )
        for layer in range(self.num_layers):
            block = {
                "attention_norm_scale": (size,),
                "attention_norm_bias": (size,),
                "query_key_value_kernel": (size, 3 * size),
                "query_key_value_bias": (3 * size,),
                "attention_output_kernel": (size, size),
                "attention_output_bias": (size,),
                "feed_forward_norm_scale": (size,),
                "feed_forward_norm_bias": (size,),
                "feed_forward_kernel": (size, inner),
                "feed_forward_bias": (inner,),
                "feed_forward_output_kernel": (inner, size),
                "feed_forward_output_bias": (size,),
            }
            shapes.update((f"layer_{layer}_{name}", shape) for name, shape in block.items())
        shapes.update(output_norm_scale=(size,), output_norm_bias=(size,))
        return shapes

    @override
    def _states(self, layers: decoder.Layers, words: tf.Tensor) -> tf.Tensor:
        positions = tf.zeros_like(words) + tf.range(self.sequence_length, dtype=words.dtype)
        states = self._embedded(layers, words, ("position_embedding", positions))
        for index in range(self.num_layers):
            states = layers.block(index).apply(self._block, states)
        return states

    def _block(self, block: decoder.Layers, states: tf.Tensor) -> tf.Tensor:
        inputs = block.normalised("attention_norm", states, self.norm_epsilon)
        projected = block.affine("query_key_value", inputs)
        parts = decoder.split_heads(projected, 3, self.sequence_length, self.num_heads)
        states += block.affine("attention_output", decoder.causal_attention(*parts))
        inputs = block.normalised("feed_forward_norm", states, self.norm_epsilon)
        inner = tf.nn.gelu(block.affine("feed_forward", inputs), approximate=True)
        return states + block.affine("feed_forward_output", inner)

    @override
    def _scores(self, layers: decoder.Layers, states: tf.Tensor) -> tf.Tensor:
        outputs = layers.normalised("output_norm", states, self.norm_epsilon)
        return self._token_scores(layers, "embedding", outputs)
