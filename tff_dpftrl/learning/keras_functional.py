"""A Keras model with its loss and metrics as a functional model.

All of it is traced at once, with Keras 2 or 3: afterwards it is a handful of graphs, whatever
happens to the objects that they were made of.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.models import custom_model, keras_model, keras_versions


def build(
    keras: keras_versions.Model,
    batch_spec: Any,
    loss: keras_versions.Loss,
    metrics: Mapping[str, Any],
) -> model_lib.Model:
    """Builds a functional model, in eager mode.

    The weights of the Keras model are the initial ones. Metrics go on from their present state; a
    metric's sums are a tuple, in the order of `metric.variables`. Weights that are not trained, or
    something else of Keras that training does not know, are refused.
    """
    x_spec, y_spec = model_lib.x_and_y(batch_spec)
    if not keras.built:
        keras(tf.nest.map_structure(lambda s: tf.zeros([n or 1 for n in s.shape], s.dtype), x_spec))
    keras_versions.refuse_untrained(keras)
    weights = tuple(variable.numpy() for variable in keras.trainable_variables)
    sums = collections.OrderedDict(
        (name, tuple(variable.numpy() for variable in metric.variables))
        for name, metric in metrics.items()
    )
    outputs = keras_model.as_function(keras)
    # The others are seeds of dropout in Keras 3. Keras 2 draws without them, anew in each run.
    seeds = list(map(keras_versions.tensorflow_variable, keras.non_trainable_variables))

    def draw():
        return tf.random.uniform(seeds[0].shape, maxval=2**31 - 1, dtype=seeds[0].dtype)

    def predict(weights, x, training):
        with keras_model.replaced(seeds, [draw] * len(seeds), may_change=True):
            return outputs(weights, x, training)

    def train(weights, x):
        return predict(weights, x, True)

    def evaluate(weights, x):
        return predict(weights, x, False)

    def loss_of(output, label):
        return loss(label, output)

    def update(sums, labels, predictions):
        updated = collections.OrderedDict()
        for name, metric in metrics.items():
            with _with_values(metric, sums[name]) as values:
                metric.update_state(y_true=labels, y_pred=predictions)
            updated[name] = tuple(values)
        return updated

    def finalize(sums):
        final = collections.OrderedDict()
        for name, metric in metrics.items():
            with _with_values(metric, sums[name]):
                final[name] = tf.nest.map_structure(tf.convert_to_tensor, metric.result())
        return final

    weights_spec, sums_spec = (tf.nest.map_structure(_spec, arrays) for arrays in (weights, sums))
    trained, output_spec = _traced(train, weights_spec, x_spec)
    evaluated, _ = _traced(evaluate, weights_spec, x_spec)
    traced_loss, _ = _traced(loss_of, output_spec, y_spec)
    updated, _ = _traced(update, sums_spec, y_spec, output_spec)
    finalized, _ = _traced(finalize, sums_spec)
    return model_lib.Model(
        initial_weights=(weights, ()),
        predict_on_batch=lambda w, x, training=True: (trained if training else evaluated)(w[0], x),
        loss=lambda output, label, sample_weight=None: traced_loss(output, label),
        input_spec=batch_spec,
        initialize_metrics_state=lambda: tf.nest.map_structure(tf.constant, sums),
        update_metrics_state=lambda state, labels, batch_output, sample_weight=None: updated(
            state, labels, batch_output.predictions
        ),
        finalize_metrics=lambda state: finalized(state),  # TFF takes no varargs.
    )


def _with_values(metric: Any, values: Any) -> Any:
    """Returns a scope in which a metric's variables have these values, and may change them."""
    variables = list(map(keras_versions.tensorflow_variable, metric.variables))
    return keras_model.replaced(variables, values, may_change=True)


def _spec(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _traced(function: Callable[..., Any], *specs: Any) -> tuple[Callable[..., Any], Any]:
    """Traces a function of structures; returns it, and the specs of what it returns."""
    wanted = tf.nest.flatten(specs)

    def of_tensors(*tensors):
        return function(*tf.nest.pack_sequence_as(specs, tensors))

    graph = custom_model.without_captures(tf.function(of_tensors).get_concrete_function(*wanted))

    def call(*arguments):
        tensors = zip(tf.nest.flatten(arguments), wanted, strict=True)
        return graph(*(tf.convert_to_tensor(tensor, spec.dtype) for tensor, spec in tensors))

    return call, tf.nest.map_structure(_spec, graph.structured_outputs)
