"""A small decoder-only transformer that predicts the next word, as pure TensorFlow functions.

Embeddings of words and positions, blocks of causal self-attention and a feed-forward layer,
each behind a layer norm (Xiong et al. 2020), and scores against the embedding of every word.
Attention has no biases: that of the keys would change nothing but gather noise.
There is neither dropout nor state: a sequence's scores depend on its words and the weights alone.
"""

from __future__ import annotations

import collections
import dataclasses

import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.models import decoder, embedding_lookup, weight_uses

_EPSILON = 1e-5  # Added to the variance in layer norms, as in GPT-2.


@dataclasses.dataclass(frozen=True)
class Transformer(decoder.Decoder):
    """A transformer of some sizes.

    The trainable weights are a tuple of float32 arrays in the order of
    `weight_shapes`. Padding comes after the words of a sequence, and attention never
    looks ahead: padding does not change the scores of words.

    Attributes:
      vocabulary_size: Number of ids V, special tokens included.
      sequence_length: Number of positions T in a batch; each has an embedding.
      embedding_size: Width E of the embeddings and of the states between blocks. Inputs
        and outputs share the embedding.
      num_layers: Number of blocks.
      num_heads: Number of attention heads in a block, each of width E / num_heads,
        rounded up.
      feed_forward_size: Width of the feed-forward layers between E and E.
    """

    vocabulary_size: int
    sequence_length: int = 20
    embedding_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    feed_forward_size: int = 384

    def __post_init__(self):
        for field in dataclasses.fields(self):
            validation.integer(field.name, getattr(self, field.name), minimum=1)

    @property
    def weight_shapes(self) -> collections.OrderedDict[str, tuple[int, ...]]:
        """Names and shapes of the weights, in order."""
        size, heads = self.embedding_size, self.num_heads * self._head_size
        shapes = collections.OrderedDict(
            embedding=(self.vocabulary_size, size),
            position_embedding=(self.sequence_length, size),
        )
        for layer in range(self.num_layers):
            block = {
                "attention_norm_scale": (size,),
                "attention_norm_bias": (size,),
                "query_key_value_kernel": (size, 3 * heads),
                "attention_output_kernel": (heads, size),
                "feed_forward_norm_scale": (size,),
                "feed_forward_norm_bias": (size,),
                "feed_forward_kernel": (size, self.feed_forward_size),
                "feed_forward_bias": (self.feed_forward_size,),
                "feed_forward_output_kernel": (self.feed_forward_size, size),
                "feed_forward_output_bias": (size,),
            }
            shapes.update((f"layer_{layer}_{name}", shape) for name, shape in block.items())
        shapes.update(
            output_norm_scale=(size,),
            output_norm_bias=(size,),
            output_bias=(self.vocabulary_size,),
        )
        return shapes

    @property
    def _head_size(self) -> int:
        return -(-self.embedding_size // self.num_heads)

    @override
    def _states(self, layers: decoder.Layers, words: tf.Tensor) -> tf.Tensor:
        named = layers.named
        states = embedding_lookup.lookup(named["embedding"], words) + named["position_embedding"]
        states = layers.record(
            tf.reshape(states, [-1, self.embedding_size]),
            weight_uses.Lookup("embedding", tf.reshape(words, [-1])),
            weight_uses.StepBias("position_embedding"),
        )
        for index in range(self.num_layers):
            states = layers.block(index).apply(self._block, states)
        return states

    def _block(self, block: decoder.Layers, states: tf.Tensor) -> tf.Tensor:
        inputs = block.normalised("attention_norm", states, _EPSILON)
        states += self._attention(block, inputs)
        inputs = block.normalised("feed_forward_norm", states, _EPSILON)
        inner = tf.nn.gelu(block.affine("feed_forward", inputs))
        return states + block.affine("feed_forward_output", inner)

    def _attention(self, block: decoder.Layers, inputs: tf.Tensor) -> tf.Tensor:
        """Applies causal self-attention; inputs and outputs have shape [batch · T, E]."""
        projected = block.product("query_key_value_kernel", inputs)
        mixed = decoder.causal_attention(
            *decoder.split_heads(projected, 3, self.sequence_length, self.num_heads)
        )
        return block.product("attention_output_kernel", mixed)

    @override
    def _scores(self, layers: decoder.Layers, states: tf.Tensor) -> tf.Tensor:
        outputs = layers.normalised("output_norm", states, _EPSILON)
        scores = tf.matmul(outputs, layers.named["embedding"], transpose_b=True)
        return layers.record(
            tf.nn.bias_add(scores, layers.named["output_bias"]),
            weight_uses.Product("embedding", outputs, transposed=True),
            weight_uses.Bias("output_bias"),
            order=layers.order,
        )
