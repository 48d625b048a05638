"""One place derives mechanism, noise, aggregator and privacy statement of a run.

A `PrivacyPlan` is made from the config and the population, and everything that
concerns privacy is asked of it: what is claimed is what is run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from tff_dpftrl.accounting import calibrate, guarantee, statement
from tff_dpftrl.mechanisms import (
    bandtoep_optimize,
    blt_optimize,
    identity,
    inverse_banded,
    serialization,
    tree,
)
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import cohorts, ledger, observed
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.training import config as config_lib

_TOEPLITZ_BANDS = 64


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """Mechanism and declared participation of one run.

    Attributes:
      strategy: The strategy matrix; None without clipping and noise.
      schema: The declared participation schema.
      noise_multiplier: z, stddev of the noise per unit of clip norm; 0 for none.
      clip_norm: L2 norm that a client's update is clipped to.
      clients_per_round: The fixed denominator.
      delta: δ of the (ε, δ) statement.
      deterministic_seed: Seed of the noise if the user gave one (not private).
    """

    strategy: strategy_lib.Strategy | None
    schema: schema_lib.MinSep
    noise_multiplier: float
    clip_norm: float
    clients_per_round: int
    delta: float
    deterministic_seed: int | None

    @property
    def has_noise(self) -> bool:
        """Whether the aggregator adds any noise."""
        return self.strategy is not None and self.noise_multiplier > 0.0

    @property
    def has_guarantee(self) -> bool:
        """Whether anything is promised: noise that nobody else can draw again."""
        return self.has_noise and self.deterministic_seed is None

    @functools.cached_property
    def _epsilons(self) -> dict[int, float]:
        return {}

    def epsilon_after(self, rounds_done: int) -> float | None:
        """ε at δ of the models of the first `rounds_done` rounds; None without guarantee."""
        if not self.has_guarantee:
            return None
        if rounds_done not in self._epsilons:
            self._epsilons[rounds_done] = guarantee.epsilon_so_far(
                self.strategy,
                noise_multiplier=self.noise_multiplier,
                schema=self.schema,
                rounds_released=rounds_done,
                delta=self.delta,
            )
        return self._epsilons[rounds_done]

    def budget_guard(self, max_epsilon: float | None) -> ledger.BudgetGuard | None:
        """A last check of the ledger, on what it observed, before a round begins."""
        if max_epsilon is None:
            return None

        def guard(seen: observed.ObservedParticipation) -> str | None:
            epsilon = self._claim(seen).epsilon
            if epsilon <= max_epsilon:
                return None
            return f"epsilon would be {epsilon:.6g}, above max_epsilon={max_epsilon:g}."

        return guard

    def _claim(self, seen: observed.ObservedParticipation) -> guarantee.Guarantee:
        return guarantee.dp_ftrl_guarantee(
            identity.Identity() if self.strategy is None else self.strategy,
            noise_multiplier=self.noise_multiplier,
            schema=seen.as_schema(),
            delta=self.delta,
        )

    def to_dict(self) -> dict[str, Any]:
        """What was derived from the config, as JSON-compatible values."""
        return {
            "strategy": None if self.strategy is None else self.strategy.to_dict(),
            "schema": dataclasses.asdict(self.schema),
            "noise_multiplier": self.noise_multiplier,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], config: config_lib.TrainingConfig) -> PrivacyPlan:
        """Inverse of `to_dict`, given the config that the plan was made from.

        Raises:
          KeyError: If a value is missing.
          ValueError: If a value cannot be used.
        """
        strategy = values["strategy"]
        return cls(
            strategy=None if strategy is None else serialization.strategy_from_dict(strategy),
            schema=schema_lib.MinSep(**values["schema"]),
            noise_multiplier=values["noise_multiplier"],
            clip_norm=config.clip_norm,
            clients_per_round=config.clients_per_round,
            delta=config.delta,
            deterministic_seed=config.deterministic_noise_seed,
        )

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
        return statement.dp_ftrl_statement(
            dataclasses.replace(self._claim(seen), mechanism=config.mechanism),
            unit_of_privacy="user",
            parameters={
                "clip_norm": self.clip_norm,
                "clients_per_round": self.clients_per_round,
                "server_optimizer": config.server_optimizer,
                "data": config.data,
                "user": user_unit,
            },
            declared=self.schema,
            observed=statement.Participation(
                seen.num_rounds, seen.min_sep, seen.max_participations
            ),
            deterministic_seed=self.deterministic_seed is not None,
            vocabulary_source=vocabulary_source,
            not_covered=(
                "Loss and accuracy on the training cohorts in metrics.csv, curves.png and the "
                "TensorBoard events: exact figures, for simulations; do not publish them.",
            ),
        )


def plan_privacy(config: config_lib.TrainingConfig, num_clients: int) -> PrivacyPlan:
    """Chooses schema, strategy and noise for a population.

    Args:
      config: Options of the run.
      num_clients: Number of training users.

    Returns:
      The plan; its ε is not above `config.target_epsilon` where that is given.

    Raises:
      ValueError: If the population cannot keep `config.min_sep` or
        `config.max_participations`, or an option cannot be used.
    """
    feasible = cohorts.largest_feasible_min_sep(num_clients, config.clients_per_round)
    if feasible < 1:
        raise ValueError(
            f"clients_per_round={config.clients_per_round} exceeds the {num_clients} training "
            f"users: lower it to {num_clients} or less."
        )
    min_sep = min(feasible, config.num_rounds) if config.min_sep is None else config.min_sep
    schema = schema_lib.MinSep(
        config.num_rounds,
        min_sep,
        -(-config.num_rounds // min_sep)
        if config.max_participations is None
        else config.max_participations,
    )
    strategy = _strategy(config, schema)
    noise_multiplier = 0.0
    if config.noise_multiplier is not None:
        noise_multiplier = config.noise_multiplier
    elif config.target_epsilon is not None:
        noise_multiplier = calibrate.calibrate_noise_multiplier(
            strategy, schema, target_epsilon=config.target_epsilon, delta=config.delta
        )
    return PrivacyPlan(
        strategy=strategy,
        schema=schema,
        noise_multiplier=noise_multiplier,
        clip_norm=config.clip_norm,
        clients_per_round=config.clients_per_round,
        delta=config.delta,
        deterministic_seed=config.deterministic_noise_seed,
    )


def _strategy(
    config: config_lib.TrainingConfig, schema: schema_lib.MinSep
) -> strategy_lib.Strategy | None:
    match config.mechanism:
        case "none":
            return None
        case "identity":
            return identity.Identity()
        case "tree":
            return tree.Tree(schema.num_rounds)
        case "blt":
            return blt_optimize.optimize_blt(schema, num_buffers=config.buffers).strategy
        case "bandtoep":
            bands = min(_TOEPLITZ_BANDS, schema.min_sep)
            return bandtoep_optimize.optimize_banded_toeplitz(schema, bands)
        case "bisr":
            bands = min(_TOEPLITZ_BANDS, schema.min_sep)
            return inverse_banded.InverseBanded.bisr(bands)
