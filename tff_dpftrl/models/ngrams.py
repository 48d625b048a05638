"""Counted n-grams: the accuracy that a language model has to beat."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.models import metrics

MAX_ORDER = 4
"""Largest order of n-grams."""


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
    """A model that predicts the most frequent word after the last words, three at most.

    For an unseen context it backs off to the next shorter one. It predicts only words of the
    vocabulary, like models under `metrics.count`. It counts the pooled text without any privacy:
    of protected text it is a baseline, not a release.
    """

    def __init__(
        self,
        sequences: np.ndarray,
        special: metrics.SpecialIds,
        size: int | None = None,
        *,
        max_order: int = 3,
    ):
        """Counts the n-grams of some sequences, integer ids of shape [n, T + 1], padded at the end.

        `size` is the number of ids; if None, a special id is the last one.
        """
        if validation.integer("max_order", max_order, minimum=1) > MAX_ORDER:
            raise validation.UsageError(
                f"max_order must be at most {MAX_ORDER}, got {max_order}: count shorter n-grams."
            )
        self._special = special
        self._size = size = max(special.all) + 1 if size is None else size
        earlier, targets = _contexts(sequences, special.pad, max_order)
        is_word = ~np.isin(targets, special.all)
        if not is_word.any():
            raise validation.UsageError(
                "sequences must hold at least one word of the vocabulary to count."
            )
        earlier, targets = earlier[is_word], targets[is_word]
        self._tables: list[_Table] = []
        for key in self._keys(earlier):
            self._tables.append(_Table.count(key, targets, size))

    def _keys(self, earlier: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the keys of contexts of no word, one word, two ...; negative for unseen ones.

        The key of a context has the place of the next shorter one in it, whose table is read when
        the caller has taken that one: keys stay below the number of words times that of ids.
        """
        key = np.zeros(len(earlier), np.int64)
        yield key
        for index in range(earlier.shape[1]):
            place, was_seen = self._tables[index].find(key)
            key = np.where(was_seen, place * self._size + earlier[:, index], -1)
            yield key

    def predict(self, sequences: np.ndarray, order: int) -> np.ndarray:
        """Returns the predicted id at each position, int64, shape [n, T].

        `order` is 1 up to the largest counted, with back-off.
        """
        earlier, targets = _contexts(sequences, self._special.pad, self._checked(order))
        predicted = np.zeros_like(targets)
        for table, key in zip(self._tables, self._keys(earlier), strict=False):
            place, was_seen = table.find(key)
            predicted = np.where(was_seen, table.best[place], predicted)
        return predicted.reshape(len(sequences), -1)

    def probabilities(self, sequences: np.ndarray, positions: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the probability of each word at some positions, with interpolated n-grams.

        Shares of an order are mixed with those of the next lower one by the rule of Witten and Bell
        (1991, method C): a context seen c times with d different words after it has the weight c /
        (c + d). `positions` are indices of targets among all n · T, shape [m]. First come the
        probabilities of unigrams, then of bigrams, up to the largest order; float32, shape [m,
        size], 0 for special ids.
        """
        earlier, _ = _contexts(sequences, self._special.pad, len(self._tables))
        (unigrams, keys), *others = zip(self._tables, self._keys(earlier[positions]), strict=True)
        mixed = np.zeros([1, self._size], np.float32)
        mixed[0, unigrams.targets] = unigrams.counts / unigrams.counts.sum()
        row_of = np.zeros(len(keys), np.int64)  # In `mixed`, which has a row for each context.
        yield mixed[row_of]
        for table, keys in others:
            keys = np.where(keys < 0, -1 - row_of, keys)  # Unseen ones differ in shorter contexts.
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
            yield mixed[row_of]

    def _checked(self, order: int) -> int:
        if not 1 <= order <= len(self._tables):
            orders = ", ".join(map(str, range(1, len(self._tables))))
            raise validation.UsageError(
                f"order must be {orders} or {len(self._tables)}, got {order!r}."
            )
        return order

    def evaluate(self, sequences: np.ndarray, order: int) -> NgramAccuracy:
        """Returns the accuracy on held-out sequences, shape [n, T + 1].

        Padding, beginnings and ends of sequences are not targets.
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


def _contexts(sequences: np.ndarray, pad: int, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `order` − 1 words before each target, the last one first, and targets; int64."""
    sequences = np.asarray(sequences, np.int64)
    padded = np.pad(sequences, [[0, 0], [order, 0]], constant_values=pad)
    places = np.arange(sequences.shape[1] - 1)[:, None] - np.arange(order - 1) + order
    targets = sequences[:, 1:].ravel()
    return padded[:, places].reshape(len(targets), order - 1), targets
