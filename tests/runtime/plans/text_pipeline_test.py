"""Texts become sequences inside of a plan as they do on a host."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.data import sequences, subword_learning, user_text, vocabulary
from tff_dpftrl.runtime.device import text_examples
from tff_dpftrl.runtime.plans import allowed_ops, text_pipeline

_WORDS = vocabulary.Vocabulary(("the", "a", "cat", "don't", "3.11", "über", "σοφός"), "a test")
_TEXTS = [
    "The cat",
    "",
    "  \n ",
    "Über a CAT don't 3.11 unknown, the!",
    "the " * 7 + "a",
    "ΣΟΦΌΣ İstanbul cat\0cat",
    "the cat a",
]
_LENGTH = 3


def _examples(texts):
    return [text_examples.encode({"tokens": [text]}) for text in texts]


def _rows(texts, *, seed=None, examples=None, words=_WORDS, **options):
    pipeline = text_pipeline.text_pipeline(words, _LENGTH, **({"batch_size": 3} | options))
    examples = _examples(texts) if examples is None else examples
    serialized = tf.constant(examples, tf.string, shape=[len(examples)])
    seed = None if seed is None else tf.constant(seed, tf.int64)
    batches = list(pipeline.batches(serialized, seed).as_numpy_iterator())
    for x, y in batches:
        assert x.dtype == y.dtype == np.int32
        np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    rows = [np.concatenate([x, y[:, -1:]], axis=1) for x, y in batches]
    return np.concatenate(rows).tolist() if rows else []


def _expected(texts, words=_WORDS, **options):
    corpus = user_text.UserText.from_mapping("test", {"one": texts}, **options)
    spec = sequences.SequenceSpec(_LENGTH)
    return sequences.SequenceCorpus(corpus, words, spec).sequences("one").tolist()


def test_sequences_are_those_of_the_host():
    expected = _expected(_TEXTS)
    assert len(expected) > len(_TEXTS)
    assert _rows(_TEXTS) == expected
    assert _rows(_TEXTS, is_tokenized=True) == _expected(_TEXTS, is_tokenized=True) != expected


def test_no_text_makes_no_batch():
    assert _rows([]) == _rows(["", " "]) == []
    assert _rows([], shuffle=True, seed=[1, 2], epochs=2) == []


def test_an_example_may_hold_several_texts_or_none():
    examples = [
        text_examples.encode({"tokens": ["the cat", "a"]}),
        text_examples.encode({"tokens": []}),
        text_examples.encode({"other": ["the"]}),
    ]
    assert _rows(None, examples=examples) == _expected(["the cat", "a"])


def test_some_of_the_sequences_are_used_in_every_pass():
    everything = sorted(_expected(_TEXTS))
    found = _rows(_TEXTS, max_rows=4, epochs=3, shuffle=True, seed=[5, 6])
    passes = [found[i : i + 4] for i in range(0, 12, 4)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
    assert passes[0] != passes[1]
    assert all(row in everything for row in passes[0])
    chosen = {str(sorted(_rows(_TEXTS, max_rows=4, shuffle=True, seed=[s, 0]))) for s in range(9)}
    assert len(chosen) > 2
    assert _rows(_TEXTS, max_rows=4) == _expected(_TEXTS)[:4]


@pytest.mark.parametrize("shuffle", [False, True])
def test_labels_say_what_was_written_before_each_sequence(shuffle):
    pipeline = text_pipeline.text_pipeline(
        _WORDS, _LENGTH, with_history=True, batch_size=3, shuffle=shuffle, max_rows=8
    )
    written = [["the cat", "a cat a cat a"], [], ["über"], [" "], ["the " * 7], ["a"]]
    newest_first = [text_examples.encode({"tokens": texts}) for texts in written[::-1]]
    seed = tf.constant([3, 4], tf.int64) if shuffle else None
    batches = list(pipeline.batches(tf.constant(newest_first), seed).as_numpy_iterator())
    expected = _expected([text for texts in written for text in texts])
    assert len(expected) == 8
    found = []
    for x, labels in batches:
        assert labels["history"].tolist() == expected
        rows = labels["history"][labels["places"]]
        np.testing.assert_array_equal(x, rows[:, :-1])
        found += labels["places"].tolist()
    assert sorted(found) == list(range(8)) and found != sorted(found)
    if not shuffle:  # The newest first, and a long text from its beginning.
        assert found == [7, 4, 5, 6, 3, 0, 1, 2]


def test_no_text_has_no_history():
    pipeline = text_pipeline.text_pipeline(_WORDS, _LENGTH, with_history=True, batch_size=3)
    for texts in ([], [" "]):
        examples = tf.constant(_examples(texts), tf.string, shape=[len(texts)])
        assert not list(pipeline.batches(examples))


@pytest.fixture(scope="module")
def sub_words():
    text = user_text.UserText.from_mapping("public", {"a": ["the cat and the caterpillar"] * 3})
    return subword_learning.learn(text, 60, kind="wordpiece", source="a test")


def test_sub_words_are_those_of_the_host(sub_words):
    found = _rows(_TEXTS, words=sub_words)
    assert found == _expected(_TEXTS, sub_words)
    assert sub_words.words[found[0][1] - 1] == "the"
    assert any(sub_words.oov in row for row in found)


def test_sub_words_without_operations_are_refused():
    text = user_text.UserText.from_mapping("public", {"a": ["the cat"]})
    words = subword_learning.learn(text, 300, kind="sentencepiece", source="a test")
    with pytest.raises(ValueError, match="must be of tokenizer 'words' or 'wordpiece' for devices"):
        text_pipeline.text_pipeline(words, _LENGTH, batch_size=3)


@pytest.mark.parametrize("of_sub_words", [False, True])
def test_devices_run_all_of_its_operations(of_sub_words, sub_words):
    pipeline = text_pipeline.text_pipeline(
        sub_words if of_sub_words else _WORDS,
        _LENGTH,
        batch_size=2,
        shuffle=True,
        max_rows=5,
        with_history=of_sub_words,
    )

    @tf.function(autograph=False)
    def count(examples, seed):
        return pipeline.batches(examples, seed).reduce(0, lambda total, batch: total + 1)

    specs = [tf.TensorSpec([None], tf.string), tf.TensorSpec([2], tf.int64)]
    graph_def = count.get_concrete_function(*specs).graph.as_graph_def()
    functions = {f.signature.name for f in graph_def.library.function}
    nodes = [*graph_def.node, *(n for f in graph_def.library.function for n in f.node_def)]
    assert {node.op for node in nodes} - functions - allowed_ops.allowed(1) == set()
    assert not {node.op for node in nodes} & allowed_ops.DRAWS_ANEW
