"""Models of any kind as rounds take them, and what they report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.execution import federated_round
from tff_dpftrl.learning import keras_functional
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.models import keras_versions

if TYPE_CHECKING:
    import tensorflow_federated as tff

Model: TypeAlias = Union["model_lib.Model", "Callable[[], tff.learning.models.VariableModel]"]
"""A functional model, also one of TFF, or a function that makes a model with variables of TFF."""


def read(
    model: Any, batch_spec: Any, *, loss: Any = None, metrics: Callable[[], Any] | None = None
) -> Model:
    """Converts a model of any kind to a form that rounds take.

    It may be a functional model, a function that makes a variable model, or a Keras model. Only a
    Keras model needs `loss`, and may have `metrics`, a function that makes further ones by name;
    others stay as they are. One that cannot be used, or takes other batches, is refused.
    """
    is_keras = isinstance(model, keras_versions.Model)
    if is_keras and not isinstance(loss, keras_versions.Loss):
        raise validation.UsageError(
            "loss must be a tf.keras.losses.Loss, such as "
            f"SparseCategoricalCrossentropy(from_logits=True), got {loss!r}."
        )
    if not is_keras and (loss is not None or metrics is not None):
        raise validation.UsageError(
            "loss and metrics are for a tf.keras.Model: a functional model, or one of TFF, has its "
            "own."
        )
    try:
        if is_keras:
            return _from_keras(model, batch_spec, loss, metrics)
        _try(model, batch_spec)
    except validation.UsageError:
        raise
    except Exception as error:  # Models may raise anything.
        raise validation.UsageError(
            f"model does not take the pipeline's batches {_shown(batch_spec)}: "
            f"{validation.one_line(error)}"
        ) from error
    return model


def num_parameters(model: Model, *, trained: bool = True) -> int:
    """Counts the trainable weights of a model, or those that are not."""
    if model_lib.is_functional(model):
        weights = model.initial_weights[0 if trained else 1]
        shapes = [np.shape(weight) for weight in tf.nest.flatten(weights)]
    else:
        with tf.Graph().as_default():
            made = model()
            weights = made.trainable_variables if trained else made.non_trainable_variables
            shapes = [tuple(weight.shape) for weight in weights]
    return sum(int(np.prod(shape)) for shape in shapes)


def metrics(model: Model) -> tuple[Any, Any]:
    """Returns the finalizers of a model's metrics, and the specs of those that a client sends."""
    with tf.Graph().as_default():
        if model_lib.is_functional(model):
            finalizers, state = model.finalize_metrics, model.initialize_metrics_state()
        else:
            made = model()
            finalizers, state = made.metric_finalizers(), made.report_local_unfinalized_metrics()
        specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), state)
    return finalizers, specs


def metric_specs(model: Model) -> dict[str, tf.TensorSpec]:
    """Returns the specs of the tensors that a client's metrics are made of, by their paths."""
    named = dict(_named(metrics(model)[1]))
    for path in named:
        if path.partition("/")[0].isdigit() or not path:
            raise validation.UsageError(
                "model has metrics without a name: let their state be an OrderedDict."
            )
    return named


def _named(structure: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields paths, such as "loss/0", and leaves of containers, in the order of their entries."""
    if hasattr(structure, "_asdict"):
        structure = structure._asdict()
    elif isinstance(structure, (list, tuple)):
        structure = dict(enumerate(structure))
    if not isinstance(structure, Mapping):
        yield path, structure
        return
    for name, value in structure.items():
        yield from _named(value, f"{path}/{name}" if path else str(name))


def _from_keras(
    model: keras_versions.Model, batch_spec: Any, loss: Any, metrics: Callable[[], Any] | None
) -> model_lib.Model:
    further = {} if metrics is None else metrics()
    if not isinstance(further, Mapping) or "loss" in further:
        raise validation.UsageError(
            "metrics must return a dictionary of Keras metrics by name, without 'loss', which is "
            f"always there; got {further!r}."
        )
    mean = keras_versions.MeanMetric(loss.call, name="loss")
    return keras_functional.build(model, batch_spec, loss, {"loss": mean, **further})


def _try(model: Any, batch_spec: Any) -> None:
    """Traces loss and metrics of a batch, so that what does not fit is known at once."""
    with tf.Graph().as_default():
        batch = tf.nest.map_structure(
            lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape), batch_spec
        )
        if model_lib.is_functional(model):
            _check_batches(model.input_spec, batch_spec)
            x, y = model_lib.x_and_y(batch)
            scores = model.predict_on_batch(model.initial_weights, x, training=True)
            loss = model.loss(output=scores, label=y)
            output = model_lib.BatchOutput(loss, scores, model_lib.num_examples(batch))
            state = model.initialize_metrics_state()
            model.update_metrics_state(state, batch_output=output, labels=y)
            return
        made = model() if callable(model) else None
        if not hasattr(made, "forward_pass"):
            raise validation.UsageError(
                "model must be a tf.keras.Model, a functional model (learning.model.Model or "
                "tff.learning.models.FunctionalModel) or a function that makes a "
                "tff.learning.models.VariableModel, got a "
                f"{type(model if made is None else made).__name__}."
            )
        _check_batches(made.input_spec, batch_spec)
        made.forward_pass(batch)


def _check_batches(wanted: Any, batch_spec: Any) -> None:
    """Refuses batches that a model does not take."""
    if not federated_round.takes(wanted, batch_spec):
        raise validation.UsageError(
            f"model takes batches {_shown(wanted)}, and the pipeline makes {_shown(batch_spec)}."
        )


def _shown(spec: Any) -> str:
    """Writes the spec of a batch in one line."""
    short = tf.nest.map_structure(lambda s: f"{s.dtype.name}{list(s.shape)}", spec)
    return str(short).replace("'", "")
