"""What models report of their weights gives the gradient of all of them."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.models import transformer, weight_uses, word_lstm

_LSTM = word_lstm.WordLstm(vocabulary_size=11, sequence_length=5, embedding_size=3, state_size=4)
_MODELS = {
    "lstm": _LSTM,
    "tied embeddings, coupled gates": dataclasses.replace(
        _LSTM, tie_embeddings=True, couple_gates=True
    ),
    "transformer": transformer.Transformer(
        11, 5, embedding_size=4, num_layers=2, num_heads=2, feed_forward_size=5
    ),
}
_WORDS = np.array([[9, 1, 2, 3, 8], [9, 4, 10, 0, 0], [9, 7, 5, 0, 0]], np.int32)


def _gradient(use, gradients, order, shape):
    """The gradient of the weight of one use, from that of its outputs, in NumPy."""
    if isinstance(use, weight_uses.Product):
        inputs = use.inputs.numpy()
        return gradients.T @ inputs if use.transposed else inputs.T @ gradients
    if isinstance(use, weight_uses.Scale):
        return np.sum(use.inputs.numpy() * gradients, axis=0)
    if isinstance(use, weight_uses.Bias):
        return np.sum(gradients, axis=0)
    made = np.zeros(shape)
    if isinstance(use, weight_uses.Lookup):
        np.add.at(made, use.ids.numpy().ravel(), gradients)
    else:  # StepBias
        steps = np.tile(np.arange(5), 3)
        if order is weight_uses.Order.STEPS:
            steps = np.repeat(np.arange(5), 3)
        elif not isinstance(order, weight_uses.Order):
            steps = order.numpy() % 5
        np.add.at(made, steps, gradients)
    return made


@pytest.mark.parametrize("model", _MODELS.values(), ids=_MODELS)
def test_reported_uses_give_the_gradient_of_every_weight(model):
    assert model.reports_uses
    rng = np.random.default_rng(0)
    weights = [
        tf.constant(weight + 0.1 * rng.normal(size=weight.shape), tf.float32)
        for weight in model.initial_weights(0)
    ]
    recorded = []
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(weights)

        def record(outputs, *uses, order=weight_uses.Order.SEQUENCES):
            tape.watch(outputs)
            recorded.append((outputs, uses, order))
            return outputs

        scores, _ = model.compact_logits(weights, tf.constant(_WORDS), record)
        loss = tf.reduce_sum(tf.square(scores))
    exact = dict(zip(model.weight_shapes, tape.gradient(loss, weights), strict=True))
    found = {name: np.zeros(shape) for name, shape in model.weight_shapes.items()}
    for outputs, uses, order in recorded:
        gradients = tape.gradient(loss, outputs).numpy()
        for use in uses:
            found[use.name] += _gradient(use, gradients, order, model.weight_shapes[use.name])
    for name, gradient in exact.items():
        expected = tf.convert_to_tensor(gradient).numpy()
        scale = np.max(np.abs(expected))
        np.testing.assert_allclose(found[name], expected, atol=1e-4 * scale, err_msg=name)
