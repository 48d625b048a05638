"""Predictions of the next word of a text, from a model's scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tff_dpftrl.models import language_model, metrics, text_cache


class NextWords(NamedTuple):
    """Predictions of the next word in each of n texts.

    Probabilities are those of the model under the condition that a word, known or not, or the
    end of the text comes next: padding and the beginning of a text never do.

    Attributes:
      ids: Ids of the k likeliest words of the vocabulary, best first, int32, shape [n, k].
      probabilities: Probabilities of `ids`, float32, shape [n, k].
      unknown_word: Probability of a word out of the vocabulary, float32, shape [n]; 0 if there is
        no such word.
      end_of_text: Probability of the end of the text, float32, shape [n].
    """

    ids: tf.Tensor
    probabilities: tf.Tensor
    unknown_word: tf.Tensor
    end_of_text: tf.Tensor


def next_words(
    model: language_model.LanguageModel,
    weights: Sequence[np.ndarray | tf.Tensor],
    texts: tf.RaggedTensor,
    special: metrics.SpecialIds,
    top: int | tf.Tensor,
    history: tf.Tensor | None = None,
) -> NextWords:
    """Returns the likeliest next words of each text; of a long text, the model reads the end.

    `texts` are ids, int32, ragged shape [n, None]; an empty text predicts the first word. `history`
    is earlier text of the one author of all these texts, as of `text_cache.rows_of`.
    """
    length = model.sequence_length
    begin = tf.fill([texts.nrows(), 1], tf.constant(special.bos, texts.dtype))
    contexts = tf.concat([begin, texts], axis=1)[:, -length:]
    words = contexts.to_tensor(default_value=special.pad, shape=[None, length])
    scores = next_scores(model, weights, words)
    return of_scores(scores, special, top, history=history, words=words)


def next_scores(
    model: language_model.LanguageModel,
    weights: Sequence[np.ndarray | tf.Tensor],
    words: tf.Tensor,
) -> tf.Tensor:
    """Returns unnormalised log-probabilities of what comes after each sequence, float32, [n, V].

    `words` are ids, int32, shape [n, T]: a sequence and then padding. A sequence without words
    counts as a single word of padding.
    """
    is_word = tf.cast(tf.not_equal(words, language_model.PAD), tf.int32)
    last = tf.maximum(tf.reduce_sum(is_word, axis=1) - 1, 0)
    return tf.gather(model.logits(weights, words), last, axis=1, batch_dims=1)


def of_scores(
    scores: tf.Tensor,
    special: metrics.SpecialIds,
    top: int | tf.Tensor,
    *,
    history: tf.Tensor | None = None,
    words: tf.Tensor | None = None,
) -> NextWords:
    """Returns the likeliest words by their scores, float32, shape [n, V].

    A `history` of the author's earlier text needs `words`, the sequences that the scores come
    after.
    """
    never = np.isin(np.arange(scores.shape[1]), special.never_next)
    probabilities = tf.nn.softmax(tf.where(never, np.float32(-np.inf), scores))
    if history is not None:
        context = text_cache.last_context(words)
        probabilities = text_cache.mix(probabilities, context, history, special)
    end = probabilities[:, special.eos]
    unknown = tf.zeros_like(end) if special.oov is None else probabilities[:, special.oov]
    return NextWords(*likeliest(probabilities, special, top), unknown, end)


def sample(
    scores: np.ndarray,
    special: metrics.SpecialIds,
    rng: np.random.Generator,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> np.ndarray:
    """Samples what comes next: a word of the vocabulary, or the end of the text.

    The ids are int64, shape [n]. `scores` has shape [n, V], and is divided by `temperature`; 0
    takes the likeliest. `top_p` is the least probability of the smallest set of likeliest ids that
    is sampled from (Holtzman et al. 2020). The samples are not private.
    """
    scores = np.array(scores, np.float64)
    unknown = [] if special.oov is None else [special.oov]
    scores[:, [*special.never_next, *unknown]] = -np.inf
    if temperature == 0.0:
        return scores.argmax(axis=1)
    scores = (scores - scores.max(axis=1, keepdims=True)) / temperature
    order = np.argsort(-scores, axis=1, kind="stable")
    shares = np.exp(np.take_along_axis(scores, order, axis=1))
    shares /= shares.sum(axis=1, keepdims=True)
    before = np.cumsum(shares, axis=1) - shares
    shares[before >= top_p] = 0.0
    sums = np.cumsum(shares, axis=1)
    drawn = (sums <= rng.random(len(scores))[:, None] * sums[:, -1:]).sum(axis=1)
    return np.take_along_axis(order, drawn[:, None], axis=1)[:, 0]


def likeliest(
    scores: tf.Tensor, special: metrics.SpecialIds, top: int | tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns ids and scores of the words of the vocabulary with the best scores, shape [n, k].

    The best come first, and the smaller id first of equal scores. `scores` has shape [n, V].
    """
    words = np.setdiff1d(np.arange(scores.shape[1]), special.all)
    first, end = words[0], words[-1] + 1
    others = [i - first for i in special.all if first <= i < end]
    scores = scores[:, first:end]
    if others:  # Special ids of sub-words are among the others.
        scores = tf.where(np.isin(np.arange(end - first), others), scores.dtype.min, scores)
    best = tf.math.top_k(scores, tf.minimum(top, len(words)))
    return best.indices + first, best.values
