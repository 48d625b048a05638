"""Client work of a round: UserUpdateFedAvg and UserUpdateFedSGD.

McMahan et al. 2018, Algorithm 1. Updates have TFF's sign: initial minus final
weights, a gradient to be subtracted by the server's optimizer.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.execution import tff_names
from tff_dpftrl.learning import local_model
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.private_round import clipping as clipping_lib

ITERATOR = tff.learning.LoopImplementation.DATASET_ITERATOR
"""Loop over the batches that is faster in simulation; TPUs need the other one."""

_LocalUpdate: TypeAlias = Callable[
    [local_model.LocalModel, tff.learning.models.ModelWeights, tf.data.Dataset, tf.Tensor],
    tuple[list[tf.Tensor], tf.Tensor, Any],
]
"""Function from (model, weights, batches, round) to (update, number of examples, metrics)."""


def build_fed_avg_client_work(
    model_fn: local_model.Model,
    optimizer: tff.learning.optimizers.Optimizer,
    *,
    clipping: clipping_lib.Clipping | None,
    local_epochs: int = 1,
    metrics_aggregator: Callable[
        ..., tff_names.Computation
    ] = tff.learning.metrics.sum_then_finalize,
    loop_implementation: tff.learning.LoopImplementation = ITERATOR,
) -> tff.learning.templates.ClientWorkProcess:
    """Builds UserUpdateFedAvg: local training that stays near its initial weights.

    After every batch the difference to the initial weights is clipped. The
    weight of the result is the client's number of examples, each counted once
    whatever `local_epochs` is.

    Args:
      model_fn: Function that makes a `VariableModel`, or a `FunctionalModel`.
      optimizer: Client optimizer; the paper's is SGD.
      clipping: Clipping after every batch; None if only the aggregator clips, at the end.
      local_epochs: Number E of passes over the client's batches.
      metrics_aggregator: Function that builds the aggregation of the training metrics.
      loop_implementation: TFF's loop over a client's batches.

    Returns:
      The client work process. Its state is the index of the round.

    Raises:
      ValueError: If `local_epochs` is less than 1.
    """
    local_epochs = validation.integer("local_epochs", local_epochs, minimum=1)

    reduce_batches = tff.learning.loop_builder.build_training_loop(loop_implementation)

    def local_update(model, weights, batches, round_index):
        initial = tuple(tf.nest.flatten(weights.trainable))
        specs = tuple(tf.TensorSpec(w.shape, w.dtype) for w in initial)

        def train_on_batch(state, batch):
            trainable, optimizer_state, metrics, num_examples = state
            gradients, metrics = model.gradients(trainable, metrics, batch)
            optimizer_state, trainable = optimizer.next(optimizer_state, trainable, gradients)
            if clipping is not None:
                trainable = _clipped_weights(trainable, initial, clipping, round_index)
            num_examples += model_lib.num_examples(batch)
            return trainable, optimizer_state, metrics, num_examples

        def before_training():
            no_examples = tf.constant(0, tf.int64)
            return initial, optimizer.initialize(specs), model.load(weights), no_examples

        trainable, _, metrics, num_examples = reduce_batches(
            train_on_batch, batches.repeat(local_epochs), before_training
        )
        update = [w0 - w for w0, w in zip(initial, trainable, strict=True)]
        return update, num_examples // local_epochs, metrics

    return _build_client_work(model_fn, local_update, metrics_aggregator)


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


def build_fed_sgd_client_work(
    model_fn: local_model.Model,
    learning_rate: float,
    *,
    metrics_aggregator: Callable[
        ..., tff_names.Computation
    ] = tff.learning.metrics.sum_then_finalize,
    loop_implementation: tff.learning.LoopImplementation = ITERATOR,
) -> tff.learning.templates.ClientWorkProcess:
    """Builds UserUpdateFedSGD: the gradient of one batch, times the learning rate.

    Round t takes batch number t modulo the number of batches of the client, so
    that a client's batches take turns and a repeated round repeats its update.
    The weight is the number of all the client's examples. Clipping is left to
    the aggregator.

    Args:
      model_fn: Function that makes a `VariableModel`, or a `FunctionalModel`.
      learning_rate: Learning rate η of the client.
      metrics_aggregator: Function that builds the aggregation of the training metrics.
      loop_implementation: TFF's loop over a client's batches.

    Returns:
      The client work process. Its state is the index of the round.

    Raises:
      ValueError: If `learning_rate` is not positive.
    """
    learning_rate = validation.positive("learning_rate", learning_rate)

    reduce_batches = tff.learning.loop_builder.build_training_loop(loop_implementation)

    def local_update(model, weights, batches, round_index):
        trainable = tuple(tf.nest.flatten(weights.trainable))
        num_batches, num_examples = batches.reduce(
            (tf.constant(0, tf.int64), tf.constant(0, tf.int64)),
            lambda sums, batch: (sums[0] + 1, sums[1] + model_lib.num_examples(batch)),
        )
        chosen = batches.skip(round_index % tf.maximum(num_batches, 1)).take(1)

        def gradient_of_batch(state, batch):
            return model.gradients(trainable, state[1], batch)

        def before_training():
            return tuple(tf.zeros_like(w) for w in trainable), model.load(weights)

        gradients, metrics = reduce_batches(gradient_of_batch, chosen, before_training)
        update = [tf.cast(learning_rate, g.dtype) * g for g in gradients]
        return update, num_examples, metrics

    return _build_client_work(model_fn, local_update, metrics_aggregator)


def build_gradient_sum_client_work(
    model_fn: local_model.Model, *, metrics_aggregator: Callable[..., tff_names.Computation]
) -> tff.learning.templates.ClientWorkProcess:
    """Builds client work whose update is the sum of the gradients of all batches.

    All gradients are taken at the round's weights. Those of a linear model do not depend on the
    weights, so that the update is exactly the sum of the inputs, up to its sign.

    Args:
      model_fn: Function that makes a `VariableModel`, or a `FunctionalModel`.
      metrics_aggregator: Function that builds the aggregation of the training metrics.

    Returns:
      The client work process. Its state is the index of the round.
    """
    reduce_batches = tff.learning.loop_builder.build_training_loop(ITERATOR)

    def local_update(model, weights, batches, round_index):
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

        sums, metrics, num_examples = reduce_batches(add_gradient, batches, before_training)
        return list(sums), num_examples, metrics

    return _build_client_work(model_fn, local_update, metrics_aggregator)


def _build_client_work(
    model_fn: local_model.Model,
    local_update: _LocalUpdate,
    metrics_aggregator: Callable[..., tff_names.Computation],
) -> tff.learning.templates.ClientWorkProcess:
    """Builds a process from the update of one client, and counts rounds at the server."""
    weights_type = local_model.build_initial_weights(model_fn).type_signature.result
    data_type, aggregate_metrics = local_model.input_and_metrics(model_fn, metrics_aggregator)

    @tff_names.tensorflow_computation(weights_type, data_type, tf.int64)
    def client_update(weights, batches, round_index):
        model = local_model.build_local_model(model_fn)

        @tf.function
        def run(weights, batches, round_index):
            update, num_examples, metrics = local_update(model, weights, batches, round_index)
            result = tff.learning.templates.ClientResult(
                update=tf.nest.pack_sequence_as(weights.trainable, update),
                update_weight=tf.cast(num_examples, tf.float32),
            )
            # A client whose training diverged would make the metrics of all diverge.
            is_finite = tf.math.is_finite(clipping_lib.global_norm(update))
            metrics = tf.nest.map_structure(
                lambda metric: tf.where(is_finite, metric, tf.zeros_like(metric)),
                model.unfinalized_metrics(metrics),
            )
            return result, metrics

        return run(weights, batches, round_index)

    @tff_names.tensorflow_computation
    def first_round():
        return tf.constant(0, tf.int64)

    @tff_names.federated_computation
    def init_fn():
        return tff_names.federated_eval(first_round, tff_names.SERVER)

    @tff_names.tensorflow_computation(tf.int64)
    def next_round(round_index):
        return round_index + 1

    @tff_names.federated_computation(
        init_fn.type_signature.result,
        tff_names.FederatedType(weights_type, tff_names.CLIENTS),
        tff_names.FederatedType(data_type, tff_names.CLIENTS),
    )
    def next_fn(round_index, weights, batches):
        result, unfinalized_metrics = tff_names.federated_map(
            client_update, (weights, batches, tff_names.federated_broadcast(round_index))
        )
        metrics = aggregate_metrics(unfinalized_metrics)
        measurements = tff_names.federated_zip(collections.OrderedDict(train=metrics))
        new_round = tff_names.federated_map(next_round, round_index)
        return tff.templates.MeasuredProcessOutput(new_round, result, measurements)

    return tff.learning.templates.ClientWorkProcess(init_fn, next_fn)
