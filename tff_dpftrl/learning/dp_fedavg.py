"""DP-FedAvg and DP-FedSGD as TFF learning processes (McMahan et al. 2018).

Unlike DP-FTRL, their privacy rests on sampling: every client joins a round with
probability q, independently of all others and of other rounds. The guarantee of
num_rounds rounds is that of the Poisson-sampled Gaussian mechanism with this
q and noise_multiplier. A process cannot see how its cohorts were drawn.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.aggregators import computations, sampled_gaussian
from tff_dpftrl.execution import tff_names
from tff_dpftrl.learning import local_model, local_updates, own_model
from tff_dpftrl.learning import model as model_lib

_ITERATOR = tff.learning.LoopImplementation.DATASET_ITERATOR
"""Loop over the batches that is faster in simulation; TPUs need the other one."""


def build_dp_fedavg(
    model_fn: local_model.Model,
    *,
    aggregator: sampled_gaussian.SampledGaussianFactory,
    client_optimizer: tff.learning.optimizers.Optimizer,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
    local_epochs: int = 1,
    clip_every_step: bool = True,
    metrics_aggregator: Callable[
        ..., tff_names.Computation
    ] = tff.learning.metrics.sum_then_finalize,
    loop_implementation: tff.learning.LoopImplementation = _ITERATOR,
) -> tff.learning.templates.LearningProcess:
    """Builds DP-FedAvg: clipped local training, one noised estimate a round.

    The cohort given to `next` must be a Poisson sample with the estimator's
    sampling probability; it may be empty. Training metrics are aggregated without
    noise: the privacy guarantee covers the model weights only. The state holds
    the seed of the noise and is secret.

    Args:
      model_fn: Function that makes a `VariableModel`, or a `FunctionalModel`.
      aggregator: Factory of the private estimate, with clipping, noise, weights and the
        sampling probability q. Its `run_of` does the accounting.
      client_optimizer: Client optimizer; the paper's is SGD.
      server_optimizer: Server optimizer, applied to the noised estimate; SGD with
        learning rate 1, the paper's, if None.
      local_epochs: Number E of passes of a client over its batches.
      clip_every_step: Whether clients clip after every local batch, as in the
        paper, or only at the end. The privacy is the same.
      metrics_aggregator: Function that builds the aggregation of the training metrics.
      loop_implementation: TFF's loop over a client's batches.

    Returns:
      A learning process, with the methods of `build_weighted_fed_avg`'s.

    Raises:
      ValueError: If an argument cannot be used.
    """
    _check(aggregator)
    clipping = aggregator.private_round.clipping if clip_every_step else None
    local_update = local_updates.FedAvg(client_optimizer, clipping, local_epochs)
    return _build(
        model_fn,
        local_update,
        aggregator,
        server_optimizer,
        metrics_aggregator,
        loop_implementation,
    )


def build_dp_fedsgd(
    model_fn: local_model.Model,
    *,
    aggregator: sampled_gaussian.SampledGaussianFactory,
    learning_rate: float,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
    metrics_aggregator: Callable[
        ..., tff_names.Computation
    ] = tff.learning.metrics.sum_then_finalize,
    loop_implementation: tff.learning.LoopImplementation = _ITERATOR,
) -> tff.learning.templates.LearningProcess:
    """Builds DP-FedSGD: the clipped gradient of one batch of every client.

    The cohort given to `next` must be a Poisson sample with the estimator's
    sampling probability; it may be empty. Training metrics are aggregated without
    noise: the privacy guarantee covers the model weights only. The state holds
    the seed of the noise and is secret.

    Args:
      model_fn: Function that makes a `VariableModel`, or a `FunctionalModel`.
      aggregator: Factory of the private estimate, with the clipping of `learning_rate`
        times the gradient, noise, weights (by the examples in all of a client's batches)
        and the sampling probability q. Its `run_of` does the accounting.
      learning_rate: Learning rate η, by which a client multiplies its gradient.
      server_optimizer: Server optimizer, applied to the noised estimate; SGD with
        learning rate 1, the paper's, if None.
      metrics_aggregator: Function that builds the aggregation of the training metrics.
      loop_implementation: TFF's loop over a client's batches.

    Returns:
      A learning process, with the methods of `build_fed_sgd`'s.

    Raises:
      ValueError: If an argument cannot be used.
    """
    _check(aggregator)
    local_update = local_updates.FedSgd(learning_rate)
    return _build(
        model_fn,
        local_update,
        aggregator,
        server_optimizer,
        metrics_aggregator,
        loop_implementation,
    )


def _check(aggregator: sampled_gaussian.SampledGaussianFactory) -> None:
    if not isinstance(aggregator, sampled_gaussian.SampledGaussianFactory):
        raise validation.UsageError(
            f"aggregator must be a SampledGaussianFactory, got {aggregator!r}."
        )


def _build(
    model_fn: local_model.Model,
    local_update: local_updates.LocalUpdate,
    aggregator: sampled_gaussian.SampledGaussianFactory,
    server_optimizer: tff.learning.optimizers.Optimizer | None,
    metrics_aggregator: Callable[..., tff_names.Computation],
    loop_implementation: tff.learning.LoopImplementation,
) -> tff.learning.templates.LearningProcess:
    """Builds the process of a client's update."""
    initial_weights = local_model.build_initial_weights(model_fn)
    weights_type = initial_weights.type_signature.result
    client_work = _client_work(
        model_fn, local_update, weights_type, metrics_aggregator, loop_implementation
    )
    result_type = client_work.next.type_signature.result.result.member
    if server_optimizer is None:
        server_optimizer = tff.learning.optimizers.build_sgdm(learning_rate=1.0)
    return tff.learning.templates.compose_learning_process(
        initial_weights,
        tff.learning.templates.build_broadcast_process(weights_type),
        client_work,
        aggregator.create(weights_type.trainable, result_type.update_weight),
        tff.learning.templates.build_apply_optimizer_finalizer(server_optimizer, weights_type),
    )


def _client_work(
    model_fn: local_model.Model,
    local_update: local_updates.LocalUpdate,
    weights_type: tff_names.Type,
    metrics_aggregator: Callable[..., tff_names.Computation],
    loop_implementation: tff.learning.LoopImplementation,
) -> tff.learning.templates.ClientWorkProcess:
    """Builds the process of the clients' updates, whose state is the index of the round."""
    loop = tff.learning.loop_builder.build_training_loop(loop_implementation)
    finalizers, metric_specs = own_model.metrics(model_fn)
    if model_lib.is_functional(model_fn):
        input_spec = model_fn.input_spec
        metrics_type = tff_names.tensorflow_to_type(metric_specs)
        aggregate_metrics = metrics_aggregator(finalizers, metrics_type)
    else:
        with tf.Graph().as_default():
            input_spec = model_fn().input_spec
        aggregate_metrics = metrics_aggregator(finalizers)
    data_type = tff_names.SequenceType(tff_names.tensorflow_to_type(input_spec))

    @computations.tensorflow(weights_type, data_type, tf.int64)
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

    first_round = computations.tensorflow(lambda: tf.constant(0, tf.int64))
    next_round = computations.tensorflow(lambda index: index + 1, tf.int64)

    @computations.federated
    def init_fn():
        return tff_names.federated_eval(first_round, tff_names.SERVER)

    @computations.federated(
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
