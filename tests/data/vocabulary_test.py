"""Tests of tff_dpftrl.data.vocabulary."""

from __future__ import annotations

import sys

import pytest
import tensorflow_federated as tff

from tff_dpftrl.data import jsonl, user_text, vocabulary


def _corpus():
    return user_text.UserText.from_mapping("m", {"u": ["b a a", "B c"], "v": ["a d"]})


def test_words_are_counted_and_ties_are_alphabetical():
    found = vocabulary.most_frequent(_corpus(), 10, is_public=True)
    assert found.words == ("a", "b", "c", "d")
    assert vocabulary.most_frequent(_corpus(), 2, is_public=True).words == ("a", "b")
    cased = vocabulary.most_frequent(_corpus(), 10, is_public=True, lower_case=False)
    assert cased.words == ("a", "B", "b", "c", "d")


def test_ids_are_those_of_tffs_stack_overflow():
    found = vocabulary.most_frequent(_corpus(), 3, is_public=True)
    baseline = tff.simulation.baselines.stackoverflow
    theirs = baseline.word_prediction_preprocessing.get_special_tokens(len(found.words))
    assert vocabulary.PAD == theirs.padding
    assert [found.oov] == theirs.out_of_vocab
    assert found.bos == theirs.beginning_of_sentence
    assert found.eos == theirs.end_of_sentence
    assert found.size == len(found.words) + theirs.get_number_of_special_tokens()
    assert found.ids(["c", "a", "d", ""]) == [3, 1, found.oov, found.oov]


def test_the_source_is_told():
    public = vocabulary.most_frequent(_corpus(), 3, is_public=True)
    assert public.is_public and public.source == "public corpus m"
    protected = vocabulary.most_frequent(_corpus(), 3, is_public=False)
    assert not protected.is_public and protected.source == "protected corpus m"


def test_a_tokenized_corpus_is_counted_as_it_is():
    corpus = user_text.UserText.from_mapping(
        "so", {"u": ["front-end <URL>"], "v": ["front-end"]}, is_tokenized=True
    )
    assert vocabulary.most_frequent(corpus, 5, is_public=True).words == ("front-end", "<url>")


def test_the_standard_library_makes_a_public_vocabulary(tmp_path):
    found = vocabulary.standard_library(1000, cache_dir=tmp_path)
    assert len(found.words) == 1000
    assert found.is_public and "standard library" in found.source
    assert {"the", "of", "return", "."} <= set(found.words[:30])


def test_word_lists(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("The 120\nof 90\n\nthe 3\nüber\n", encoding="utf-8")
    found = vocabulary.from_file(path)
    assert found.words == ("the", "of", "über")
    assert found.is_public and str(path) in found.source
    assert vocabulary.from_file(path, 2).words == ("the", "of")
    assert vocabulary.from_file(path, lower_case=False).words == ("The", "of", "the", "über")


def test_public_corpora(tmp_path):
    path = tmp_path / "public.jsonl.gz"
    jsonl.write(_corpus(), path)
    assert vocabulary.from_file(path, 2).words == ("a", "b")
    with pytest.raises(ValueError, match="size must be given"):
        vocabulary.from_file(path)


def test_bad_word_lists_are_named(tmp_path):
    with pytest.raises(ValueError, match="none.txt: the vocabulary cannot be read"):
        vocabulary.from_file(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="empty.txt: the vocabulary has no words"):
        vocabulary.from_file(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match="latin.txt: the vocabulary cannot be read"):
        vocabulary.from_file(tmp_path / "latin.txt")


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_must_be_positive(tmp_path, size):
    with pytest.raises(ValueError, match="size of the vocabulary must be at least 1"):
        vocabulary.most_frequent(_corpus(), size, is_public=True)
    with pytest.raises(ValueError, match="size of the vocabulary must be at least 1"):
        vocabulary.from_file(tmp_path / "words.txt", size)


def test_words_must_be_there_and_distinct():
    with pytest.raises(ValueError, match="must not be empty"):
        vocabulary.Vocabulary((), "nowhere", True)
    with pytest.raises(ValueError, match="must be distinct"):
        vocabulary.Vocabulary(("a", "a"), "twice", True)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
