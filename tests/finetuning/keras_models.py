"""Keras models of many kinds, whose gradients are clipped in one pass or one after the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

_layers = tf.keras.layers
_WORDS, _STEPS = 13, 5


class _Subclassed(tf.keras.Model):
    """A model of layers, by name, and a function of them and its inputs."""

    def __init__(self, function: Callable, **layers):
        super().__init__()
        self._function = function
        self._names = list(layers)
        for name, layer in layers.items():
            setattr(self, name, layer)

    def call(self, inputs):
        return self._function(inputs, *(getattr(self, name) for name in self._names))


def _sequential(*layers, shape=(4,), dtype=None):
    return tf.keras.Sequential([tf.keras.Input(shape, dtype=dtype), *layers])


def _of_steps(*layers):
    return _sequential(*layers, _layers.Flatten(), _layers.Dense(3), shape=(_STEPS, 4))


def _of_words(*layers):
    return _sequential(_layers.Embedding(_WORDS, 6), *layers, shape=(_STEPS,), dtype="int32")


def _masked():
    ids = tf.keras.Input([_STEPS], dtype="int32")
    words = _layers.Embedding(_WORDS, 6, mask_zero=True)(ids)
    return tf.keras.Model(ids, _layers.Dense(3)(_layers.LSTM(5)(words)))


def _tied():
    return _Subclassed(
        lambda ids, words, inner: tf.matmul(
            inner(words(ids)), tf.convert_to_tensor(words.embeddings), transpose_b=True
        ),
        words=_layers.Embedding(_WORDS, 6),
        inner=_layers.Dense(6, "tanh"),
    )


def _transformer():
    def call(ids, words, places, attention, first, inner, outer, last, scores):
        states = words(ids) + places(tf.range(tf.shape(ids)[1]))
        states = first(states + attention(states, states, use_causal_mask=True))
        states = last(states + outer(inner(states)))
        return scores(tf.reduce_mean(states, axis=1))

    return _Subclassed(
        call,
        words=_layers.Embedding(_WORDS, 6),
        places=_layers.Embedding(9, 6),
        attention=_layers.MultiHeadAttention(2, 3),
        first=_layers.LayerNormalization(),
        inner=_layers.Dense(7, "gelu"),
        outer=_layers.Dense(6),
        last=_layers.LayerNormalization(),
        scores=_layers.Dense(3),
    )


def _with_two_inputs():
    first, second = tf.keras.Input([4], name="a"), tf.keras.Input([4], name="b")
    shared = _layers.Dense(5, "tanh")
    joined = _layers.Concatenate()([shared(first), shared(second)])
    return tf.keras.Model([first, second], _layers.Dense(3)(joined))


def _einsum(equation, output_shape, bias_axes):
    return _layers.EinsumDense(equation, output_shape=output_shape, bias_axes=bias_axes)


def _twice(inputs, shared, last):
    return last(shared(shared(inputs)))


def _penalised(inputs, inner, last):
    outputs = last(inner(inputs))
    return outputs * tf.reduce_sum(tf.square(tf.convert_to_tensor(inner.kernel)))


def _by_hand(inputs, inner, last):
    """The tokens of all rows in one axis."""
    kernel, bias = map(tf.convert_to_tensor, (inner.kernel, inner.bias))
    flat = tf.reshape(inputs, [-1, 4])
    flat = tf.nn.relu(tf.matmul(flat, kernel) + bias)
    flat = tf.matmul(flat, kernel, transpose_b=False) + bias
    return last(tf.reshape(flat, [-1, _STEPS * 4]))


def _built(function, **layers):
    """Layers whose weights are read without calling them."""
    model = _Subclassed(function, **layers)
    model.inner.build([None, 4])
    return model


def _steps_first(inputs, inner, last):
    flat = tf.reshape(tf.transpose(inputs, [1, 0, 2]), [-1, 4])
    flat = tf.matmul(flat, tf.convert_to_tensor(inner.kernel))
    flat = tf.transpose(tf.reshape(flat, [_STEPS, -1, 4]), [1, 0, 2])
    return last(tf.reshape(flat, [-1, _STEPS * 4]))


def _last_first(inputs, inner, last):
    return last(tf.reverse(inner(tf.reverse(inputs, [0])), [0]))


ONE_PASS = {
    "dense": lambda: _sequential(_layers.Dense(8, "relu"), _layers.Dense(3, use_bias=False)),
    # So wide that tokens are compared instead of gradients formed.
    "dense-wide": lambda: _sequential(_layers.Dense(40, "relu"), _layers.Dense(30), shape=(50,)),
    "dense-steps": lambda: _of_steps(_layers.Dense(8, "relu"), _layers.Dense(8, use_bias=False)),
    "layer-norms": lambda: _of_steps(
        _layers.Dense(8), _layers.LayerNormalization(), _layers.LayerNormalization(axis=[1, 2])
    ),
    "einsum": lambda: _of_steps(
        _einsum("abc,cde->abde", (_STEPS, 2, 3), "de"),
        _einsum("abde,def->abf", (_STEPS, 4), "f"),
        _einsum("abx,xy->aby", (_STEPS, 6), "y"),
        _einsum("abc,bd->acd", (6, 4), "cd"),
    ),
    "time-distributed": lambda: _of_steps(_layers.TimeDistributed(_layers.Dense(5))),
    "nested": lambda: _sequential(_sequential(_layers.Dense(4, "relu")), _layers.Dense(3)),
    "lstm": lambda: _of_steps(_layers.LSTM(5, return_sequences=True), _layers.LSTM(4)),
    "lstm-wide": lambda: _of_words(_layers.LSTM(40), _layers.Dense(3)),
    "lstm-both-ways": lambda: _of_words(_layers.Bidirectional(_layers.LSTM(5)), _layers.Dense(3)),
    "masked": _masked,
    "gru": lambda: _of_words(_layers.GRU(5), _layers.Dense(3)),
    "transformer": _transformer,
    "tied": _tied,
    "two-inputs": _with_two_inputs,
    "twice": lambda: _Subclassed(_twice, shared=_layers.Dense(4, "swish"), last=_layers.Dense(3)),
    "by-hand": lambda: _built(_by_hand, inner=_layers.Dense(4), last=_layers.Dense(3)),
}
"""Makers of models whose uses of weights are all known."""

if hasattr(_layers, "RMSNormalization"):
    ONE_PASS["rms-norm"] = lambda: _of_steps(_layers.Dense(8), _layers.RMSNormalization())

ONE_BY_ONE = {
    "convolution": lambda: _of_steps(_layers.Conv1D(3, 2)),
    "penalty-in-call": lambda: _Subclassed(
        _penalised, inner=_layers.Dense(4, "tanh"), last=_layers.Dense(3)
    ),
    "steps-first": lambda: _built(
        _steps_first, inner=_layers.Dense(4, use_bias=False), last=_layers.Dense(3)
    ),
    "product-by-row": lambda: _of_steps(_einsum("abc,cbd->abd", (_STEPS, 4), None)),
    "part-of-a-kernel": lambda: (
        _of_steps(_layers.LSTM(4, implementation=1))
        if "implementation" in _layers.LSTM(1).get_config()
        else _of_steps(_layers.Conv1D(3, 1))
    ),
}
"""Makers of models with a use of a weight that is not known, or of which it cannot be told whose
gradients are whose."""


def in_another_order() -> tf.keras.Model:
    """Makes a model that has the rows in the opposite order on the way, which no shape shows."""
    return _Subclassed(_last_first, inner=_layers.Dense(8, "tanh"), last=_layers.Dense(3))


_OF_WORDS = ("lstm-wide", "lstm-both-ways", "masked", "gru", "transformer", "tied")
_OF_VECTORS = ("dense", "nested", "twice", "penalty-in-call", "in-another-order")


def rows(model: tf.keras.Model, name: str, num_rows: int):
    """Returns inputs and targets of a few rows for a model, and builds it with them."""
    rng = np.random.default_rng(0)
    if name in _OF_WORDS:
        inputs = rng.integers(1, 5, [num_rows, _STEPS]).astype(np.int32)
        if name == "masked":
            inputs[np.arange(_STEPS) >= rng.integers(1, _STEPS, [num_rows, 1])] = 0
    elif name == "two-inputs":
        inputs = list(rng.normal(size=[2, num_rows, 4]).astype(np.float32))
    else:
        shape = [4] if name in _OF_VECTORS else [50] if name == "dense-wide" else [_STEPS, 4]
        inputs = rng.normal(size=[num_rows, *shape]).astype(np.float32)
    outputs = model(tf.nest.map_structure(lambda x: x[:1], inputs))
    targets = rng.integers(0, outputs.shape[-1], [num_rows, *outputs.shape[1:-1]])
    return tf.nest.map_structure(tf.constant, (inputs, targets.astype(np.int32)))
