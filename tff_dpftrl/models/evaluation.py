"""Evaluation of model weights on held-out sequences, without TFF."""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.models import language_model, metrics

_MAX_PARALLEL = 8


class Evaluator:
    """An evaluator of weights on a fixed set of sequences.

    The graph is traced at the first call, in about half a second, if not before for a model of the
    same sizes. Batches are scored in parallel, on up to eight cores; the metrics do not depend on
    the number of cores.
    """

    def __init__(
        self,
        model: language_model.LanguageModel,
        special: metrics.SpecialIds,
        sequences: np.ndarray,
        *,
        batch_size: int = 32,
        targets_per_character: float | None = None,
    ):
        """Copies the sequences, integer ids of shape [n, T + 1], to TensorFlow.

        `targets_per_character` is None if unknown.
        """
        if sequences.ndim != 2 or sequences.shape[1] != model.sequence_length + 1:
            raise validation.UsageError(
                f"sequences must have shape [n, {model.sequence_length + 1}], got "
                f"{list(sequences.shape)}; use the model's sequence_length to make them."
            )
        if len(sequences) == 0:
            raise validation.UsageError("sequences must not be empty; hold out more users.")
        self._count = _counter(model, special, _batches(sequences, batch_size))
        self._targets_per_character = targets_per_character

    def __call__(self, weights: Sequence[np.ndarray | tf.Tensor]) -> dict[str, float]:
        """Evaluates trainable weights; returns the metrics of `metrics.finalize`.

        With `targets_per_character`, `bits_per_character` is added: the log-loss of all targets
        over the characters of the text, which can be compared between vocabularies.
        """
        counts = tf.nest.map_structure(tf.reduce_sum, self._count(weights))
        found = {name: float(value) for name, value in metrics.finalize(counts).items()}
        if self._targets_per_character is not None:
            bits = found["loss"] / math.log(2) * self._targets_per_character
            found["bits_per_character"] = bits
        return found


class CountsOfUsers:
    """Counts of the targets of each of some users, with a graph as that of `Evaluator`."""

    def __init__(
        self,
        model: language_model.LanguageModel,
        special: metrics.SpecialIds,
        sequences: np.ndarray,
    ):
        """Copies the sequences, ids of shape [users, n, T + 1] with padding, to TensorFlow."""
        self._count = _counter(model, special, sequences)

    def __call__(self, weights: Sequence[np.ndarray], names: Sequence[str]) -> np.ndarray:
        """Returns counts of each user, float64, shape [users, names]."""
        counts = self._count(weights)
        return np.stack([counts[name].numpy().astype(np.float64) for name in names], axis=1)


def _counter(
    model: language_model.LanguageModel, special: metrics.SpecialIds, batches: np.ndarray
) -> Callable[[Sequence[np.ndarray | tf.Tensor]], metrics.Counts]:
    """Returns a function from weights to the counts of each batch, tensors of shape [batches]."""
    cores = len(os.sched_getaffinity(0))
    graph = _counts(model, special, min(_MAX_PARALLEL, cores))
    rows, specs = tf.constant(batches, tf.int32), model.weight_specs

    def count(weights):
        pairs = zip(specs, weights, strict=True)
        return graph([tf.convert_to_tensor(weight, spec.dtype) for spec, weight in pairs], rows)

    return count


@language_model.kept
def _counts(
    model: language_model.LanguageModel, special: metrics.SpecialIds, parallel: int
) -> Callable[[Sequence[tf.Tensor], tf.Tensor], metrics.Counts]:
    spec = collections.OrderedDict(
        (name, tf.TensorSpec([], count.dtype)) for name, count in metrics.zero_counts().items()
    )
    of_batches = tf.TensorSpec([None, None, model.sequence_length + 1], tf.int32)

    @tf.function(autograph=False, input_signature=[model.weight_specs, of_batches])
    def counts(weights, batches):
        def count(batch):
            logits, positions = model.compact_logits(weights, batch[:, :-1])
            targets = tf.gather(tf.reshape(batch[:, 1:], [-1]), positions)
            return metrics.count(logits, targets, special)

        return tf.map_fn(count, batches, fn_output_signature=spec, parallel_iterations=parallel)

    return counts


def _batches(sequences: np.ndarray, batch_size: int) -> np.ndarray:
    """Returns the sequences as int32, [batches, batch_size, T + 1], filled up with padding."""
    batch_size = min(batch_size, len(sequences))
    num_batches = -(-len(sequences) // batch_size)
    padded = np.full([num_batches * batch_size, sequences.shape[1]], language_model.PAD, np.int32)
    padded[: len(sequences)] = sequences
    return padded.reshape(num_batches, batch_size, -1)
