"""Pipelines from texts on a device to the sequences that a language model trains on.

The plan's graph holds the words of the vocabulary as hashes. So a device stores plain texts and
needs no file beside its plan. Sequences are those of `data.sequences.SequenceCorpus`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.data import vocabulary as vocabulary_lib
from tff_dpftrl.runtime.plans import example_pipeline

_BUCKETS = 2**63 - 1
"""Buckets of `tf.strings.to_hash_bucket_fast`: two of 10⁵ words collide with probability 10⁻⁹."""

_ROWS = "ids"
_HISTORY, _PLACES = "history", "places"


def text_pipeline(
    words: vocabulary_lib.Vocabulary,
    sequence_length: int,
    *,
    feature: str = "tokens",
    is_tokenized: bool = False,
    with_history: bool = False,
    **options: Any,
) -> example_pipeline.ExamplePipeline:
    """Builds a pipeline for examples that hold texts.

    It makes batches (x, y), int32, [batch, T]; y is x shifted by one word. Texts are UTF-8,
    normalised to NFC, in the bytes feature `feature`; one longer than T continues in the next
    sequence. With `is_tokenized` they are words already, separated by white space. `options` are
    `batch_size`, `epochs`, `shuffle` and `max_rows` (sequences) of `ExamplePipeline`.

    With `with_history`, labels also say what was written before each sequence, for
    `functional_model.build` with its `with_cache`. Examples must come newest first then, as devices
    give them. y is an `OrderedDict`: `history`, all sequences of the device, the earliest first,
    int32, [n, T + 1]; `places`, the indices in it of those in the batch, int32, [batch].

    It raises ValueError if two words have the same hash, or the words are sub-words that no plan
    can make.
    """
    ids_of = ids_of_texts(words, is_tokenized=is_tokenized)

    def to_rows(features: Mapping[str, tf.RaggedTensor]) -> dict[str, tf.Tensor]:
        texts = features[feature]
        ids = ids_of(texts.values)
        rows = _sequences(ids, sequence_length, words)
        if not with_history:
            return {_ROWS: rows}
        counts = texts.with_values(_num_sequences(ids, sequence_length))
        order = _in_time(tf.reduce_sum(counts, axis=1))
        places = tf.math.invert_permutation(order)
        return {_ROWS: rows, _PLACES: places, _HISTORY: tf.gather(rows, order)}

    def to_batch(rows: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, Any]:
        ids = tf.ensure_shape(rows[_ROWS], [None, sequence_length + 1])
        if not with_history:
            return ids[:, :-1], ids[:, 1:]
        history = tf.ensure_shape(rows[_HISTORY], [None, sequence_length + 1])
        labels = collections.OrderedDict([(_HISTORY, history), (_PLACES, rows[_PLACES])])
        return ids[:, :-1], labels

    features = {feature: example_pipeline.Values(tf.string)}
    return example_pipeline.ExamplePipeline(
        features, to_batch, to_rows=to_rows, whole=[_HISTORY], **options
    )


def ids_of_texts(
    words: vocabulary_lib.Vocabulary, *, is_tokenized: bool
) -> Callable[[tf.Tensor], tf.RaggedTensor]:
    """Makes the function that splits texts into words, inside of a traced function.

    It maps texts in NFC, string, [n], to the ids of their words, int32, [n, None]; `words.oov` for
    words that are not in the vocabulary.
    """
    rule = words.rule(is_tokenized)
    if not rule.is_in_graphs:
        raise validation.UsageError(
            "vocabulary must be of tokenizer 'words' or 'wordpiece' for devices, whose plans have "
            f"no operations for these sub-words ({words.source}): pretrain with one of the two."
        )
    hashes, ids = _hashed(words)
    unknown = words.oov
    assert unknown is not None  # Whatever graphs split has one.

    def ids_of(texts: tf.Tensor) -> tf.RaggedTensor:
        split = rule.split(texts)
        return split.with_values(_lookup(split.values, hashes, ids, unknown))

    return ids_of


def _hashed(words: vocabulary_lib.Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hashes of the words, int64, ascending, and the id of each, int32."""
    # A word can end in half of a surrogate pair that JSON cut; no UTF-8 text contains it.
    encoded = [word.encode("utf-8", "surrogatepass") for word in words.words]
    with tf.device("/CPU:0"):
        hashes = tf.strings.to_hash_bucket_fast(tf.constant(encoded), _BUCKETS).numpy()
    if len(np.unique(hashes)) < len(hashes):
        raise validation.UsageError(
            "words of the vocabulary must have different hashes: leave out the last."
        )
    order = np.argsort(hashes)
    return hashes[order], (order + 1).astype(np.int32)


def _lookup(flat: tf.Tensor, hashes: np.ndarray, ids: np.ndarray, oov: int) -> tf.Tensor:
    """Looks up ids of words, int32, [n]; a table would be state, which plans must not have."""
    wanted = tf.strings.to_hash_bucket_fast(flat, _BUCKETS)
    place = tf.minimum(tf.searchsorted(hashes, wanted), len(hashes) - 1)
    return tf.where(tf.equal(tf.gather(hashes, place), wanted), tf.gather(ids, place), oov)


def _num_sequences(ids: tf.RaggedTensor, length: int) -> tf.Tensor:
    """Returns the number of sequences of each text, int64, [n]."""
    return -(-ids.row_lengths() // length)


def _in_time(counts: tf.Tensor) -> tf.Tensor:
    """Returns the indices of sequences from the earliest to the latest, int32, [m].

    `counts` are those of the sequences of each example, int64, [n], the newest example first.
    """
    indices = tf.range(tf.reduce_sum(tf.cast(counts, tf.int32)))
    by_example = tf.RaggedTensor.from_row_lengths(indices, counts, validate=False)
    return tf.gather(by_example, tf.range(tf.size(counts))[::-1]).values


def _sequences(ids: tf.RaggedTensor, length: int, words: vocabulary_lib.Vocabulary) -> tf.Tensor:
    """Cuts all texts into sequences, int32, [m, length + 1], in order.

    A text without a word has no sequence. A sequence ends with the id that the next one of the
    same text begins with.
    """
    counts = _num_sequences(ids, length)
    ends = tf.ones([tf.size(counts), 1], tf.int32)
    whole = tf.concat([ends * words.bos, ids, ends * words.eos], axis=1)
    text = tf.repeat(tf.range(tf.size(counts)), counts)
    behind = tf.gather(whole.row_limits(), text)[:, None]
    start = tf.gather(whole.row_starts(), text) + length * tf.ragged.range(counts).values
    place = start[:, None] + tf.range(length + 1, dtype=tf.int64)[None, :]
    filled = tf.gather(whole.values, tf.minimum(place, behind - 1))
    return tf.where(place < behind, filled, vocabulary_lib.PAD)
