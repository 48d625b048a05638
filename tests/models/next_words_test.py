"""Tests of tff_dpftrl.models.next_words, against one text at a time in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.models import metrics, next_words, table, word_lstm

_MODEL = word_lstm.WordLstm(10, sequence_length=4, embedding_size=3, state_size=5)
_SPECIAL = metrics.SpecialIds(oov=7, bos=8, eos=9)
_TEXTS = [[1, 2], [], [3, 7, 4], [5, 1, 2, 3, 6], [7]]


def _weights(seed):
    # Biases and weights large enough for the scores to differ.
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s).astype(np.float32) for s in _MODEL.weight_shapes.values()]


def _probabilities(weights, text):
    """Probabilities of all ids after one text; those that never come are left out."""
    context = [8, *text][-4:]
    rows = np.zeros([1, 4], np.int32)
    rows[0, : len(context)] = context
    scores = _MODEL.logits(weights, rows).numpy()[0, len(context) - 1].astype(np.float64)
    odds = np.exp(scores)
    odds[[0, 8]] = 0.0
    return odds / odds.sum()


@pytest.mark.parametrize("top", [1, 3, 6, 50])
def test_agrees_with_one_text_at_a_time(top):
    weights = _weights(0)
    found = next_words.next_words(
        _MODEL, weights, tf.ragged.constant(_TEXTS, dtype=tf.int32), _SPECIAL, top
    )
    best = []
    for i, text in enumerate(_TEXTS):
        expected = _probabilities(weights, text)
        order = 1 + np.argsort(-expected[1:7])[:top]
        assert found.ids[i].numpy().tolist() == order.tolist()
        np.testing.assert_allclose(found.probabilities[i], expected[order], rtol=1e-4)
        np.testing.assert_allclose(found.unknown_word[i], expected[7], rtol=1e-4)
        np.testing.assert_allclose(found.end_of_text[i], expected[9], rtol=1e-4)
        best.append(order[0])
    assert len(set(best)) > 1  # The texts matter.


def test_what_never_comes_next_gets_nothing_whatever_its_score():
    bias = list(_MODEL.weight_shapes).index("output_bias")
    weights = _weights(1)
    plain, shouting = weights[bias].copy(), weights[bias].copy()
    shouting[[0, 8]] = 50.0  # Padding and the beginning of a text.
    found = []
    for weights[bias] in (plain, shouting):
        found.append(
            next_words.next_words(
                _MODEL, weights, tf.ragged.constant([[1]], dtype=tf.int32), _SPECIAL, 6
            )
        )
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    total = tf.reduce_sum(found[1].probabilities) + found[1].unknown_word + found[1].end_of_text
    assert float(total[0]) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("name", table.MODELS)
def test_what_stands_after_a_text_is_not_read(name):
    model = table.build(name, vocabulary_size=10, sequence_length=6)
    weights = model.initial_weights(3)
    texts = [[1, 2], [], [3, 7, 4], [5, 1, 2, 3, 6]]
    found = next_words.next_words(
        model, weights, tf.ragged.constant(texts, dtype=tf.int32), _SPECIAL, 6
    )
    for i, text in enumerate(texts):
        row = np.array([[8, *text, *([1, 9, 4, 2, 5][len(text) :])]], np.int32)  # All six ids.
        scores = model.logits(weights, row).numpy()[0, len(text)]
        scores[[0, 8]] = -np.inf
        expected = tf.nn.softmax(scores).numpy()
        order = found.ids[i].numpy()
        assert sorted(order) == [1, 2, 3, 4, 5, 6]
        np.testing.assert_allclose(found.probabilities[i], expected[order], rtol=1e-4)
        np.testing.assert_allclose(found.end_of_text[i], expected[9], rtol=1e-4)


def test_special_ids_among_the_words_are_left_out():
    special = metrics.SpecialIds(oov=None, bos=2, eos=2)
    scores = tf.constant([[9.0, 1.0, 8.0, 3.0, 2.0]])
    found = next_words.of_scores(scores, special, 10)
    assert found.ids.numpy().tolist() == [[3, 4, 1]]
    odds = np.exp([3.0, 2.0, 1.0, 8.0])
    np.testing.assert_allclose(found.probabilities[0], odds[:3] / odds.sum(), rtol=1e-5)
    np.testing.assert_allclose(found.end_of_text, [odds[3] / odds.sum()], rtol=1e-5)
    assert found.unknown_word.numpy().tolist() == [0.0]


def test_samples_have_the_probabilities_of_the_nucleus():
    special = metrics.SpecialIds(oov=5, bos=6, eos=7)
    rng = np.random.default_rng(0)
    shares = np.array([0.5, 0.1, 0.06, 0.3, 0.02, 0.2, 0.1, 0.02])  # Ids 0, 5 and 6 never come.
    rows = np.tile(np.log(shares), [20_000, 1])

    def found(**options):
        ids = next_words.sample(rows, special, rng, **options)
        return np.bincount(ids, minlength=8) / len(rows)

    def check(expected, **options):
        expected = np.array(expected) / np.sum(expected)
        error = np.sqrt(expected * (1 - expected) / len(rows))
        measured = found(**options)
        assert (np.abs(measured - expected) <= 6 * error).all(), (measured, expected)

    check([0, 0.1, 0.06, 0.3, 0.02, 0, 0, 0.02])
    check([0, 0.1**2, 0.06**2, 0.3**2, 0.02**2, 0, 0, 0.02**2], temperature=0.5)
    # Of 0.5 in all, 0.3 and 0.1 are 80 %; 0.06 more are 92 %.
    check([0, 0.1, 0, 0.3, 0, 0, 0, 0], top_p=0.79)
    check([0, 0.1, 0.06, 0.3, 0, 0, 0, 0], top_p=0.85)
    check([0, 0, 0, 1, 0, 0, 0, 0], top_p=1e-6)
    check([0, 0, 0, 1, 0, 0, 0, 0], temperature=0.0)
    without_unknown = metrics.SpecialIds(oov=None, bos=7, eos=7)
    ids = next_words.sample(rows, without_unknown, rng)
    assert set(ids.tolist()) == {1, 2, 3, 4, 5, 6, 7}
