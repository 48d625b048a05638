"""Text by user and a model of it: what is trained on, and how the model is judged."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.data import sequences, split, user_text, vocabulary
from tff_dpftrl.models import (
    evaluation,
    held_out,
    language_model,
    metrics,
    ngrams,
    text_cache,
)
from tff_dpftrl.reports import results

_EVALUATION_SEED = 0
"""Seed of the choice of held-out sequences: the same for all seeds of a run, to compare them."""

_BY_USER = {"top1_in_vocab": False, "top1_oov_wrong": True}
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_NGRAM_ORDERS = {"unigrams": 1, "bigrams": 2, "trigrams": 3, "4-grams": 4}
_WITH_CACHE = ("trigrams", "4-grams")
_MIXED = 2**25  # Probabilities that are mixed at a time, at most: a few copies are in memory.
_MOST_OF_USER = 4  # Sequences of a user in an evaluation that is released with noise.
_COUNTED = 2**19  # Sequences that n-grams are counted on, at most: more take gigabytes.


@dataclasses.dataclass(frozen=True)
class TextFacts:
    """Exact figures of the text of the users who are protected: for the operator's eyes only.

    Users without text have no word and train on nothing. `oov_share` is the share of the words that
    are not in the vocabulary.
    """

    num_users: int
    num_users_without_text: int
    num_sequences: int
    num_words: int
    oov_share: float


@dataclasses.dataclass(frozen=True, eq=False)
class TextTask:
    """Training users, held-out text, model and baselines of one run.

    Attributes:
      train: Sequences of the training users, the ones who are protected.
      held_out: Word ids of users who never train, int32, [n, sequence_length + 1].
      held_out_users: Number of the user of each held-out row, int64, [n].
      held_out_places: Index of each held-out row among those of its user, int64, [n].
      num_held_out_users: Number of users that the held-out rows were taken from.
      targets_per_character: Number of targets for each character of the held-out users' text.
      num_untouched_users: Number of users who are kept for a test, and not used.
      held_out_text: Sequences of all held-out users.
    """

    train: sequences.SequenceCorpus
    held_out: np.ndarray
    held_out_users: np.ndarray
    held_out_places: np.ndarray
    held_out_text: sequences.SequenceCorpus
    num_held_out_users: int
    targets_per_character: float
    num_untouched_users: int
    words: vocabulary.Vocabulary
    model: language_model.LanguageModel

    @property
    def special(self) -> metrics.SpecialIds:
        """Ids that are not words of the vocabulary."""
        return metrics.SpecialIds(oov=self.words.oov, bos=self.words.bos, eos=self.words.eos)

    @functools.cached_property
    def evaluate(self) -> evaluation.Evaluator:
        """Maps trainable weights to metrics on the held-out users."""
        return evaluation.Evaluator(
            self.model,
            self.special,
            self.held_out,
            targets_per_character=self.targets_per_character,
        )

    def counts_of_users(self, most: int) -> evaluation.CountsOfUsers:
        """Returns the counter of what is released of protected held-out users, with noise.

        What a user contributes depends on its own text and id, and on nothing of other users but
        the number of training users: if it is at most `most`, all held-out users are measured, and
        of more training users as large a part. Users must be held out by their ids alone, as
        `split.by_user` does it.
        """
        wrong = sum(map(split.is_held_out, self.train.user_ids))
        wrong += sum(not split.is_held_out(user) for user in self.held_out_text.user_ids)
        if wrong:
            raise validation.UsageError(
                f"{wrong} users train or are held out, and the hash of their ids says otherwise: "
                "held_out_users 'protected' with noised metrics needs train and validation of "
                "data.split.by_user; or leave metrics_epsilon out."
            )
        share = most / len(self.train.user_ids)
        rows = [
            self.held_out_text.sample(user, max_sequences=_MOST_OF_USER, seed=_EVALUATION_SEED)
            for user in self.held_out_text.user_ids
            if _place(user) < share
        ]
        padded = np.zeros([len(rows), _MOST_OF_USER, self.model.sequence_length + 1], np.int32)
        for of_user, found in zip(padded, rows, strict=True):
            of_user[: len(found)] = found
        return evaluation.CountsOfUsers(self.model, self.special, padded)

    def examine(self, weights: Sequence[np.ndarray]) -> dict[str, Any]:
        """Measures on held-out users what is measured once, after training, as JSON.

        `users`, `sequences` and `words` say what it was measured on. `accuracy_by_user` has, for
        the two ways to count words out of the vocabulary, the number of users who have words, and
        quantiles of their top-1 accuracies. `head_words` is the histogram of Table 3 of McMahan et
        al. 2018, and `earlier_text` has top-1 accuracies over the words of the vocabulary, with a
        cache of what the same user wrote earlier and without it.
        """
        predictions = held_out.predict_words(
            self.model,
            weights,
            self.special,
            self.held_out,
            batch_size=self._rows_at_a_time,
            mix=self._earlier_text.mix,
        )
        by_user = {
            name: held_out.accuracy_by_user(
                predictions, self.held_out_users, self.special, count_oov=count_oov
            )
            for name, count_oov in _BY_USER.items()
        }
        histogram = held_out.head_word_histogram(predictions, self.special)
        return {
            "users": len(np.unique(self.held_out_users)),
            "sequences": len(self.held_out),
            "words": len(predictions.targets),
            "accuracy_by_user": {
                name: {"users": len(accuracies), "quantiles": _quantiles(accuracies)}
                for name, accuracies in by_user.items()
            },
            "head_words": {
                "top": predictions.likeliest.shape[1],
                "histograms": dict(
                    zip(map(str, held_out.HEAD_SIZES), histogram.tolist(), strict=True)
                ),
            },
            "earlier_text": self._with_earlier_text(predictions),
        }

    @property
    def _rows_at_a_time(self) -> int:
        return min(64, max(1, _MIXED // (self.held_out.shape[1] * self.words.size)))

    @functools.cached_property
    def _earlier_text(self) -> text_cache.EarlierText:
        ids = self.held_out_text.user_ids
        texts = {i: self.held_out_text.sequences(ids[i]) for i in np.unique(self.held_out_users)}
        return text_cache.EarlierText(
            texts, self.held_out_users, self.held_out_places, self.special
        )

    def _with_earlier_text(self, predictions: held_out.WordPredictions) -> dict[str, Any]:
        """Returns accuracies with the cache and without it, where there is earlier text and not."""
        in_vocab = ~np.isin(predictions.targets, self.special.all)
        has_text = in_vocab & (self.held_out_places[predictions.rows] > 0)
        parts = {"all": in_vocab, "with": has_text, "without": in_vocab & ~has_text}
        judged = {"model": predictions.is_best, "model_and_cache": predictions.is_best_mixed}
        return {
            name: {
                "words": int(part.sum()),
                **{who: float(right[part].mean()) for who, right in judged.items() if part.any()},
            }
            for name, part in parts.items()
        }

    @functools.cached_property
    def training_text(self) -> TextFacts:
        """Counts the training users' text; the first time, all of it is split into words."""
        survey = self.train.survey
        return TextFacts(
            num_users=len(survey.num_sequences),
            num_users_without_text=int(np.sum(survey.num_sequences == 0)),
            num_sequences=int(survey.num_sequences.sum()),
            num_words=survey.num_words,
            oov_share=survey.num_unknown / survey.num_words if survey.num_words else 0.0,
        )

    def baselines(self) -> Mapping[str, float]:
        """Returns the top-1 accuracy of n-gram counts over the training users' pooled text.

        For comparison in a simulation: these counts are not private. Of a large corpus, a sample
        of the sequences is counted, and the names say so. Interpolated n-grams with the cache that
        `examine` gives the model are among them.
        """
        ngram_model, of = self._ngrams
        alone = {
            f"{name}{of}": ngram_model.evaluate(self.held_out, order).top1_in_vocab
            for name, order in _NGRAM_ORDERS.items()
        }
        with_cache = self._ngrams_with_cache()
        return alone | {
            f"{name}{of}{results.WITH_EARLIER_TEXT}": with_cache[name] for name in with_cache
        }

    @functools.cached_property
    def _ngrams(self) -> tuple[ngrams.NgramModel, str]:
        """The n-grams of the training users' text, and what of it was counted if not all."""
        total = self.training_text.num_sequences
        limit, of = (
            (None, "") if total <= _COUNTED else (_COUNTED, f" of {_COUNTED}/{total} sequences")
        )
        pooled = self.train.pooled(max_sequences=limit)
        ngram_model = ngrams.NgramModel(
            pooled, self.special, self.words.size, max_order=ngrams.MAX_ORDER
        )
        return ngram_model, of

    def _ngrams_with_cache(self) -> dict[str, float]:
        """Returns top-1 accuracies of n-grams with the cache of `examine`, by their names."""
        right: dict[str, list[np.ndarray]] = {name: [] for name in _WITH_CACHE}
        for start in range(0, len(self.held_out), self._rows_at_a_time):
            rows = self.held_out[start : start + self._rows_at_a_time]
            words = np.flatnonzero(self.special.is_word(rows[:, 1:]))
            targets = rows[:, 1:].ravel()[words]
            known = ~np.isin(targets, self.special.all)
            places, positions = np.divmod(words[known], rows.shape[1] - 1)
            cached = self._earlier_text.lookup(start + places, positions, self.words.size)
            found = self._ngrams[0].probabilities(rows, words)
            for name, shares in zip(_NGRAM_ORDERS, found, strict=True):
                if name in right:
                    mixed = text_cache.mixture(shares[known], *cached)
                    right[name].append(held_out.best_are(mixed, targets[known], self.special))
        return {name: float(np.concatenate(parts).mean()) for name, parts in right.items()}


def sequences_of(
    train: user_text.UserText,
    held_out: user_text.UserText,
    words: vocabulary.Vocabulary,
    spec: sequences.SequenceSpec,
    *,
    max_held_out: int,
) -> dict[str, Any]:
    """Encodes the text of a task: the attributes of `TextTask` that are made of it, by name."""
    others = sequences.SequenceCorpus(held_out, words, spec)
    rows, users, places = others.pooled_with_users(
        max_sequences=max_held_out, seed=_EVALUATION_SEED
    )
    measured = [others.user_ids[index] for index in np.unique(users)]
    return {
        "train": sequences.SequenceCorpus(train, words, spec),
        "held_out": rows,
        "held_out_users": users,
        "held_out_places": places,
        "held_out_text": others,
        "num_held_out_users": len(held_out),
        "targets_per_character": others.targets_per_character(measured),
        "words": words,
    }


def _place(user_id: str) -> float:
    """Returns a number in [0, 1) by a hash of an id."""
    content = b"tff_dpftrl released evaluation" + user_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2.0**64


def _quantiles(values: np.ndarray) -> dict[str, float]:
    """Returns quantiles by their level; none of no values."""
    if len(values) == 0:
        return {}
    quantiles = np.quantile(values, _QUANTILES).tolist()
    return dict(zip(map(str, _QUANTILES), quantiles, strict=True))
