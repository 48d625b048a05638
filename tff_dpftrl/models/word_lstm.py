"""A word-level LSTM that predicts the next word, as pure TensorFlow functions.

Embedding, one LSTM layer, projection to the size of the embedding, and scores
against the (same or another) embedding of every word. `PAPER` has the sizes of
McMahan et al. 2018, appendix B: embedding 96 tied for input and output, state 256
projected to 96, 10,000 words, 1.35 million parameters.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.models import language_model


@dataclasses.dataclass(frozen=True)
class WordLstm(language_model.LanguageModel):
    """Sizes of the model, and the functions that compute it.

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
    """

    vocabulary_size: int
    sequence_length: int = 20
    embedding_size: int = 96
    state_size: int = 256
    tie_embeddings: bool = True
    couple_gates: bool = False
    unit_norm_embeddings: bool = False

    def __post_init__(self):
        for name in ("vocabulary_size", "sequence_length", "embedding_size", "state_size"):
            validation.integer(name, getattr(self, name), minimum=1)

    @property
    def weight_shapes(self) -> collections.OrderedDict[str, tuple[int, ...]]:
        """Names and shapes of the weights, in order."""
        embedding = (self.vocabulary_size, self.embedding_size)
        gates = self._num_gates * self.state_size
        shapes = collections.OrderedDict(
            embedding=embedding,
            input_kernel=(self.embedding_size, gates),
            recurrent_kernel=(self.state_size, gates),
            gate_bias=(gates,),
            projection=(self.state_size, self.embedding_size),
            output_bias=(self.vocabulary_size,),
        )
        if not self.tie_embeddings:
            shapes["output_embedding"] = embedding
        return shapes

    @property
    def _num_gates(self) -> int:
        return 3 if self.couple_gates else 4

    def initial_weights(self, seed: int) -> tuple[np.ndarray, ...]:
        """Draws the weights.

        Matrices are Gaussian with standard deviation 1/√(inputs), embeddings
        1/√E, so that they have norm 1 or so; biases are 0, but 1 for the forget gate.

        Args:
          seed: Non-negative; the same seed gives the same weights everywhere.

        Returns:
          One float32 array for each entry of `weight_shapes`.
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

    def logits(self, weights: Sequence[tf.Tensor], words: tf.Tensor) -> tf.Tensor:
        """Returns scores of every next word at every position, as the base class says."""
        named = self._named(weights)
        outputs = self._outputs(named, words)
        scores = self._scores(named, tf.reshape(outputs, [-1, self.embedding_size]))
        return tf.reshape(scores, [-1, self.sequence_length, self.vocabulary_size])

    def compact_logits(
        self, weights: Sequence[tf.Tensor], words: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns scores without padding, which the largest product never sees."""
        named = self._named(weights)
        positions = language_model.word_positions(words)
        outputs = tf.reshape(self._outputs(named, words), [-1, self.embedding_size])
        return self._scores(named, tf.gather(outputs, positions)), positions

    def _named(self, weights: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        named = dict(zip(self.weight_shapes, weights, strict=True))
        if self.unit_norm_embeddings:
            for name in ("embedding", "output_embedding"):
                if name in named:
                    named[name] = tf.math.l2_normalize(named[name], axis=1)
        return named

    def _outputs(self, named: dict[str, tf.Tensor], words: tf.Tensor) -> tf.Tensor:
        """Returns what the projection puts out, shape [batch, T, E]."""
        words = tf.convert_to_tensor(words)
        if words.shape[1] != self.sequence_length:
            raise ValueError(
                f"words must have shape [batch, {self.sequence_length}], got {words.shape}; make "
                "sequences of the model's sequence_length."
            )
        # Time comes first, and one product makes the inputs of all steps.
        inputs = tf.reshape(
            tf.gather(named["embedding"], tf.transpose(words)), [-1, self.embedding_size]
        )
        gates = tf.matmul(inputs, named["input_kernel"]) + named["gate_bias"]
        gates = tf.reshape(gates, [self.sequence_length, -1, self._num_gates * self.state_size])
        hidden = cell = tf.zeros([tf.shape(words)[0], self.state_size])
        states = []
        for gate_inputs in tf.unstack(gates, num=self.sequence_length):
            gate_inputs += tf.matmul(hidden, named["recurrent_kernel"])
            *forget, enter, leave, new = tf.split(gate_inputs, self._num_gates, axis=1)
            enter = tf.sigmoid(enter)
            keep = 1.0 - enter if self.couple_gates else tf.sigmoid(forget[0])
            cell = keep * cell + enter * tf.tanh(new)
            hidden = tf.sigmoid(leave) * tf.tanh(cell)
            states.append(hidden)
        states = tf.reshape(tf.stack(states, axis=1), [-1, self.state_size])
        outputs = tf.matmul(states, named["projection"])
        return tf.reshape(outputs, [-1, self.sequence_length, self.embedding_size])

    def _scores(self, named: dict[str, tf.Tensor], outputs: tf.Tensor) -> tf.Tensor:
        embedding = named["embedding" if self.tie_embeddings else "output_embedding"]
        return tf.matmul(outputs, embedding, transpose_b=True) + named["output_bias"]


PAPER = WordLstm(vocabulary_size=10_000)
"""Sizes of McMahan et al. 2018; `output_bias` comes on top of theirs."""
