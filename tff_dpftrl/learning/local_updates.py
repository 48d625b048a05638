"""What clients compute in a round: UserUpdateFedAvg, UserUpdateFedSGD and sums of gradients.

McMahan et al. 2018, Algorithm 1. Updates have TFF's sign: initial minus final
weights, a gradient to be subtracted by the server's optimizer.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.learning import optimizers
from tff_dpftrl.private_round import clipping as clipping_lib

Loop = Callable[..., Any]
"""Function (step, batches, initial): carries the state of `initial()` through `step(state, batch)`
of all batches, and returns it."""


class LocalModel(abc.ABC):
    """Model at one client during one round, inside a TensorFlow computation."""

    @abc.abstractmethod
    def load(self, weights: Any) -> Any:
        """Loads the round's weights; returns the initial state of the metrics."""

    @abc.abstractmethod
    def gradients(
        self, trainable: tuple[tf.Tensor, ...], metrics: Any, batch: Any
    ) -> tuple[tuple[tf.Tensor, ...], Any]:
        """Computes the gradients of a batch's loss, and updates the metrics.

        Args:
          trainable: Trainable weights at which the gradient is taken.
          metrics: State of the metrics.
          batch: Batch with the model's `input_spec`.

        Returns:
          Dense gradients like `trainable`, and the new state of the metrics.
        """

    @abc.abstractmethod
    def unfinalized_metrics(self, metrics: Any) -> Any:
        """Returns this client's metrics for the sums."""


class FunctionalLocalModel(LocalModel):
    """Model whose weights and metrics are passed around as tensors."""

    def __init__(self, model: model_lib.Model):
        self._model = model
        self._non_trainable = ()

    @override
    def load(self, weights):
        self._non_trainable = weights.non_trainable
        return self._model.initialize_metrics_state()

    @override
    def gradients(self, trainable, metrics, batch):
        x, y = model_lib.x_and_y(batch)
        with tf.GradientTape() as tape:
            tape.watch(trainable)
            weights = (trainable, self._non_trainable)
            predictions = self._model.predict_on_batch(weights, x, training=True)
            loss = self._model.loss(output=predictions, label=y)
        output = model_lib.BatchOutput(loss, predictions, model_lib.num_examples(batch))
        metrics = self._model.update_metrics_state(metrics, batch_output=output, labels=y)
        gradients = tape.gradient(loss, trainable)
        return optimizers.dense_gradients(trainable, gradients), metrics

    @override
    def unfinalized_metrics(self, metrics):
        return metrics


def iterate(step: Callable[[Any, Any], Any], batches: tf.data.Dataset, initial: Callable[[], Any]):
    """Runs a loop over batches; a reduction of the dataset would cost several times as much."""
    state = initial()
    leaves = tf.nest.flatten(state)
    iterator = iter(batches)

    def body(has_value: tf.Tensor, found: Any, *tensors: tf.Tensor) -> list[Any]:
        del has_value
        new = tf.nest.flatten(step(tf.nest.pack_sequence_as(state, tensors), found.get_value()))
        with tf.control_dependencies(new):
            found = iterator.get_next_as_optional()
        return [found.has_value(), found, *new]

    first = iterator.get_next_as_optional()
    _, _, *last = tf.while_loop(
        lambda has_value, *_: has_value,
        body,
        [first.has_value(), first, *leaves],
        parallel_iterations=1,
    )
    return tf.nest.pack_sequence_as(state, last)


class LocalUpdate(abc.ABC):
    """Computation of one client's update; `counts_rounds` if it depends on the round's index."""

    counts_rounds = True

    @abc.abstractmethod
    def update(
        self,
        model: LocalModel,
        weights: Any,
        batches: tf.data.Dataset,
        round_index: tf.Tensor,
        loop: Loop = iterate,
    ) -> tuple[list[tf.Tensor], tf.Tensor, Any]:
        """Computes the update.

        Args:
          model: Model to train.
          weights: Its weights, with the attributes `trainable` and `non_trainable`.
          batches: The client's batches.
          round_index: Index of the round, an int64 scalar.
          loop: Loop over the batches.

        Returns:
          The update, the number of examples (int64) and the state of the metrics.
        """

    def run(
        self,
        model: LocalModel,
        weights: Any,
        batches: tf.data.Dataset,
        round_index: tf.Tensor,
        loop: Loop = iterate,
    ) -> tuple[list[tf.Tensor], tf.Tensor, Any]:
        """Computes the update, and the metrics of a client whose training did not diverge."""
        update, num_examples, metrics = self.update(model, weights, batches, round_index, loop)
        # A client whose training diverged would make the metrics of all diverge.
        is_finite = tf.math.is_finite(clipping_lib.global_norm(update))
        metrics = tf.nest.map_structure(
            lambda metric: tf.where(is_finite, metric, tf.zeros_like(metric)),
            model.unfinalized_metrics(metrics),
        )
        return update, num_examples, metrics


@dataclasses.dataclass(frozen=True)
class FedAvg(LocalUpdate):
    """UserUpdateFedAvg: local training that stays near its initial weights.

    After every batch the difference to the initial weights is clipped. The
    weight of the result is the client's number of examples, each counted once
    whatever `local_epochs` is.

    `clipping` is that after every batch; None if only the aggregator clips, at the end.
    """

    optimizer: optimizers.Optimizer
    clipping: clipping_lib.Clipping | None = None
    local_epochs: int = 1

    def __post_init__(self):
        validation.integer("local_epochs", self.local_epochs, minimum=1)

    @property
    def counts_rounds(self) -> bool:
        """Whether a clip norm may depend on the round."""
        return self.clipping is not None

    @override
    def update(self, model, weights, batches, round_index, loop=iterate):
        initial = tuple(tf.nest.flatten(weights.trainable))
        specs = tuple(tf.TensorSpec(w.shape, w.dtype) for w in initial)

        def train_on_batch(state, batch):
            trainable, optimizer_state, metrics, num_examples = state
            gradients, metrics = model.gradients(trainable, metrics, batch)
            optimizer_state, trainable = self.optimizer.next(optimizer_state, trainable, gradients)
            if self.clipping is not None:
                trainable = _clipped_weights(trainable, initial, self.clipping, round_index)
            num_examples += model_lib.num_examples(batch)
            return trainable, optimizer_state, metrics, num_examples

        def before_training():
            no_examples = tf.constant(0, tf.int64)
            return initial, self.optimizer.initialize(specs), model.load(weights), no_examples

        passes = batches if self.local_epochs == 1 else batches.repeat(self.local_epochs)
        trainable, _, metrics, num_examples = loop(train_on_batch, passes, before_training)
        update = [w0 - w for w0, w in zip(initial, trainable, strict=True)]
        return update, num_examples // self.local_epochs, metrics


def _clipped_weights(
    trainable: Sequence[tf.Tensor],
    initial: Sequence[tf.Tensor],
    clipping: clipping_lib.Clipping,
    round_index: tf.Tensor,
) -> tuple[tf.Tensor, ...]:
    """Computes θ⁰ + ClipFn(θ − θ⁰); diverged weights stay so, for the aggregator to drop."""
    moved = [w - w0 for w, w0 in zip(trainable, initial, strict=True)]
    clipped, norm = clipping.clip(moved, round_index)
    return tuple(
        tf.where(tf.math.is_finite(norm), w0 + tf.cast(c, w.dtype), w)
        for w, w0, c in zip(trainable, initial, clipped, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class FedSgd(LocalUpdate):
    """UserUpdateFedSGD: the gradient of one batch, times the learning rate.

    Round t takes batch number t modulo the number of batches of the client, so
    that a client's batches take turns and a repeated round repeats its update.
    The weight is the number of all the client's examples. Clipping is left to
    the aggregator.
    """

    learning_rate: float

    def __post_init__(self):
        validation.positive("learning_rate", self.learning_rate)

    @override
    def update(self, model, weights, batches, round_index, loop=iterate):
        trainable = tuple(tf.nest.flatten(weights.trainable))

        def count(sums, batch):
            return sums[0] + 1, sums[1] + model_lib.num_examples(batch)

        def nothing():
            return tf.constant(0, tf.int64), tf.constant(0, tf.int64)

        num_batches, num_examples = loop(count, batches, nothing)
        chosen = batches.skip(round_index % tf.maximum(num_batches, 1)).take(1)

        def gradient_of_batch(state, batch):
            return model.gradients(trainable, state[1], batch)

        def before_training():
            return tuple(tf.zeros_like(w) for w in trainable), model.load(weights)

        gradients, metrics = loop(gradient_of_batch, chosen, before_training)
        update = [tf.cast(self.learning_rate, g.dtype) * g for g in gradients]
        return update, num_examples, metrics


@dataclasses.dataclass(frozen=True)
class GradientSum(LocalUpdate):
    """Sum of the gradients of all batches.

    All gradients are taken at the round's weights. Those of a linear model do not depend on the
    weights, so that the update is exactly the sum of the inputs, up to its sign.
    """

    counts_rounds = False

    @override
    def update(self, model, weights, batches, round_index, loop=iterate):
        del round_index
        trainable = tuple(tf.nest.flatten(weights.trainable))

        def add_gradient(state, batch):
            sums, metrics, num_examples = state
            gradients, metrics = model.gradients(trainable, metrics, batch)
            sums = tuple(s + g for s, g in zip(sums, gradients, strict=True))
            return sums, metrics, num_examples + model_lib.num_examples(batch)

        def before_training():
            no_examples = tf.constant(0, tf.int64)
            return tuple(tf.zeros_like(w) for w in trainable), model.load(weights), no_examples

        sums, metrics, num_examples = loop(add_gradient, batches, before_training)
        return list(sums), num_examples, metrics
