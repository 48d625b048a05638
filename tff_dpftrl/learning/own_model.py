"""Models of any kind as TFF's algorithms take them, and what they report."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.execution import leaves, tff_names
from tff_dpftrl.models import keras_versions

Model: TypeAlias = (
    "tff.learning.models.FunctionalModel | Callable[[], tff.learning.models.VariableModel]"
)
"""Model in a form that TFF's algorithms take."""


def read(
    model: Any, batch_spec: Any, *, loss: Any = None, metrics: Callable[[], Any] | None = None
) -> Model:
    """Converts a model of any kind to the form that TFF's algorithms take.

    Args:
      model: Functional model, function that makes a variable model, or Keras model.
      batch_spec: Structure of `tf.TensorSpec` of the batches that the model will get.
      loss: Loss of a Keras model; None for other models.
      metrics: Function that makes further metrics of a Keras model, by name; None for none.

    Returns:
      The model, as it is unless it is a Keras model.

    Raises:
      UsageError: If it is of no such kind, cannot be used, or takes other batches.
    """
    is_keras = isinstance(model, keras_versions.Model)
    if is_keras and not isinstance(loss, keras_versions.Loss):
        raise validation.UsageError(
            "loss must be a tf.keras.losses.Loss, such as "
            f"SparseCategoricalCrossentropy(from_logits=True), got {loss!r}."
        )
    if not is_keras and (loss is not None or metrics is not None):
        raise validation.UsageError(
            "loss and metrics are for a tf.keras.Model: a model of tff.learning has its own."
        )
    try:
        made = _from_keras(model, batch_spec, loss, metrics) if is_keras else model
        _try(made, batch_spec)
    except validation.UsageError:
        raise
    except Exception as error:  # Models may raise anything.
        raise validation.UsageError(
            f"model does not take the pipeline's batches {_shown(batch_spec)}: "
            f"{validation.one_line(error)}"
        ) from error
    return made


def num_parameters(model: Model, *, trained: bool = True) -> int:
    """Counts the trainable weights of a model, or those that are not."""
    if isinstance(model, tff.learning.models.FunctionalModel):
        weights = model.initial_weights[0 if trained else 1]
        shapes = [np.shape(weight) for weight in tf.nest.flatten(weights)]
    else:
        with tf.Graph().as_default():
            made = model()
            weights = made.trainable_variables if trained else made.non_trainable_variables
            shapes = [tuple(weight.shape) for weight in weights]
    return sum(int(np.prod(shape)) for shape in shapes)


def metrics(model: Model) -> tuple[Any, tff_names.Type]:
    """Returns the finalizers of a model's metrics, and the type of those that a client sends."""
    with tf.Graph().as_default():
        if isinstance(model, tff.learning.models.FunctionalModel):
            finalizers, state = model.finalize_metrics, model.initialize_metrics_state()
        else:
            made = model()
            finalizers, state = made.metric_finalizers(), made.report_local_unfinalized_metrics()
        specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), state)
    return finalizers, tff_names.tensorflow_to_type(specs)


def metric_specs(model: Model) -> dict[str, tf.TensorSpec]:
    """Returns the specs of the tensors that a client's metrics are made of, by their paths.

    Raises:
      UsageError: If metrics have no names.
    """
    _, structure = metrics(model)
    names = leaves.paths(structure)
    for path in names:
        if path.partition("/")[0].isdigit() or not path:
            raise validation.UsageError(
                "model has metrics without a name: let their state be an OrderedDict."
            )
    return dict(zip(names, leaves.specs(structure), strict=True))


def _from_keras(
    model: keras_versions.Model, batch_spec: Any, loss: Any, metrics: Callable[[], Any] | None
) -> tff.learning.models.FunctionalModel:
    # TFF would give the weights of a layer that is not trained to another layer of their shape.
    keras_versions.refuse_untrained(model)
    keras_versions.refuse_ignored(model)
    further = {} if metrics is None else metrics()
    if not isinstance(further, Mapping) or "loss" in further:
        raise validation.UsageError(
            "metrics must return a dictionary of Keras metrics by name, without 'loss', which is "
            f"always there; got {further!r}."
        )

    def make_metrics() -> collections.OrderedDict[str, Any]:
        mean = keras_versions.MeanMetric(loss.call, name="loss")
        return collections.OrderedDict(loss=mean, **(metrics() if metrics is not None else {}))

    return tff.learning.models.functional_model_from_keras(model, loss, batch_spec, make_metrics)


def _try(model: Any, batch_spec: Any) -> None:
    """Traces loss and metrics of a batch, so that what does not fit is known at once."""
    with tf.Graph().as_default():
        batch = tf.nest.map_structure(
            lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape), batch_spec
        )
        if isinstance(model, tff.learning.models.FunctionalModel):
            _check_batches(model.input_spec, batch_spec)
            x, y = (batch["x"], batch["y"]) if isinstance(batch, Mapping) else batch
            scores = model.predict_on_batch(model.initial_weights, x, training=True)
            output = tff.learning.models.BatchOutput(
                loss=model.loss(output=scores, label=y), predictions=scores, num_examples=1
            )
            model.update_metrics_state(model.initialize_metrics_state(), y, output)
            return
        made = model() if callable(model) else None
        if not isinstance(made, tff.learning.models.VariableModel):
            raise validation.UsageError(
                "model must be a tf.keras.Model, a tff.learning.models.FunctionalModel or a "
                "function that makes a tff.learning.models.VariableModel, got a "
                f"{type(model if made is None else made).__name__}."
            )
        _check_batches(made.input_spec, batch_spec)
        made.forward_pass(batch)


def _check_batches(wanted: Any, batch_spec: Any) -> None:
    """Refuses batches that a model does not take."""
    try:
        tf.nest.assert_same_structure(wanted, batch_spec)
        pairs = zip(tf.nest.flatten(wanted), tf.nest.flatten(batch_spec), strict=True)
        fits = all(one.is_compatible_with(other) for one, other in pairs)
    except (ValueError, TypeError):
        fits = False
    if not fits:
        raise validation.UsageError(
            f"model takes batches {_shown(wanted)}, and the pipeline makes {_shown(batch_spec)}."
        )


def _shown(spec: Any) -> str:
    """Writes the spec of a batch in one line."""
    short = tf.nest.map_structure(lambda s: f"{s.dtype.name}{list(s.shape)}", spec)
    return str(short).replace("'", "")
