"""Local training of a language model, against SGD by itself."""

import math

import numpy as np
import pytest
import tensorflow as tf

from experiments import local_training
from tests.models import small_models
from tff_dpftrl.models import evaluation, metrics

_SPECIAL = metrics.SpecialIds(oov=8, bos=9, eos=10)
_ROWS = np.array(
    [[9, 1, 2, 3, 10], [9, 4, 8, 10, 0], [9, 5, 6, 7, 1], [9, 2, 10, 0, 0], [9, 3, 3, 3, 10]],
    np.int32,
)


def _problem(name="transformer"):
    model = small_models.build(name, vocabulary_size=11, sequence_length=4)
    weights = model.initial_weights(0)
    return model, weights, local_training.LocalTraining(model, weights, _SPECIAL)


def _loss(model, weights, rows):
    """Mean over all targets of the rows."""
    log_shares = tf.nn.log_softmax(model.logits(weights, rows[:, :-1]))
    targets = tf.one_hot(rows[:, 1:], model.vocabulary_size)
    is_target = tf.cast(rows[:, 1:] != 0, tf.float32)
    losses = -tf.reduce_sum(targets * log_shares, axis=2) * is_target
    return tf.reduce_sum(losses) / tf.reduce_sum(is_target)


def _sgd(model, weights, batches, learning_rate):
    weights = [tf.constant(weight) for weight in weights]
    for rows in batches:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = _loss(model, weights, rows)
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, weights))
        weights = [w - learning_rate * g for w, g in zip(weights, gradients, strict=True)]
    return weights


def _train(local, learning_rate, batch_size=2):
    options = {"num_epochs": 3, "batch_size": batch_size, "rng": np.random.default_rng(4)}
    local.train(_ROWS, learning_rate=learning_rate, **options)


@pytest.mark.parametrize("name", ["word-lstm", pytest.param("transformer", marks=pytest.mark.slow)])
def test_every_epoch_takes_all_rows_once_in_batches(name):
    model, weights, local = _problem(name)
    _train(local, 0.5)
    rng = np.random.default_rng(4)
    orders = [rng.permutation(5) for _ in range(3)]
    batches = [_ROWS[order[i : i + 2]] for order in orders for i in (0, 2, 4)]
    expected = evaluation.Evaluator(model, _SPECIAL, _ROWS)(_sgd(model, weights, batches, 0.5))
    found = local.measure(_ROWS)
    assert found.loss == pytest.approx(expected["loss"], rel=1e-5)
    assert found.top1 == pytest.approx(expected["top1_in_vocab"])
    assert found.loss < float(_loss(model, weights, _ROWS)) - 0.1


def test_a_rate_of_zero_changes_nothing():
    _, _, local = _problem()
    before = local.measure(_ROWS)
    _train(local, 0.0)
    assert local.measure(_ROWS) == before


def test_the_next_user_begins_anew():
    _, _, local = _problem()
    before = local.measure(_ROWS)
    _train(local, 0.5)
    first = local.measure(_ROWS)
    assert first != before
    local.restart()
    assert local.measure(_ROWS) == before
    _train(local, 0.5)
    assert local.measure(_ROWS) == first


def test_many_rows_are_measured_piece_by_piece(monkeypatch):
    model, weights, local = _problem()
    expected = evaluation.Evaluator(model, _SPECIAL, _ROWS)(weights)
    monkeypatch.setattr(local_training, "_ROWS_AT_ONCE", 2)
    found = local.measure(_ROWS)
    assert found.loss == pytest.approx(expected["loss"], rel=1e-6)
    assert found.top1 == pytest.approx(expected["top1_in_vocab"])


def test_of_unknown_words_there_is_no_accuracy():
    _, _, local = _problem()
    found = local.measure(np.array([[9, 8, 8, 10, 0]]))
    assert math.isnan(found.top1) and found.loss > 0
