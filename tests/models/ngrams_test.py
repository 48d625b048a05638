"""Tests of tff_dpftrl.models.ngrams."""

import collections
import itertools
import pathlib

import numpy as np
import pytest

from tff_dpftrl.data import jsonl, sequences, split, tokenizer, user_text, vocabulary
from tff_dpftrl.models import metrics, ngrams

_SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"
_VOCABULARY = vocabulary.Vocabulary(tuple("abcdefgh"), "test")
_SPECIAL = metrics.SpecialIds(oov=9, bos=10, eos=11)


def _random_sequences(seed, count):
    rng = np.random.default_rng(seed)
    texts = ["".join(rng.choice(list("aabcdefghxy"), rng.integers(1, 9))) for _ in range(count)]
    corpus = user_text.UserText.from_mapping("m", {"u": [" ".join(text) for text in texts]})
    return sequences.SequenceCorpus(corpus, _VOCABULARY, sequences.SequenceSpec(6)).sequences("u")


def _by_hand(train, row, t, order):
    """Interpolated probabilities of one position, by dictionaries."""
    shares = np.zeros(12)
    for length in range(order):
        context = ([0, 0, 0, *row[:t]])[3 + t - length :][:length]
        found = collections.Counter(
            other[s]
            for other in train.tolist()
            for s in range(1, len(other))
            if 1 <= other[s] <= 8 and [0, 0, 0, *other[:s]][3 + s - length :] == context
        )
        if found:
            lower = len(found) if length else 0
            counts = np.array([found[i] for i in range(12)])
            shares = (counts + lower * shares) / (counts.sum() + lower)
    return shares


def test_probabilities_are_interpolated():
    train, test = _random_sequences(0, 60), _random_sequences(1, 4)
    model = ngrams.NgramModel(train, _SPECIAL, max_order=4)
    every = [(row, t) for row in test.tolist() for t in range(1, len(row))]
    positions = np.flatnonzero(test[:, 1:])  # Padding is no position that anybody asks for.
    assert 0 < len(positions) < len(every)
    orders = list(model.probabilities(test, positions))
    assert len(orders) == 4
    for order, found in enumerate(orders, start=1):
        assert found.dtype == np.float32
        expected = [_by_hand(train, *every[position], order) for position in positions]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("order", [0, 5])
def test_longer_n_grams_are_refused(order):
    with pytest.raises(ValueError, match=f"max_order must be at .*, got {order}"):
        ngrams.NgramModel(_random_sequences(0, 3), _SPECIAL, max_order=order)


def _brute_force(train, test, order):
    """Counts with dictionaries, one position at a time."""
    tables = [collections.defaultdict(collections.Counter) for _ in range(3)]

    def contexts(row, t):
        return (), (row[t - 1],), (row[t - 2] if t >= 2 else 0, row[t - 1])

    for row in train.tolist():
        for t in range(1, len(row)):
            if 1 <= row[t] <= 8:
                for table, context in zip(tables, contexts(row, t), strict=True):
                    table[context][row[t]] += 1
    correct = in_vocab = words = 0
    for row in test.tolist():
        for t in range(1, len(row)):
            in_vocab += 1 <= row[t] <= 8
            words += 1 <= row[t] <= 9
            for table, context in reversed(
                list(zip(tables, contexts(row, t), strict=True))[:order]
            ):
                if context in table:
                    best = min(table[context], key=lambda word: (-table[context][word], word))
                    correct += best == row[t]
                    break
    return ngrams.NgramAccuracy(correct / in_vocab, correct / words, in_vocab, words)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_agrees_with_counting_by_hand(order):
    train, test = _random_sequences(0, 60), _random_sequences(1, 60)
    model = ngrams.NgramModel(train, _SPECIAL)
    assert model.evaluate(test, order) == _brute_force(train, test, order)


def test_a_small_example():
    train = np.array([[10, 1, 2, 11, 0], [10, 1, 2, 11, 0], [10, 3, 2, 4, 11]])
    model = ngrams.NgramModel(train, _SPECIAL)
    test = np.array([[10, 1, 2, 4, 9]])
    # Unigram 2; bigrams BOS-1, 1-2, 2-4 (the end is never predicted), 4-nothing, so 2.
    assert model.predict(test, 1).tolist() == [[2, 2, 2, 2]]
    assert model.predict(test, 2).tolist() == [[1, 2, 4, 2]]
    # The trigram 1-2 has only been seen before an end, so the bigram decides.
    assert model.predict(test, 3).tolist() == [[1, 2, 4, 2]]
    assert model.evaluate(test, 3) == ngrams.NgramAccuracy(1.0, 0.75, 3, 4)


def test_bad_arguments_are_refused():
    model = ngrams.NgramModel(np.array([[10, 1]]), _SPECIAL)
    for order in (0, 4):
        with pytest.raises(ValueError, match=f"order must be 1, 2 or 3, got {order}"):
            model.predict(np.array([[10, 1]]), order)
    with pytest.raises(ValueError, match="at least one word of the vocabulary"):
        model.evaluate(np.array([[10, 9]]), 1)
    with pytest.raises(ValueError, match="at least one word of the vocabulary to count"):
        ngrams.NgramModel(np.array([[10, 9, 11, 0]]), _SPECIAL)


def _stream(corpus, words):
    """All texts as one row, with padding between them."""
    rule = tokenizer.Tokenizer()
    texts = ([words.bos, *words.ids(rule.words(text)), words.eos, 0] for text in corpus.texts())
    return np.array([[0, *itertools.chain.from_iterable(texts)]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "published"),
    [
        # ../shared/data/README.md: unigrams, bigrams, trigrams; stats.txt: targets.
        ("shakespeare_by_role", [0.084, 0.138, 0.150, 89_623]),
        ("ubuntu_irc_by_user", [0.048, 0.153, 0.196, 186_898]),
        ("commits_by_author", [0.049, 0.145, 0.181, 867_322]),
    ],
)
def test_published_baselines_are_met(name, published):
    path = _SHARED / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip("../shared/data is not there")
    parts = split.by_user(jsonl.read(path))
    words = vocabulary.of_training_users(parts.train, 10_000)
    special = metrics.SpecialIds(oov=words.oov, bos=words.bos, eos=words.eos)
    model = ngrams.NgramModel(_stream(parts.train, words), special)
    test = _stream(parts.test, words)
    found = [model.evaluate(test, order) for order in (1, 2, 3)]
    # Theirs counts without our marks of beginnings and ends, so not to the digit.
    assert found[0].num_in_vocab == pytest.approx(published[3], rel=2e-3)
    for accuracy, expected in zip(found, published[:3], strict=True):
        assert accuracy.top1_in_vocab == pytest.approx(expected, abs=6e-3)
