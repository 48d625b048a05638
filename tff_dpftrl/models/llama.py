"""Llama (Touvron et al. 2023) and its family, as pure TensorFlow functions.

Embeddings of tokens, blocks of causal self-attention with rotary positions (Su et al. 2021) and a
gated feed-forward layer (SwiGLU, Shazeer 2020), each behind an RMSNorm, and scores against the
embedding of every token or a table of its own. Nothing has a bias. The weights of a checkpoint are
these weights (`checkpoint`).
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.models import decoder


@dataclasses.dataclass(frozen=True)
class Llama(decoder.TokenDecoder):
    """A model of Llama's family.

    Attributes:
      vocabulary_size: Number of ids V, one more than there are tokens.
      sequence_length: Number of positions T in a batch.
      embedding_size: Width E of the embeddings and of the states between blocks.
      num_layers: Number of blocks.
      num_heads: Number of attention heads in a block.
      num_key_value_heads: Number of heads that have keys and values, a divisor of `num_heads`;
        consecutive heads share them (Ainslie et al. 2023).
      feed_forward_size: Width of the gated layers between E and E.
      tie_embeddings: Whether inputs and outputs share the embedding.
      head_size: Width of a head, an even number; E / num_heads if None.
      num_positions: Number of positions that the model was made for, at least T; None if any.
      rotary_base: Base θ of the rotary positions.
      norm_epsilon: Number that is added to the mean square in norms.
    """

    vocabulary_size: int
    sequence_length: int = 20
    embedding_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_key_value_heads: int = 2
    feed_forward_size: int = 256
    tie_embeddings: bool = True
    head_size: int | None = None
    num_positions: int | None = None
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-5

    def __post_init__(self):
        validation.integer("vocabulary_size", self.vocabulary_size, minimum=2)
        for name in ("sequence_length", "embedding_size", "num_layers", "num_heads"):
            validation.integer(name, getattr(self, name), minimum=1)
        for name in ("num_key_value_heads", "feed_forward_size"):
            validation.integer(name, getattr(self, name), minimum=1)
        for name in ("rotary_base", "norm_epsilon"):
            validation.positive(name, getattr(self, name))
        if self.num_positions is not None:
            decoder.check_positions(self.sequence_length, self.num_positions)
        if self.num_heads % self.num_key_value_heads:
            raise validation.UsageError(
                f"num_heads must be a multiple of num_key_value_heads={self.num_key_value_heads}, "
                f"got {self.num_heads}."
            )
        if self.head_size is not None:
            validation.integer("head_size", self.head_size, minimum=2)
        elif self.embedding_size % self.num_heads:
            raise validation.UsageError(
                f"embedding_size must be a multiple of num_heads={self.num_heads}, got "
                f"{self.embedding_size}."
            )
        if self._head_size % 2:
            raise validation.UsageError(
                f"the width of a head must be even, for rotary positions, got {self._head_size}: "
                "change embedding_size, num_heads or head_size."
            )

    @property
    def _head_size(self) -> int:
        return self.head_size or self.embedding_size // self.num_heads

    @property
    def weight_shapes(self) -> collections.OrderedDict[str, tuple[int, ...]]:
        """Names and shapes of the weights, in order."""
        size, inner = self.embedding_size, self.feed_forward_size
        heads = self.num_heads * self._head_size
        groups = self.num_key_value_heads * self._head_size
        shapes = collections.OrderedDict(embedding=(self.num_tokens, size))
        for layer in range(self.num_layers):
            block = {
                "attention_norm_scale": (size,),
                "query_kernel": (size, heads),
                "key_kernel": (size, groups),
                "value_kernel": (size, groups),
                "attention_output_kernel": (heads, size),
                "feed_forward_norm_scale": (size,),
                "gate_kernel": (size, inner),
                "feed_forward_kernel": (size, inner),
                "feed_forward_output_kernel": (inner, size),
            }
            shapes.update((f"layer_{layer}_{name}", shape) for name, shape in block.items())
        shapes["output_norm_scale"] = (size,)
        if not self.tie_embeddings:
            shapes["output_embedding"] = (self.num_tokens, size)
        return shapes

    @override
    def _states(self, layers: decoder.Layers, words: tf.Tensor) -> tf.Tensor:
        states = self._embedded(layers, words)
        for index in range(self.num_layers):
            states = layers.block(index).apply(self._block, states)
        return states

    def _block(self, block: decoder.Layers, states: tf.Tensor) -> tf.Tensor:
        inputs = block.mean_square_normalised("attention_norm", states, self.norm_epsilon)
        states += self._attention(block, inputs)
        inputs = block.mean_square_normalised("feed_forward_norm", states, self.norm_epsilon)
        gate = tf.nn.silu(block.product("gate_kernel", inputs))
        inner = gate * block.product("feed_forward_kernel", inputs)
        return states + block.product("feed_forward_output_kernel", inner)

    def _attention(self, block: decoder.Layers, inputs: tf.Tensor) -> tf.Tensor:
        """Applies causal self-attention; inputs and outputs have shape [batch · T, E]."""
        length, groups = self.sequence_length, self.num_key_value_heads
        query, key, value = (
            decoder.split_heads(block.product(f"{name}_kernel", inputs), 1, length, heads)[0]
            for name, heads in (("query", self.num_heads), ("key", groups), ("value", groups))
        )
        mixed = decoder.causal_attention(self._rotated(query), self._rotated(key), value)
        return block.product("attention_output_kernel", mixed)

    def _rotated(self, values: tf.Tensor) -> tf.Tensor:
        """Rotates pairs of a head's values by angles that grow with the position.

        Value i of the first half of a head makes a pair with value i of the second half. Shape:
        [batch, heads, T, size].
        """
        half = self._head_size // 2
        speeds = self.rotary_base ** (-np.arange(half) / half)
        angles = np.arange(self.sequence_length)[:, None] * speeds
        cosine, sine = (tf.constant(f(angles), values.dtype) for f in (np.cos, np.sin))
        first, second = tf.split(values, 2, axis=3)
        rotated = first * cosine - second * sine, second * cosine + first * sine
        return tf.concat(rotated, axis=3)

    @override
    def _scores(self, layers: decoder.Layers, states: tf.Tensor) -> tf.Tensor:
        outputs = layers.mean_square_normalised("output_norm", states, self.norm_epsilon)
        table = "embedding" if self.tie_embeddings else "output_embedding"
        return self._token_scores(layers, table, outputs)
