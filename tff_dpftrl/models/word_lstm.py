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
from tff_dpftrl.models import language_model, layers


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
        states = self._hidden_states(named, words)
        states = tf.reshape(states, [self.sequence_length, -1, self.state_size])
        states = tf.reshape(tf.transpose(states, [1, 0, 2]), [-1, self.state_size])
        scores = self._scores(named, states)
        return tf.reshape(scores, [-1, self.sequence_length, self.vocabulary_size])

    def compact_logits(
        self, weights: Sequence[tf.Tensor], words: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns scores without padding, which the largest products never see."""
        named = self._named(weights)
        positions = language_model.word_positions(words)
        states = self._hidden_states(named, words)
        rows, steps = positions // self.sequence_length, positions % self.sequence_length
        batch_size = tf.shape(words, out_type=positions.dtype)[0]
        return self._scores(named, tf.gather(states, steps * batch_size + rows)), positions

    def _named(self, weights: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        named = dict(zip(self.weight_shapes, weights, strict=True))
        if self.unit_norm_embeddings:
            for name in ("embedding", "output_embedding"):
                if name in named:
                    named[name] = tf.math.l2_normalize(named[name], axis=1)
        return named

    def _hidden_states(self, named: dict[str, tf.Tensor], words: tf.Tensor) -> tf.Tensor:
        """Returns the LSTM's states, shape [T · batch, H], all of the first step first."""
        words = tf.convert_to_tensor(words)
        if words.shape[1] != self.sequence_length:
            raise ValueError(
                f"words must have shape [batch, {self.sequence_length}], got {words.shape}; make "
                "sequences of the model's sequence_length."
            )
        # Time comes first, and one product makes the inputs of all steps.
        inputs = layers.lookup(named["embedding"], tf.reshape(tf.transpose(words), [-1]))
        gates = tf.nn.bias_add(tf.matmul(inputs, named["input_kernel"]), named["gate_bias"])
        gates = tf.reshape(gates, [self.sequence_length, -1, self._num_gates * self.state_size])
        states = layers.lstm(gates, named["recurrent_kernel"], couple_gates=self.couple_gates)
        return tf.reshape(states, [-1, self.state_size])

    def _scores(self, named: dict[str, tf.Tensor], states: tf.Tensor) -> tf.Tensor:
        outputs = tf.matmul(states, named["projection"])
        embedding = named["embedding" if self.tie_embeddings else "output_embedding"]
        scores = tf.matmul(outputs, embedding, transpose_b=True)
        return tf.nn.bias_add(scores, named["output_bias"])


PAPER = WordLstm(vocabulary_size=10_000)
"""Sizes of McMahan et al. 2018; `output_bias` comes on top of theirs."""
