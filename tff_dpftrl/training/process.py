"""The learning process of a run: TFF's own federated averaging with our aggregator."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.aggregators import adaptive_clipping, dp_ftrl, sampled_gaussian, secagg
from tff_dpftrl.execution import tff_names
from tff_dpftrl.learning import (
    dp_fedavg,
    iterate_averaging,
    local_model,
    optimizer_restarts,
    python_optimizers,
)
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.mechanisms import restarts
from tff_dpftrl.private_round import adaptive_clipping as adaptive_clipping_lib
from tff_dpftrl.private_round import clipping, estimators
from tff_dpftrl.runs import amplified_privacy, dp_ftrl_privacy, privacy, sampled_privacy
from tff_dpftrl.training import learning_options


@functools.singledispatch
def build_process(
    plan: privacy.PrivacyPlan,
    options: learning_options.LearningOptions,
    model: model_lib.Model,
    *,
    metrics_aggregator: Callable[
        ..., tff_names.Computation
    ] = tff.learning.metrics.sum_then_finalize,
) -> tff.learning.templates.LearningProcess:
    """Builds the process of a run; which one depends on the class of the plan.

    With secure aggregation, TFF's executor runs the process in a context with secure sums only;
    for a simulation, `execution.secure_sum_simulation`.

    Args:
      plan: Mechanism, noise and clipping.
      options: Optimizers and their learning rates.
      model: The model, with its initial weights.
      metrics_aggregator: Function that builds the aggregation of the clients' training metrics.

    Returns:
      TFF's own unweighted federated averaging, with our aggregator, or DP-FedAvg or
      DP-FedSGD.
    """
    raise TypeError(f"There is no process for a {type(plan).__name__}: register one here.")


@build_process.register(dp_ftrl_privacy.DpFtrlPlan)
@build_process.register(amplified_privacy.AmplifiedPlan)
def _build_dp_ftrl(
    plan: dp_ftrl_privacy.DpFtrlPlan | amplified_privacy.AmplifiedPlan,
    options: learning_options.LearningOptions,
    model: model_lib.Model,
    *,
    metrics_aggregator: Callable[
        ..., tff_names.Computation
    ] = tff.learning.metrics.sum_then_finalize,
) -> tff.learning.templates.LearningProcess:
    return tff.learning.algorithms.build_unweighted_fed_avg(
        local_model.as_tff(model),
        client_optimizer_fn=_build_client_optimizer(options),
        server_optimizer_fn=build_server_optimizer(options),
        model_aggregator=build_aggregator(options, plan),
        metrics_aggregator=metrics_aggregator,
        # Several times faster than a reduce over the dataset for an unrolled LSTM on a CPU.
        loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
    )


@build_process.register
def _build_sampled(
    plan: sampled_privacy.SampledPlan,
    options: learning_options.LearningOptions,
    model: model_lib.Model,
    *,
    metrics_aggregator: Callable[
        ..., tff_names.Computation
    ] = tff.learning.metrics.sum_then_finalize,
) -> tff.learning.templates.LearningProcess:
    common = {
        "metrics_aggregator": metrics_aggregator,
        "aggregator": build_sampled_aggregator(plan, options.noise),
        "server_optimizer": build_server_optimizer(options),
    }
    if plan.algorithm == "dp-fedsgd":
        return dp_fedavg.build_dp_fedsgd(
            model, learning_rate=options.client_learning_rate, **common
        )
    return dp_fedavg.build_dp_fedavg(
        model,
        client_optimizer=_build_client_optimizer(options),
        **common,
    )


def build_sampled_aggregator(
    plan: sampled_privacy.SampledPlan, noise: learning_options.NoiseGenerator = "philox"
) -> sampled_gaussian.SampledGaussianFactory:
    """Builds the aggregator of the updates of a sampled cohort."""
    clip = clipping.PerLayerClipping if plan.per_layer_clipping else clipping.FlatClipping
    estimator = {
        sampled_privacy.FIXED: estimators.FixedDenominator,
        sampled_privacy.CLIPPED: estimators.ClippedDenominator,
    }[plan.estimator]
    return sampled_gaussian.SampledGaussianFactory(
        clipping=clip(plan.clip_norms),
        noise_multiplier=plan.noise_multiplier,
        estimator=estimator(plan.sampling_probability, plan.num_clients),
        deterministic_seed=plan.deterministic_seed,
        secure_noise=noise == "secure",
        report_non_finite_clients=True,
    )


def build_server_optimizer(
    options: learning_options.LearningOptions,
) -> tff.learning.optimizers.Optimizer:
    """Builds the server's optimizer, which only post-processes what was noised."""
    optimizers = tff.learning.optimizers
    rate = options.server_learning_rate
    match options.server_optimizer:
        case "adam":
            optimizer = optimizers.build_adam(rate, epsilon=options.server_adam_epsilon)
        case "momentum":
            optimizer = optimizers.build_sgdm(rate, options.server_momentum)
        case "sgd":
            optimizer = optimizers.build_sgdm(rate)
    if options.server_restarts:
        optimizer = optimizer_restarts.restart_at(optimizer, options.server_restarts)
    if options.server_warmup_rounds or options.server_decay != "none":
        optimizer = optimizers.schedule_learning_rate(
            optimizer, functools.partial(_scheduled_rate, options)
        )
    if options.iterate_averaging is not None:
        optimizer = iterate_averaging.average_iterates(optimizer, options.iterate_averaging)
    return python_optimizers.without_autograph(optimizer)


def _build_client_optimizer(
    options: learning_options.LearningOptions,
) -> tff.learning.optimizers.Optimizer:
    sgd = tff.learning.optimizers.build_sgdm(options.client_learning_rate)
    return python_optimizers.without_autograph(sgd)


def _scheduled_rate(options: learning_options.LearningOptions, round_index: tf.Tensor) -> tf.Tensor:
    """Returns the server's learning rate in a round: a linear warm-up times a decay to zero."""
    now = tf.cast(round_index, tf.float32)
    rate = tf.constant(options.server_learning_rate, tf.float32)
    if options.server_warmup_rounds:
        rate *= tf.minimum(1.0, (now + 1.0) / (options.server_warmup_rounds + 1.0))
    done = now / options.num_rounds
    match options.server_decay:
        case "linear":
            rate *= 1.0 - done
        case "cosine":
            rate *= 0.5 * (1.0 + tf.cos(math.pi * done))
    return rate


def build_aggregator(
    options: learning_options.LearningOptions,
    plan: dp_ftrl_privacy.DpFtrlPlan | amplified_privacy.AmplifiedPlan,
) -> tff.aggregators.UnweightedAggregationFactory:
    """Builds the aggregator of the clients' updates: `model_aggregator`.

    It counts clients whose update is not finite, for the operator's eyes only, except
    under secure aggregation, which hides who they are.
    """
    if plan.strategy is None:
        return tff.aggregators.UnweightedMeanFactory()
    common = {
        "noise_multiplier": plan.noise_multiplier,
        "clients_per_round": plan.clients_per_round,
        "deterministic_seed": plan.deterministic_seed,
        "secure_noise": options.noise == "secure",
    }
    if isinstance(plan, amplified_privacy.AmplifiedPlan):
        return dp_ftrl.build_dp_ftrl_aggregator(
            plan.strategy, clip_norm=plan.clip_norm, **common, report_non_finite_clients=True
        )
    adaptive = adaptive_clipping_lib.AdaptiveClipping(
        initial_clip_norm=plan.clip_norm,
        target_unclipped_quantile=options.target_unclipped_quantile,
        clip_learning_rate=options.clip_learning_rate,
        clipped_count_stddev=options.clipped_count_stddev,
        only_estimates=not restarts.has_restarts(plan.strategy),  # Which the run has said.
    )
    if plan.encoding is not None:
        clip_norm = adaptive if plan.adaptive_clipping else plan.clip_norm
        return secagg.build_secagg_dp_ftrl_aggregator(
            plan.strategy,
            encoding=plan.encoding,
            clip_norm=clip_norm,
            noise_parties=plan.noise_parties,
            **common,
        )
    if plan.adaptive_clipping:
        return adaptive_clipping.build_adaptive_dp_ftrl_aggregator(
            plan.strategy, clipping=adaptive, **common, report_non_finite_clients=True
        )
    return dp_ftrl.build_dp_ftrl_aggregator(
        plan.strategy, clip_norm=plan.clip_norm, **common, report_non_finite_clients=True
    )
