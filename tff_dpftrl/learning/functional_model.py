"""Conversion of language models to and from `tff.learning.models.FunctionalModel`."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.models import custom_model, language_model, metrics

_LOGITS = "logits"
_POSITIONS = "positions"


def build(
    model: language_model.LanguageModel,
    special: metrics.SpecialIds,
    seed: int,
    initial_weights: Sequence[np.ndarray] | None = None,
) -> tff.learning.models.FunctionalModel:
    """Builds the model for `tff.learning.algorithms`.

    `predict_on_batch` returns scores at the positions without padding only, and these
    positions (`LanguageModel.compact_logits`). The loss is the mean cross-entropy of
    a batch's targets. In simulation, `LoopImplementation.DATASET_ITERATOR` is much
    faster.

    Args:
      model: Language model.
      special: Ids of special tokens.
      seed: Seed of the initial weights, non-negative.
      initial_weights: Initial weights, a float32 array for each entry of the model's
        `weight_shapes`; drawn with `seed` if None.

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


def to_language_model(
    model: tff.learning.models.FunctionalModel, *, vocabulary_size: int, sequence_length: int
) -> custom_model.CustomModel:
    """Makes a language model of a client-supplied functional model.

    Only its `predict_on_batch` and its trainable weights are used, not its loss and metrics.

    Args:
      model: Functional model that maps ids, int32, [batch, T], to scores (logits), float32,
        [batch, T, V].
      vocabulary_size: Number V of words, special tokens included.
      sequence_length: Length T of a sequence.

    Returns:
      The language model, with the same weights as the initial ones.

    Raises:
      ValueError: If it has weights that are not trained, or its weights or scores
        have other shapes or dtypes.
    """
    trainable, others = model.initial_weights
    if tf.nest.flatten(others):
        raise validation.UsageError(
            f"model has {len(tf.nest.flatten(others))} weights that are not trained; it must have "
            "trainable weights only: leave out layers such as batch normalisation."
        )
    spec = model.input_spec
    spec = spec["x"] if isinstance(spec, Mapping) else spec[0]
    names = tf.nest.flatten(_names(trainable, "weights"))
    arrays = map(np.asarray, tf.nest.flatten(trainable))

    def scores(weights, words, training):
        if isinstance(spec, tf.TensorSpec) and spec.dtype.is_integer:
            words = tf.cast(words, spec.dtype)
        packed = tf.nest.pack_sequence_as(trainable, weights)
        return model.predict_on_batch((packed, others), words, training=training)

    return custom_model.build(
        scores,
        collections.OrderedDict(zip(names, arrays, strict=True)),
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        # What TFF makes of Keras models can be traced nowhere else.
        trace_in=lambda: tf.Graph().as_default(),
    )


def _names(structure: Any, name: str) -> Any:
    """Returns the same structure with a name in the place of each leaf."""
    if isinstance(structure, Mapping):
        return {key: _names(value, f"{name}/{key}") for key, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return [_names(value, f"{name}/{index}") for index, value in enumerate(structure)]
    return name
