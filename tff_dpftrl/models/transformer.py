"""A small decoder-only transformer that predicts the next word, as pure TensorFlow functions.

Embeddings of words and positions, blocks of causal self-attention and a feed-forward layer,
each behind a layer norm (Xiong et al. 2020), and scores against the embedding of every word.
Attention has no biases: that of the keys would change nothing but gather noise.
There is neither dropout nor state: a sequence's scores depend on its words and the weights alone.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.models import embedding_lookup, language_model, weight_uses

_EPSILON = 1e-5  # Added to the variance in layer norms, as in GPT-2.
_EMBEDDING_STDDEV = 0.02
_MASKED = -1e9


@dataclasses.dataclass(frozen=True)
class Transformer(language_model.LanguageModel):
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
    @override
    def reports_uses(self) -> bool:
        return True

    @property
    @override
    def adaptable_kernels(self) -> Sequence[str]:
        """The names of the four kernels of each block."""
        return [name for name in self.weight_shapes if name.endswith("_kernel")]

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

    def initial_weights(self, seed: int) -> tuple[np.ndarray, ...]:
        """Draws the weights.

        Kernels are Gaussian with standard deviation 1/√(inputs), those that add to the
        states between blocks 1/√(2 · num_layers) of that (Radford et al. 2019), embeddings
        0.02; biases are 0, and the scales of layer norms 1.

        Args:
          seed: Non-negative seed; the same seed gives the same weights everywhere.

        Returns:
          One float32 array for each entry of `weight_shapes`.
        """
        rng = np.random.Generator(np.random.Philox(seed))
        weights = []
        for name, shape in self.weight_shapes.items():
            if len(shape) == 1:
                weight = np.full(shape, 1.0 if name.endswith("scale") else 0.0)
            elif name.endswith("embedding"):
                weight = rng.standard_normal(shape) * _EMBEDDING_STDDEV
            else:
                weight = rng.standard_normal(shape) / math.sqrt(shape[0])
                if name.endswith("output_kernel"):
                    weight /= math.sqrt(2 * self.num_layers)
            weights.append(weight.astype(np.float32))
        return tuple(weights)

    @override
    def logits(self, weights: Sequence[tf.Tensor], words: tf.Tensor) -> tf.Tensor:
        named = dict(zip(self.weight_shapes, weights, strict=True))
        scores = self._scores(named, self._states(named, words))
        return tf.reshape(scores, [-1, self.sequence_length, self.vocabulary_size])

    def compact_logits(
        self,
        weights: Sequence[tf.Tensor],
        words: tf.Tensor,
        record: weight_uses.Recorder = weight_uses.ignore,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns scores without padding, which the product with the embedding never sees."""
        named = dict(zip(self.weight_shapes, weights, strict=True))
        positions = language_model.word_positions(words)
        states = tf.gather(self._states(named, words, record), positions)
        return self._scores(named, states, record, positions), positions

    def _states(
        self,
        named: dict[str, tf.Tensor],
        words: tf.Tensor,
        record: weight_uses.Recorder = weight_uses.ignore,
    ) -> tf.Tensor:
        """Returns the states after the last block, shape [batch · T, E]."""
        words = language_model.checked_words(words, self.sequence_length)
        states = embedding_lookup.lookup(named["embedding"], words) + named["position_embedding"]
        states = record(
            tf.reshape(states, [-1, self.embedding_size]),
            weight_uses.Lookup("embedding", tf.reshape(words, [-1])),
            weight_uses.StepBias("position_embedding"),
        )
        for layer in range(self.num_layers):
            block = _Recorded(named, f"layer_{layer}_", record)
            states += self._attention(block, block.normalised("attention_norm", states))
            inputs = block.normalised("feed_forward_norm", states)
            inner = tf.nn.gelu(block.affine("feed_forward", inputs))
            states += block.affine("feed_forward_output", inner)
        return states

    def _attention(self, block: _Recorded, inputs: tf.Tensor) -> tf.Tensor:
        """Applies causal self-attention; inputs and outputs have shape [batch · T, E]."""
        length, size = self.sequence_length, self._head_size
        projected = block.product("query_key_value_kernel", inputs)
        projected = tf.reshape(projected, [-1, length, 3, self.num_heads, size])
        # Each has shape [batch, heads, T, size].
        query, key, value = tf.unstack(tf.transpose(projected, [2, 0, 3, 1, 4]), num=3)
        scores = tf.matmul(query / math.sqrt(size), key, transpose_b=True)
        ahead = np.triu(np.full([length, length], _MASKED), k=1)
        shares = tf.nn.softmax(scores + tf.constant(ahead, scores.dtype))
        mixed = tf.transpose(tf.matmul(shares, value), [0, 2, 1, 3])
        mixed = tf.reshape(mixed, [-1, self.num_heads * size])
        return block.product("attention_output_kernel", mixed)

    def _scores(
        self,
        named: dict[str, tf.Tensor],
        states: tf.Tensor,
        record: weight_uses.Recorder = weight_uses.ignore,
        order: weight_uses.Order | tf.Tensor = weight_uses.Order.SEQUENCES,
    ) -> tf.Tensor:
        outputs = _Recorded(named, "", record, order).normalised("output_norm", states)
        scores = tf.matmul(outputs, named["embedding"], transpose_b=True)
        return record(
            tf.nn.bias_add(scores, named["output_bias"]),
            weight_uses.Product("embedding", outputs, transposed=True),
            weight_uses.Bias("output_bias"),
            order=order,
        )


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """Layers whose weights' names begin with a prefix, and which record their uses."""

    named: dict[str, tf.Tensor]
    prefix: str
    record: weight_uses.Recorder
    order: weight_uses.Order | tf.Tensor = weight_uses.Order.SEQUENCES

    def product(self, name: str, inputs: tf.Tensor) -> tf.Tensor:
        name = self.prefix + name
        outputs = tf.matmul(inputs, self.named[name])
        return self.record(outputs, weight_uses.Product(name, inputs), order=self.order)

    def affine(self, name: str, inputs: tf.Tensor) -> tf.Tensor:
        kernel, bias = (f"{self.prefix}{name}_{part}" for part in ("kernel", "bias"))
        return self.record(
            tf.nn.bias_add(tf.matmul(inputs, self.named[kernel]), self.named[bias]),
            weight_uses.Product(kernel, inputs),
            weight_uses.Bias(bias),
            order=self.order,
        )

    def normalised(self, name: str, states: tf.Tensor) -> tf.Tensor:
        """Applies layer norm (Ba et al. 2016): mean 0, variance 1, then scale and bias."""
        centred = states - tf.reduce_mean(states, axis=1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), axis=1, keepdims=True)
        normal = centred * tf.math.rsqrt(variance + _EPSILON)
        scale, bias = (f"{self.prefix}{name}_{part}" for part in ("scale", "bias"))
        return self.record(
            normal * self.named[scale] + self.named[bias],
            weight_uses.Scale(scale, normal),
            weight_uses.Bias(bias),
            order=self.order,
        )
