"""WordPiece in graphs, with operations of TensorFlow's core and without state.

`tensorflow_text` has an operation for it. But every program that loads the graph would need that
package, and a device's plan may not use the operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

_CONTINUES = "##"
_BUCKETS = 2**63 - 1
_CHARACTER = "UTF8_CHAR"


def split(
    words: tf.RaggedTensor, tokens: Sequence[str], unknown: str, longest_word: int
) -> tf.RaggedTensor:
    """Splits words into the longest tokens that they begin with, one after the other.

    Words and tokens of each text are strings, ragged shape [n, None].
    """
    flat, hashes = words.values, _hashes(tokens)
    longest = max(len(token) for token in tokens)
    length = tf.strings.length(flat, unit=_CHARACTER)

    def piece(start: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        prefix = tf.where(start > 0, _CONTINUES, "")
        place = tf.minimum(start, length - 1)
        return tf.strings.join([prefix, tf.strings.substr(flat, place, size, unit=_CHARACTER)])

    def advance(start, is_unknown, pieces):
        best = tf.zeros_like(start)
        for size in range(1, longest + 1):
            is_token = _is_known(piece(start, tf.fill(tf.shape(start), size)), hashes)
            best = tf.where(is_token & (start + size <= length), size, best)
        is_active = start < length
        is_lost = is_active & tf.equal(best, 0)
        found = tf.where(is_active, piece(start, best), "")
        start = tf.where(is_lost, length, start + best)
        return start, is_unknown | is_lost, tf.concat([pieces, found[:, None]], axis=1)

    is_long = length > longest_word
    first = (tf.where(is_long, length, 0), is_long, tf.zeros([tf.size(flat), 0], tf.string))
    _, is_unknown, pieces = tf.while_loop(
        lambda start, *_: tf.reduce_any(start < length),
        advance,
        first,
        shape_invariants=tuple(map(tf.TensorShape, ([None], [None], [None, None]))),
    )
    pieces = tf.where(is_unknown[:, None], "", pieces)
    pieces = tf.concat([tf.where(is_unknown, unknown, "")[:, None], pieces], axis=1)
    return _by_text(words, tf.ragged.boolean_mask(pieces, tf.not_equal(pieces, "")))


def cut(words: tf.RaggedTensor, longest_word: int) -> tf.RaggedTensor:
    """Cuts words into pieces of at most `longest_word` characters; ragged shape [n, None]."""
    spaced = tf.strings.regex_replace(words.values, f"(.{{{longest_word}}})", "\\1\n")
    return _by_text(words, tf.strings.split(spaced))


def _by_text(words: tf.RaggedTensor, by_word: tf.RaggedTensor) -> tf.RaggedTensor:
    splits = tf.gather(by_word.row_splits, words.row_splits)
    return tf.RaggedTensor.from_row_splits(by_word.values, splits, validate=False)


def _hashes(tokens: Sequence[str]) -> np.ndarray:
    """Returns the tokens' hashes, int64, ascending."""
    with tf.init_scope(), tf.device("/CPU:0"):
        return np.sort(tf.strings.to_hash_bucket_fast(tf.constant(tokens), _BUCKETS).numpy())


def _is_known(words: tf.Tensor, hashes: np.ndarray) -> tf.Tensor:
    wanted = tf.strings.to_hash_bucket_fast(words, _BUCKETS)
    place = tf.minimum(tf.searchsorted(hashes, wanted), len(hashes) - 1)
    return tf.equal(tf.gather(hashes, place), wanted)
