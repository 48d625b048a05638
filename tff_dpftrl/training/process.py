"""The learning round of a run: federated averaging or gradients, around a private round."""

from __future__ import annotations

import warnings

from tff_dpftrl.execution import federated_round
from tff_dpftrl.learning import local_updates, metric_sums, rounds
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.learning import optimizers as optimizers_lib
from tff_dpftrl.mechanisms import restarts
from tff_dpftrl.private_round import (
    adaptive_clipping,
    aggregation,
    clipping,
    estimators,
    fixed_clip,
    interface,
    sampled_gaussian,
    secure_sums,
)
from tff_dpftrl.runs import mechanism_plan, participants
from tff_dpftrl.training import learning_options, optimizers


def build_round(
    plan: mechanism_plan.MechanismPlan,
    options: learning_options.LearningOptions,
    model: model_lib.Model,
    *,
    metrics: metric_sums.Build = metric_sums.build,
) -> federated_round.FederatedRound:
    """Builds the round of a run; the cohorts of the plan decide which one it is.

    It is unweighted federated averaging with DP-FTRL, or DP-FedAvg or DP-FedSGD.
    """
    return rounds.build_training(
        model,
        local_update=_local_update(plan, options),
        aggregation=build_aggregation(options, plan),
        server_optimizer=optimizers.build_server_optimizer(options),
        metrics=metrics,
    )


def _local_update(
    plan: mechanism_plan.MechanismPlan, options: learning_options.LearningOptions
) -> local_updates.LocalUpdate:
    optimizer = optimizers_lib.sgdm(options.client_learning_rate)
    if not isinstance(plan.participation, participants.FedAvgCohorts):
        return local_updates.FedAvg(optimizer)
    if plan.participation.algorithm == "dp-fedsgd":
        return local_updates.FedSgd(options.client_learning_rate)
    return local_updates.FedAvg(optimizer, _clipping(plan))


def _clipping(plan: mechanism_plan.MechanismPlan) -> clipping.Clipping:
    clip = clipping.PerLayerClipping if plan.clipping.per_layer else clipping.FlatClipping
    return clip(plan.clipping.norms(plan.num_rounds))


def _private_round(
    plan: mechanism_plan.MechanismPlan, options: learning_options.LearningOptions
) -> interface.PrivateRound:
    """Builds the mechanism of a plan; which one depends on its cohorts."""
    drawn, noise = plan.participation, plan.noise
    if isinstance(drawn, participants.FedAvgCohorts):
        estimator = {
            participants.FIXED: estimators.FixedDenominator,
            participants.CLIPPED: estimators.ClippedDenominator,
        }[drawn.estimator]
        return sampled_gaussian.SampledGaussianRound(
            clipping=_clipping(plan),
            noise_multiplier=plan.noise_multiplier,
            estimator=estimator(drawn.sampling_probability, plan.num_clients),
            deterministic_seed=plan.deterministic_seed,
            secure_noise=options.noise == "secure",
        )
    assert noise.strategy is not None
    encoding = noise.encoding
    common = {
        "noise_multiplier": plan.noise_multiplier,
        "clients_per_round": plan.clients_per_round,
        "deterministic_seed": plan.deterministic_seed,
        "secure_noise": options.noise == "secure",
        # Noise parties add the noise within secure sums only.
        "noise_parties": 0 if encoding is None else noise.parties,
    }
    if plan.clipping.adaptive:
        made = adaptive_clipping.AdaptiveClipRound(
            noise.strategy,
            clipping=adaptive_clipping.AdaptiveClipping(
                initial_clip_norm=plan.clip_norm,
                target_unclipped_quantile=options.target_unclipped_quantile,
                clip_learning_rate=options.clip_learning_rate,
                clipped_count_stddev=options.clipped_count_stddev,
                # The run has printed this already.
                only_estimates=not restarts.has_restarts(noise.strategy),
            ),
            unit_inflation=encoding and encoding.inflated_clip_norm(1.0),
            **common,
        )
        if made.expensive_clipping is not None:
            warnings.warn(
                made.expensive_clipping, adaptive_clipping.ExpensiveClippingWarning, stacklevel=2
            )
        return made
    return fixed_clip.FixedClipRound(
        noise.strategy,
        clipping=clipping.FlatClipping(plan.clip_norm),
        encoded_norm=encoding and encoding.inflated_clip_norm(plan.clip_norm),
        **common,
    )


def build_aggregation(
    options: learning_options.LearningOptions, plan: mechanism_plan.MechanismPlan
) -> rounds.Aggregation:
    """Builds the aggregation of the clients' updates; a plain mean if the plan has no mechanism.

    It counts clients whose update is not finite, for the operator's eyes only, except under secure
    aggregation, which hides who they are.
    """
    if plan.strategy is None:
        return aggregation.PlainMean()
    private_round = _private_round(plan, options)
    encoding = plan.noise.encoding
    if encoding is None:
        return aggregation.Aggregation(private_round, report_non_finite_clients=True)
    clip_norm = 1.0 if plan.clipping.adaptive else plan.clip_norm
    return aggregation.Aggregation(
        private_round, vector_sum=secure_sums.VectorSum(encoding, clip_norm)
    )
