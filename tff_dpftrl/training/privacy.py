"""One place derives mechanism, noise, cohorts and privacy statement of a run.

A plan is made from the config and the population, and everything that concerns
privacy is asked of it: what is claimed is what is run. `DpFtrlPlan` is in this
module, the plan of DP-FedAvg and DP-FedSGD in `sampled_privacy`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from tff_dpftrl.accounting import calibrate, display, guarantee, statement
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import identity, restarts, serialization, table
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import cohorts, ledger, observed
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.training import config as config_lib

TRAINING_METRICS_NOT_COVERED = (
    "Loss and accuracy on the training cohorts, the number of clients in them, and the n-gram "
    "baselines counted on the training users (metrics.csv, curves.png, TensorBoard events and "
    "terminal): exact figures, for simulations; do not publish them."
)


@dataclasses.dataclass(frozen=True)
class PrivacyPlan(abc.ABC):
    """What a run promises, and what keeps the promise.

    Attributes:
      schema: The declared participation schema.
      noise_multiplier: z, standard deviation of the noise per unit of sensitivity
        of one client's contribution to one round; 0 for none.
      clip_norm: L2 norm that a client's update is clipped to.
      clients_per_round: Size of a cohort, the expected one if it is sampled.
      num_clients: Number of training users.
      delta: δ of the (ε, δ) statement.
      deterministic_seed: Seed of the noise if the user gave one (not private).
    """

    schema: schema_lib.MinSep
    noise_multiplier: float
    clip_norm: float
    clients_per_round: int
    num_clients: int
    delta: float
    deterministic_seed: int | None

    @property
    def has_noise(self) -> bool:
        """Whether the aggregator adds any noise."""
        return self.noise_multiplier > 0.0

    @property
    def has_guarantee(self) -> bool:
        """Whether anything is promised: noise that nobody else can draw again."""
        return self.has_noise and self.deterministic_seed is None

    @property
    @abc.abstractmethod
    def needs_secret_cohorts(self) -> bool:
        """Whether the guarantee rests on the secrecy of who took part."""

    @abc.abstractmethod
    def sampler(self, seed: int) -> cohorts.CohortSampler:
        """The cohorts; they never break `schema`."""

    @abc.abstractmethod
    def epsilon_after(self, rounds_done: int) -> float | None:
        """ε at δ of the models of the first `rounds_done` rounds; None without guarantee."""

    @abc.abstractmethod
    def budget_guard(self, max_epsilon: float | None) -> ledger.BudgetGuard | None:
        """The ledger's last check before a round begins, on what it has observed."""

    @abc.abstractmethod
    def statement(
        self,
        seen: observed.ObservedParticipation,
        *,
        config: config_lib.TrainingConfig,
        user_unit: str,
        vocabulary_source: str,
    ) -> statement.PrivacyStatement:
        """The statement of what was run, for the participation that was observed.

        Args:
          seen: Rounds, stride and participations that the ledger recorded.
          config: Options of the run, for its parameters.
          user_unit: What one user of the corpus is.
          vocabulary_source: Where the vocabulary came from.

        Returns:
          A statement; one that says "no guarantee" where there is none.
        """

    @abc.abstractmethod
    def derived(self) -> dict[str, Any]:
        """What was derived from the config, as JSON-compatible values."""

    def _parameters(self, config: config_lib.TrainingConfig, user_unit: str) -> dict[str, Any]:
        return {
            "clip_norm": self.clip_norm,
            "clients_per_round": self.clients_per_round,
            "server_optimizer": config.server_optimizer,
            "data": config.data,
            "user": user_unit,
        }


@dataclasses.dataclass(frozen=True)
class DpFtrlPlan(PrivacyPlan):
    """DP-FTRL: correlated noise and a participation schema, no sampling assumption.

    Attributes:
      strategy: The strategy matrix, restarts included; None without clipping and
        noise.
      encoding: Grid of the secure aggregation; None without it.
    """

    strategy: strategy_lib.Strategy | None
    encoding: grid.GridEncoding | None

    needs_secret_cohorts = False

    def sampler(self, seed: int) -> cohorts.CohortSampler:
        """See the base class."""
        return cohorts.MinSepSampler(
            num_clients=self.num_clients,
            clients_per_round=self.clients_per_round,
            min_sep=self.schema.min_sep,
            max_participations=self.schema.max_participations,
            num_rounds=self.schema.num_rounds,
            seed=seed,
        )

    def epsilon_after(self, rounds_done: int) -> float | None:
        """See the base class."""
        if not self.has_guarantee:
            return None
        return guarantee.epsilon_so_far(
            self.strategy,
            noise_multiplier=self.noise_multiplier,
            schema=self.schema,
            rounds_released=rounds_done,
            delta=self.delta,
        )

    def budget_guard(self, max_epsilon: float | None) -> ledger.BudgetGuard | None:
        """See the base class."""
        if max_epsilon is None:
            return None

        def guard(seen: observed.ObservedParticipation) -> str | None:
            epsilon = self._claim(seen.as_schema()).epsilon
            if epsilon <= max_epsilon:
                return None
            return (
                f"epsilon would be {display.round_up(epsilon)}, above max_epsilon={max_epsilon:g}."
            )

        return guard

    def _claim(self, schema: schema_lib.MinSep) -> guarantee.Guarantee:
        return guarantee.dp_ftrl_guarantee(
            identity.Identity() if self.strategy is None else self.strategy,
            noise_multiplier=self.noise_multiplier,
            schema=schema,
            delta=self.delta,
            seed_is_known=self.deterministic_seed is not None,
            clip_norm=self.clip_norm,
        )

    def statement(
        self,
        seen: observed.ObservedParticipation,
        *,
        config: config_lib.TrainingConfig,
        user_unit: str,
        vocabulary_source: str,
    ) -> statement.PrivacyStatement:
        """See the base class."""
        parameters = self._parameters(config, user_unit)
        if config.adaptive_clipping:
            parameters |= {
                "restart_warmup": config.restart_warmup,
                "restart_every": config.restart_every,
            }
        if self.encoding is not None:
            parameters |= {
                "secagg_norm_inflation": self.encoding.inflation,
                "secagg_bits_per_parameter": self.encoding.bits_per_parameter,
                "secagg_upload_bytes_per_client": self.encoding.upload_bytes,
                "noise_multiplier_is_relative_to": "clip_norm times secagg_norm_inflation",
            }
        # When it stops at an accuracy depends on the models: then all rounds are charged that it
        # might have run.
        charged = seen.as_schema() if config.stop_at_accuracy is None else self.schema
        claim = self._claim(charged)
        if self.strategy is None:
            claim = dataclasses.replace(claim, mechanism="none")
        if config.adaptive_clipping:
            claim = dataclasses.replace(claim, clip_norm=None, adaptive_clipping=True)
        return statement.dp_ftrl_statement(
            claim,
            unit_of_privacy="user",
            num_users=self.num_clients,
            parameters=parameters,
            declared=self.schema,
            observed=seen,
            vocabulary_source=vocabulary_source,
            not_covered=(TRAINING_METRICS_NOT_COVERED,),
        )

    def derived(self) -> dict[str, Any]:
        """See the base class."""
        return {
            "schema": dataclasses.asdict(self.schema),
            "noise_multiplier": self.noise_multiplier,
            "strategy": None if self.strategy is None else self.strategy.to_dict(),
            "secagg_encoding": None if self.encoding is None else self.encoding.to_dict(),
        }

    @classmethod
    def make(
        cls, config: config_lib.TrainingConfig, num_clients: int, num_parameters: int
    ) -> DpFtrlPlan:
        """Chooses schema, strategy and noise for a population.

        Args:
          config: Options of the run.
          num_clients: Number of training users.
          num_parameters: Number of trainable weights.

        Returns:
          The plan; its ε is not above `config.target_epsilon` where that is given.

        Raises:
          ValueError: If the population cannot keep `config.min_sep`, or an option
            cannot be used.
        """
        schema = _schema(config, num_clients)
        strategy = _strategy(config, schema)
        noise_multiplier = config.noise_multiplier or 0.0
        if config.target_epsilon is not None:
            noise_multiplier = calibrate.calibrate_noise_multiplier(
                strategy, schema, target_epsilon=config.target_epsilon, delta=config.delta
            )
        return cls._with(config, num_clients, num_parameters, schema, noise_multiplier, strategy)

    @classmethod
    def resumed(
        cls,
        config: config_lib.TrainingConfig,
        num_clients: int,
        num_parameters: int,
        derived: Mapping[str, Any],
    ) -> DpFtrlPlan:
        """The plan of a run that is under way, from what `derived` had recorded."""
        strategy = derived["strategy"]
        return cls._with(
            config,
            num_clients,
            num_parameters,
            schema_lib.MinSep(**derived["schema"]),
            derived["noise_multiplier"],
            None if strategy is None else serialization.strategy_from_dict(strategy),
        )

    @classmethod
    def _with(
        cls,
        config: config_lib.TrainingConfig,
        num_clients: int,
        num_parameters: int,
        schema: schema_lib.MinSep,
        noise_multiplier: float,
        strategy: strategy_lib.Strategy | None,
    ) -> DpFtrlPlan:
        encoding = None
        if config.secagg_bits is not None:
            encoding = grid.for_bits(num_parameters, config.clients_per_round, config.secagg_bits)
        return cls(
            schema=schema,
            noise_multiplier=noise_multiplier,
            clip_norm=config.clip_norm,
            clients_per_round=config.clients_per_round,
            num_clients=num_clients,
            delta=config.delta,
            deterministic_seed=config.deterministic_noise_seed,
            strategy=strategy,
            encoding=encoding,
        )


def _schema(config: config_lib.TrainingConfig, num_clients: int) -> schema_lib.MinSep:
    feasible = cohorts.largest_feasible_min_sep(num_clients, config.clients_per_round)
    if feasible < 1:
        raise ValueError(
            f"clients_per_round={config.clients_per_round} exceeds the {num_clients} training "
            f"users: lower it to {num_clients} or less."
        )
    min_sep = min(feasible, config.num_rounds) if config.min_sep is None else config.min_sep
    participations = config.max_participations
    if participations is None:
        participations = -(-config.num_rounds // min_sep)
    return schema_lib.MinSep(config.num_rounds, min_sep, participations)


def _strategy(
    config: config_lib.TrainingConfig, schema: schema_lib.MinSep
) -> strategy_lib.Strategy | None:
    """The strategy of the whole run, restarts included; None for the mechanism "none"."""
    rounds, starts = schema.num_rounds, (0,)
    if config.adaptive_clipping:
        starts = restarts.starts(rounds, every=config.restart_every, first=config.restart_warmup)
    if config.strategy is not None:
        return restarts.whole_run(serialization.load(config.strategy), rounds, starts)
    if config.mechanism == "none":
        return None
    return table.build(config.mechanism, schema, config.mechanism_options, starts=starts)
