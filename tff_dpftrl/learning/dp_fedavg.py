"""DP-FedAvg and DP-FedSGD as TFF learning processes (McMahan et al. 2018).

Unlike DP-FTRL, their privacy rests on sampling: every client joins a round with
probability q, independently of all others and of other rounds. The guarantee of
num_rounds rounds is that of the Poisson-sampled Gaussian mechanism with this
q and noise_multiplier. A process cannot see how its cohorts were drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.aggregators import sampled_gaussian
from tff_dpftrl.execution import tff_names
from tff_dpftrl.learning import client_work as client_work_lib
from tff_dpftrl.learning import local_model


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
    loop_implementation: tff.learning.LoopImplementation = client_work_lib.ITERATOR,
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
    client_work = client_work_lib.build_fed_avg_client_work(
        model_fn,
        client_optimizer,
        clipping=aggregator.private_round.clipping if clip_every_step else None,
        local_epochs=local_epochs,
        metrics_aggregator=metrics_aggregator,
        loop_implementation=loop_implementation,
    )
    return _compose(model_fn, client_work, aggregator, server_optimizer)


def build_dp_fedsgd(
    model_fn: local_model.Model,
    *,
    aggregator: sampled_gaussian.SampledGaussianFactory,
    learning_rate: float,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
    metrics_aggregator: Callable[
        ..., tff_names.Computation
    ] = tff.learning.metrics.sum_then_finalize,
    loop_implementation: tff.learning.LoopImplementation = client_work_lib.ITERATOR,
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
    client_work = client_work_lib.build_fed_sgd_client_work(
        model_fn,
        learning_rate,
        metrics_aggregator=metrics_aggregator,
        loop_implementation=loop_implementation,
    )
    return _compose(model_fn, client_work, aggregator, server_optimizer)


def _check(aggregator: sampled_gaussian.SampledGaussianFactory) -> None:
    if not isinstance(aggregator, sampled_gaussian.SampledGaussianFactory):
        raise validation.UsageError(
            f"aggregator must be a SampledGaussianFactory, got {aggregator!r}."
        )


def _compose(
    model_fn: local_model.Model,
    client_work: tff.learning.templates.ClientWorkProcess,
    aggregator: sampled_gaussian.SampledGaussianFactory,
    server_optimizer: tff.learning.optimizers.Optimizer | None,
) -> tff.learning.templates.LearningProcess:
    if server_optimizer is None:
        server_optimizer = tff.learning.optimizers.build_sgdm(learning_rate=1.0)
    initial_weights = local_model.build_initial_weights(model_fn)
    weights_type = initial_weights.type_signature.result
    result_type = client_work.next.type_signature.result.result.member
    return tff.learning.templates.compose_learning_process(
        initial_weights,
        tff.learning.templates.build_broadcast_process(weights_type),
        client_work,
        aggregator.create(weights_type.trainable, result_type.update_weight),
        tff.learning.templates.build_apply_optimizer_finalizer(server_optimizer, weights_type),
    )
