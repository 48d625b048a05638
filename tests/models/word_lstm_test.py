"""Tests of tff_dpftrl.models.word_lstm, against Keras layers."""

import dataclasses
import functools
import itertools
import operator

import numpy as np
import pytest
import tensorflow as tf

from tests.models import keras_peer
from tff_dpftrl.models import word_lstm

_SMALL = word_lstm.WordLstm(vocabulary_size=11, sequence_length=5, embedding_size=3, state_size=4)
_CHOICES = ("tie_embeddings", "couple_gates", "unit_norm_embeddings", "recurrent_projection")
_VARIANTS = [  # By default, a half that has every three choices in all ways.
    pytest.param(
        dataclasses.replace(_SMALL, **dict(zip(_CHOICES, chosen, strict=True))),
        marks=[pytest.mark.slow] if sum(chosen) % 2 else [],
    )
    for chosen in itertools.product([True, False], repeat=len(_CHOICES))
]
_WORDS = np.array([[9, 1, 2, 3, 8], [9, 4, 10, 0, 0], [9, 7, 0, 0, 0]], np.int32)


class _Cell(tf.keras.layers.Layer):
    """An LSTM's cell, a dense layer a gate."""

    def __init__(self, model):
        super().__init__(dtype=tf.float64)
        gates = (
            ["enter", "leave", "new"] if model.couple_gates else ["keep", "enter", "leave", "new"]
        )
        dense = functools.partial(tf.keras.layers.Dense, dtype=tf.float64)
        self.of_input = {gate: dense(model.state_size) for gate in gates}
        self.of_output = {gate: dense(model.state_size, use_bias=False) for gate in gates}
        self.projection = None
        self.output_size = model.state_size
        if model.recurrent_projection:
            self.output_size = model.embedding_size
            self.projection = dense(model.embedding_size, use_bias=False)
        self.state_size = [self.output_size, model.state_size]

    def call(self, inputs, states):
        output, cell = states
        sums = {
            gate: layer(inputs) + self.of_output[gate](output)
            for gate, layer in self.of_input.items()
        }
        enter = tf.sigmoid(sums["enter"])
        keep = tf.sigmoid(sums["keep"]) if "keep" in sums else 1 - enter
        cell = keep * cell + enter * tf.tanh(sums["new"])
        output = tf.sigmoid(sums["leave"]) * tf.tanh(cell)
        if self.projection is not None:
            output = self.projection(output)
        return output, [output, cell]


def _columns(name, *gates):
    """The weights of some gates in the order of the model."""

    def of_weights(named):
        parts = np.split(named[name], len(named["gate_bias"]) // _SMALL.state_size, axis=-1)
        return np.concatenate([parts[gate] for gate in gates], axis=-1)

    return of_weights


def _peer(model):
    """Keras' own LSTM, or its RNN with the cell above where Keras has none."""
    embeddings = {
        name: tf.Variable(tf.zeros(shape, tf.float64), name=name)
        for name, shape in model.weight_shapes.items()
        if name.endswith("embedding")
    }
    bias = tf.Variable(tf.zeros(model.vocabulary_size, tf.float64), name="output_bias")
    normalise = tf.identity
    if model.unit_norm_embeddings:
        normalise = tf.keras.layers.UnitNormalization(axis=1, dtype=tf.float64)
    own_cell = model.couple_gates or model.recurrent_projection
    if own_cell:
        lstm = tf.keras.layers.RNN(_Cell(model), return_sequences=True, dtype=tf.float64)
    else:
        lstm = tf.keras.layers.LSTM(model.state_size, return_sequences=True, dtype=tf.float64)
    project = tf.identity
    if not model.recurrent_projection:
        project = tf.keras.layers.Dense(model.embedding_size, use_bias=False, dtype=tf.float64)

    def logits(words):
        outputs = project(lstm(tf.gather(normalise(embeddings["embedding"]), words)))
        scored = embeddings.get("output_embedding", embeddings["embedding"])
        return tf.matmul(outputs, normalise(scored), transpose_b=True) + bias

    logits(_WORDS)  # Makes the layers' variables.
    kernels = (lstm.cell.projection if model.recurrent_projection else project).trainable_variables
    variables = [(v, operator.itemgetter(name)) for name, v in embeddings.items()]
    variables += [(bias, operator.itemgetter("output_bias"))]
    variables += [(kernels[0], operator.itemgetter("projection"))]
    if not own_cell:
        names = ("input_kernel", "recurrent_kernel", "gate_bias")
        order = (1, 0, 3, 2)  # Keras has input, forget, new, output.
        lstm_variables = lstm.trainable_variables
        pairs = zip(lstm_variables, names, strict=True)
        return keras_peer.Peer(logits, variables + [(v, _columns(n, *order)) for v, n in pairs])
    for index, gate in enumerate(lstm.cell.of_input):
        of_input, of_output = lstm.cell.of_input[gate], lstm.cell.of_output[gate]
        variables += [
            (of_input.kernel, _columns("input_kernel", index)),
            (of_input.bias, _columns("gate_bias", index)),
            (of_output.kernel, _columns("recurrent_kernel", index)),
        ]
    return keras_peer.Peer(logits, variables)


@pytest.mark.parametrize("model", _VARIANTS)
def test_scores_and_gradients_are_those_of_keras_layers(model):
    keras_peer.assert_same(model, _peer(model), _WORDS)


def test_a_recurrent_projection_makes_the_recurrent_kernel_smaller():
    projected = dataclasses.replace(_SMALL, recurrent_projection=True)
    assert projected.weight_shapes["recurrent_kernel"] == (3, 16)
    assert _SMALL.weight_shapes["recurrent_kernel"] == (4, 16)
    assert _SMALL.num_parameters - projected.num_parameters == 16


def test_coupled_gates_save_a_quarter():
    coupled = dataclasses.replace(_SMALL, couple_gates=True)
    for name in ("input_kernel", "recurrent_kernel", "gate_bias"):
        assert coupled.weight_shapes[name][-1] * 4 == _SMALL.weight_shapes[name][-1] * 3


def test_initial_weights_are_the_same_everywhere():
    # Golden value: Philox is the same on every platform and in every NumPy since 1.17.
    assert word_lstm.WordLstm(3, embedding_size=4).initial_weights(0)[0][0, 0] == pytest.approx(
        np.random.Generator(np.random.Philox(0)).standard_normal() / 2, rel=1e-6
    )


def test_initial_weights_have_the_stated_scales():
    model = word_lstm.WordLstm(2000, embedding_size=50, state_size=80)
    named = dict(zip(model.weight_shapes, model.initial_weights(0), strict=True))
    for name, inputs in (
        *(("embedding", 50), ("input_kernel", 50)),
        *(("recurrent_kernel", 80), ("projection", 80)),
    ):
        weight = named[name]
        # The standard error of a standard deviation of n Gaussians is 1/√(2n) of it.
        margin = 6 / np.sqrt(2 * weight.size)
        assert weight.std() * np.sqrt(inputs) == pytest.approx(1, abs=margin)
    assert named["gate_bias"][:80].tolist() == [1] * 80
    assert not named["gate_bias"][80:].any() and not named["output_bias"].any()


@pytest.mark.parametrize(
    "field", ["vocabulary_size", "sequence_length", "embedding_size", "state_size"]
)
def test_bad_sizes_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        dataclasses.replace(_SMALL, **{field: 0})
