"""Language models as functional models, and back."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.models import custom_model, language_model, metrics, text_cache

_LOGITS = "logits"
_POSITIONS = "positions"
_EARLIER_TEXT = "earlier_text"
_CACHED = 10_000  # Latest places before a sequence that its cache counts, which bounds memory.


def build(
    model: language_model.LanguageModel,
    special: metrics.SpecialIds,
    seed: int,
    initial_weights: Sequence[np.ndarray] | None = None,
    *,
    with_cache: bool = False,
) -> model_lib.Model:
    """Builds the functional model of a language model.

    `predict_on_batch` returns scores at the positions without padding only, and these
    positions (`LanguageModel.compact_logits`). The loss is the mean cross-entropy of
    a batch's targets.

    Weights are drawn with `seed` where no initial ones are given. Batches are (x, y), int32 of
    shape [None, sequence_length]. Metrics are those of `metrics.finalize` and `num_sequences`.

    With `with_cache`, metrics also say what `text_cache` gives, with what the client wrote before
    each sequence: at most the latest 10,000 words, padding included. Then y is an `OrderedDict`:
    `history`, all sequences of the client, the earliest first, int32, [n, sequence_length + 1];
    `places`, indices in it of those in the batch, int32, [None]. Further metrics are
    `top1_in_vocab_with_cache`, where a client's first sequence has an empty cache;
    `earlier_text_num_in_vocab`, the number of words of the vocabulary in all other sequences; and
    the accuracies on these, `earlier_text_top1_in_vocab` and
    `earlier_text_top1_in_vocab_with_cache`.
    """
    if initial_weights is None:
        initial_weights = model.initial_weights(seed)

    @tf.function(autograph=False)
    def predict_on_batch(model_weights, x, training=True):
        del training
        logits, positions = model.compact_logits(model_weights[0], x)
        return collections.OrderedDict([(_LOGITS, logits), (_POSITIONS, positions)])

    def ids_of(labels):
        return tf.gather(labels["history"], labels["places"])[:, 1:] if with_cache else labels

    @tf.autograph.experimental.do_not_convert
    def loss(output, label, sample_weight=None):
        del sample_weight
        targets = tf.gather(tf.reshape(ids_of(label), [-1]), output[_POSITIONS])
        return metrics.mean_cross_entropy(output[_LOGITS], targets, special.pad)

    @tf.function(autograph=False)
    def initialize_metrics():
        state = collections.OrderedDict(
            counts=metrics.zero_counts(), num_sequences=tf.zeros([], tf.int64)
        )
        if with_cache:
            state[_EARLIER_TEXT] = zero_cached()
        return state

    @tf.function(autograph=False)
    def update_metrics(state, labels, batch_output, sample_weight=None):
        del sample_weight
        output = batch_output.predictions
        ids = ids_of(labels)
        targets = tf.gather(tf.reshape(ids, [-1]), output[_POSITIONS])
        counts = metrics.count(output[_LOGITS], targets, special)
        updated = collections.OrderedDict(
            counts=metrics.add(state["counts"], counts),
            num_sequences=state["num_sequences"] + tf.shape(ids, out_type=tf.int64)[0],
        )
        if with_cache:
            cached = _count_cached(output, labels["history"], labels["places"], special)
            updated[_EARLIER_TEXT] = metrics.add(state[_EARLIER_TEXT], cached)
        return updated

    @tf.function(autograph=False)
    def finalize_metrics(state):
        finalized = metrics.finalize(state["counts"])
        finalized["num_sequences"] = state["num_sequences"]
        if with_cache:
            finalized.update(_with_cache(state["counts"], state[_EARLIER_TEXT]))
        return finalized

    batch_spec = tf.TensorSpec([None, model.sequence_length], tf.int32)
    labels_spec: Any = batch_spec
    if with_cache:
        labels_spec = collections.OrderedDict(
            history=tf.TensorSpec([None, model.sequence_length + 1], tf.int32),
            places=tf.TensorSpec([None], tf.int32),
        )
    return model_lib.Model(
        initial_weights=(tuple(initial_weights), ()),
        predict_on_batch=predict_on_batch,
        loss=loss,
        input_spec=(batch_spec, labels_spec),
        initialize_metrics_state=initialize_metrics,
        update_metrics_state=update_metrics,
        finalize_metrics=finalize_metrics,
    )


def zero_cached() -> metrics.Counts:
    """Returns the counts of no words that have earlier text, int64."""
    names = ("num_in_vocab", "num_top1", "num_top1_with_cache")
    return collections.OrderedDict((name, tf.zeros([], tf.int64)) for name in names)


def _count_cached(
    output: Mapping[str, tf.Tensor],
    history: tf.Tensor,
    places: tf.Tensor,
    special: metrics.SpecialIds,
) -> metrics.Counts:
    """Counts the words that have earlier text, and those predicted without and with a cache of it.

    It takes one sequence after another, as each has another history.
    """
    length = history.shape[1] - 1
    most_rows = max(_CACHED // length, 1)
    places_in_batch = tf.cast(output[_POSITIONS], tf.int32)

    def count(total, row):
        place = places[row]
        chosen = tf.where(tf.equal(places_in_batch // length, row))[:, 0]
        logits = tf.gather(output[_LOGITS], chosen)
        positions = tf.gather(places_in_batch, chosen) % length
        after, targets = (
            tf.gather(part, positions) for part in text_cache.contexts(history[place : place + 1])
        )
        earlier = history[tf.maximum(place - most_rows, 0) : place]
        mixed = text_cache.mix(tf.nn.softmax(logits), after, earlier, special)
        is_best = tf.equal(metrics.ranks(mixed, targets, special), 1.0)
        alone = metrics.count(logits, targets, special)
        counts = [
            alone["num_in_vocab"],
            alone["num_top1"],
            tf.math.count_nonzero(special.is_known(targets) & is_best),
        ]
        has_text = tf.cast(place > 0, tf.int64)
        found = (has_text * number for number in counts)
        return metrics.add(total, collections.OrderedDict(zip(total, found, strict=True)))

    rows = tf.range(tf.size(places))
    return tf.foldl(count, rows, zero_cached(), parallel_iterations=1)


def _with_cache(
    counts: Mapping[str, tf.Tensor], earlier: Mapping[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """Computes the metrics with a cache from sums over clients."""
    right, with_cache = earlier["num_top1"], earlier["num_top1_with_cache"]
    ratios = {
        "top1_in_vocab_with_cache": (
            counts["num_top1"] - right + with_cache,
            counts["num_in_vocab"],
        ),
        f"{_EARLIER_TEXT}_top1_in_vocab": (right, earlier["num_in_vocab"]),
        f"{_EARLIER_TEXT}_top1_in_vocab_with_cache": (with_cache, earlier["num_in_vocab"]),
    }
    return {
        f"{_EARLIER_TEXT}_num_in_vocab": earlier["num_in_vocab"],
        **{name: metrics.ratio(*pair) for name, pair in ratios.items()},
    }


def to_language_model(
    model: model_lib.Model, *, vocabulary_size: int, sequence_length: int
) -> custom_model.CustomModel:
    """Makes a language model of a client-supplied functional model.

    Only its `predict_on_batch` and its trainable weights are used, not its loss and metrics.

    It maps ids, int32, [batch, T], to scores (logits), float32, [batch, T, V]. All its weights are
    trained.
    """
    trainable, others = model.initial_weights
    if tf.nest.flatten(others):
        raise validation.UsageError(
            f"model has {len(tf.nest.flatten(others))} weights that are not trained; it must have "
            "trainable weights only: leave out layers such as batch normalisation."
        )
    spec, _ = model_lib.x_and_y(model.input_spec)
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
