"""Offline stand-ins for the A/B metrics of keyboards, on held-out text.

Xu et al. 2023 (section 3) measure models of Gboard by what users do: which suggestions they pick.
Held-out text has no user who could pick anything. Here an ideal user takes a suggestion if and only
if it is the word of the text. So the figures rank models; they are no rates of real users.

* Next-word prediction shows three words after a word is committed. The ratio of committed words
  that are among them is the paper's accuracy. A picked word is committed, so its picked rate is
  at most that.
* Smart Compose shows the likeliest word where its probability reaches a threshold.
* On-the-fly rescoring orders the candidates of a decoder again, before a word is committed.

Probabilities are those given that a word of the vocabulary comes next, since n-grams count no
other; so thresholds mean the same for all predictors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.models import metrics

SHOWN = 3
"""Number of words that next-word prediction shows."""

THRESHOLDS = (0.1, 0.2, 0.3, 0.5, 0.7)
"""Probabilities from which the likeliest word is shown inline."""

FIXED_ACCEPTANCE = 0.5
"""Share of inline suggestions accepted at which trigger rates of models are compared."""

CANDIDATES = 10
"""Number of candidates of the decoder for each word."""

TAP_STDDEV = 0.5
"""Standard deviation of a tap about the centre of its key, in key widths, along each axis."""

_KEY_ROWS = (("qwertyuiop", 0.0), ("asdfghjkl", 0.5), ("zxcvbnm", 1.5))
_KEYS = {
    letter: (shift + column, float(row))
    for row, (letters, shift) in enumerate(_KEY_ROWS)
    for column, letter in enumerate(letters)
}
_SEED = 0
"""Seed of the taps: the same for all models, to compare them."""

_DECODED = 1024  # Words that are decoded at a time.
_LEAST = 1e-8  # A smaller probability, as of a word that n-grams never saw, forbids no candidate.


@dataclasses.dataclass(frozen=True, eq=False)
class TypedWords:
    """The n words of held-out sequences, and what a decoder makes of their typing.

    Attributes:
      special: Ids of special tokens.
      targets: Ids of the words, those out of the vocabulary included, int64, shape [n].
      follows_word: Whether a word comes before it in its sequence, bool, shape [n].
      candidates: Ids of the decoder's candidates, int64, shape [n, CANDIDATES].
      scores: Their log-likelihoods, up to a constant of each row, float64, shape
        [n, CANDIDATES]. It is -inf where there is no candidate, as for a word without a key for
        each character.
    """

    special: metrics.SpecialIds
    targets: np.ndarray
    follows_word: np.ndarray
    candidates: np.ndarray
    scores: np.ndarray

    @classmethod
    def create(
        cls, sequences: np.ndarray, special: metrics.SpecialIds, words: Sequence[str] | None
    ) -> TypedWords:
        """Types the words of some sequences, integer ids of shape [n, T + 1].

        `words` is the spelling of the ids from 1; None for sub-words, which nobody types one by
        one.
        """
        is_word = _is_word(sequences, special)
        targets = np.asarray(sequences, np.int64)[:, 1:][is_word[:, 1:]]
        follows = is_word[:, :-1][is_word[:, 1:]]
        return cls(special, targets, follows, *_decode(targets, words or ()))


class Meter:
    """A measurement of a predictor of the next word, to which its probabilities are given.

    A word is right if it is of the vocabulary and no other one has as large a probability: ties
    count against the predictor, as in `metrics.count`. Special ids are never shown.
    """

    def __init__(self, typed: TypedWords):
        """Starts before the first of the words that are to be predicted."""
        self._typed = typed
        self._rank = np.zeros(len(typed.targets), np.int64)
        self._confidence = np.zeros(len(typed.targets))
        self._log_probabilities = np.zeros(typed.candidates.shape)
        self._done = 0

    def add(self, probabilities: np.ndarray) -> None:
        """Judges the next k words.

        `probabilities` has one distribution over the V ids for each, given what comes before it in
        its sequence; shape [k, V], not necessarily normalised.
        """
        left = len(self._rank) - self._done
        if len(probabilities) > left:
            raise validation.UsageError(
                f"probabilities must be of one word each: {left} are left, got "
                f"{len(probabilities)} distributions."
            )
        words = slice(self._done, self._done + len(probabilities))
        self._done = words.stop
        shares, targets = np.array(probabilities), self._typed.targets[words, None]
        shares[:, self._typed.special.all] = 0.0
        own = np.take_along_axis(shares, targets, axis=1)
        rank = np.count_nonzero(shares >= own, axis=1)
        # A special id, or not a number, is never among the first.
        self._rank[words] = np.where(own[:, 0] > 0.0, rank, shares.shape[1])
        known = np.maximum(shares.sum(axis=1), np.finfo(np.float32).tiny)
        self._confidence[words] = np.nan_to_num(shares.max(axis=1) / known)
        chosen = np.take_along_axis(shares, self._typed.candidates[words], axis=1)
        floored = np.maximum(np.nan_to_num(chosen / known[:, None]), _LEAST)
        self._log_probabilities[words] = np.log(floored)

    def result(self) -> dict[str, Any]:
        """Returns the measurements, fit for JSON; a share of nothing is None.

        `words`: number of words. `picked_at_3`: share of the `words_after_another` that are among
        the `SHOWN` likeliest. `triggered`: as of `triggered_at` with `FIXED_ACCEPTANCE`.
        `thresholds`: for each of `THRESHOLDS` the share of words `triggered`, and of these the
        share `accepted`. `decoder`, `rescored`: shares of the `words_decoded` that the decoder gets
        right, alone and with the logarithms of the probabilities added to its scores.
        `among_candidates`: the upper bound of both.
        """
        typed, rank, confidence = self._typed, self._rank, self._confidence
        if self._done < len(rank):
            raise validation.UsageError(
                f"add must be given {len(rank)} distributions before result, got {self._done}."
            )
        is_right, is_typed = rank == 1, typed.scores[:, 0] > -np.inf
        scores = typed.scores[is_typed]
        found = typed.candidates[is_typed] == typed.targets[is_typed, None]
        best = scores.argmax(axis=1), (scores + self._log_probabilities[is_typed]).argmax(axis=1)
        alone, rescored = (np.take_along_axis(found, one[:, None], axis=1) for one in best)
        return {
            "words": len(rank),
            "words_after_another": int(np.count_nonzero(typed.follows_word)),
            "picked_at_3": _share(rank[typed.follows_word] <= SHOWN),
            "triggered": triggered_at(confidence, is_right, FIXED_ACCEPTANCE),
            "thresholds": {
                str(threshold): {
                    "triggered": _share(confidence >= threshold),
                    "accepted": _share(is_right[confidence >= threshold]),
                }
                for threshold in THRESHOLDS
            },
            "words_decoded": len(found),
            "among_candidates": _share(found.any(axis=1)),
            "decoder": _share(alone),
            "rescored": _share(rescored),
        }


def triggered_at(confidence: np.ndarray, is_right: np.ndarray, acceptance: float) -> float | None:
    """Returns the largest trigger rate of all thresholds that keep an acceptance; None if n is 0.

    It compares predictors whose probabilities are not calibrated alike: trigger rate "is an
    important metric when PRate is fixed" (Xu et al. 2023, section 3). The threshold is chosen on
    the same words, so the rate is a little too high for all of them. `confidence` is the
    probability of the likeliest word, shape [n]; `acceptance` is the least share of triggered words
    that are right.
    """
    if len(confidence) == 0:
        return None
    order = np.argsort(-confidence, kind="stable")
    # A threshold triggers all words of a confidence or none of them.
    is_end = np.append(np.diff(confidence[order]) != 0, True)
    triggered = np.flatnonzero(is_end) + 1
    keeps = np.cumsum(is_right[order])[is_end] >= acceptance * triggered
    return int(triggered[keeps].max(initial=0)) / len(order)


def _is_word(ids: np.ndarray, special: metrics.SpecialIds) -> np.ndarray:
    return ~np.isin(ids, [special.pad, special.bos, special.eos])


def _decode(targets: np.ndarray, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the words of the same length that fit random taps best, with their log-likelihoods.

    Each tap is Gaussian about the centre of its key, and a candidate's score is the logarithm of
    the taps' density (the spatial model of Goodman et al. 2002). Both have shape [n, CANDIDATES].
    """
    ids = np.zeros([len(targets), CANDIDATES], np.int64)
    scores = np.full([len(targets), CANDIDATES], -np.inf)
    lengths = np.zeros(max(len(words), int(targets.max(initial=0))) + 1, np.int64)
    for index, word in enumerate(words, start=1):
        lengths[index] = len(word) if set(word.lower()) <= _KEYS.keys() else 0
    rng = np.random.default_rng(_SEED)
    for length in np.unique(lengths[lengths > 0]):
        same = np.flatnonzero(lengths == length)
        keys = np.array([[_KEYS[c] for c in words[i - 1].lower()] for i in same]).reshape(
            len(same), 2 * length
        )
        typed = np.flatnonzero(lengths[targets] == length)
        k = min(CANDIDATES, len(same))
        for start in range(0, len(typed), _DECODED):
            now = typed[start : start + _DECODED]
            centres = keys[np.searchsorted(same, targets[now])]
            taps = centres + TAP_STDDEV * rng.standard_normal(centres.shape)
            # |taps - keys|², but for what is the same for all candidates.
            fit = (2.0 * taps @ keys.T - np.sum(keys**2, axis=1)) / (2.0 * TAP_STDDEV**2)
            best = np.sort(np.argpartition(-fit, k - 1, axis=1)[:, :k], axis=1)
            ids[now, :k] = same[best]
            scores[now, :k] = np.take_along_axis(fit, best, axis=1)
    return ids, scores


def _share(values: np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None
