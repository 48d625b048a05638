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
    """Returns a model as TFF's own builders take it; functional ones of this package change."""
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
    """Wraps a model; call it inside a TensorFlow computation."""
    if model_lib.is_functional(model_fn):
        return local_updates.FunctionalLocalModel(model_fn)
    return _VariableLocalModel(model_fn())


def build_initial_weights(model_fn: Model) -> tff_names.Computation:
    """Builds the computation that makes the initial `ModelWeights`."""
    is_functional = model_lib.is_functional(model_fn)
    if not is_functional and not callable(model_fn):
        raise validation.UsageError(
            "model_fn must be a function that makes a tff.learning.models.VariableModel, or a "
            f"functional model, got {model_fn!r}."
        )

    @tff_names.tensorflow_computation
    def initial_weights():
        if not is_functional:
            return tff.learning.models.ModelWeights.from_model(model_fn())
        tensors = (tuple(map(tf.convert_to_tensor, one)) for one in model_fn.initial_weights)
        return tff.learning.models.ModelWeights(*tensors)

    return initial_weights
