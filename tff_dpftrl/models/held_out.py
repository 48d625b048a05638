"""Predictions of a trained model at each word of held-out text, and statistics of them.

They answer two questions of the papers: how accuracy differs between users, and whether noise
drives a model towards the words that are frequent anyway (McMahan et al. 2018, Table 3). They are
for the end of a run: during it, `evaluation.Evaluator` is quicker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.models import language_model, metrics, next_words

TOP = 10
"""Number of words that a model proposes, as in Table 3 of McMahan et al. 2018."""

HEAD_SIZES = (10, 50, 100)
"""Numbers of words that count as frequent, as in Table 3 of McMahan et al. 2018."""


Mix = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Function from rows and positions of n words, as of `WordPredictions`, and probabilities of all
ids there, float32, shape [n, V], to other probabilities."""


@dataclasses.dataclass(frozen=True, eq=False)
class WordPredictions:
    """Predictions at each of the n words of some sequences, in the vocabulary or not.

    Ends of sequences are no words.

    Attributes:
      rows: Index of the sequence that each word is in, int64, shape [n].
      targets: Ids of the words, int64, shape [n].
      is_best: Whether the word is of the vocabulary and had a better score than every other
        one, as `metrics.count` counts it, bool, shape [n].
      positions: Place of each word in its sequence, 0 for the first target, int64, shape [n].
      is_best_mixed: `is_best` of what the callback `mix` of `predict_words` returned; equal to it
        without one.
      likeliest: Ids of the k words of the vocabulary with the best scores, best first, int32,
        shape [n, k].
    """

    rows: np.ndarray
    targets: np.ndarray
    is_best: np.ndarray
    positions: np.ndarray
    is_best_mixed: np.ndarray
    likeliest: np.ndarray


def predict_words(
    model: language_model.LanguageModel,
    weights: Sequence[np.ndarray],
    special: metrics.SpecialIds,
    sequences: np.ndarray,
    *,
    top: int = TOP,
    batch_size: int = 64,
    mix: Mix | None = None,
) -> WordPredictions:
    """Predicts each word of some sequences, integer ids of shape [n, T + 1].

    `mix` changes the probabilities of some words, which are then judged as well. `batch_size`
    sequences are scored at a time, which bounds memory.
    """
    validation.integer("top", top, minimum=1)
    if sequences.shape[1:] != (model.sequence_length + 1,) or len(sequences) == 0:
        raise validation.UsageError(
            f"sequences must have shape [n, {model.sequence_length + 1}] with n at least 1, got "
            f"{list(sequences.shape)}."
        )
    weights = [tf.convert_to_tensor(weight, tf.float32) for weight in weights]
    predict = _predicting(model, special, top, mix is not None)
    parts = []
    for start in range(0, len(sequences), batch_size):
        found = predict(weights, tf.constant(sequences[start : start + batch_size], tf.int32))
        flat, targets, is_best, ids, *probabilities = (part.numpy() for part in found)
        rows, positions = np.divmod(flat.astype(np.int64), model.sequence_length)
        rows += start
        mixed = is_best
        if mix is not None:
            mixed = best_are(mix(rows, positions, *probabilities), targets, special)
        parts.append((rows, targets.astype(np.int64), is_best, positions, mixed, ids))
    return WordPredictions(*map(np.concatenate, zip(*parts, strict=True)))


@language_model.kept
def _predicting(
    model: language_model.LanguageModel, special: metrics.SpecialIds, top: int, takes_shares: bool
) -> Callable[..., tuple[tf.Tensor, ...]]:
    rows = tf.TensorSpec([None, model.sequence_length + 1], tf.int32)

    @tf.function(autograph=False, input_signature=[model.weight_specs, rows])
    def predict(weights, batch):
        logits, positions = model.compact_logits(weights, batch[:, :-1])
        targets = tf.gather(tf.reshape(batch[:, 1:], [-1]), positions)
        is_word = special.is_word(targets)
        logits, targets = tf.boolean_mask(logits, is_word), tf.boolean_mask(targets, is_word)
        is_finite = tf.math.is_finite(metrics.cross_entropy(logits, targets))
        is_known = special.is_known(targets)
        is_best = is_known & is_finite & tf.equal(metrics.ranks(logits, targets, special), 1.0)
        ids, _ = next_words.likeliest(logits, special, top)
        probabilities = [tf.nn.softmax(logits)] if takes_shares else []
        return tf.boolean_mask(positions, is_word), targets, is_best, ids, *probabilities

    return predict


def best_are(
    probabilities: np.ndarray, targets: np.ndarray, special: metrics.SpecialIds
) -> np.ndarray:
    """Returns which targets are words of the vocabulary likelier than every other one.

    `probabilities` have shape [n, V], and `targets` are ids of shape [n].
    """
    others = np.array(probabilities)
    others[:, special.all] = -np.inf
    of_targets = others[np.arange(len(targets)), targets]
    return (of_targets > -np.inf) & ((others >= of_targets[:, None]).sum(axis=1) == 1)


def accuracy_by_user(
    predictions: WordPredictions,
    users: np.ndarray,
    special: metrics.SpecialIds,
    *,
    count_oov: bool,
) -> np.ndarray:
    """Returns the share of each user's words that were the model's first guess, float64.

    `users` has the number of the user of each sequence; users without a word that counts are left
    out. With `count_oov`, words out of the vocabulary count as wrong (AccuracyTop1 of McMahan et
    al. 2018); otherwise they are left out.
    """
    in_vocab = ~np.isin(predictions.targets, special.all)
    user = np.asarray(users, np.int64)[predictions.rows]
    size = int(np.max(users, initial=-1)) + 1
    right = np.bincount(user[predictions.is_best], minlength=size)
    words = np.bincount(user if count_oov else user[in_vocab], minlength=size)
    return right[words > 0] / words[words > 0]


def head_word_histogram(
    predictions: WordPredictions,
    special: metrics.SpecialIds,
    head_sizes: Sequence[int] = HEAD_SIZES,
) -> np.ndarray:
    """Returns histograms of the number of frequent words among a model's likeliest words.

    They are those of Table 3 in McMahan et al. 2018. A model that proposes frequent words only has
    its mass to the right. Frequent are the `head_sizes[i]` most frequent targets, smaller ids first
    among equals. Row i, column j has the share of words where j of the k likeliest are frequent;
    float64, zeros if there is no word.
    """
    size = int(max(predictions.targets.max(initial=0), predictions.likeliest.max(initial=0))) + 1
    counts = np.bincount(predictions.targets, minlength=size)
    words_known = np.setdiff1d(np.arange(len(counts)), special.all)
    by_frequency = words_known[np.argsort(-counts[words_known], kind="stable")]
    words, top = predictions.likeliest.shape
    shares = []
    for size in head_sizes:
        is_head = np.zeros(len(counts), bool)
        is_head[by_frequency[:size]] = True
        num_frequent = np.count_nonzero(is_head[predictions.likeliest], axis=1)
        shares.append(np.bincount(num_frequent, minlength=top + 1) / max(words, 1))
    return np.stack(shares)
