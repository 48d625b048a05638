"""Local training of a language model: for one user after the other, each from the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tff_dpftrl.models import language_model, metrics

_ROWS_AT_ONCE = 64  # Rows that are measured at a time; it bounds memory.


class Measured(NamedTuple):
    """Loss and accuracy of a model on some text.

    Attributes:
      loss: Mean cross-entropy in nats over all targets, as in `metrics.finalize`.
      top1: Share of the words of the vocabulary that were the model's first guess; NaN if
        there is no such word.
    """

    loss: float
    top1: float


class LocalTraining:
    """A model that is trained and measured for one user, and reset before the next.

    The graphs are traced once for all users and models of the same sizes.
    """

    def __init__(
        self,
        model: language_model.LanguageModel,
        weights: Sequence[np.ndarray],
        special: metrics.SpecialIds,
    ):
        """Copies the weights.

        Args:
          model: Model to train.
          weights: Initial weights for every user; one array for each entry of the model's
            `weight_shapes`.
          special: Ids of special tokens.
        """
        self._first = [tf.convert_to_tensor(weight, tf.float32) for weight in weights]
        self._weights = self._first
        self._step, self._count = _graphs(model, special)

    def restart(self) -> None:
        """Resets the model to the initial weights."""
        self._weights = self._first

    def train(
        self,
        rows: np.ndarray,
        *,
        learning_rate: float,
        num_epochs: int,
        batch_size: int,
        rng: np.random.Generator,
    ) -> None:
        """Continues training, by plain SGD on the mean cross-entropy of a batch.

        Args:
          rows: Ids, integer, shape [n, T + 1], T the model's sequence length.
          learning_rate: Constant learning rate.
          num_epochs: Number of passes over the rows, each in another order.
          batch_size: Number of rows in a batch; the last one of a pass may have fewer.
          rng: Random generator of the orders.
        """
        rows, learning_rate = np.asarray(rows, np.int32), tf.constant(learning_rate, tf.float32)
        for _ in range(num_epochs):
            order = rng.permutation(len(rows))
            for start in range(0, len(rows), batch_size):
                batch = rows[order[start : start + batch_size]]
                self._weights = self._step(self._weights, tf.constant(batch), learning_rate)

    def measure(self, rows: np.ndarray) -> Measured:
        """Measures the current model.

        Args:
          rows: Ids, integer, shape [n, T + 1], n positive.

        Returns:
          Loss and accuracy; they are not finite if training diverged.
        """
        counts = metrics.zero_counts()
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            batch = np.asarray(rows[start : start + _ROWS_AT_ONCE], np.int32)
            counts = metrics.add(counts, self._count(self._weights, tf.constant(batch)))
        values = metrics.finalize(counts)
        top1 = float(values["top1_in_vocab"]) if int(values["num_in_vocab"]) else float("nan")
        return Measured(float(values["loss"]), top1)


@language_model.kept
def _graphs(
    model: language_model.LanguageModel, special: metrics.SpecialIds
) -> tuple[Callable[..., list[tf.Tensor]], Callable[..., metrics.Counts]]:
    """Returns a step of SGD, from weights to weights, and the counts of some rows."""
    rows = tf.TensorSpec([None, model.sequence_length + 1], tf.int32)

    def scores(weights, batch):
        logits, positions = model.compact_logits(weights, batch[:, :-1])
        return logits, tf.gather(tf.reshape(batch[:, 1:], [-1]), positions)

    @tf.function(
        autograph=False, input_signature=[model.weight_specs, rows, tf.TensorSpec([], tf.float32)]
    )
    def step(weights, batch, learning_rate):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            loss = metrics.mean_cross_entropy(*scores(weights, batch), language_model.PAD)
        gradients = tape.gradient(loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        pairs = zip(weights, gradients, strict=True)
        return [weight - learning_rate * tf.convert_to_tensor(given) for weight, given in pairs]

    @tf.function(autograph=False, input_signature=[model.weight_specs, rows])
    def count(weights, batch):
        return metrics.count(*scores(weights, batch), special)

    return step, count
