"""A language model as a `tff.learning.models.FunctionalModel`."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.models import language_model, metrics

_LOGITS = "logits"
_POSITIONS = "positions"


def build(
    model: language_model.LanguageModel,
    special: metrics.SpecialIds,
    seed: int,
    initial_weights: Sequence[np.ndarray] | None = None,
) -> tff.learning.models.FunctionalModel:
    """Builds the model for `tff.learning.algorithms`.

    `predict_on_batch` returns scores at the positions without padding only, and
    where they are (`LanguageModel.compact_logits`). The loss is the mean cross-entropy of
    a batch's targets. In simulation, `LoopImplementation.DATASET_ITERATOR` is much
    the faster for it.

    Args:
      model: The model.
      special: Ids of special tokens.
      seed: Seed of the initial weights, non-negative.
      initial_weights: One float32 array for each entry of the model's `weight_shapes`;
        drawn with `seed` if None.

    Returns:
      The model; batches are (x, y), int32 of shape [None, sequence_length]. Its
      metrics are those of `metrics.finalize` and `num_sequences`.
    """
    if initial_weights is None:
        initial_weights = model.initial_weights(seed)

    @tf.function(autograph=False)
    def predict_on_batch(model_weights, x, training):
        del training
        logits, positions = model.compact_logits(model_weights[0], x)
        return collections.OrderedDict([(_LOGITS, logits), (_POSITIONS, positions)])

    @tf.autograph.experimental.do_not_convert
    def loss(output, label, sample_weight=None):
        del sample_weight
        targets = tf.gather(tf.reshape(label, [-1]), output[_POSITIONS])
        return metrics.mean_cross_entropy(output[_LOGITS], targets, special.pad)

    @tf.function(autograph=False)
    def initialize_metrics():
        return collections.OrderedDict(
            counts=metrics.zero_counts(), num_sequences=tf.zeros([], tf.int64)
        )

    @tf.function(autograph=False)
    def update_metrics(state, labels, batch_output, sample_weight=None):
        del sample_weight
        output = batch_output.predictions
        targets = tf.gather(tf.reshape(labels, [-1]), output[_POSITIONS])
        counts = metrics.count(output[_LOGITS], targets, special)
        return collections.OrderedDict(
            counts=metrics.add(state["counts"], counts),
            num_sequences=state["num_sequences"] + tf.shape(labels, out_type=tf.int64)[0],
        )

    @tf.function(autograph=False)
    def finalize_metrics(state):
        finalized = metrics.finalize(state["counts"])
        finalized["num_sequences"] = state["num_sequences"]
        return finalized

    batch_spec = tf.TensorSpec([None, model.sequence_length], tf.int32)
    return tff.learning.models.FunctionalModel(
        initial_weights=(tuple(initial_weights), ()),
        predict_on_batch_fn=predict_on_batch,
        loss_fn=loss,
        metrics_fns=(initialize_metrics, update_metrics, finalize_metrics),
        input_spec=(batch_spec, batch_spec),
    )
