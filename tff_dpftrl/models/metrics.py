"""Metrics of next-word prediction as sums of counts, for TFF and without it.

A target is a position to predict. Padding and the beginning of a sequence are no targets. The
end of a sequence and out-of-vocabulary words are learned, so they are in `loss`; but accuracies
and perplexity are about words (McMahan et al. 2018, appendix B; TFF's Stack Overflow baseline).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping

import tensorflow as tf

Counts = collections.OrderedDict
"""Scalar sums over targets, by name. Counts of two batches may be added."""

_TOP = (1, 3, 5)


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Ids that are not words of the vocabulary.

    Attributes:
      oov: Id of words out of the vocabulary; None if there can be none, as with sub-words.
      bos: Id of the beginning of a sequence; perhaps that of its end, too.
      eos: Id of the end of a sequence.
      pad: Id of padding.
    """

    oov: int | None
    bos: int
    eos: int
    pad: int = 0

    @property
    def all(self) -> list[int]:
        """The ids, each once."""
        ids = (self.pad, self.oov, self.bos, self.eos)
        return list(dict.fromkeys(i for i in ids if i is not None))

    @property
    def never_next(self) -> list[int]:
        """Ids that never come next in a text, and so are no targets: padding, and the beginning."""
        return [self.pad] if self.bos == self.eos else [self.pad, self.bos]

    def is_target(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns which ids can come next: words, known or not, and the end of a sequence."""
        return _differs(ids, self.never_next)

    def is_word(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns which ids are of words, those out of the vocabulary included."""
        return _differs(ids, [self.pad, self.bos, self.eos])

    def is_known(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns which ids are of words of the vocabulary."""
        return _differs(ids, self.all)


def _differs(ids: tf.Tensor, others: list[int]) -> tf.Tensor:
    # In TFF's graphs `!=` would compare objects, not values.
    return functools.reduce(tf.logical_and, (tf.not_equal(ids, other) for other in others))


def zero_counts() -> Counts:
    """Returns the counts of no targets: float32 sums of losses, int64 counts."""
    return collections.OrderedDict(
        loss_sum=tf.zeros([], tf.float32),
        num_targets=tf.zeros([], tf.int64),
        word_loss_sum=tf.zeros([], tf.float32),
        num_words=tf.zeros([], tf.int64),
        num_in_vocab=tf.zeros([], tf.int64),
        **{f"num_top{k}": tf.zeros([], tf.int64) for k in _TOP},
    )


def cross_entropy(logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Returns minus the log-probability of each target, in nats, shape [n].

    It makes fewer passes over the scores than TensorFlow's
    `sparse_softmax_cross_entropy_with_logits` does on a CPU, in both directions, with the same
    precision. It has a first derivative only. `logits` has shape [n, V], and `targets` shape [n].
    """
    targets = tf.cast(targets, tf.int32)

    @tf.custom_gradient
    def run(logits):
        # Not `tf.gather(..., batch_dims=1)`, which fails for n = 0 in a gradient.
        indices = tf.stack([tf.range(tf.shape(targets)[0]), targets], axis=1)
        target_logits = tf.gather_nd(logits, indices)
        softmax = tf.nn.softmax(logits)
        # From the largest entries of both; others may have underflowed in the softmax.
        normaliser = tf.reduce_max(logits, axis=1) - tf.math.log(tf.reduce_max(softmax, axis=1))
        losses = normaliser - target_logits

        def gradient(weights):
            # The probabilities, minus 1 at the target. The product comes last: an update copies
            # its input anyway, and the product can then be in place.
            updated = tf.tensor_scatter_nd_update(softmax, indices, tf.math.expm1(-losses))
            return updated * weights[:, None]

        return losses, gradient

    return run(logits)


def mean_cross_entropy(logits: tf.Tensor, targets: tf.Tensor, pad: int) -> tf.Tensor:
    """Returns the training loss in nats: the mean of `cross_entropy` over targets without padding.

    It is 0 if there is no target. `logits` has shape [n, V], and `targets` shape [n].
    """
    losses = cross_entropy(logits, targets)
    # In TFF's graphs `!=` would compare objects, not values.
    is_target = tf.cast(tf.not_equal(targets, pad), losses.dtype)
    return tf.math.divide_no_nan(tf.reduce_sum(losses * is_target), tf.reduce_sum(is_target))


def count(logits: tf.Tensor, targets: tf.Tensor, special: SpecialIds) -> Counts:
    """Counts the targets of one batch and how well they were predicted, as `zero_counts` names it.

    A word is among the top k if at most k words of the vocabulary, itself included, have at least
    its score: a tie counts against the model. Special ids are no words and are not ranked: a
    keyboard proposes words, whatever the probability of the end or of an unknown word, and so do
    the n-grams that a model is compared with. A score that is not finite counts as wrong. `logits`
    is float32, shape [n, V]; `targets` has shape [n], and its padding is ignored.
    """
    logits, targets = tf.convert_to_tensor(logits), tf.convert_to_tensor(targets)
    losses = cross_entropy(logits, targets)
    is_target = special.is_target(targets)
    is_word, in_vocab = special.is_word(targets), special.is_known(targets)
    rank = ranks(logits, targets, special)
    rankable = in_vocab & tf.math.is_finite(losses)
    return collections.OrderedDict(
        loss_sum=_masked_sum(losses, is_target),
        num_targets=tf.math.count_nonzero(is_target),
        word_loss_sum=_masked_sum(losses, is_word),
        num_words=tf.math.count_nonzero(is_word),
        num_in_vocab=tf.math.count_nonzero(in_vocab),
        **{f"num_top{k}": tf.math.count_nonzero(rankable & (rank <= k)) for k in _TOP},
    )


def ranks(logits: tf.Tensor, targets: tf.Tensor, special: SpecialIds) -> tf.Tensor:
    """Returns how many words have at least the score of each target, itself included; float32, [n].

    Special ids do not count. The rank is 0 where the target's score is not a number. `logits` is
    float32, shape [n, V]; `targets` has shape [n].
    """
    target_logits = tf.gather(logits, targets, batch_dims=1)[:, None]
    others = tf.gather(logits, special.all, axis=1)
    # Floats are added faster, and exactly up to 2²⁴. A slice of the words would be a copy.
    at_least, special_ones = (
        tf.reduce_sum(tf.cast(scores >= target_logits, tf.float32), axis=1)
        for scores in (logits, others)
    )
    return at_least - special_ones


def add(first: Counts, second: Counts) -> Counts:
    """Adds the counts of two batches."""
    return collections.OrderedDict((name, first[name] + second[name]) for name in first)


def finalize(counts: Mapping[str, tf.Tensor]) -> collections.OrderedDict[str, tf.Tensor]:
    """Computes the metrics from counts, as scalars; means of nothing are 0.

    `loss`: mean cross-entropy in nats over all targets, the end of a sequence and words out of the
    vocabulary included; training minimises it. `perplexity`: exp of the mean cross-entropy over
    words, those out of the vocabulary included as one word, the end of a sequence not.
    `top1_in_vocab`, `top3_in_vocab`, `top5_in_vocab`: share of the words in the vocabulary that
    were among the 1, 3, 5 words of best scores. `top1_oov_wrong`, `top3_oov_wrong`,
    `top5_oov_wrong`: share of all words that were, those out of the vocabulary counted as wrong
    (AccuracyTop1 of McMahan et al. 2018). `num_targets`, `num_words`, `num_in_vocab`: the counts.
    """
    metrics = collections.OrderedDict(
        loss=ratio(counts["loss_sum"], counts["num_targets"]),
        perplexity=tf.exp(ratio(counts["word_loss_sum"], counts["num_words"])),
        top1_in_vocab=ratio(counts["num_top1"], counts["num_in_vocab"]),
        top1_oov_wrong=ratio(counts["num_top1"], counts["num_words"]),
        top3_in_vocab=ratio(counts["num_top3"], counts["num_in_vocab"]),
        top5_in_vocab=ratio(counts["num_top5"], counts["num_in_vocab"]),
        top3_oov_wrong=ratio(counts["num_top3"], counts["num_words"]),
        top5_oov_wrong=ratio(counts["num_top5"], counts["num_words"]),
    )
    for name in ("num_targets", "num_words", "num_in_vocab"):
        metrics[name] = counts[name]
    return metrics


def _masked_sum(values: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.where(mask, values, tf.zeros_like(values)))


def ratio(numerator: tf.Tensor, denominator: tf.Tensor) -> tf.Tensor:
    """Returns the quotient of two sums, a float32 scalar; that of nothing is 0."""
    return tf.math.divide_no_nan(tf.cast(numerator, tf.float32), tf.cast(denominator, tf.float32))
