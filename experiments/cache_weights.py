"""Refits the weights of the cache: `python experiments/cache_weights.py PRETRAINED`.

PRETRAINED is a folder of `tff-dpftrl pretrain --config quickstart`. Its model has never trained on
the modules of Python's standard library that it was judged on; on their docstrings, a module being
a user, the weights are fitted. Nothing of a protected user is read. Prints the weights
beside `text_cache.WEIGHTS`; the exit status is 1 if one differs by more than 0.01.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.data import docstrings, sequences, split
from tff_dpftrl.models import held_out, text_cache
from tff_dpftrl.training import trained_model

_MOST_OF_USER = 200  # Sequences: a long module does not decide alone.
_STEPS = 200  # Of expectation maximisation.


def fit(pretrained: pathlib.Path) -> tuple[int, tuple[float, ...]]:
    """Returns the number of words that the weights are fitted to, and the weights."""
    trained = trained_model.find(pretrained).load()
    special, spec = trained.special, sequences.SequenceSpec(trained.model.sequence_length)
    public = split.by_user(docstrings.read_standard_library()).validation
    corpus = sequences.SequenceCorpus(public, trained.words, spec)
    texts = {i: corpus.sequences(user) for i, user in enumerate(corpus.user_ids)}
    texts = {i: rows[:_MOST_OF_USER] for i, rows in texts.items() if len(rows)}
    users = np.repeat(list(texts), list(map(len, texts.values())))
    places = np.concatenate([np.arange(len(rows)) for rows in texts.values()])
    rows = np.concatenate(list(texts.values()))
    earlier = text_cache.EarlierText(texts, users, places, special)
    found: list[np.ndarray] = []

    def collect(of: np.ndarray, positions: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        cached, longest = earlier.lookup(of, positions, probabilities.shape[1])
        targets = rows[of, positions + 1]
        each = np.arange(len(targets))
        values = np.stack([probabilities[each, targets], cached[each, targets], longest], axis=1)
        found.append(values[~np.isin(targets, special.all)])
        return probabilities

    held_out.predict_words(trained.model, trained.weights, special, rows, mix=collect)
    model, cached, longest = np.concatenate(found).T
    model, cached = np.minimum(model, 1.0), np.minimum(cached, 1.0)  # But for rounding.
    return len(longest), fit_weights(model, cached, longest)


def fit_weights(
    probabilities: np.ndarray, cached: np.ndarray, longest: np.ndarray
) -> tuple[float, ...]:
    """Fits the weights of a cache to text, by expectation maximisation of its likelihood.

    Give it public text only. Weights that were fitted to text of protected users, whether they
    trained or not, are exact figures of that text, which no privacy statement covers.

    Args:
      probabilities: Probability of each of n words of the text in a predictor, shape [n].
      cached: Probabilities of the same words in the cache, as of `lookup`, shape [n].
      longest: Order of the longest n-gram found before each word, as of `lookup`, shape [n].

    Returns:
      A weight for each order, `text_cache.ORDER` in all; 0 for an order that was not found.

    Raises:
      ValueError: If the arrays are not of one length, or a number is no probability.
    """
    given = {"probabilities": probabilities, "cached": cached}
    for name, array in given.items():
        array = np.asarray(array)
        if array.shape != np.shape(longest) or not ((array >= 0) & (array <= 1)).all():
            raise validation.UsageError(
                f"{name} must be probabilities, one for each of the {np.size(longest)} of longest, "
                f"got shape {list(array.shape)} with values that are perhaps not between 0 and 1."
            )
    weights = []
    for order in range(1, text_cache.ORDER + 1):
        model, cache = (np.asarray(part, np.float64)[longest == order] for part in given.values())
        weight = 0.5 if len(model) else 0.0
        for _ in range(_STEPS if len(model) else 0):
            mixed = (1.0 - weight) * model + weight * cache
            shares = np.divide(weight * cache, mixed, out=np.zeros_like(mixed), where=mixed > 0.0)
            weight = float(shares.mean())
        weights.append(weight)
    return tuple(weights)


def main() -> int:
    """Reads the command line, and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pretrained", type=pathlib.Path, help="Folder of tff-dpftrl pretrain.")
    num_words, weights = fit(parser.parse_args().pretrained)
    print(f"{num_words} words; fitted / constant, by order of the longest n-gram:")
    for fitted, constant in zip(weights, text_cache.WEIGHTS, strict=True):
        print(f"{fitted:.3f} / {constant}")
    return int(np.abs(np.subtract(weights, text_cache.WEIGHTS)).max() > 0.01)


if __name__ == "__main__":
    sys.exit(main())
