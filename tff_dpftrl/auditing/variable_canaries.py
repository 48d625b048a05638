"""Canaries in a model with variables of TFF."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.auditing import directions as directions_lib
from tff_dpftrl.learning import model as model_lib


def wrap(
    model_fn: Callable[[], tff.learning.models.VariableModel],
    directions: directions_lib.Directions,
    gradient_norm: float,
    spec: Any,
) -> Callable[[], tff.learning.models.VariableModel]:
    """Wraps a function that makes a model, as `Canaries` says."""
    return lambda: _CanaryModel(model_fn(), directions, gradient_norm, spec)


class _CanaryModel(tff.learning.models.VariableModel):
    """A model with variables, whose loss on a canary's batch is linear."""

    def __init__(
        self,
        model: tff.learning.models.VariableModel,
        directions: directions_lib.Directions,
        gradient_norm: float,
        spec: Any,
    ):
        self._model = model
        self._directions = directions
        self._gradient_norm = gradient_norm
        self._spec = spec

    @property
    def trainable_variables(self) -> Sequence[tf.Variable]:
        return self._model.trainable_variables

    @property
    def non_trainable_variables(self) -> Sequence[tf.Variable]:
        return self._model.non_trainable_variables

    @property
    def local_variables(self) -> Sequence[tf.Variable]:
        return self._model.local_variables

    @property
    def input_spec(self):
        return self._spec

    @tf.function(autograph=False)
    def forward_pass(self, batch_input, training=True):
        x, y = model_lib.x_and_y(batch_input)
        canary = directions_lib.canary_of(x)
        batch = x[directions_lib.VALUES], y[directions_lib.VALUES]
        if isinstance(batch_input, Mapping):
            batch = collections.OrderedDict(zip("xy", batch, strict=True))

        def of_canary():
            along = [
                tf.reduce_sum(tf.cast(tensor, variable.dtype) * variable)
                for tensor, variable in zip(
                    self._directions.of(canary), self.trainable_variables, strict=True
                )
            ]
            loss = -self._gradient_norm * tf.add_n([tf.cast(one, tf.float32) for one in along])
            return loss, self._model.predict_on_batch(x[directions_lib.VALUES], training=False)

        def of_data():
            output = self._model.forward_pass(batch, training=training)
            return tf.cast(output.loss, tf.float32), output.predictions

        loss, predictions = tf.cond(canary >= 0, of_canary, of_data)
        return tff.learning.models.BatchOutput(
            loss=loss, predictions=predictions, num_examples=tf.shape(tf.nest.flatten(x)[0])[0]
        )

    @tf.function(autograph=False)
    def predict_on_batch(self, batch_input, training=True):
        return self._model.predict_on_batch(batch_input[directions_lib.VALUES], training=training)

    def report_local_unfinalized_metrics(self):
        return self._model.report_local_unfinalized_metrics()

    def metric_finalizers(self):
        return self._model.metric_finalizers()

    def reset_metrics(self):
        return self._model.reset_metrics()
