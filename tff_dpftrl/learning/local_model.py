"""Models in TFF's processes: of TFF, with variables, and functional ones, ours and TFF's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.execution import tff_names
from tff_dpftrl.learning import local_updates, optimizers
from tff_dpftrl.learning import model as model_lib

Model: TypeAlias = (
    Callable[[], tff.learning.models.VariableModel]
    | tff.learning.models.FunctionalModel
    | model_lib.Model
)
"""Model as our builders take it: a function that makes a model, or a functional model."""


def as_tff(
    model: Model,
) -> Callable[[], tff.learning.models.VariableModel] | tff.learning.models.FunctionalModel:
    """Returns a model as TFF's own builders take it.

    Args:
      model: Model of any kind.

    Returns:
      A model of this package as TFF's functional model; any other one as it is.
    """
    if not isinstance(model, model_lib.Model):
        return model
    metrics_fns = (
        model.initialize_metrics_state,
        model.update_metrics_state,
        model.finalize_metrics,
    )
    return tff.learning.models.FunctionalModel(
        initial_weights=model.initial_weights,
        predict_on_batch_fn=tf.function(model.predict_on_batch, autograph=False),
        loss_fn=tf.autograph.experimental.do_not_convert(model.loss),
        metrics_fns=tuple(tf.function(one, autograph=False) for one in metrics_fns),
        input_spec=model.input_spec,
    )


class _VariableLocalModel(local_updates.LocalModel):
    """Model whose weights and metrics live in its variables."""

    def __init__(self, model: tff.learning.models.VariableModel):
        self._model = model

    @override
    def load(self, weights):
        variables = tff.learning.models.ModelWeights.from_model(self._model)
        tf.nest.map_structure(lambda v, w: v.assign(w), variables, weights)
        return ()

    @override
    def gradients(self, trainable, metrics, batch):
        variables = tuple(self._model.trainable_variables)
        for variable, value in zip(variables, trainable, strict=True):
            variable.assign(value)
        with tf.GradientTape() as tape:
            output = self._model.forward_pass(batch, training=True)
        gradients = tape.gradient(output.loss, variables)
        return optimizers.dense_gradients(variables, gradients), metrics

    @override
    def unfinalized_metrics(self, metrics):
        del metrics  # They are in the model.
        return self._model.report_local_unfinalized_metrics()


def build_local_model(model_fn: Model) -> local_updates.LocalModel:
    """Wraps a model; call it inside a TensorFlow computation.

    Args:
      model_fn: Function that makes a `VariableModel`, or a functional model.

    Returns:
      The model at a client.
    """
    if model_lib.is_functional(model_fn):
        return local_updates.FunctionalLocalModel(model_fn)
    return _VariableLocalModel(model_fn())


def build_initial_weights(model_fn: Model) -> tff_names.Computation:
    """Builds the computation that makes the initial model weights.

    Args:
      model_fn: Function that makes a `VariableModel`, or a functional model.

    Returns:
      A computation without arguments that returns `ModelWeights`.

    Raises:
      ValueError: If `model_fn` is neither.
    """
    if model_lib.is_functional(model_fn):

        @tff_names.tensorflow_computation
        def initial_weights():
            trainable, non_trainable = model_fn.initial_weights
            return tff.learning.models.ModelWeights(
                tuple(tf.convert_to_tensor(w) for w in trainable),
                tuple(tf.convert_to_tensor(w) for w in non_trainable),
            )

        return initial_weights
    if not callable(model_fn):
        raise validation.UsageError(
            "model_fn must be a function that makes a tff.learning.models.VariableModel, or a "
            f"functional model, got {model_fn!r}."
        )

    @tff_names.tensorflow_computation
    def initial_weights_of_variables():
        return tff.learning.models.ModelWeights.from_model(model_fn())

    return initial_weights_of_variables


def input_and_metrics(
    model_fn: Model, metrics_aggregator: Callable[..., tff_names.Computation]
) -> tuple[tff_names.Type, tff_names.Computation]:
    """Returns the type of a client's data, and the aggregation of its metrics.

    Args:
      model_fn: Function that makes a `VariableModel`, or a functional model.
      metrics_aggregator: Function that builds the aggregation of the metrics, such as
        `tff.learning.metrics.sum_then_finalize`.

    Returns:
      The sequence type of the batches, and a computation from the clients'
      unfinalized metrics to metrics at the server.
    """
    if model_lib.is_functional(model_fn):
        input_spec, finalizers = model_fn.input_spec, model_fn.finalize_metrics
        unfinalized = tff_names.tensorflow_computation(model_fn.initialize_metrics_state)
        aggregation = metrics_aggregator(finalizers, unfinalized.type_signature.result)
    else:
        # The variables of this model are needed nowhere else.
        with tf.Graph().as_default():
            model = model_fn()
            input_spec = model.input_spec
            aggregation = metrics_aggregator(model.metric_finalizers())
    return tff_names.SequenceType(tff_names.tensorflow_to_type(input_spec)), aggregation
