"""Tests of tff_dpftrl.models.text_cache, against counts in dictionaries, one word at a time."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.models import metrics, text_cache

# Ids: padding 0, words 1 to 4, out of vocabulary 5, beginning 6, end 7.
_SPECIAL, _SIZE, _LENGTH = metrics.SpecialIds(oov=5, bos=6, eos=7), 8, 6
_WEIGHTS = (0.1, 0.2, 0.3, 0.4)


def _rows(seed, count):
    rng, rows = np.random.default_rng(seed), np.zeros([count, _LENGTH + 1], np.int32)
    for row in rows:
        words = rng.integers(1, 6, rng.integers(1, _LENGTH))
        row[: len(words) + 2] = [6, *words, 7]
    return rows


def _targets(rows):
    """Context of three words and target, of each position of rows."""
    for row in rows.tolist():
        padded = [0, 0, *row]
        for t in range(1, len(row)):
            yield tuple(padded[t - 1 : t + 2]), row[t]


def _by_hand(base, context, history, weights):
    """The mixture for one context after pairs of context and target."""
    cached, longest = np.zeros(_SIZE), 0
    for order in range(1, 5):
        last = 4 - order  # Of the context, words from here on count.
        found = collections.Counter(
            word for known, word in history if word not in (0, 6) and known[last:] == context[last:]
        )
        if found:
            shares = np.array([found[i] for i in range(_SIZE)], float)
            lower = len(found) if order > 1 else 0
            cached = (shares + lower * cached) / (shares.sum() + lower)
            longest = order
    weight = weights[longest - 1] if longest else 0.0
    return (1 - weight) * base + weight * cached, longest


def _base(seed, count):
    return np.random.default_rng(seed).dirichlet(np.ones(_SIZE), count).astype(np.float32)


def test_agrees_with_counting_by_hand():
    history, rows = _rows(0, 9), _rows(1, 12)
    after, targets = text_cache.contexts(tf.constant(rows))
    expected = list(_targets(rows))
    assert [tuple(context[::-1]) for context in after.numpy().tolist()] == [c for c, _ in expected]
    assert targets.numpy().tolist() == [word for _, word in expected]
    base, known = _base(2, len(expected)), list(_targets(history))
    found = text_cache.mix(base, after, tf.constant(history), _SPECIAL, weights=_WEIGHTS).numpy()
    by_hand = [
        _by_hand(one, context, known, _WEIGHTS)
        for one, (context, _) in zip(base, expected, strict=True)
    ]
    np.testing.assert_allclose(found, [mixed for mixed, _ in by_hand], rtol=1e-5)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-5)
    assert {longest for _, longest in by_hand} == {1, 2, 3, 4}


@pytest.mark.parametrize("history", [np.zeros([0, 0]), np.zeros([2, 7]), np.full([1, 1], 6)])
def test_nothing_is_mixed_in_where_nothing_was_written(history):
    base = _base(0, 3)
    after = tf.constant([[6, 0, 0], [1, 6, 0], [0, 0, 0]])
    found = text_cache.mix(base, after, tf.constant(history, tf.int32), _SPECIAL)
    np.testing.assert_array_equal(found, base)


def test_texts_become_rows_and_contexts():
    texts = tf.ragged.constant([[1, 2, 3], [], [4]], dtype=tf.int32)
    rows = text_cache.rows_of(texts, _SPECIAL)
    assert rows.numpy().tolist() == [[6, 1, 2, 3, 7, 0, 0, 6, 4, 7, 0, 0]]
    padded = tf.constant([[6, 1, 2, 3, 7], [6, 4, 7, 0, 0]])
    for special in (_SPECIAL, metrics.SpecialIds(oov=None, bos=6, eos=6)):
        after = text_cache.contexts(_rows(1, 5))[0]
        for known, other in zip(
            text_cache.lookup(_SIZE, after, rows, special),
            text_cache.lookup(_SIZE, after, padded, special),
            strict=True,
        ):
            np.testing.assert_array_equal(known, other)
    begun = tf.constant([[6, 1, 2, 3, 4], [6, 4, 0, 0, 0], [6, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    last = text_cache.last_context(begun).numpy().tolist()
    assert last == [[4, 3, 2], [4, 6, 0], [6, 0, 0], [0, 0, 0]]


def _judged(texts, rows_of_users):
    users, places = (np.array(part) for part in zip(*rows_of_users, strict=True))
    judge = text_cache.EarlierText(texts, users, places, _SPECIAL)
    rows, positions = (part.ravel() for part in np.indices([len(users), _LENGTH]))
    return judge.mix(rows, positions, _base(3, len(rows)))


def test_only_earlier_text_of_the_same_user_counts():
    texts = {4: _rows(4, 8), 9: _rows(5, 3)}
    judged = [(9, 1), (4, 0), (4, 5), (9, 2), (4, 6)]
    found = _judged(texts, judged)
    base, expected = _base(3, len(judged) * _LENGTH), []
    for user, place in judged:
        known = list(_targets(texts[user][:place]))
        for context, _ in _targets(texts[user][place : place + 1]):
            one = base[len(expected)]
            expected.append(_by_hand(one, context, known, text_cache.WEIGHTS)[0])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(found[_LENGTH : 2 * _LENGTH], base[_LENGTH : 2 * _LENGTH])


def test_later_words_and_other_users_change_nothing():
    texts, judged = {0: _rows(6, 6), 1: _rows(7, 6)}, [(0, 3)]
    found = _judged(texts, judged)
    changed = {0: texts[0].copy(), 1: _rows(8, 6)}
    changed[0][4:] = _rows(9, 2)
    np.testing.assert_array_equal(_judged(changed, judged), found)
    for position in range(_LENGTH):  # A target, and what comes after it, is not looked at.
        changed = {0: texts[0].copy(), 1: texts[1]}
        changed[0][3, position + 1 :] = 1
        again = _judged(changed, judged)
        np.testing.assert_array_equal(again[: position + 1], found[: position + 1])
    earlier = {0: texts[0].copy(), 1: texts[1]}
    earlier[0][2] = [6, 1, 1, 1, 1, 1, 7]
    assert (_judged(earlier, judged) != found).any()
