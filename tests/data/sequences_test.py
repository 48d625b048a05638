"""Tests of tff_dpftrl.data.sequences."""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tff_dpftrl.data import sequences, user_text, vocabulary

_VOCABULARY = vocabulary.Vocabulary(("a", "b", "c"), "test")
_OOV, _BOS, _EOS = 4, 5, 6


def _corpus(spec=None, **users):
    corpus = user_text.UserText.from_mapping("m", users)
    return sequences.SequenceCorpus(corpus, _VOCABULARY, spec)


def test_texts_become_padded_rows():
    corpus = _corpus(sequences.SequenceSpec(4), u=["a b", "", " ", "C q"], v=[])
    expected = [[_BOS, 1, 2, _EOS, 0], [_BOS, 3, _OOV, _EOS, 0]]
    assert corpus.sequences("u").tolist() == expected
    assert corpus.sequences("u").dtype == np.int32
    assert corpus.sequences("v").shape == (0, 5)


def test_long_texts_continue_with_the_last_word():
    corpus = _corpus(sequences.SequenceSpec(3), u=["a b c a b", "a b c", "a b"], v=[])
    assert corpus.sequences("u").tolist() == [
        [_BOS, 1, 2, 3],
        [3, 1, 2, _EOS],
        [_BOS, 1, 2, 3],
        [_BOS, 1, 2, _EOS],
    ]


def test_long_texts_can_be_cut_off():
    corpus = _corpus(sequences.SequenceSpec(3, split_long_texts=False), u=["a b c a b"], v=[])
    assert corpus.sequences("u").tolist() == [[_BOS, 1, 2, 3]]


@hypothesis.given(
    st.lists(st.lists(st.sampled_from("abcq"), max_size=9), max_size=4), st.integers(1, 5)
)
def test_every_word_is_a_target_once(texts, length):
    corpus = _corpus(sequences.SequenceSpec(length), u=[" ".join(text) for text in texts], v=[])
    rows = corpus.sequences("u")
    targets = rows[:, 1:]
    words = [_VOCABULARY.id_of.get(word, _OOV) for text in texts for word in text]
    assert targets[(targets != 0) & (targets != _EOS)].tolist() == words
    for row in rows.tolist():
        filled = sum(1 for word in row if word)
        assert filled >= 2 and not any(row[filled:])
        assert row[0] == _BOS or row[0] <= _OOV


def test_rows_are_kept_and_cannot_be_changed():
    corpus = _corpus(u=["a"], v=[])
    assert corpus.sequences("u") is corpus.sequences("u")
    with pytest.raises(ValueError, match="read-only"):
        corpus.sequences("u")[0, 0] = 9


def _numbered(count):
    return _corpus(
        sequences.SequenceSpec(8), u=[" ".join("a" * (i + 1)) for i in range(count)], v=[]
    )


def test_samples_depend_on_seed_and_user_only():
    texts = [" ".join("abc"[i % 3] * (i % 7 + 1)) for i in range(50)]
    corpus, again = (_corpus(u=texts, v=texts) for _ in range(2))
    again.sequences("v")
    first = corpus.sample("u", max_sequences=20, seed=7)
    np.testing.assert_array_equal(first, again.sample("u", max_sequences=20, seed=7))
    assert (first != corpus.sample("u", max_sequences=20, seed=8)).any()
    assert (first != corpus.sample("v", max_sequences=20, seed=7)).any()


def test_a_sample_is_a_shuffle_without_repetition():
    corpus = _numbered(6)
    rows = corpus.sequences("u").tolist()
    for count, size in ((None, 6), (10, 6), (4, 4)):
        taken = corpus.sample("u", max_sequences=count, seed=1).tolist()
        assert len(taken) == size
        assert all(row in rows for row in taken)
        assert len(set(map(tuple, taken))) == size
    assert corpus.sample("u", max_sequences=None, seed=1).tolist() != rows


def test_epochs_repeat_the_same_rows_in_another_order():
    corpus = _numbered(7)
    taken = corpus.sample("u", max_sequences=5, num_epochs=3, seed=2).tolist()
    epochs = [taken[:5], taken[5:10], taken[10:]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1]


def test_a_sample_of_nothing_is_empty():
    assert _corpus(u=[], v=[]).sample("u", max_sequences=3, num_epochs=2, seed=0).shape == (0, 21)


def test_each_row_is_sampled_equally_often():
    corpus = _numbered(8)
    counts = np.zeros(9)
    for seed in range(2000):
        rows = corpus.sample("u", max_sequences=2, seed=seed)
        counts[np.count_nonzero(rows == 1, axis=1)] += 1
    # Binomial with n = 2,000 and p = 1/4: mean 500, six standard errors 117; a row
    # that is always or never first of the two differs by 250 or more.
    assert np.abs(counts[1:] - 500).max() < 117


def test_pooled_rows_of_all_users():
    corpus = _corpus(u=["a", "b"], v=["c"], w=[])
    assert corpus.pooled()[:, 1].tolist() == [1, 2, 3]
    assert corpus.pooled(["v", "u"])[:, 1].tolist() == [3, 1, 2]
    assert corpus.pooled(["w"]).shape == (0, 21)


def test_a_pooled_sample_is_fixed_and_limited():
    users = {f"u{i}": [" ".join("abc"[i % 3] * (j + 1)) for j in range(5)] for i in range(40)}
    corpus = _corpus(**users)
    sample = corpus.pooled(max_sequences=30, seed=3)
    assert len(sample) == 30
    np.testing.assert_array_equal(sample, _corpus(**users).pooled(max_sequences=30, seed=3))
    assert (sample != corpus.pooled(max_sequences=30, seed=4)).any()
    assert len(corpus.pooled(max_sequences=10_000)) == 200
    rows = set(map(tuple, corpus.pooled().tolist()))
    assert set(map(tuple, sample.tolist())) <= rows


@pytest.mark.parametrize("max_sequences", [None, 17, 500])
def test_pooled_rows_are_told_apart_by_user(max_sequences):
    users = {f"u{i}": [f"{'a ' * (i % 5 + j)}b c" for j in range(i % 3)] for i in range(30)}
    corpus = _corpus(**users)
    chosen = [f"u{i}" for i in (7, 2, 1, 9, 4, *range(10, 30))]
    rows, owners, places = corpus.pooled_with_users(chosen, max_sequences, seed=5)
    np.testing.assert_array_equal(rows, corpus.pooled(chosen, max_sequences, seed=5))
    assert len(rows) == len(owners) == min(max_sequences or 500, sum(len(users[u]) for u in chosen))
    for row, owner, place in zip(rows, owners, places, strict=True):
        assert row.tolist() == corpus.sequences(chosen[owner])[place].tolist()
    if max_sequences is None:
        expected = [i for i, user in enumerate(chosen) for _ in users[user]]
        assert owners.tolist() == expected


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="sequence_length must be at least 1, got 0"):
        sequences.SequenceSpec(0)
    corpus = _corpus(u=["a"], v=[])
    with pytest.raises(ValueError, match="max_sequences must be at least 1, got 0"):
        corpus.sample("u", max_sequences=0, seed=0)
    with pytest.raises(ValueError, match="num_epochs must be at least 1, got 0"):
        corpus.sample("u", max_sequences=1, num_epochs=0, seed=0)
    with pytest.raises(ValueError, match="'q' is not a user"):
        corpus.sequences("q")


def test_targets_per_character_counts_words_and_ends_over_the_text():
    texts = {"a": ["The cat sat", "  "], "b": ["the end of all of the texts"], "c": []}
    corpus = user_text.UserText.from_mapping("c", texts)
    words = vocabulary.Vocabulary(("the", "cat"), "test")
    encoded = sequences.SequenceCorpus(corpus, words, sequences.SequenceSpec(5))
    assert encoded.targets_per_character(["a"]) == 4 / 13  # Three words and the end.
    assert encoded.targets_per_character() == (4 + 8) / (13 + 27)
    assert math.isnan(encoded.targets_per_character(["c"]))
    # Texts that are cut off have all of their characters, and so all of their targets.
    cut = sequences.SequenceCorpus(corpus, words, sequences.SequenceSpec(2, split_long_texts=False))
    assert cut.targets_per_character() == (4 + 8) / (13 + 27)
