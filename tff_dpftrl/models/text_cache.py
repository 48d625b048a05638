"""A cache of a user's own earlier text, mixed into the probabilities of a predictor.

It counts n-grams where the text is, on the user's device, which the text does not leave. What is
mixed is a released model and the user's own words: by post-processing (Dwork and Roth 2014,
proposition 2.1), no guarantee about the users who trained the model changes. Caches in language
models are those of Kuhn and De Mori (1990), and keyboards have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tff_dpftrl.models import metrics

ORDER = 4
"""Largest order of the n-grams of a cache."""

WEIGHTS = (0.11, 0.26, 0.42, 0.59)
"""Weight of the cache where the longest n-gram that it has for a context is of order 1, 2, 3, 4.

They were fitted by `experiments/cache_weights.py` to public text: 17,164 words of docstrings of
Python's standard library, a module being a user, for a model that was pretrained on other modules.
No protected text was looked at.
"""


def contexts(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the words before each target of some sequences, and the targets.

    `rows` are ids, int32, shape [n, T + 1], padded at the end. The contexts are the last word, the
    one before it and so on, int32, shape [n · T, `ORDER` − 1]; the targets have shape [n · T].
    """
    padded = tf.pad(rows, [[0, 0], [ORDER - 2, 0]])
    earlier = [padded[:, ORDER - 2 - back : -1 - back] for back in range(ORDER - 1)]
    return tf.reshape(tf.stack(earlier, axis=-1), [-1, ORDER - 1]), tf.reshape(rows[:, 1:], [-1])


def last_context(rows: tf.Tensor) -> tf.Tensor:
    """Returns the context of what comes after each sequence, int32, shape [n, `ORDER` − 1].

    `rows` are ids, int32, shape [n, T], padded at the end.
    """
    length = tf.math.count_nonzero(rows, axis=1, dtype=tf.int32)
    places = length[:, None] + (ORDER - 2) - tf.range(ORDER - 1)[None, :]
    padded = tf.pad(rows, [[0, 0], [ORDER - 1, 0]])
    return tf.gather(padded, places, axis=1, batch_dims=1)


def rows_of(texts: tf.RaggedTensor, special: metrics.SpecialIds) -> tf.Tensor:
    """Returns texts, int32 ids of ragged shape [n, None], as one row of a history, shape [1, N].

    It has each text that has words, with its beginning and its end, and as much padding behind it
    as no context reaches over. N grows with the number of words only.
    """
    # A mask would be as large as the number of texts times the length of the longest.
    texts = tf.gather(texts, tf.where(texts.row_lengths() > 0)[:, 0])
    begin, end, pad = (
        tf.fill([texts.nrows(), 1], tf.constant(i, texts.dtype))
        for i in (special.bos, special.eos, special.pad)
    )
    return tf.concat([begin, texts, end, *[pad] * (ORDER - 2)], axis=1).flat_values[None, :]


def mix(
    probabilities: tf.Tensor,
    after: tf.Tensor,
    history: tf.Tensor,
    special: metrics.SpecialIds,
    *,
    weights: Sequence[float] = WEIGHTS,
) -> tf.Tensor:
    """Mixes n-grams of one user's own earlier text into the probabilities of a predictor.

    The shares of the words that came after the longest part of a context are interpolated with
    those of shorter parts, by the rule of Witten and Bell (1991, method C) as in
    `ngrams.NgramModel.probabilities`. `probabilities` is float32, shape [m, V], `after` has the
    contexts, and `history` ids of the user's earlier text, int32, shape [h, T + 1]. `weights` has
    the weight of the cache by the order of the longest n-gram found.
    """
    cached, longest = lookup(probabilities.shape[1], after, history, special)
    weight = tf.gather(tf.constant([0.0, *weights]), longest)[:, None]
    return (1.0 - weight) * probabilities + weight * cached


def lookup(
    size: int,
    after: tf.Tensor,
    history: tf.Tensor,
    special: metrics.SpecialIds,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the probabilities of the cache alone, float32, [m, V], and the longest orders, [m].

    Both are 0 where the history is empty. `after` and `history` are as for `mix`.
    """
    known, seen = contexts(history)
    is_next = special.is_target(seen) & tf.not_equal(known[:, 0], special.pad)
    matches = is_next[None, :] & tf.fill([tf.shape(after)[0], 1], True)
    cached = tf.zeros([size, tf.shape(after)[0]])
    longest = tf.zeros([tf.shape(after)[0]], tf.int32)
    for order in range(1, ORDER + 1):
        if order > 1:
            matches &= tf.equal(after[:, None, order - 2], known[None, :, order - 2])
        found = tf.transpose(tf.cast(matches, tf.float32))
        counts = tf.math.unsorted_segment_sum(found, seen, size)
        # Nothing is below unigrams.
        lower = tf.reduce_sum(tf.cast(counts > 0.0, tf.float32), axis=0) * float(order > 1)
        total = tf.reduce_sum(counts, axis=0)
        is_found = total > 0.0
        shares = (counts + lower * cached) / tf.maximum(total + lower, 1.0)
        cached = tf.where(is_found, shares, cached)
        longest += tf.cast(is_found, tf.int32)
    return tf.transpose(cached), longest


def mixture(probabilities: np.ndarray, cached: np.ndarray, longest: np.ndarray) -> np.ndarray:
    """Mixes what `EarlierText.lookup` found into probabilities, float32, [m, V], as `mix` does."""
    weight = np.array([0.0, *WEIGHTS], np.float32)[longest][:, None]
    return (1.0 - weight) * probabilities + weight * cached


class EarlierText:
    """A view of what users wrote before each of some sequences, for judging a cache of it."""

    def __init__(
        self,
        texts: Mapping[int, np.ndarray],
        users: np.ndarray,
        places: np.ndarray,
        special: metrics.SpecialIds,
    ):
        """Takes all sequences of each user, int32, [h, T + 1], by the number of the user.

        `users` and `places` have the user of each of the n sequences that are judged, and its index
        among those of the user.
        """
        self._texts, self._users, self._places, self._special = texts, users, places, special
        self._counted: dict[int, tuple[np.ndarray, ...]] = {}

    def mix(self, rows: np.ndarray, positions: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        """Mixes each user's earlier sequences, and no other text, into probabilities, [m, V].

        `rows` are the sequences that the words are in, and `positions` their places in these.
        """
        return mixture(probabilities, *self.lookup(rows, positions, probabilities.shape[1]))

    def lookup(
        self, rows: np.ndarray, positions: np.ndarray, size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the same as the function `lookup`, with NumPy: faster for many histories."""
        cached, longest = np.zeros([len(rows), size], np.float32), np.zeros(len(rows), np.int64)
        for row in np.unique(rows):
            after, places, known, seen = self._of(self._users[row])
            start = self._places[row] * (self._texts[self._users[row]].shape[1] - 1)
            num_earlier = np.searchsorted(places, start)  # The sequence begins at `start`.
            if not num_earlier:
                continue
            known, seen = known[:num_earlier], seen[:num_earlier]
            words = np.flatnonzero(rows == row)
            last = after[start + positions[words]]
            shares = (np.bincount(seen, minlength=size) / num_earlier).astype(np.float32)
            own, orders = np.tile(shares, [len(words), 1]), np.ones(len(words), np.int64)
            word, place = np.nonzero(last[:, None, 0] == known[None, :, 0])
            for order in range(2, ORDER + 1):
                if order > 2:
                    is_same = last[word, order - 2] == known[place, order - 2]
                    word, place = word[is_same], place[is_same]
                pairs, counts = np.unique(word * size + seen[place], return_counts=True)
                of_pair = pairs // size
                lower = np.bincount(of_pair, minlength=len(words))
                total = np.bincount(of_pair, counts, len(words)) + lower
                found = np.flatnonzero(lower)
                own[found] *= (lower[found] / total[found]).astype(np.float32)[:, None]
                own.reshape(-1)[pairs] += (counts / total[of_pair]).astype(np.float32)
                orders[found] = order
            cached[words], longest[words] = own, orders
        return cached, longest

    def _of(self, user: int) -> tuple[np.ndarray, ...]:
        """Returns a user's contexts; and places, contexts and ids of what can come next."""
        if user not in self._counted:
            after, seen = (part.numpy() for part in contexts(tf.constant(self._texts[user])))
            places = np.flatnonzero(~np.isin(seen, self._special.never_next))
            self._counted[user] = after, places, after[places], seen[places]
        return self._counted[user]
