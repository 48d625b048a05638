"""Tests of tff_dpftrl.models.central_training."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.models import central_training, word_lstm

_MODEL = word_lstm.WordLstm(8, sequence_length=4, embedding_size=3, state_size=5)


def _cycles(num_sequences):
    """Words 1 to 5 in a cycle: what comes next is certain."""
    start = np.arange(num_sequences)[:, np.newaxis]
    return ((start + np.arange(5)) % 5 + 1).astype(np.int32)


def _train(**options):
    defaults = {"num_epochs": 2, "batch_size": 4, "learning_rate": 0.1, "seed": 0}
    weights = _MODEL.initial_weights(0)
    return list(central_training.epochs(_MODEL, weights, _cycles(10), **defaults | options))


def test_what_is_certain_is_learned():
    *_, last = _train(num_epochs=30)
    logits = _MODEL.logits(last.weights, tf.constant(_cycles(5)[:, :-1])).numpy()
    np.testing.assert_array_equal(logits.argmax(axis=-1)[:, 1:], _cycles(5)[:, 2:])


def test_the_first_step_is_that_of_adam():
    """Adam's first step is the learning rate times g / (|g| + ε / √(1 − β₂)).

    Keras adds its ε = 1e-7 before the bias correction.
    """
    rows, weights = _cycles(4), _MODEL.initial_weights(0)
    (epoch,) = central_training.epochs(
        _MODEL, weights, rows, num_epochs=1, batch_size=4, learning_rate=0.01, seed=0
    )
    variables = [tf.constant(weight) for weight in weights]
    with tf.GradientTape() as tape:
        tape.watch(variables)
        logits = _MODEL.logits(variables, tf.constant(rows[:, :-1]))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(rows[:, 1:], logits)
        loss = tf.reduce_mean(losses)
    np.testing.assert_allclose(epoch.loss, loss, rtol=1e-5)
    for before, after, gradient in zip(
        weights, epoch.weights, tape.gradient(loss, variables), strict=True
    ):
        gradient = tf.convert_to_tensor(gradient).numpy()
        large = np.abs(gradient) > 1e-3  # Rounding of the gradients is far below.
        expected = before - 0.01 * gradient / (np.abs(gradient) + 1e-7 / np.sqrt(1 - 0.999))
        np.testing.assert_allclose(after[large], expected[large], rtol=0, atol=2e-6)
        assert np.all(after[gradient == 0] == before[gradient == 0])


def test_the_learning_rate_falls_to_zero():
    """Steps of Adam are at most 3 learning rates or so: those of the last epoch are short."""
    epochs = _train(num_epochs=20)
    first, last = (
        max(np.abs(a - b).max() for a, b in zip(one.weights, other.weights, strict=True))
        for one, other in (epochs[:2], epochs[-2:])
    )
    assert last < 0.2 * first


@pytest.mark.slow
def test_the_seed_decides_the_order():
    one, again, other = (_train(seed=seed)[-1].weights for seed in (1, 1, 2))
    for a, b, c in zip(one, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)


def test_every_batch_is_told():
    losses = []
    epochs = _train(on_batch=losses.append)
    assert len(losses) == 2 * central_training.num_batches(10, 4) == 6
    np.testing.assert_allclose([np.mean(losses[:3]), np.mean(losses[3:])], [e.loss for e in epochs])
