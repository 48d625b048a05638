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
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.auditing import directions as directions_lib
from tff_dpftrl.learning import model as model_lib


class Canaries:
    """Canaries for one model.

    Attributes:
      model: Wrapped model: give it to the builder of the learning process.
      directions: Directions of the canaries, secret until training is over.
      number: Number of canaries.
    """

    def __init__(
        self,
        model: model_lib.Model | Callable[[], Any],
        *,
        number: int,
        gradient_norm: float = 1e6,
        examples: int = 1,
        seed: int | None = None,
    ):
        """Wraps a model.

        Args:
          model: A functional model, also one of TFF, or a function that makes a
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
        if model_lib.is_functional(model):
            trainable, _ = model.initial_weights
            shapes = [np.shape(weight) for weight in tf.nest.flatten(trainable)]
            wrap, input_spec = _functional, model.input_spec
        elif callable(model):
            with tf.Graph().as_default():
                made = model()
                shapes = [variable.shape.as_list() for variable in made.trainable_variables]
                input_spec = made.input_spec
            from tff_dpftrl.auditing import variable_canaries  # Needs TFF, as such a model does.

            wrap = variable_canaries.wrap
        else:
            raise validation.UsageError(
                "model must be a learning.model.Model, a tff.learning.models.FunctionalModel or a "
                f"function that makes a VariableModel, got {model!r}."
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
        return collections.OrderedDict(
            [(directions_lib.VALUES, values), (directions_lib.CANARY, canary)]
        )

    if isinstance(batch, Mapping):
        return collections.OrderedDict([("x", both(batch["x"])), ("y", both(batch["y"]))])
    x, y = batch
    return both(x), both(y)


def _mark(*batch: Any) -> Any:
    """Marks a batch as real data."""
    batch = batch[0] if len(batch) == 1 else batch
    rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    return _with_canary(batch, tf.fill([rows], directions_lib.REAL))


def _functional(
    model: model_lib.Model,
    directions: directions_lib.Directions,
    gradient_norm: float,
    spec: Any,
) -> model_lib.Model:
    @tf.function(autograph=False)
    def predict_on_batch(model_weights, x, training=True):
        trainable, others = model_weights
        attached = directions.attach(
            tf.nest.flatten(trainable), directions_lib.canary_of(x), gradient_norm
        )
        weights = tf.nest.pack_sequence_as(trainable, attached), others
        return model.predict_on_batch(weights, x[directions_lib.VALUES], training)

    @tf.autograph.experimental.do_not_convert
    def loss(output, label, sample_weight=None):
        return model.loss(output, label[directions_lib.VALUES], sample_weight)

    @tf.function(autograph=False)
    def update_metrics(state, labels, batch_output, sample_weight=None):
        # Without `tf.cond`, the parts that loss and metrics share are computed once.
        updated = model.update_metrics_state(
            state, labels[directions_lib.VALUES], batch_output, sample_weight
        )
        counts = directions_lib.canary_of(labels) < 0
        return tf.nest.map_structure(lambda old, new: tf.where(counts, new, old), state, updated)

    wrapped = model_lib.Model(
        initial_weights=model.initial_weights,
        predict_on_batch=predict_on_batch,
        loss=loss,
        input_spec=spec,
        initialize_metrics_state=model.initialize_metrics_state,
        update_metrics_state=update_metrics,
        finalize_metrics=model.finalize_metrics,
    )
    if isinstance(model, model_lib.Model):
        return wrapped
    from tff_dpftrl.learning import local_model  # The model is of TFF, for TFF's own builders.

    return local_model.as_tff(wrapped)
