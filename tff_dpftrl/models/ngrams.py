"""Counted n-grams: the accuracy that a language model has to beat."""

from __future__ import annotations

import dataclasses

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.models import metrics

MAX_ORDER = 3
"""Largest order of n-grams: trigrams."""


@dataclasses.dataclass(frozen=True)
class NgramAccuracy:
    """Accuracy of an n-gram model, with the counts behind it.

    Attributes:
      top1_in_vocab: Accuracy over targets in the vocabulary only.
      top1_oov_wrong: Accuracy over all words, those out of vocabulary counted as wrong
        (McMahan et al. 2018, AccuracyTop1).
      num_in_vocab: Number of targets in the vocabulary.
      num_words: Number of targets, out-of-vocabulary words included.
    """

    top1_in_vocab: float
    top1_oov_wrong: float
    num_in_vocab: int
    num_words: int


@dataclasses.dataclass(frozen=True)
class _Table:
    """The targets after each context seen, and how often each came."""

    contexts: np.ndarray  # Sorted, int64.
    first: np.ndarray  # Where the targets of each context begin, and the number of targets.
    targets: np.ndarray
    counts: np.ndarray
    best: np.ndarray  # The most frequent target of each context.

    @classmethod
    def count(cls, contexts: np.ndarray, targets: np.ndarray, size: int) -> _Table:
        pairs, counts = _count(contexts * size + targets)
        contexts, targets = np.divmod(pairs, size)
        # Pairs are sorted by context, then target. Among the pairs of a context with the highest
        # count, the smallest target is best.
        first = np.flatnonzero(np.diff(contexts, prepend=contexts[0] - 1))
        rank = counts * size + (size - 1 - targets)
        best = size - 1 - np.maximum.reduceat(rank, first) % size
        return cls(contexts[first], np.append(first, len(pairs)), targets, counts, best)

    def find(self, contexts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places of contexts, and whether each was seen."""
        place = np.searchsorted(self.contexts, contexts)
        place = np.minimum(place, len(self.contexts) - 1)
        return place, self.contexts[place] == contexts


class NgramModel:
    """A model that predicts the most frequent word after the last one or two words.

    For an unseen context it backs off to the next shorter one. It predicts only words of the
    vocabulary, like models under `metrics.count`. It counts the pooled text without any privacy:
    it is a baseline, not a release.
    """

    def __init__(self, sequences: np.ndarray, special: metrics.SpecialIds, size: int | None = None):
        """Counts the n-grams of some sequences.

        Args:
          sequences: Ids, integer, shape [n, T + 1], padded at the end.
          special: Ids that are not words of the vocabulary.
          size: Number of ids; if None, a special id is the last one.

        Raises:
          ValueError: If `sequences` holds no word of the vocabulary as a target.
        """
        self._special = special
        self._size = size = max(special.all) + 1 if size is None else size
        before, last, targets = _contexts(sequences, special.pad)
        is_word = ~np.isin(targets, special.all)
        if not is_word.any():
            raise validation.UsageError(
                "sequences must hold at least one word of the vocabulary to count."
            )
        before, last, targets = before[is_word], last[is_word], targets[is_word]
        self._tables = (
            _Table.count(np.zeros_like(last), targets, size),
            _Table.count(last, targets, size),
            _Table.count(before * size + last, targets, size),
        )

    def predict(self, sequences: np.ndarray, order: int) -> np.ndarray:
        """Returns the predicted id at each position.

        Args:
          sequences: Ids, shape [n, T + 1].
          order: Order of the n-grams: 1, 2 or 3, with back-off.

        Returns:
          Ids, int64, shape [n, T].

        Raises:
          ValueError: If `order` is not 1, 2 or 3.
        """
        predicted = np.zeros(sequences.shape[0] * (sequences.shape[1] - 1), np.int64)
        for table, context in self._of_order(sequences, order):
            place, was_seen = table.find(context)
            predicted = np.where(was_seen, table.best[place], predicted)
        return predicted.reshape(len(sequences), -1)

    def probabilities(self, sequences: np.ndarray, order: int) -> np.ndarray:
        """Returns the probability of each word at each position, with interpolated n-grams.

        Shares of an order are mixed with those of the next lower one by the rule of Witten and
        Bell (1991, method C): a context seen c times with d different words after it has the
        weight c / (c + d).

        Args:
          sequences: Ids, shape [n, T + 1].
          order: Order of the n-grams: 1, 2 or 3.

        Returns:
          Probabilities of all ids, float32, shape [n · T, size]; 0 for special ids.

        Raises:
          ValueError: If `order` is not 1, 2 or 3.
        """
        (unigrams, keys), *others = self._of_order(sequences, order)
        mixed = np.zeros([1, self._size], np.float32)
        mixed[0, unigrams.targets] = unigrams.counts / unigrams.counts.sum()
        row_of = np.zeros(len(keys), np.int64)  # In `mixed`, which has a row for each context.
        for table, keys in others:
            contexts, index, is_at = np.unique(keys, return_index=True, return_inverse=True)
            mixed, row_of = mixed[row_of[index]], is_at
            place, was_seen = table.find(contexts)
            rows, place = np.flatnonzero(was_seen), place[was_seen]
            start, different = table.first[place], table.first[place + 1] - table.first[place]
            of_row = np.repeat(np.arange(len(rows)), different)
            begins = np.cumsum(different) - different
            found = np.arange(len(of_row)) + np.repeat(start - begins, different)
            counts = table.counts[found]
            total = np.bincount(of_row, counts, len(rows)) + different
            mixed[rows] *= (different / total).astype(np.float32)[:, None]
            at = rows[of_row] * self._size + table.targets[found]
            mixed.reshape(-1)[at] += (counts / total[of_row]).astype(np.float32)
        return mixed[row_of]

    def _of_order(self, sequences: np.ndarray, order: int) -> list[tuple[_Table, np.ndarray]]:
        """Returns the tables up to an order, the shortest contexts first, and those contexts."""
        if not 1 <= order <= MAX_ORDER:
            raise validation.UsageError(f"order must be 1, 2 or 3, got {order!r}.")
        before, last, _ = _contexts(sequences, self._special.pad)
        contexts = (np.zeros_like(last), last, before * self._size + last)
        return list(zip(self._tables, contexts, strict=True))[:order]

    def evaluate(self, sequences: np.ndarray, order: int) -> NgramAccuracy:
        """Returns the accuracy on held-out sequences.

        Padding, beginnings and ends of sequences are not targets.

        Args:
          sequences: Ids, shape [n, T + 1].
          order: Order of the n-grams: 1, 2 or 3, with back-off.

        Returns:
          The accuracy.

        Raises:
          ValueError: If no target is in the vocabulary.
        """
        targets = np.asarray(sequences)[:, 1:]
        special = self._special
        in_vocab = ~np.isin(targets, special.all)
        num_in_vocab = int(in_vocab.sum())
        if num_in_vocab == 0:
            raise validation.UsageError("sequences must hold at least one word of the vocabulary.")
        num_words = num_in_vocab + int(np.isin(targets, [special.oov]).sum())
        correct = int((in_vocab & (self.predict(sequences, order) == targets)).sum())
        return NgramAccuracy(correct / num_in_vocab, correct / num_words, num_in_vocab, num_words)


def _count(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct numbers, ascending, and how often each occurs."""
    if numbers.max() < 2 * len(numbers):  # Counting is several times faster than sorting.
        counts = np.bincount(numbers)
        distinct = np.flatnonzero(counts)
        return distinct, counts[distinct]
    return np.unique(numbers, return_counts=True)


def _contexts(sequences: np.ndarray, pad: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the word before the last, the last word, and the target; flat int64."""
    sequences = np.asarray(sequences, np.int64)
    before = np.pad(sequences, [[0, 0], [1, 0]], constant_values=pad)[:, :-2]
    return before.ravel(), sequences[:, :-1].ravel(), sequences[:, 1:].ravel()
