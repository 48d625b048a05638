"""The learning process of a run: TFF's own federated averaging with our aggregator."""

from __future__ import annotations

import tensorflow_federated as tff

from tff_dpftrl.aggregators import dp_ftrl
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import privacy


def build_process(
    config: config_lib.TrainingConfig,
    plan: privacy.PrivacyPlan,
    model: tff.learning.models.FunctionalModel,
) -> tff.learning.templates.LearningProcess:
    """Builds `tff.learning.algorithms.build_unweighted_fed_avg` for a run.

    Args:
      config: Optimizers and their learning rates.
      plan: Mechanism, noise and clipping.
      model: The model, with its initial weights.

    Returns:
      The process; its aggregator is TFF's unweighted mean without a strategy.
    """
    return tff.learning.algorithms.build_unweighted_fed_avg(
        model,
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(config.client_learning_rate),
        server_optimizer_fn=build_server_optimizer(config),
        model_aggregator=build_aggregator(plan),
        # Several times faster than a reduce over the dataset for an unrolled LSTM on a CPU.
        loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
    )


def build_server_optimizer(
    config: config_lib.TrainingConfig,
) -> tff.learning.optimizers.Optimizer:
    """The server's optimizer, which only post-processes what was noised."""
    match config.server_optimizer:
        case "adam":
            return tff.learning.optimizers.build_adam(config.server_learning_rate)
        case "momentum":
            return tff.learning.optimizers.build_sgdm(
                config.server_learning_rate, config.server_momentum
            )
        case "sgd":
            return tff.learning.optimizers.build_sgdm(config.server_learning_rate)


def build_aggregator(
    plan: privacy.PrivacyPlan,
) -> tff.aggregators.UnweightedAggregationFactory:
    """What turns the clients' updates into the server's: `model_aggregator`."""
    if plan.strategy is None:
        return tff.aggregators.UnweightedMeanFactory()
    return dp_ftrl.build_dp_ftrl_aggregator(
        plan.strategy,
        noise_multiplier=plan.noise_multiplier,
        clip_norm=plan.clip_norm,
        clients_per_round=plan.clients_per_round,
        deterministic_seed=plan.deterministic_seed,
    )
