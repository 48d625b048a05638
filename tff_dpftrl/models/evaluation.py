"""Evaluation of model weights on held-out sequences, without TFF."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tff_dpftrl.models import language_model, metrics


class Evaluator:
    """Evaluates weights on a fixed set of sequences, as often as you like.

    The graph is traced at the first call, for half a second or so.
    """

    def __init__(
        self,
        model: language_model.LanguageModel,
        special: metrics.SpecialIds,
        sequences: np.ndarray,
        *,
        batch_size: int = 64,
    ):
        """Copies the sequences to TensorFlow.

        Args:
          model: The model.
          special: Ids of special tokens.
          sequences: Ids, integer, shape [n, T + 1], T the model's sequence length.
          batch_size: Number of sequences scored at a time; it bounds memory.

        Raises:
          ValueError: If `sequences` is empty or has another shape.
        """
        if sequences.ndim != 2 or sequences.shape[1] != model.sequence_length + 1:
            raise ValueError(
                f"sequences must have shape [n, {model.sequence_length + 1}], got "
                f"{list(sequences.shape)}; use the model's sequence_length to make them."
            )
        if len(sequences) == 0:
            raise ValueError("sequences must not be empty; hold out more users.")
        batches = tf.data.Dataset.from_tensor_slices(sequences.astype(np.int32)).batch(batch_size)

        @tf.function
        def evaluate(weights):
            counts = metrics.zero_counts()
            for batch in batches:
                logits, positions = model.compact_logits(weights, batch[:, :-1])
                targets = tf.gather(tf.reshape(batch[:, 1:], [-1]), positions)
                counts = metrics.add(counts, metrics.count(logits, targets, special))
            return metrics.finalize(counts)

        self._evaluate = evaluate

    def __call__(self, weights: Sequence[np.ndarray | tf.Tensor]) -> dict[str, float]:
        """Evaluates trainable weights.

        Args:
          weights: One array for each entry of the model's `weight_shapes`.

        Returns:
          The metrics of `metrics.finalize` as floats.
        """
        weights = tuple(tf.convert_to_tensor(weight, tf.float32) for weight in weights)
        return {name: float(value) for name, value in self._evaluate(weights).items()}
