"""The privacy plan of DP-FedAvg and DP-FedSGD: independent noise, secret sampling."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from tff_dpftrl.accounting import dp_fedavg, statement
from tff_dpftrl.participation import cohorts, ledger, observed
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import privacy


@dataclasses.dataclass(frozen=True)
class SampledPlan(privacy.PrivacyPlan):
    """Every client takes part in a round with one probability, independently.

    The guarantee is amplified by the secrecy of the cohorts (McMahan et al. 2018).
    """

    needs_secret_cohorts = True

    @property
    def sampling_probability(self) -> float:
        """The q of the papers: clients per round over number of clients."""
        return self.clients_per_round / self.num_clients

    def sampler(self, seed: int) -> cohorts.CohortSampler:
        """See the base class."""
        return cohorts.PoissonSampler(
            num_clients=self.num_clients,
            sampling_probability=self.sampling_probability,
            num_rounds=self.schema.num_rounds,
            seed=seed,
        )

    def epsilon_after(self, rounds_done: int) -> float | None:
        """See the base class."""
        if not self.has_guarantee:
            return None
        return _epsilon(self.sampling_probability, self.noise_multiplier, rounds_done, self.delta)

    def budget_guard(self, max_epsilon: float | None) -> ledger.BudgetGuard | None:
        """See the base class; only the number of rounds counts."""
        if max_epsilon is None:
            return None

        def guard(seen: observed.ObservedParticipation) -> str | None:
            epsilon = self.epsilon_after(seen.num_rounds)
            if epsilon is not None and epsilon <= max_epsilon:
                return None
            return f"epsilon would be {epsilon}, above max_epsilon={max_epsilon:g}."

        return guard

    def statement(
        self,
        seen: observed.ObservedParticipation,
        *,
        config: config_lib.TrainingConfig,
        user_unit: str,
        vocabulary_source: str,
    ) -> statement.PrivacyStatement:
        """See the base class."""
        # When it stops at an accuracy depends on the models: all rounds are charged then.
        charged = seen.num_rounds if config.stop_at_accuracy is None else self.schema.num_rounds
        spent = dp_fedavg.DpFedAvg(self.sampling_probability, self.noise_multiplier, charged)
        return statement.sampled_statement(
            mechanism=config.algorithm,
            epsilon=spent.epsilon(self.delta),
            delta=self.delta,
            accounting=(
                "Privacy loss distribution of the Poisson-sampled Gaussian mechanism, composed "
                "over the rounds."
            ),
            sampling=(
                "Every user is in a round's cohort with probability "
                f"{self.sampling_probability:.6g}, independently of everything else."
            ),
            parameters=self._parameters(config, user_unit)
            | {
                "noise_multiplier": self.noise_multiplier,
                "sampling_probability": self.sampling_probability,
                "num_rounds": seen.num_rounds,
                "num_rounds_charged": charged,
                "estimator": "fixed denominator: expected number of clients",
            },
            num_users=self.num_clients,
            seed_is_known=self.deterministic_seed is not None,
            vocabulary_source=vocabulary_source,
            not_covered=(privacy.TRAINING_METRICS_NOT_COVERED,),
        )

    def derived(self) -> dict[str, Any]:
        """See the base class."""
        return {
            "schema": dataclasses.asdict(self.schema),
            "noise_multiplier": self.noise_multiplier,
            "sampling_probability": self.sampling_probability,
        }

    @classmethod
    def make(cls, config: config_lib.TrainingConfig, num_clients: int) -> SampledPlan:
        """Chooses the noise for a population.

        Raises:
          ValueError: If `config.clients_per_round` exceeds the population.
        """
        if config.clients_per_round > num_clients:
            raise ValueError(
                f"clients_per_round={config.clients_per_round} exceeds the {num_clients} training "
                f"users: lower it to {num_clients} or less."
            )
        noise_multiplier = config.noise_multiplier
        if noise_multiplier is None:
            noise_multiplier = dp_fedavg.calibrate_noise_multiplier(
                sampling_probability=config.clients_per_round / num_clients,
                num_rounds=config.num_rounds,
                target_epsilon=config.target_epsilon,
                delta=config.delta,
            )
        return cls._with(config, num_clients, noise_multiplier)

    @classmethod
    def resumed(
        cls, config: config_lib.TrainingConfig, num_clients: int, derived: Mapping[str, Any]
    ) -> SampledPlan:
        """The plan of a run that is under way, from what `derived` had recorded."""
        return cls._with(config, num_clients, derived["noise_multiplier"])

    @classmethod
    def _with(
        cls, config: config_lib.TrainingConfig, num_clients: int, noise_multiplier: float
    ) -> SampledPlan:
        return cls(
            # A sampled client may be in every round.
            schema=schema_lib.MinSep(config.num_rounds, 1, config.num_rounds),
            noise_multiplier=noise_multiplier,
            clip_norm=config.clip_norm,
            clients_per_round=config.clients_per_round,
            num_clients=num_clients,
            delta=config.delta,
            deterministic_seed=config.deterministic_noise_seed,
        )


@functools.lru_cache(maxsize=4)
def _epsilon(probability: float, noise_multiplier: float, rounds: int, delta: float) -> float:
    if rounds == 0:
        return 0.0
    return dp_fedavg.DpFedAvg(probability, noise_multiplier, rounds).epsilon(delta)
