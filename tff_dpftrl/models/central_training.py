"""Central training of a language model on pooled text: neither federated nor private."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tff_dpftrl.models import keras_versions, language_model, metrics


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The result of an epoch.

    Attributes:
      weights: One float32 array for each entry of the model's `weight_shapes`.
      loss: Mean training loss of the batches, cross-entropy in nats per word.
    """

    weights: tuple[np.ndarray, ...]
    loss: float


def num_batches(num_sequences: int, batch_size: int) -> int:
    """Returns the number of batches in an epoch; the last one may be smaller."""
    return -(-num_sequences // batch_size)


def epochs(
    model: language_model.LanguageModel,
    weights: Sequence[np.ndarray],
    sequences: np.ndarray,
    *,
    num_epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    on_batch: Callable[[float], None] = lambda loss: None,
) -> Iterator[Epoch]:
    """Trains with Adam, whose learning rate falls linearly to zero over all epochs.

    `sequences` are ids, integer, shape [n, T + 1], with n > 0. Each epoch has its own order.
    """
    variables = [tf.Variable(weight, dtype=tf.float32) for weight in weights]
    rng = np.random.default_rng(seed)
    per_epoch = num_batches(len(sequences), batch_size)
    optimizer = keras_versions.Adam(
        keras_versions.PolynomialDecay(learning_rate, num_epochs * per_epoch, 0.0)
    )
    optimizer.build(variables)

    @tf.function(
        autograph=False,
        input_signature=[tf.TensorSpec([None, model.sequence_length + 1], tf.int32)],
    )
    def step(batch):
        with tf.GradientTape() as tape:
            logits, positions = model.compact_logits(variables, batch[:, :-1])
            targets = tf.gather(tf.reshape(batch[:, 1:], [-1]), positions)
            loss = metrics.mean_cross_entropy(logits, targets, language_model.PAD)
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, variables))
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    for _ in range(num_epochs):
        order, losses = rng.permutation(len(sequences)), []
        for start in range(0, len(sequences), batch_size):
            batch = sequences[order[start : start + batch_size]]
            losses.append(float(step(tf.constant(batch, tf.int32))))
            on_batch(losses[-1])
        yield Epoch(tuple(variable.numpy() for variable in variables), float(np.mean(losses)))
