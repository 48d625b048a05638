"""Tests of tff_dpftrl.models.lstm_layer, against TensorFlow's gradients of the plain form."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.models import embedding_lookup, lstm_layer

_STEPS, _BATCH, _SIZE = 4, 2, 3


def _plain_lstm(gate_inputs, recurrent_kernel, projection=None, *, couple_gates):
    """The layer as a textbook has it, one gate at a time."""
    size = gate_inputs.shape[2] // (3 if couple_gates else 4)
    batch, dtype = tf.shape(gate_inputs)[1], recurrent_kernel.dtype
    output, cell = (
        tf.zeros([batch, recurrent_kernel.shape[0]], dtype),
        tf.zeros([batch, size], dtype),
    )
    outputs = []
    for inputs in tf.unstack(gate_inputs):
        inputs += tf.matmul(output, recurrent_kernel)
        *forget, enter, leave, new = tf.split(inputs, 3 if couple_gates else 4, axis=1)
        enter = tf.sigmoid(enter)
        keep = 1.0 - enter if couple_gates else tf.sigmoid(forget[0])
        cell = keep * cell + enter * tf.tanh(new)
        output = tf.sigmoid(leave) * tf.tanh(cell)
        if projection is not None:
            output = tf.matmul(output, projection)
        outputs.append(output)
    return tf.stack(outputs)


def _arguments(
    couple_gates, projected, *, steps=_STEPS, batch=_BATCH, size=_SIZE, dtype=tf.float64, seed=0
):
    """Gate inputs, recurrent kernel, and a projection to another size if there is to be one."""
    rng = np.random.default_rng(seed)
    gates, output_size = (3 if couple_gates else 4) * size, size + 2 if projected else size
    shapes = [[output_size, gates], [size, output_size]][: 1 + projected]
    return [
        tf.constant(rng.normal(0, 2, [steps, batch, gates]), dtype),
        *(tf.constant(rng.normal(0, 1, shape), dtype) for shape in shapes),
    ]


_VARIANTS = pytest.mark.parametrize(
    "couple_gates, projected", list(itertools.product([False, True], repeat=2))
)
_TWO_VARIANTS = pytest.mark.parametrize(
    "couple_gates, projected",
    [
        pytest.param(False, False, marks=pytest.mark.slow),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)


def _states_and_gradients(layer, arguments, couple_gates):
    """States, and gradients of a function of them that weighs each differently."""
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        states = layer(*arguments, couple_gates=couple_gates)
        weights = tf.cast(tf.range(1, tf.size(states) + 1), states.dtype)
        total = tf.reduce_sum(tf.sin(tf.reshape(states, [-1]) * weights))
    return states, *tape.gradient(total, arguments)


@_VARIANTS
@pytest.mark.parametrize(
    "steps, batch, size", [(_STEPS, _BATCH, _SIZE), (1, 2, 3), (4, 0, 3), (3, 2, 16), (2, 1, 18)]
)
# In float32, sums that nearly cancel keep three digits, and machines differ in the others.
@pytest.mark.parametrize("dtype, margin", [(tf.float64, 1e-12), (tf.float32, 2e-3)])
def test_lstm_is_the_plain_form(couple_gates, projected, steps, batch, size, dtype, margin):
    arguments = _arguments(
        couple_gates, projected, steps=steps, batch=batch, size=size, dtype=dtype
    )
    found = _states_and_gradients(lstm_layer.lstm, arguments, couple_gates)
    expected = _states_and_gradients(_plain_lstm, arguments, couple_gates)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype == dtype and x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=margin, atol=margin)


@_TWO_VARIANTS
def test_lstm_has_the_gradient_of_finite_differences(couple_gates, projected):
    def function(*arguments):
        return tf.sin(3 * lstm_layer.lstm(*arguments, couple_gates=couple_gates))

    found, expected = tf.test.compute_gradient(
        function, _arguments(couple_gates, projected, steps=3, size=2), delta=1e-5
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-8)
        assert np.abs(x).max() > 0.1


@_VARIANTS
def test_later_gates_do_not_matter_to_earlier_states(couple_gates, projected):
    gate_inputs, *matrices = _arguments(couple_gates, projected)
    changed = tf.concat([gate_inputs[:2], -gate_inputs[2:]], axis=0)
    states = lstm_layer.lstm(gate_inputs, *matrices, couple_gates=couple_gates)
    others = lstm_layer.lstm(changed, *matrices, couple_gates=couple_gates)
    np.testing.assert_array_equal(states[:2], others[:2])
    assert np.abs(states[2:] - others[2:]).max() > 1e-3


@_TWO_VARIANTS
def test_lstm_and_lookup_can_be_vectorised(couple_gates, projected):
    arguments = [_arguments(couple_gates, projected, seed=seed) for seed in range(3)]
    stacked = tuple(tf.stack(values) for values in zip(*arguments, strict=True))
    ids = tf.constant([[0, 2, 0], [1, 2, 1], [2, 2, 2]])

    def gradients(arguments):
        *arguments, ids = arguments
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            states = lstm_layer.lstm(*arguments, couple_gates=couple_gates)
            looked_up = embedding_lookup.lookup(arguments[1], ids)
            total = tf.reduce_sum(tf.sin(states)) + tf.reduce_sum(looked_up**2)
        return tape.gradient(total, arguments)

    together = tf.vectorized_map(gradients, (*stacked, ids), fallback_to_while_loop=False)
    for index, alone in enumerate(arguments):
        for x, y in zip(together, gradients((*alone, ids[index])), strict=True):
            np.testing.assert_allclose(x[index], y, rtol=1e-12, atol=1e-12)
