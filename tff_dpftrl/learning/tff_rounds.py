"""Rounds of TFF's own models and algorithms, around a private round of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.aggregators import adaptive_clipping, check_process, dp_ftrl, inner_sum, secagg_sum
from tff_dpftrl.execution import contexts, federated_round, process_form, tff_names
from tff_dpftrl.learning import (
    local_model,
    metric_sums,
    optimizers,
    own_model,
    rounds,
    tff_metrics,
)
from tff_dpftrl.private_round import adaptive_clipping as adaptive_clipping_lib
from tff_dpftrl.private_round import aggregation as aggregation_lib

Algorithm = Callable[..., Any]
"""Function from a model and the arguments `model_aggregator` and `metrics_aggregator` to a
`tff.learning.templates.LearningProcess`."""


def federated_averaging(
    client_optimizer: optimizers.Optimizer, server_optimizer: optimizers.Optimizer
) -> Algorithm:
    """Returns TFF's unweighted federated averaging with these optimizers."""

    def build(model, *, model_aggregator, metrics_aggregator):
        return tff.learning.algorithms.build_unweighted_fed_avg(
            local_model.as_tff(model),
            client_optimizer_fn=client_optimizer,
            server_optimizer_fn=server_optimizer,
            model_aggregator=model_aggregator,
            metrics_aggregator=metrics_aggregator,
            # Several times faster than a reduce over the dataset for an unrolled LSTM on a CPU.
            loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
        )

    return build


def training(
    algorithm: Algorithm,
    model: own_model.Model,
    aggregation: rounds.Aggregation,
    metrics: metric_sums.Build,
    *,
    name: str = "algorithm",
) -> federated_round.FederatedRound:
    """Builds the round of an algorithm, and refuses one that does not release all privately.

    The algorithm is called with a TFF factory of the aggregation. It is refused if it fails, makes
    no learning process, or releases anything besides metrics and the noised sum of the
    aggregation. Errors call it `name`.
    """
    aggregator = factory_of(aggregation)
    with contexts.compiled_only():
        try:
            made = algorithm(
                local_model.as_tff(model),
                model_aggregator=aggregator,
                metrics_aggregator=tff_metrics.aggregator(metrics),
            )
        except validation.UsageError:
            raise
        except Exception as error:  # Anybody's code may raise anything.
            raise validation.UsageError(f"{name} raises {validation.one_line(error)}") from error
        if not isinstance(made, tff.learning.templates.LearningProcess):
            raise validation.UsageError(
                "algorithm must return a tff.learning.templates.LearningProcess, got a "
                f"{type(made).__name__}."
            )
        if isinstance(aggregation, aggregation_lib.Aggregation):
            _check_private(made, aggregator)
        return process_form.round_of(made)


def evaluation(
    model: own_model.Model, metrics: metric_sums.Build
) -> federated_round.FederatedRound:
    """Builds the round of TFF's evaluation of a model."""
    finalizers, specs = own_model.metrics(model)
    with contexts.compiled_only():
        return process_form.round_of(
            tff.learning.algorithms.build_fed_eval(
                local_model.as_tff(model),
                metrics_aggregation_process=tff_metrics.evaluation_process(
                    metrics, finalizers, tff_names.tensorflow_to_type(specs)
                ),
                loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
            )
        )


def factory_of(
    aggregation: rounds.Aggregation,
) -> tff.aggregators.UnweightedAggregationFactory:
    """Returns the TFF factory that aggregates around the same private round of DP-FTRL."""
    if isinstance(aggregation, aggregation_lib.PlainMean):
        return tff.aggregators.UnweightedMeanFactory()
    private_round, vector_sum = aggregation.private_round, aggregation.vector_sum
    options: dict[str, Any] = {"report_non_finite_clients": vector_sum is None}
    is_adaptive = isinstance(private_round, adaptive_clipping_lib.AdaptiveClipRound)
    if vector_sum is not None:
        secure = secagg_sum.SecAggSumFactory(
            vector_sum.encoding, vector_sum.clip_norm, rotation_seed=vector_sum.rotation_seed
        )
        options["inner_sum"] = inner_sum.InnerSum.of(secure, vector_sum.clip_norm)
        if is_adaptive:
            bits = secagg_sum.SecAggHalfBitFactory(has_noise=private_round.noise_parties > 0)
            options["count_sum"] = inner_sum.exact_count(bits, bits.contribution_norm)
    if is_adaptive:
        return adaptive_clipping.AdaptiveDPFTRLFactory(private_round, **options)
    return dp_ftrl.DPFTRLFactory(private_round, **options)


def _check_private(
    made: tff.learning.templates.LearningProcess,
    aggregator: tff.aggregators.UnweightedAggregationFactory,
) -> None:
    """Refuses a process that releases more than metrics and the noised sum of an aggregator."""
    found = check_process.check_process(made)
    found.raise_if_any(["metrics"])
    updates = made.get_model_weights.type_signature.result.trainable
    charged = check_process.check_process(aggregator.create(updates))
    if found.releases != charged.releases:
        raise validation.UsageError(
            "algorithm must release the whole update once, by the model_aggregator that it gets: "
            "the statement charges that release and no other."
        )
