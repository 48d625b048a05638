"""Tests of learned vocabularies of sub-words."""

import dataclasses
import unicodedata

import pytest
import tensorflow as tf

from tests.data import random_texts, shared_docstrings
from tff_dpftrl import validation
from tff_dpftrl.data import docstrings, subword_learning, subwords, tokenizer, user_text

pytest.importorskip("tokenizers")

standard_library = shared_docstrings.standard_library
_KINDS = ("wordpiece", "sentencepiece")


@pytest.fixture(scope="module")
def corpus(standard_library):
    return docstrings.read_standard_library(cache_dir=standard_library)


@pytest.fixture(scope="module", params=_KINDS)
def words(request, corpus):
    return subword_learning.learn(corpus, 1500, kind=request.param, source="docstrings")


def test_the_same_text_gives_the_same_vocabulary(corpus, words):
    again = subword_learning.learn(corpus, 1500, kind=words.kind, source="docstrings")
    assert again == words
    assert len(words.words) == 1500 and words.size == 1501
    assert (words.bos, words.eos) == (2, 3)


def test_texts_come_back(words):
    text = "the planned un-believability of federated learning"
    found = words.rule().words(text.title())
    assert len(found) < len(text) / 2
    expected = text if words.kind == "sentencepiece" else text.replace("-", " - ")
    assert words.text(words.ids(found)) == expected


@pytest.mark.parametrize("words", ["sentencepiece"], indirect=True)
def test_every_string_is_spelled_by_bytes(words):
    assert words.oov is None
    for text in random_texts.strings(2000):
        ids = words.ids(words.rule().words(text))
        assert words.text(ids) == unicodedata.normalize("NFC", text).lower().removeprefix(" ")
        assert words.bos not in ids and words.eos not in ids


@pytest.mark.parametrize(
    ("lower_case", "is_tokenized", "num_random"),
    [
        (False, True, 500),
        pytest.param(False, True, 3000, marks=pytest.mark.slow),
        pytest.param(True, False, 3000, marks=pytest.mark.slow),
    ],
)
def test_graphs_split_as_python_does(corpus, lower_case, is_tokenized, num_random):
    words = subword_learning.learn(
        corpus, 1500, kind="wordpiece", source="docstrings", lower_case=lower_case
    )
    rule = words.rule(is_tokenized)
    texts = [*random_texts.strings(num_random), *list(corpus.texts())[:100]]
    texts += ["", " ", "##ing", "a\0b", "[UNK] [BOS]", "[EOS]x [EOS]"]
    texts = [unicodedata.normalize("NFC", text) for text in texts]  # As a graph cannot.
    split = tf.function(rule.split, input_signature=[tf.TensorSpec([None], tf.string)])
    found = split(tf.constant([text.encode() for text in texts])).to_list()
    ids = []
    for text, tokens in zip(texts, found, strict=True):
        expected = rule.words(text)
        assert [token.decode() for token in tokens] == expected, text
        assert not {words.beginning, words.end}.intersection(expected), text
        ids += words.ids(expected)
    assert 0 < words.count(tf.constant(ids))[1]
    assert split(tf.constant([], tf.string)).to_list() == []


@pytest.mark.parametrize("kind", _KINDS)
def test_sentences_without_spaces_are_spelled(kind):
    """BERT has each Chinese character apart, and a word of more than 100 characters is unknown."""
    texts = [
        "我们在学习语言模型的隐私保护方法" * 13,
        "เราเรียนรู้แบบจำลองภาษาที่รักษาความเป็นส่วนตัว" * 5,
        "プライバシーを守りながら言語モデルを学習しています。",
        "".join(map(chr, range(0x4E00, 0x4F00))),  # More than the letters of other scripts.
        "a" * 201,
    ]
    # Of longer tokens the graph would be large.
    corpus = user_text.UserText.from_mapping("few", {"a": [" ".join("".join(texts))]})
    words = subword_learning.learn(corpus, 900, kind=kind, source="letters")
    found = [words.rule().words(text) for text in texts]
    for text, tokens in zip(texts, found, strict=True):
        assert words.oov not in words.ids(tokens)
        assert words.text(words.ids(tokens)).replace(" ", "") == text
    if kind == "wordpiece":
        graph = tf.function(words.rule().split)(tf.constant(texts)).to_list()
        assert [[token.decode() for token in tokens] for tokens in graph] == found
        assert words.rule().words("隐私") == ["隐", "私"]


def test_sub_words_of_an_earlier_version_keep_their_rule():
    corpus = user_text.UserText.from_mapping("one", {"a": ["隐 私 क \u093e a"]})
    words = subword_learning.learn(corpus, 30, kind="wordpiece", source="letters")
    old = dataclasses.replace(words, word_rule=tokenizer.NO_MARKS).rule()
    expected = ["[UNK]", "क", "\u093e", "[UNK]"]
    text = "隐私 का " + "a" * 101
    assert old.words(text) == expected
    (found,) = tf.function(old.split)(tf.constant([text])).to_list()
    assert [token.decode() for token in found] == expected


@pytest.mark.parametrize("words", ["wordpiece"], indirect=True)
def test_tensorflow_text_splits_words_the_same(corpus, words):
    """The library's own operation is another implementation of the same rule."""
    tensorflow_text = pytest.importorskip("tensorflow_text")
    peer = tensorflow_text.FastWordpieceTokenizer(
        list(words.words), unknown_token="[UNK]", no_pretokenization=True, token_out_type=tf.string
    )
    spoken = sorted({word for text in list(corpus.texts())[:200] for word in text.lower().split()})
    found = peer.tokenize(tf.constant(spoken)).to_list()
    rule = words.rule(is_tokenized=True)
    for word, tokens in zip(spoken, found, strict=True):
        assert [token.decode() for token in tokens] == rule.words(word), word


def test_bytes_cannot_be_in_a_graph(words):
    if words.kind == "wordpiece":
        assert words.rule().is_in_graphs
        return
    with pytest.raises(validation.UsageError, match=r"'sentencepiece' cannot be in a graph.*ids"):
        words.rule().split(tf.constant(["a"]))


@pytest.mark.parametrize("kind", _KINDS)
def test_bad_arguments_are_refused(kind: subwords.Kind):
    corpus = user_text.UserText.from_mapping("empty", {"a": [""]})
    with pytest.raises(validation.UsageError, match="must not be empty"):
        subword_learning.learn(corpus, 1000, kind=kind, source="nothing")
    corpus = user_text.UserText.from_mapping("small", {"a": ["some text"]})
    with pytest.raises(validation.UsageError, match=r"vocabulary_size must be more than"):
        subword_learning.learn(corpus, 10, kind=kind, source="little")
