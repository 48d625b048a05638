"""Client work of TFF's processes: UserUpdateFedAvg and UserUpdateFedSGD.

`local_updates` computes the updates, with TFF's loop over the batches.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.execution import tff_names
from tff_dpftrl.learning import local_model, local_updates
from tff_dpftrl.private_round import clipping as clipping_lib

ITERATOR = tff.learning.LoopImplementation.DATASET_ITERATOR
"""Loop over the batches that is faster in simulation; TPUs need the other one."""


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
    local_update = local_updates.FedAvg(optimizer, clipping, local_epochs)
    return _build_client_work(model_fn, local_update, metrics_aggregator, loop_implementation)


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
    local_update = local_updates.FedSgd(learning_rate)
    return _build_client_work(model_fn, local_update, metrics_aggregator, loop_implementation)


def _build_client_work(
    model_fn: local_model.Model,
    local_update: local_updates.LocalUpdate,
    metrics_aggregator: Callable[..., tff_names.Computation],
    loop_implementation: tff.learning.LoopImplementation,
) -> tff.learning.templates.ClientWorkProcess:
    """Builds a process from the update of one client, and counts rounds at the server."""
    weights_type = local_model.build_initial_weights(model_fn).type_signature.result
    loop = tff.learning.loop_builder.build_training_loop(loop_implementation)
    data_type, aggregate_metrics = local_model.input_and_metrics(model_fn, metrics_aggregator)

    @tff_names.tensorflow_computation(weights_type, data_type, tf.int64)
    def client_update(weights, batches, round_index):
        model = local_model.build_local_model(model_fn)

        @tf.function
        def run(weights, batches, round_index):
            update, num_examples, metrics = local_update.run(
                model, weights, batches, round_index, loop
            )
            result = tff.learning.templates.ClientResult(
                update=tf.nest.pack_sequence_as(weights.trainable, update),
                update_weight=tf.cast(num_examples, tf.float32),
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
