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
from tff_dpftrl.runs import amplified_privacy, dp_ftrl_privacy, privacy, sampled_privacy
from tff_dpftrl.training import noise_options, optimizers


def build_round(
    plan: privacy.PrivacyPlan,
    rules: noise_options.RoundRules,
    model: model_lib.Model,
    *,
    metrics: metric_sums.Build = metric_sums.build,
) -> federated_round.FederatedRound:
    """Builds the round of a run; the class of the plan decides which one it is.

    It is unweighted federated averaging with DP-FTRL, or DP-FedAvg or DP-FedSGD.
    """
    return rounds.build_training(
        model,
        local_update=_local_update(plan, rules),
        aggregation=build_aggregation(rules, plan),
        server_optimizer=optimizers.build_server_optimizer(rules),
        metrics=metrics,
    )


def _local_update(
    plan: privacy.PrivacyPlan, rules: noise_options.RoundRules
) -> local_updates.LocalUpdate:
    optimizer = optimizers_lib.sgdm(rules.learning.client_learning_rate)
    if not isinstance(plan, sampled_privacy.SampledPlan):
        return local_updates.FedAvg(optimizer)
    if plan.algorithm == "dp-fedsgd":
        return local_updates.FedSgd(rules.learning.client_learning_rate)
    return local_updates.FedAvg(optimizer, _clipping(plan))


def _clipping(plan: sampled_privacy.SampledPlan) -> clipping.Clipping:
    clip = clipping.PerLayerClipping if plan.per_layer_clipping else clipping.FlatClipping
    return clip(plan.clip_norms)


def _private_round(
    plan: privacy.PrivacyPlan, rules: noise_options.RoundRules
) -> interface.PrivateRound:
    """Builds the mechanism of a plan; which one depends on the class of the plan."""
    if isinstance(plan, sampled_privacy.SampledPlan):
        estimator = {
            sampled_privacy.FIXED: estimators.FixedDenominator,
            sampled_privacy.CLIPPED: estimators.ClippedDenominator,
        }[plan.estimator]
        return sampled_gaussian.SampledGaussianRound(
            clipping=_clipping(plan),
            noise_multiplier=plan.noise_multiplier,
            estimator=estimator(plan.sampling_probability, plan.num_clients),
            deterministic_seed=plan.deterministic_seed,
            secure_noise=rules.secure_noise,
        )
    if not isinstance(plan, dp_ftrl_privacy.DpFtrlPlan | amplified_privacy.AmplifiedPlan):
        raise TypeError(f"There is no round for a {type(plan).__name__}.")
    encoding = getattr(plan, "encoding", None)
    common = {
        "noise_multiplier": plan.noise_multiplier,
        "clients_per_round": plan.clients_per_round,
        "deterministic_seed": plan.deterministic_seed,
        "secure_noise": rules.secure_noise,
        # Noise parties add the noise within secure sums only.
        "noise_parties": 0 if encoding is None else plan.noise_parties,
    }
    if isinstance(adaptive := rules.noise, noise_options.AdaptiveDpFtrl):
        made = adaptive_clipping.AdaptiveClipRound(
            plan.strategy,
            clipping=adaptive_clipping.AdaptiveClipping(
                initial_clip_norm=plan.clip_norm,
                target_unclipped_quantile=adaptive.target_unclipped_quantile,
                clip_learning_rate=adaptive.clip_learning_rate,
                clipped_count_stddev=adaptive.clipped_count_stddev,
                # The run has printed this already.
                only_estimates=not restarts.has_restarts(plan.strategy),
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
        plan.strategy,
        clipping=clipping.FlatClipping(plan.clip_norm),
        encoded_norm=encoding and encoding.inflated_clip_norm(plan.clip_norm),
        **common,
    )


def build_aggregation(
    rules: noise_options.RoundRules, plan: privacy.PrivacyPlan
) -> rounds.Aggregation:
    """Builds the aggregation of the clients' updates; a plain mean if the plan has no mechanism.

    It counts clients whose update is not finite, for the operator's eyes only, except under secure
    aggregation, which hides who they are.
    """
    if getattr(plan, "strategy", plan) is None:
        return aggregation.PlainMean()
    private_round = _private_round(plan, rules)
    encoding = getattr(plan, "encoding", None)
    if encoding is None:
        return aggregation.Aggregation(private_round, report_non_finite_clients=True)
    clip_norm = 1.0 if plan.adaptive_clipping else plan.clip_norm
    return aggregation.Aggregation(
        private_round, vector_sum=secure_sums.VectorSum(encoding, clip_norm)
    )
