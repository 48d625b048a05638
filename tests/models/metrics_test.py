"""Tests of tff_dpftrl.models.metrics, against counting one target at a time."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.models import metrics

# Ids: padding 0, words 1 to 6, out of vocabulary 7, beginning 8, end 9.
_SPECIAL = metrics.SpecialIds(oov=7, bos=8, eos=9)
_SIZE = 10


def _by_hand(logits, targets):
    losses, word_losses, ranks, words = [], [], [], 0
    for scores, target in zip(np.float64(logits), targets, strict=True):
        if target in (0, 8):
            continue
        loss = math.log(sum(math.exp(s) for s in scores)) - scores[target]
        losses.append(loss)
        if target == 9:
            continue
        words += 1
        word_losses.append(loss)
        if target != 7:
            ranks.append(sum(s >= scores[target] for s in scores[1:7]))
    expected = {
        "loss": sum(losses) / len(losses),
        "perplexity": math.exp(sum(word_losses) / len(word_losses)),
        "num_targets": len(losses),
        "num_words": words,
        "num_in_vocab": len(ranks),
    }
    for k in (1, 3, 5):
        expected[f"top{k}_in_vocab"] = sum(rank <= k for rank in ranks) / len(ranks)
        expected[f"top{k}_oov_wrong"] = sum(rank <= k for rank in ranks) / words
    return expected


def _finalized(counts):
    return {name: value.numpy() for name, value in metrics.finalize(counts).items()}


def test_agrees_with_counting_by_hand():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, [500, _SIZE]).astype(np.float32)
    targets = rng.integers(0, _SIZE, 500).astype(np.int32)
    logits[np.arange(500), targets] += 3
    found = _finalized(metrics.count(logits, targets, _SPECIAL))
    expected = _by_hand(logits, targets)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def test_batches_add_up():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=[60, _SIZE]).astype(np.float32)
    targets = rng.integers(0, _SIZE, 60).astype(np.int32)
    counts = metrics.zero_counts()
    for start in range(0, 60, 7):
        part = slice(start, start + 7)
        counts = metrics.add(counts, metrics.count(logits[part], targets[part], _SPECIAL))
    whole = metrics.count(logits, targets, _SPECIAL)
    assert list(counts) == list(whole) == list(metrics.zero_counts())
    for name in counts:
        assert counts[name].dtype == whole[name].dtype
        assert float(counts[name]) == pytest.approx(float(whole[name]), rel=1e-6)


def test_a_word_out_of_the_vocabulary_is_never_right():
    logits = np.zeros([2, _SIZE], np.float32)
    logits[:, 7] = 9.0
    found = _finalized(metrics.count(logits, np.array([7, 1]), _SPECIAL))
    assert found["top1_oov_wrong"] == found["top1_in_vocab"] == 0
    assert (found["num_words"], found["num_in_vocab"]) == (2, 1)


def test_words_are_ranked_among_words():
    logits = np.zeros([2, _SIZE], np.float32)
    logits[:, [0, 7, 8, 9]], logits[:, 1], logits[:, 2] = 9.0, 5.0, 6.0
    found = _finalized(metrics.count(logits, np.array([1, 2]), _SPECIAL))
    assert (found["top1_in_vocab"], found["top3_in_vocab"]) == (0.5, 1)


def test_ties_count_against_the_model():
    counts = metrics.count(np.zeros([4, _SIZE], np.float32), np.array([1, 2, 3, 4]), _SPECIAL)
    found = _finalized(counts)
    assert found["top1_in_vocab"] == found["top5_in_vocab"] == 0
    assert found["loss"] == pytest.approx(math.log(_SIZE))
    assert found["perplexity"] == pytest.approx(_SIZE)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_wrong(bad):
    logits = np.full([1, _SIZE], bad, np.float32)
    found = _finalized(metrics.count(logits, np.array([1]), _SPECIAL))
    assert found["top1_in_vocab"] == found["top5_in_vocab"] == 0
    assert found["num_in_vocab"] == 1


def test_padding_does_not_count_even_with_bad_scores():
    logits = np.zeros([3, _SIZE], np.float32)
    logits[0] = np.nan
    logits[2, 1] = 1.0
    found = _finalized(metrics.count(logits, np.array([0, 8, 1]), _SPECIAL))
    assert found["num_targets"] == 1
    assert found["top1_in_vocab"] == 1
    assert np.isfinite(found["loss"])


def test_nothing_counted_gives_zeros():
    found = _finalized(metrics.zero_counts())
    assert found.pop("perplexity") == 1
    assert not any(found.values())


def test_cross_entropy_agrees_with_tensorflow():
    rng = np.random.default_rng(2)
    logits = tf.constant(rng.normal(0, 10, [40, _SIZE]), tf.float32)
    targets = tf.constant(rng.integers(0, _SIZE, 40), tf.int32)
    gradients, losses = [], []
    for function in (
        metrics.cross_entropy,
        lambda x, y: tf.nn.sparse_softmax_cross_entropy_with_logits(y, x),
    ):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            losses.append(function(logits, targets))
            total = tf.reduce_sum(losses[-1])
        gradients.append(tape.gradient(total, logits))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-6)


@pytest.mark.parametrize("integer", [tf.int32, tf.int64])
def test_cross_entropy_has_the_gradient_of_finite_differences(integer):
    rng = np.random.default_rng(3)
    logits = tf.constant(rng.normal(0, 2, [4, _SIZE]))
    targets = tf.constant([3, 3, 0, 9], integer)

    def function(logits):
        return tf.sin(metrics.cross_entropy(logits, targets))

    (found,), (expected,) = tf.test.compute_gradient(function, [logits], delta=1e-5)
    np.testing.assert_allclose(found, expected, atol=1e-8)


def test_cross_entropy_of_extreme_scores():
    rows = [[1000.0, 0.0], [-1000.0, 0.0], [-np.inf, 0.0], [0.0, -np.inf], [np.inf, 0.0]]
    logits = tf.constant(rows)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        losses = metrics.cross_entropy(logits, tf.zeros([5], tf.int32))
    np.testing.assert_array_equal(losses, [0, 1000, np.inf, 0, np.nan])
    gradients = tape.gradient(losses, logits)
    np.testing.assert_array_equal(gradients[:4], [[0, 0], [-1, 1], [-1, 1], [0, 0]])


def test_cross_entropy_of_nothing_has_a_gradient():
    logits = tf.zeros([0, _SIZE])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        losses = metrics.cross_entropy(logits, tf.zeros([0], tf.int32))
    assert losses.shape == [0]
    assert tape.gradient(losses, logits).shape == [0, _SIZE]


def test_cross_entropy_can_be_vectorised():
    rng = np.random.default_rng(4)
    logits = tf.constant(rng.normal(0, 3, [2, 6, _SIZE]), tf.float32)
    targets = tf.constant(rng.integers(0, _SIZE, [2, 6]), tf.int32)

    def losses_and_gradient(arguments):
        logits, targets = arguments
        with tf.GradientTape() as tape:
            tape.watch(logits)
            losses = metrics.cross_entropy(logits, targets)
        return losses, tape.gradient(losses, logits)

    found = tf.vectorized_map(losses_and_gradient, (logits, targets), fallback_to_while_loop=False)
    for index in range(2):
        expected = losses_and_gradient((logits[index], targets[index]))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x[index], y, rtol=1e-6, atol=1e-6)


def test_values_are_compared_in_legacy_graphs():
    logits = np.eye(_SIZE, dtype=np.float32)
    targets = np.arange(_SIZE, dtype=np.int32)
    expected = {name: float(v) for name, v in metrics.count(logits, targets, _SPECIAL).items()}
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        found = session.run(metrics.count(tf.constant(logits), tf.constant(targets), _SPECIAL))
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected)


def test_special_ids_may_be_among_the_words():
    """Sub-words have their special tokens anywhere: the metrics do not depend on the places."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, [300, _SIZE]).astype(np.float32)
    targets = rng.integers(0, _SIZE, 300).astype(np.int32)
    place = np.array([0, 1, 4, 6, 7, 8, 9, 2, 5, 3])  # New ids, by old ones.
    moved = np.empty_like(logits)
    moved[:, place] = logits
    special = metrics.SpecialIds(oov=2, bos=5, eos=3)
    expected = _finalized(metrics.count(logits, targets, _SPECIAL))
    found = _finalized(metrics.count(moved, place[targets].astype(np.int32), special))
    assert found == pytest.approx(expected, rel=1e-6)


def test_one_token_may_begin_and_end_a_text():
    special = metrics.SpecialIds(oov=None, bos=3, eos=3)
    logits = np.array([[0, 5, 0, 0], [9, 0, 5, 9], [0, 0, 0, 5]], np.float32)
    found = _finalized(metrics.count(logits, np.array([1, 2, 3], np.int32), special))
    assert (found["num_targets"], found["num_words"], found["num_in_vocab"]) == (3, 2, 2)
    assert found["top1_in_vocab"] == found["top1_oov_wrong"] == 1.0
