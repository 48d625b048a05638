"""Canaries: clients with a chosen update, for any learning process, through its model.

    canaries = Canaries(model, number=200)
    process = tff.learning.algorithms.build_unweighted_fed_avg(
        canaries.model, client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1)
    )
    cohort = [canaries.real(dataset) for dataset in datasets] + [canaries.client(3)]

`canaries.model` takes one more integer with every example: the number of a canary, or −1 for
real data. For real data it is the model, bit for bit. For a canary's batch its gradient is
−`gradient_norm` · direction, whatever the weights are. A client that takes one step of SGD then
moves along its direction, far beyond any clip norm: clipping makes of it clip norm · direction.
The same holds for a client with momentum, with several epochs, or with Adam: all entries of a
direction have one size, and Adam's steps keep equal sizes equal. Metrics count no canary.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.auditing import directions as directions_lib

_VALUES = "values"
_CANARY = "canary"


class Canaries:
    """Canaries for one model.

    Attributes:
      model: Wrapped model: give it to the builder of the learning process.
      directions: Directions of the canaries, secret until training is over.
      number: Number of canaries.
    """

    def __init__(
        self,
        model: tff.learning.models.FunctionalModel | Callable[[], Any],
        *,
        number: int,
        gradient_norm: float = 1e6,
        examples: int = 1,
        seed: int | None = None,
    ):
        """Wraps a model.

        Args:
          model: A `tff.learning.models.FunctionalModel`, or a function that makes a
            `tff.learning.models.VariableModel`.
          number: Number of canaries; at most a twentieth of the trainable weights.
          gradient_norm: Norm of a canary's gradient. Times the client's learning rate it
            has to be far above the clip norm, and below 1.8e19: larger updates count as zero.
            Make it smaller if updates that are too large are dropped.
          examples: Rows of a canary's batch, where clients are weighted by their number.
          seed: Seed of the directions, an integer in [0, 2^128); drawn from the operating
            system if None.

        Raises:
          ValueError: If an argument is out of range or the model's examples cannot be made
            up: they must be dense tensors.
        """
        self.gradient_norm = validation.positive("gradient_norm", gradient_norm)
        self._examples = validation.integer("examples", examples, minimum=1)
        if isinstance(model, tff.learning.models.FunctionalModel):
            trainable, _ = model.initial_weights
            shapes = [np.shape(weight) for weight in tf.nest.flatten(trainable)]
            wrap, input_spec = _functional, model.input_spec
        elif callable(model):
            with tf.Graph().as_default():
                made = model()
                shapes = [variable.shape.as_list() for variable in made.trainable_variables]
                input_spec = made.input_spec
            wrap = _model_fn
        else:
            raise validation.UsageError(
                "model must be a tff.learning.models.FunctionalModel or a function that makes a "
                f"VariableModel, got {model!r}."
            )
        self.directions = directions_lib.Directions(shapes, number=number, seed=seed)
        self.number = self.directions.number
        self._spec = _with_canary(input_spec, tf.TensorSpec([None], tf.int32))
        self._example = tf.nest.map_structure(self._made_up, input_spec)
        self._mark = tf.function(_mark, autograph=False)  # Traced once, not for each dataset.
        self.model = wrap(model, self.directions, self.gradient_norm, self._spec)

    def _made_up(self, spec: tf.TensorSpec) -> tf.Tensor:
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank in (None, 0):
            raise validation.UsageError(
                f"model has {spec!r} in its input_spec: canaries can only make up examples of "
                "dense tensors whose first axis is the batch."
            )
        sizes = [self._examples, *(size or 1 for size in spec.shape.as_list()[1:])]
        return tf.zeros(sizes, spec.dtype)

    def real(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a real client's dataset for the wrapped model.

        Args:
          dataset: Batches for the model that was wrapped.

        Returns:
          The same batches, marked as real data.
        """
        return dataset.map(self._mark)

    def client(self, canary: int, sign: int = 1) -> tf.data.Dataset:
        """Returns the dataset of a canary: one batch.

        Args:
          canary: Number of the canary, 0 ... number - 1.
          sign: 1 to move the model along its direction, -1 for the opposite one.

        Returns:
          The dataset of a client of a round.

        Raises:
          ValueError: If there is no such canary, or sign.
        """
        canary = validation.integer("canary", canary, minimum=0)
        if canary >= self.number:
            raise validation.UsageError(
                f"canary={canary} does not exist: there are {self.number}, from 0."
            )
        if sign not in (1, -1):
            raise validation.UsageError(f"sign must be 1 or -1, got {sign!r}.")
        canary += 0 if sign == 1 else self.number
        batch = _with_canary(self._example, tf.fill([self._examples], canary))
        return tf.data.Dataset.from_tensors(batch)

    def weights(self, model_weights: Any) -> list[np.ndarray]:
        """Copies the trainable weights of `process.get_model_weights(state)`."""
        return [np.array(weight) for weight in tf.nest.flatten(model_weights.trainable)]


def _with_canary(batch: Any, canary: Any) -> Any:
    """Returns a batch with the canary's number beside x and beside y."""

    def both(values):
        return collections.OrderedDict([(_VALUES, values), (_CANARY, canary)])

    if isinstance(batch, Mapping):
        return collections.OrderedDict([("x", both(batch["x"])), ("y", both(batch["y"]))])
    x, y = batch
    return both(x), both(y)


def _mark(*batch: Any) -> Any:
    """Marks a batch as real data."""
    batch = batch[0] if len(batch) == 1 else batch
    rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    return _with_canary(batch, tf.fill([rows], directions_lib.REAL))


def _canary_of(rows: Mapping[str, Any]) -> tf.Tensor:
    """Returns a batch's canary for `Directions.of`; −1 for real data or without rows."""
    return tf.reduce_max(tf.concat([rows[_CANARY], [directions_lib.REAL]], 0))


def _functional(
    model: tff.learning.models.FunctionalModel,
    directions: directions_lib.Directions,
    gradient_norm: float,
    spec: Any,
) -> tff.learning.models.FunctionalModel:
    @tf.function(autograph=False)
    def predict_on_batch(model_weights, x, training):
        trainable, others = model_weights
        attached = directions.attach(tf.nest.flatten(trainable), _canary_of(x), gradient_norm)
        weights = tf.nest.pack_sequence_as(trainable, attached), others
        return model.predict_on_batch(weights, x[_VALUES], training)

    @tf.autograph.experimental.do_not_convert
    def loss(output, label, sample_weight=None):
        return model.loss(output, label[_VALUES], sample_weight)

    @tf.function(autograph=False)
    def update_metrics(state, labels, batch_output, sample_weight=None):
        # Without `tf.cond`, the parts that loss and metrics share are computed once.
        updated = model.update_metrics_state(state, labels[_VALUES], batch_output, sample_weight)
        counts = _canary_of(labels) < 0
        return tf.nest.map_structure(lambda old, new: tf.where(counts, new, old), state, updated)

    return tff.learning.models.FunctionalModel(
        initial_weights=model.initial_weights,
        predict_on_batch_fn=predict_on_batch,
        loss_fn=loss,
        metrics_fns=(
            tf.function(model.initialize_metrics_state, autograph=False),
            update_metrics,
            tf.function(model.finalize_metrics, autograph=False),
        ),
        input_spec=spec,
    )


def _model_fn(
    model_fn: Callable[[], tff.learning.models.VariableModel],
    directions: directions_lib.Directions,
    gradient_norm: float,
    spec: Any,
) -> Callable[[], tff.learning.models.VariableModel]:
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
        is_mapping = isinstance(batch_input, Mapping)
        x, y = (batch_input["x"], batch_input["y"]) if is_mapping else batch_input
        canary = _canary_of(x)
        values = x[_VALUES], y[_VALUES]
        batch = collections.OrderedDict(zip("xy", values, strict=True)) if is_mapping else values

        def of_canary():
            along = [
                tf.reduce_sum(tf.cast(tensor, variable.dtype) * variable)
                for tensor, variable in zip(
                    self._directions.of(canary), self.trainable_variables, strict=True
                )
            ]
            loss = -self._gradient_norm * tf.add_n([tf.cast(one, tf.float32) for one in along])
            return loss, self._model.predict_on_batch(x[_VALUES], training=False)

        def of_data():
            output = self._model.forward_pass(batch, training=training)
            return tf.cast(output.loss, tf.float32), output.predictions

        loss, predictions = tf.cond(canary >= 0, of_canary, of_data)
        return tff.learning.models.BatchOutput(
            loss=loss, predictions=predictions, num_examples=tf.shape(x[_CANARY])[0]
        )

    @tf.function(autograph=False)
    def predict_on_batch(self, batch_input, training=True):
        return self._model.predict_on_batch(batch_input[_VALUES], training=training)

    def report_local_unfinalized_metrics(self):
        return self._model.report_local_unfinalized_metrics()

    def metric_finalizers(self):
        return self._model.metric_finalizers()

    def reset_metrics(self):
        return self._model.reset_metrics()
