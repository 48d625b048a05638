"""Predictions of the next word of a text, from a model's scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tff_dpftrl.models import language_model, metrics


class NextWords(NamedTuple):
    """Predictions of the next word in each of n texts.

    Probabilities are those of the model under the condition that a word, known or not, or the
    end of the text comes next: padding and the beginning of a text never do.

    Attributes:
      ids: Ids of the k likeliest words of the vocabulary, best first, int32, shape [n, k].
      probabilities: Probabilities of `ids`, float32, shape [n, k].
      unknown_word: Probability of a word out of the vocabulary, float32, shape [n].
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
) -> NextWords:
    """Returns the likeliest next words of each text.

    Args:
      model: Model. It reads the end of a text that is longer than its sequence_length.
      weights: One array for each entry of its `weight_shapes`.
      texts: Ids of the words of each text, int32, ragged shape [n, None]; none of them
        special but `special.oov`. An empty text predicts the first word.
      special: Special ids.
      top: Number of words k; all of the vocabulary's if it has fewer.

    Returns:
      The words and their probabilities.
    """
    length = model.sequence_length
    begin = tf.fill([texts.nrows(), 1], tf.constant(special.bos, texts.dtype))
    contexts = tf.concat([begin, texts], axis=1)[:, -length:]
    words = contexts.to_tensor(default_value=special.pad, shape=[None, length])
    scores = tf.gather(
        model.logits(weights, words), contexts.row_lengths() - 1, axis=1, batch_dims=1
    )
    never = np.isin(np.arange(model.vocabulary_size), [special.pad, special.bos])
    probabilities = tf.nn.softmax(tf.where(never, np.float32(-np.inf), scores))
    return NextWords(
        *likeliest(probabilities, special, top),
        probabilities[:, special.oov],
        probabilities[:, special.eos],
    )


def likeliest(
    scores: tf.Tensor, special: metrics.SpecialIds, top: int | tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the words of the vocabulary with the best scores.

    Args:
      scores: Scores of all ids, float32, shape [n, V].
      special: Special ids, which are left out.
      top: Number of words k; all of the vocabulary's if it has fewer.

    Returns:
      Ids, int32, and their scores, both of shape [n, k], best first, and the smaller id
      first of equal scores.
    """
    # Words have the ids between padding and out-of-vocabulary.
    num_words = special.oov - special.pad - 1
    best = tf.math.top_k(scores[:, special.pad + 1 : special.oov], tf.minimum(top, num_words))
    return best.indices + special.pad + 1, best.values
