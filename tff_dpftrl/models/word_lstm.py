"""A word-level LSTM that predicts the next word, as pure TensorFlow functions.

Embedding, one LSTM layer, projection to the size of the embedding, and scores
against the (same or another) embedding of every word. `table.MODELS` has the variants
and sizes of published models.
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
from tff_dpftrl.models import embedding_lookup, language_model, lstm_layer, weight_uses


@dataclasses.dataclass(frozen=True)
class WordLstm(language_model.LanguageModel):
    """An LSTM of some sizes.

    The trainable weights are a tuple of float32 arrays in the order of
    `weight_shapes`.

    Attributes:
      vocabulary_size: Number of ids V, special tokens included.
      sequence_length: Number of positions T in a batch; the LSTM is unrolled.
      embedding_size: Length E of word embeddings and of projected outputs.
      state_size: Length H of the LSTM's state.
      tie_embeddings: Whether inputs and outputs share one embedding.
      couple_gates: Whether the forget gate is one minus the input gate (CIFG),
        which saves a quarter of the LSTM's weights.
      unit_norm_embeddings: Whether embeddings are scaled to L2 norm 1 wherever
        they are used, as in McMahan et al. 2018.
      recurrent_projection: Whether the gates see the projected output of the step before
        (Sak et al. 2014) instead of the whole state, which makes the recurrent kernel,
        and the products with it, smaller by E / H.
    """

    vocabulary_size: int
    sequence_length: int = 20
    embedding_size: int = 96
    state_size: int = 256
    tie_embeddings: bool = True
    couple_gates: bool = False
    unit_norm_embeddings: bool = False
    recurrent_projection: bool = False

    def __post_init__(self):
        for name in ("vocabulary_size", "sequence_length", "embedding_size", "state_size"):
            validation.integer(name, getattr(self, name), minimum=1)

    @property
    @override
    def reports_uses(self) -> bool:
        """Whether there is neither a recurrent projection nor embeddings of norm 1."""
        return not (self.recurrent_projection or self.unit_norm_embeddings)

    @property
    def weight_shapes(self) -> collections.OrderedDict[str, tuple[int, ...]]:
        """Names and shapes of the weights, in order."""
        embedding = (self.vocabulary_size, self.embedding_size)
        gates = self._num_gates * self.state_size
        shapes = collections.OrderedDict(
            embedding=embedding,
            input_kernel=(self.embedding_size, gates),
            recurrent_kernel=(self._output_size, gates),
            gate_bias=(gates,),
            projection=(self.state_size, self.embedding_size),
            output_bias=(self.vocabulary_size,),
        )
        if not self.tie_embeddings:
            shapes["output_embedding"] = embedding
        return shapes

    @property
    def _output_size(self) -> int:
        """The length of the LSTM's output after a step, which the next step's gates read."""
        return self.embedding_size if self.recurrent_projection else self.state_size

    @property
    def _num_gates(self) -> int:
        return 3 if self.couple_gates else 4

    def initial_weights(self, seed: int) -> tuple[np.ndarray, ...]:
        """Draws the weights, float32; the same seed gives the same weights everywhere.

        Matrices are Gaussian with standard deviation 1/√(inputs), embeddings 1/√E, so that they
        have norm 1 or so; biases are 0, but 1 for the forget gate.
        """
        rng = np.random.Generator(np.random.Philox(seed))
        weights = []
        for name, shape in self.weight_shapes.items():
            if len(shape) == 1:
                weight = np.zeros(shape)
            else:
                inputs = shape[1] if name.endswith("embedding") else shape[0]
                weight = rng.standard_normal(shape) / math.sqrt(inputs)
            if name == "gate_bias" and not self.couple_gates:
                weight[: self.state_size] = 1.0
            weights.append(weight.astype(np.float32))
        return tuple(weights)

    @override
    def logits(self, weights: Sequence[tf.Tensor], words: tf.Tensor) -> tf.Tensor:
        named = self._named(weights)
        outputs = self._lstm_outputs(named, words)
        outputs = tf.reshape(outputs, [self.sequence_length, -1, self._output_size])
        outputs = tf.reshape(tf.transpose(outputs, [1, 0, 2]), [-1, self._output_size])
        scores = self._scores(named, outputs)
        return tf.reshape(scores, [-1, self.sequence_length, self.vocabulary_size])

    def compact_logits(
        self,
        weights: Sequence[tf.Tensor],
        words: tf.Tensor,
        record: weight_uses.Recorder = weight_uses.ignore,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns scores without padding, which the largest products never see."""
        named = self._named(weights)
        positions = language_model.word_positions(words)
        outputs = self._lstm_outputs(named, words, record)
        rows, steps = positions // self.sequence_length, positions % self.sequence_length
        batch_size = tf.shape(words, out_type=positions.dtype)[0]
        outputs = tf.gather(outputs, steps * batch_size + rows)
        return self._scores(named, outputs, record, positions), positions

    def _named(self, weights: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        named = dict(zip(self.weight_shapes, weights, strict=True))
        if self.unit_norm_embeddings:
            for name in ("embedding", "output_embedding"):
                if name in named:
                    named[name] = tf.math.l2_normalize(named[name], axis=1)
        return named

    def _lstm_outputs(
        self,
        named: dict[str, tf.Tensor],
        words: tf.Tensor,
        record: weight_uses.Recorder = weight_uses.ignore,
    ) -> tf.Tensor:
        """Returns shape [T · batch, `_output_size`], all of the first step first."""
        words = language_model.checked_words(words, self.sequence_length)
        by_step = weight_uses.Order.STEPS
        # Time comes first, and one product makes the inputs of all steps.
        words = tf.reshape(tf.transpose(words), [-1])
        inputs = record(
            embedding_lookup.lookup(named["embedding"], words),
            weight_uses.Lookup("embedding", words),
            order=by_step,
        )
        gates = record(
            tf.nn.bias_add(tf.matmul(inputs, named["input_kernel"]), named["gate_bias"]),
            weight_uses.Product("input_kernel", inputs),
            weight_uses.Bias("gate_bias"),
            order=by_step,
        )
        outputs = lstm_layer.lstm(
            tf.reshape(gates, [self.sequence_length, -1, self._num_gates * self.state_size]),
            named["recurrent_kernel"],
            named["projection"] if self.recurrent_projection else None,
            couple_gates=self.couple_gates,
        )
        if record is not weight_uses.ignore:
            # The inputs of each step's gates from the step before.
            before = tf.concat([tf.zeros_like(outputs[:1]), outputs[:-1]], axis=0)
            before = tf.reshape(before, [-1, self._output_size])
            record(gates, weight_uses.Product("recurrent_kernel", before), order=by_step)
        return tf.reshape(outputs, [-1, self._output_size])

    def _scores(
        self,
        named: dict[str, tf.Tensor],
        outputs: tf.Tensor,
        record: weight_uses.Recorder = weight_uses.ignore,
        order: weight_uses.Order | tf.Tensor = weight_uses.Order.SEQUENCES,
    ) -> tf.Tensor:
        if not self.recurrent_projection:
            states = outputs
            outputs = record(
                tf.matmul(states, named["projection"]),
                weight_uses.Product("projection", states),
                order=order,
            )
        name = "embedding" if self.tie_embeddings else "output_embedding"
        scores = tf.matmul(outputs, named[name], transpose_b=True)
        return record(
            tf.nn.bias_add(scores, named["output_bias"]),
            weight_uses.Product(name, outputs, transposed=True),
            weight_uses.Bias("output_bias"),
            order=order,
        )
