"""Shared parts of decoder-only transformers: layers that record their uses of weights, attention.

There is neither dropout nor state: a sequence's scores depend on its words and the weights alone.
Padding comes after the words of a sequence, and attention never looks ahead: padding does not
change the scores of words.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.models import embedding_lookup, language_model, weight_uses

MASKED = -1e9
"""Score of what cannot be: its probability, and its part in every gradient, is exactly 0."""

_EMBEDDING_STDDEV = 0.02


class Decoder(language_model.LanguageModel):
    """A decoder-only transformer with trainable weights, in the order of `weight_shapes`.

    Names tell what a weight is: "…_kernel" is a matrix [inputs, outputs], "…_output_kernel" one
    that adds to the states between blocks, "…embedding" a table with a row for each word or
    position, "…scale" a factor, and "…bias" what is added.

    Attributes:
      embedding_size: Width E of the states between blocks.
      num_layers: Number of blocks.
    """

    embedding_size: int
    num_layers: int

    @property
    @override
    def reports_uses(self) -> bool:
        return True

    @property
    @override
    def compute_dtypes(self) -> Sequence[str]:
        return ("float32", "bfloat16")

    @property
    @override
    def can_recompute(self) -> bool:
        return True

    @property
    @override
    def adaptable_kernels(self) -> Sequence[str]:
        """The names of the kernels of each block."""
        return [name for name in self.weight_shapes if name.endswith("_kernel")]

    def initial_weights(self, seed: int) -> tuple[np.ndarray, ...]:
        """Draws the weights, float32; the same seed gives the same weights everywhere.

        Kernels are Gaussian with standard deviation 1/√(inputs), those that add to the states
        between blocks 1/√(2 · num_layers) of that (Radford et al. 2019), embeddings 0.02; biases
        are 0, and the scales of norms 1.
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
        layers = Layers(dict(zip(self.weight_shapes, weights, strict=True)))
        scores = self._scores(layers, self._checked_states(layers, words))
        return tf.reshape(scores, [-1, self.sequence_length, self.vocabulary_size])

    def compact_logits(
        self,
        weights: Sequence[tf.Tensor],
        words: tf.Tensor,
        record: weight_uses.Recorder = weight_uses.ignore,
        recompute: bool = False,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns scores without padding, which the product with the embedding never sees.

        With `recompute`, `record` may ignore uses or have weights of its own, but not keep what it
        is given, which would be a block's own.
        """
        named = dict(zip(self.weight_shapes, weights, strict=True))
        layers = Layers(named, record=record, recompute=recompute)
        positions = language_model.word_positions(words)
        states = tf.gather(self._checked_states(layers, words), positions)
        return self._scores(dataclasses.replace(layers, order=positions), states), positions

    def _checked_states(self, layers: Layers, words: tf.Tensor) -> tf.Tensor:
        return self._states(layers, language_model.checked_words(words, self.sequence_length))

    @abc.abstractmethod
    def _states(self, layers: Layers, words: tf.Tensor) -> tf.Tensor:
        """Returns the states after the last block, shape [batch · T, E], of ids [batch, T]."""

    @abc.abstractmethod
    def _scores(self, layers: Layers, states: tf.Tensor) -> tf.Tensor:
        """Returns the scores of all ids, shape [n, V], of states of shape [n, E]."""


class TokenDecoder(Decoder):
    """A decoder whose tables have a row for each token of a checkpoint, and none for padding.

    Token t has the id t + 1, since 0 is the id of padding: V is the number of tokens and one.
    """

    @property
    def num_tokens(self) -> int:
        """Number of rows of the embedding."""
        return self.vocabulary_size - 1

    def _embedded(self, layers: Layers, words: tf.Tensor, *tables: Sequence) -> tf.Tensor:
        """Returns embeddings, plus rows of further tables, shape [batch · T, E].

        Padding is embedded as token 0: no score of a word depends on it, and its gradient is
        exactly 0. `words` and the ids in `tables` are integer, shape [batch, T].
        """
        return layers.lookup(
            ("embedding", tf.maximum(words - 1, 0)),
            *tables,
        )

    def _token_scores(self, layers: Layers, table: str, states: tf.Tensor) -> tf.Tensor:
        """Returns products with the rows of a table; the score of padding is `MASKED`."""
        scores = layers.product(table, states, transposed=True)
        return tf.pad(scores, [[0, 0], [1, 0]], constant_values=MASKED)


def check_positions(sequence_length: int, num_positions: int) -> None:
    """Refuses sequences that are longer than the positions that a model was made for."""
    validation.integer("num_positions", num_positions, minimum=1)
    if sequence_length > num_positions:
        raise validation.UsageError(
            f"sequence_length must be at most {num_positions}, the positions that the model was "
            f"made for, got {sequence_length}."
        )


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers whose weights' names begin with a prefix, and which record their uses.

    They compute in the dtype of the weights; norms and the shares of attention in float32.

    Attributes:
      named: Weights by name.
      prefix: Beginning of the names.
      record: Recorder of the uses of weights.
      order: Order of sequences and steps in inputs and outputs, as `record` takes it.
      recompute: Whether a block is computed again for the gradient (`apply`).
    """

    named: dict[str, tf.Tensor]
    prefix: str = ""
    record: weight_uses.Recorder = weight_uses.ignore
    order: weight_uses.Order | tf.Tensor = weight_uses.Order.SEQUENCES
    recompute: bool = False

    def block(self, index: int) -> Layers:
        """Returns the layers of a block."""
        return dataclasses.replace(self, prefix=f"layer_{index}_")

    def apply(
        self, function: Callable[[Layers, tf.Tensor], tf.Tensor], states: tf.Tensor
    ) -> tf.Tensor:
        """Calls the function of a block, from its layers and states to states.

        With `recompute` nothing but the states given is kept for the gradient, for which the
        function is called again (Chen et al. 2016, "gradient checkpointing").
        """
        if not self.recompute:
            return function(self, states)
        has_own = isinstance(self.record, weight_uses.RecorderWithWeights)
        parts = [self.named, *([self.record.named] if has_own else [])]
        parts = [{k: w for k, w in x.items() if k.startswith(self.prefix)} for x in parts]

        def call(states, *weights):
            named, *others = tf.nest.pack_sequence_as(parts, list(weights))
            record = dataclasses.replace(self.record, named=others[0]) if others else self.record
            return function(dataclasses.replace(self, named=named, record=record), states)

        @tf.custom_gradient
        def run(*given):
            def gradient(upstream):
                # Not before the gradient is there; nor is it found to be the same computation.
                with tf.control_dependencies([upstream]):
                    again = [tf.identity(x) for x in given]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(again)
                    outputs = call(*again)
                return tape.gradient(outputs, again, upstream, tf.UnconnectedGradients.ZERO)

            return call(*given), gradient

        return run(states, *tf.nest.flatten(parts))

    def lookup(self, *tables: tuple[str, tf.Tensor]) -> tf.Tensor:
        """Adds up rows of tables, [n, outputs]; the ids of all tables have the same shape."""
        tables = [(self.prefix + name, tf.reshape(ids, [-1])) for name, ids in tables]
        return self.record(
            tf.add_n([embedding_lookup.lookup(self.named[name], ids) for name, ids in tables]),
            *(weight_uses.Lookup(name, ids) for name, ids in tables),
            order=self.order,
        )

    def product(self, name: str, inputs: tf.Tensor, *, transposed: bool = False) -> tf.Tensor:
        """Multiplies inputs with a matrix, or its transpose."""
        name = self.prefix + name
        outputs = tf.matmul(inputs, self.named[name], transpose_b=transposed)
        return self.record(
            outputs, weight_uses.Product(name, inputs, transposed=transposed), order=self.order
        )

    def affine(self, name: str, inputs: tf.Tensor) -> tf.Tensor:
        """Multiplies inputs with a kernel and adds a bias."""
        kernel, bias = (f"{self.prefix}{name}_{part}" for part in ("kernel", "bias"))
        return self.record(
            tf.nn.bias_add(tf.matmul(inputs, self.named[kernel]), self.named[bias]),
            weight_uses.Product(kernel, inputs),
            weight_uses.Bias(bias),
            order=self.order,
        )

    def normalised(self, name: str, states: tf.Tensor, epsilon: float) -> tf.Tensor:
        """Applies layer norm (Ba et al. 2016): mean 0, variance 1, then scale and bias."""
        values = _widened(states)
        centred = values - tf.reduce_mean(values, axis=1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), axis=1, keepdims=True)
        normal = tf.cast(centred * tf.math.rsqrt(variance + epsilon), states.dtype)
        scale, bias = (f"{self.prefix}{name}_{part}" for part in ("scale", "bias"))
        return self.record(
            normal * self.named[scale] + self.named[bias],
            weight_uses.Scale(scale, normal),
            weight_uses.Bias(bias),
            order=self.order,
        )

    def mean_square_normalised(self, name: str, states: tf.Tensor, epsilon: float) -> tf.Tensor:
        """Applies RMSNorm (Zhang and Sennrich 2019): mean square 1, then scale."""
        values = _widened(states)
        square = tf.reduce_mean(tf.square(values), axis=1, keepdims=True)
        normal = tf.cast(values * tf.math.rsqrt(square + epsilon), states.dtype)
        scale = f"{self.prefix}{name}_scale"
        return self.record(
            normal * self.named[scale], weight_uses.Scale(scale, normal), order=self.order
        )


def split_heads(projected: tf.Tensor, parts: int, length: int, heads: int) -> list[tf.Tensor]:
    """Splits projections into parts and heads.

    The projections have shape [batch · T, parts · heads · size], and each part has shape [batch,
    heads, T, size].
    """
    size = projected.shape[1] // (parts * heads)
    projected = tf.reshape(projected, [-1, length, parts, heads, size])
    return tf.unstack(tf.transpose(projected, [2, 0, 3, 1, 4]), num=parts)


def _widened(values: tf.Tensor) -> tf.Tensor:
    """Returns values of fewer than 32 bits as float32, others as they are."""
    return tf.cast(values, tf.float32) if values.dtype.size < tf.float32.size else values


def causal_attention(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Applies attention to the present and earlier positions.

    `query` has shape [batch, heads, T, size], `key` and `value` [batch, groups, T, size].
    Consecutive heads share the keys of a group (Ainslie et al. 2023). The result has shape [batch ·
    T, heads · size].
    """
    heads, length, size = query.shape[1:]
    groups = key.shape[1]
    query = tf.reshape(query / math.sqrt(size), [-1, groups, heads // groups * length, size])
    scores = tf.reshape(tf.matmul(query, key, transpose_b=True), [-1, heads, length, length])
    ahead = np.triu(np.full([length, length], MASKED), k=1)
    scores = _widened(scores)
    shares = tf.cast(tf.nn.softmax(scores + tf.constant(ahead, scores.dtype)), value.dtype)
    shares = tf.reshape(shares, [-1, groups, heads // groups * length, length])
    mixed = tf.reshape(tf.matmul(shares, value), [-1, heads, length, size])
    return tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [-1, heads * size])
