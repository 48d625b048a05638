"""A Keras model, its loss and its metrics compute the same without variables, as in TFF."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.learning import keras_functional
from tff_dpftrl.learning import model as model_lib

_LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_SPEC = (tf.TensorSpec([None, 4], tf.int32), tf.TensorSpec([None], tf.int64))


def _keras(*further):
    return tf.keras.Sequential(
        [
            tf.keras.Input([4], dtype="int32"),
            tf.keras.layers.Embedding(7, 3),
            tf.keras.layers.Flatten(),
            *further,
            tf.keras.layers.Dense(6),
        ]
    )


class _Largest(tf.keras.metrics.Metric):
    """The largest score so far, and how often it was reached for."""

    def __init__(self):
        super().__init__(name="largest")
        self.score = self.add_weight(name="score", shape=(), initializer="zeros")
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.score.assign(tf.maximum(self.score, tf.reduce_max(y_pred)))
        self.calls.assign_add(1)

    def result(self):
        return {"score": self.score, "calls": self.calls}


def _metrics():
    return collections.OrderedDict(
        loss=tf.keras.metrics.MeanMetricWrapper(_LOSS.call, name="loss"),
        accuracy=tf.keras.metrics.SparseCategoricalAccuracy(),
        top_2=tf.keras.metrics.SparseTopKCategoricalAccuracy(2),
        areas=tf.keras.metrics.MeanIoU(6, sparse_y_pred=False),
        largest=_Largest(),
    )


def _batches(sizes=(3, 1, 4)):
    rng = np.random.default_rng(0)
    for size in sizes:
        yield (
            rng.integers(0, 7, [size, 4]).astype(np.int32),
            rng.integers(0, 6, size).astype(np.int64),
        )


def _train(model, weights, x, y, state):
    """Returns the loss of a batch, its gradients and the metrics' sums."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        scores = model.predict_on_batch((weights, ()), x, training=True)
        loss = model.loss(output=scores, label=y)
    output = model_lib.BatchOutput(loss, scores, len(y))
    state = model.update_metrics_state(state, labels=y, batch_output=output)
    return loss, tuple(map(tf.convert_to_tensor, tape.gradient(loss, weights))), state


def _found(model, sizes=(3, 1, 4)):
    """Losses and gradients of batches, sums of metrics and metrics."""
    weights = tuple(map(tf.constant, model.initial_weights[0]))
    state, steps = model.initialize_metrics_state(), []
    for x, y in _batches(sizes):
        *step, state = _train(model, weights, x, y, state)
        steps.append(step)
    return steps, state, model.finalize_metrics(state)


def _in_graph(model):
    """The same in a graph of TensorFlow 1, as TFF's own model needs it."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(_found(model, sizes=(4,)))


def test_losses_gradients_and_metrics_are_those_of_keras():
    keras, expected = _keras(), _metrics()
    steps, _, final = _found(keras_functional.build(keras, _SPEC, _LOSS, _metrics()))
    for (x, y), (loss, gradients) in zip(_batches(), steps, strict=True):
        with tf.GradientTape() as tape:
            scores = keras(x, training=True)
            wanted = _LOSS(y, scores)
        np.testing.assert_allclose(loss, wanted, rtol=1e-6)
        for one, other in zip(
            gradients, tape.gradient(wanted, keras.trainable_variables), strict=True
        ):
            np.testing.assert_allclose(one, tf.convert_to_tensor(other), rtol=1e-4, atol=1e-7)
        for metric in expected.values():
            metric.update_state(y, scores)
    assert list(final) == list(expected)
    for name, metric in expected.items():
        wanted = tf.nest.map_structure(np.asarray, metric.result())
        tf.nest.map_structure(
            functools.partial(np.testing.assert_allclose, rtol=1e-6), final[name], wanted
        )
    assert final["largest"]["calls"] == 3


def _all_equal(found, expected):
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
    dtypes = ([np.asarray(x).dtype for x in tf.nest.flatten(both)] for both in (found, expected))
    assert next(dtypes) == next(dtypes)


@pytest.mark.slow  # TFF clones the model in each graph.
def test_everything_is_that_of_tff_to_the_bit():
    tff = pytest.importorskip("tensorflow_federated", reason="is compared with TFF")
    keras = _keras()
    own = keras_functional.build(keras, _SPEC, _LOSS, _metrics())
    theirs = tff.learning.models.functional_model_from_keras(keras, _LOSS, _SPEC, _metrics)
    _all_equal(own.initial_weights[0], theirs.initial_weights[0])
    _all_equal(_in_graph(own), _in_graph(theirs))


def test_nothing_depends_on_the_objects_that_it_was_made_of():
    keras, own = _keras(), _metrics()
    model = keras_functional.build(keras, _SPEC, _LOSS, own)
    before = _found(model)
    x, y = next(_batches())
    for metric in own.values():
        assert not np.any(metric.variables[0].numpy())
        metric.update_state(y, keras(x))
    for variable in keras.trainable_variables:
        variable.assign(tf.ones(variable.shape))
    _all_equal(_found(model), before)


def test_dropout_draws_anew_in_training_only():
    layers = [tf.keras.layers.Reshape([4, 3]), tf.keras.layers.GRU(8), tf.keras.layers.Dropout(0.5)]
    model = keras_functional.build(_keras(*layers), _SPEC, _LOSS, {})
    x, _ = next(_batches())
    one, other = (model.predict_on_batch(model.initial_weights, x) for _ in range(2))
    assert np.any(one != other)
    _all_equal(*(model.predict_on_batch(model.initial_weights, x, False) for _ in range(2)))


def test_a_model_without_weights_gets_them_and_batches_may_have_names():
    keras = tf.keras.Sequential([tf.keras.layers.Dense(6)])
    spec = collections.OrderedDict(x=tf.TensorSpec([None, 2]), y=_SPEC[1])
    model = keras_functional.build(keras, spec, _LOSS, {})
    scores = model.predict_on_batch(model.initial_weights, np.ones([3, 2], np.float32))
    np.testing.assert_allclose(scores, keras(np.ones([3, 2], np.float32)), rtol=1e-6)
    assert model_lib.is_functional(model) and not model_lib.is_functional(keras)


class _Scaled(tf.keras.layers.Layer):
    """Multiplies by a number that is made before the graph is."""

    def __init__(self, number):
        super().__init__()
        self.read = lambda: number  # Keras would find a variable.

    def call(self, inputs):
        return inputs * self.read()


def test_numbers_of_the_caller_become_constants_and_variables_are_refused():
    model = keras_functional.build(_keras(_Scaled(tf.constant(2.0))), _SPEC, _LOSS, {})
    _in_graph(model)  # It would raise if it read a tensor from outside.
    hidden = tf.Variable(2.0, trainable=False)
    with pytest.raises(validation.UsageError, match="not one of its trainable weights"):
        keras_functional.build(_keras(_Scaled(hidden)), _SPEC, _LOSS, {})
