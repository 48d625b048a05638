"""Tests of tff_dpftrl.models.held_out, against NumPy, one word at a time."""

import numpy as np
import pytest

from tff_dpftrl.models import evaluation, held_out, metrics, word_lstm

# Ids: padding 0, words 1 to 16, out of vocabulary 17, beginning 18, end 19.
_MODEL = word_lstm.WordLstm(20, sequence_length=4, embedding_size=3, state_size=5)
_SPECIAL = metrics.SpecialIds(oov=17, bos=18, eos=19)


def _weights(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s).astype(np.float32) for s in _MODEL.weight_shapes.values()]


def _sequences(count=23):
    rng = np.random.default_rng(1)
    rows = np.minimum(rng.integers(1, 18, [count, 5]), rng.integers(1, 25, [count, 5]))
    rows[:, 0] = 18
    for row in rows:
        length = rng.integers(1, 6)
        row[length:] = 0
        if 1 < length < 5:
            row[length] = 19
    return rows.astype(np.int32)


def _one_at_a_time(weights, sequences):
    """Row, target and scores of every word."""
    found = []
    scores = _MODEL.logits(weights, sequences[:, :-1]).numpy()
    for i, (row, of_row) in enumerate(zip(sequences, scores, strict=True)):
        found += [(i, t, s) for t, s in zip(row[1:], of_row, strict=True) if 1 <= t <= 17]
    return found


@pytest.mark.parametrize("top, batch_size", [(1, 64), (10, 5), (16, 1), (99, 23)])
def test_every_word_is_asked_for(top, batch_size):
    weights, sequences = _weights(), _sequences()
    visited = []

    def visit(rows, positions, shares):
        visited.append(shares)
        return shares

    found = held_out.predict_words(
        _MODEL, weights, _SPECIAL, sequences, top=top, batch_size=batch_size, mix=visit
    )
    expected = _one_at_a_time(weights, sequences)
    shares = [np.exp(s) / np.exp(s).sum() for _, _, s in expected]
    np.testing.assert_allclose(np.concatenate(visited), shares, rtol=1e-4)
    assert found.rows.tolist() == [i for i, _, _ in expected]
    assert found.targets.tolist() == [t for _, t, _ in expected]
    best = [t < 17 and sum(s[1:17] >= s[t]) == 1 for _, t, s in expected]
    assert found.is_best.tolist() == best and any(best) and not all(best)
    likeliest = [1 + np.argsort(-s[1:17], kind="stable")[:top] for _, _, s in expected]
    np.testing.assert_array_equal(found.likeliest, likeliest)


def test_accuracies_of_users_add_up_to_that_of_all():
    weights, sequences = _weights(), _sequences(60)
    users = np.arange(60) // 7  # Nine of them.
    sequences[7:14, 1:] = 0  # The second has no text.
    sequences[14:21, 1:] = 17  # The third has unknown words only.
    predictions = held_out.predict_words(_MODEL, weights, _SPECIAL, sequences)
    pooled = evaluation.Evaluator(_MODEL, _SPECIAL, sequences)(weights)
    every = _one_at_a_time(weights, sequences)
    words = [[(t, s) for i, t, s in every if users[i] == user] for user in range(9)]
    for name, count_oov in (("top1_oov_wrong", True), ("top1_in_vocab", False)):
        found = held_out.accuracy_by_user(predictions, users, _SPECIAL, count_oov=count_oov)
        right = [sum(t < 17 and sum(s[1:17] >= s[t]) == 1 for t, s in own) for own in words]
        total = [sum(t < 17 or count_oov for t, _ in own) for own in words]
        expected = [r / n for r, n in zip(right, total, strict=True) if n]
        assert len(found) == (8 if count_oov else 7)
        np.testing.assert_allclose(found, expected)
        assert sum(right) / sum(total) == pytest.approx(pooled[name], rel=1e-6)
        assert len(set(found)) > 2


def test_head_words_are_counted_as_in_table_3():
    weights, sequences = _weights(), _sequences(60)
    predictions = held_out.predict_words(_MODEL, weights, _SPECIAL, sequences, top=5)
    words = _one_at_a_time(weights, sequences)
    count = {word: sum(t == word for _, t, _ in words) for word in range(1, 17)}
    by_frequency = sorted(count, key=lambda word: (-count[word], word))
    sizes = (3, 8, 16)
    found = held_out.head_word_histogram(predictions, _SPECIAL, sizes)
    for row, size in zip(found, sizes, strict=True):
        expected = np.zeros(6)
        for _, _, scores in words:
            likeliest = sorted(range(1, 17), key=lambda word: (-scores[word], word))[:5]
            expected[len(set(likeliest) & set(by_frequency[:size]))] += 1 / len(words)
        np.testing.assert_allclose(row, expected, atol=1e-12)
    assert found[2].tolist() == [0, 0, 0, 0, 0, 1]  # All words are among the 16.
    assert np.count_nonzero(found[0]) > 2


def test_a_model_that_knows_frequencies_only_proposes_the_head():
    sequences = _sequences(60)
    weights = [np.zeros(shape, np.float32) for shape in _MODEL.weight_shapes.values()]
    counts = np.bincount(sequences[:, 1:].ravel(), minlength=20)
    weights[list(_MODEL.weight_shapes).index("output_bias")][:] = np.log(counts + 0.1)
    predictions = held_out.predict_words(_MODEL, weights, _SPECIAL, sequences, top=4)
    found = held_out.head_word_histogram(predictions, _SPECIAL, (4, 2))
    np.testing.assert_allclose(found, [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0]])


def test_sequences_without_words_give_nothing():
    sequences = np.array([[18, 19, 0, 0, 0]], np.int32)
    predictions = held_out.predict_words(_MODEL, _weights(), _SPECIAL, sequences)
    assert predictions.likeliest.shape == (0, 10)
    users = np.zeros(1, np.int64)
    assert not len(held_out.accuracy_by_user(predictions, users, _SPECIAL, count_oov=True))
    assert not held_out.head_word_histogram(predictions, _SPECIAL).any()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="top must be at least 1, got 0"):
        held_out.predict_words(_MODEL, _weights(), _SPECIAL, _sequences(), top=0)
    for bad in (_sequences()[:, :4], _sequences(0)):
        with pytest.raises(ValueError, match=r"must have shape \[n, 5\] with n at least 1, got"):
            held_out.predict_words(_MODEL, _weights(), _SPECIAL, bad)
