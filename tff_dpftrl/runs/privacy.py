"""The privacy plan of a run: mechanism, noise, cohorts, ε and statement, all in one place.

A run describes the privacy it wants in a small frozen `Privacy`, which makes a `PrivacyPlan` for a
population. Everything that concerns privacy is asked of the plan: what is claimed is what is run.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import display, parts, statement
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.participation import cohorts, ledger, observed
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import simulated_run

TRAINING_METRICS_NOT_COVERED = (
    "Loss and accuracy on the training cohorts, the number of users in them and of those whose "
    "update was dropped, how long a round took, the figures about the training data that a run "
    "begins with, and the n-gram baselines counted on it (in private/ and on the terminal only): "
    "exact figures, for simulations; do not publish them."
)
"""Sentence of a statement on the exact figures of training on text by cohorts of users."""

EXACT_BESIDE_RELEASED = (
    "What is in private/ and on the terminal: figures of the training data without the noise that "
    "the released ones have; do not publish them."
)
"""Sentence of a statement whose run releases training metrics within its budget."""


def not_covered(exact: str, others: Sequence[parts.Part]) -> str:
    """Returns a statement's sentence on exact figures: `exact`, unless metrics are released."""
    is_released = any(part.name == parts.METRICS for part in others)
    return EXACT_BESIDE_RELEASED if is_released else exact


def check_parts(others: Sequence[parts.Part], deployment: simulated_run.Deployment | None) -> None:
    """Refuses other parts in the budget of a simulated larger run, which has other users."""
    if others and deployment is not None:
        raise validation.UsageError(
            f"The {others[0].name} of a run with simulate_report_goal cannot be a part of its "
            "budget, which is that of the larger run: leave one of them out."
        )


def derived_parts(others: Sequence[parts.Part]) -> dict[str, Any]:
    """Returns parts as `PrivacyPlan.derived` has them; empty if there are none."""
    return {"others": parts.to_json(others)} if others else {}


@functools.lru_cache(maxsize=8)
def epsilon(rounds: parts.Weights, others: tuple[parts.Part, ...], delta: float) -> float:
    """Computes ε of rounds and of all else that a run releases; the last ones are kept."""
    return parts.compose(rounds, others, delta)


SWAMPED = 0.3
"""`PrivacyPlan.noise_to_signal` above which a run gets a hint: clear evidence ends there.

Runs of docs/experiments.md with tree or BLT that gained clearly on their pretrained model had 0.06
to 0.3, those with banded noise and secret samples about 0.4. At 0.44 independent noise cost four
points, and above 0.7 a point was gained at best. But a pretrained model at 0.58 beat trigrams,
while toy models from random weights learned nothing from 0.2 on.
"""


def check_population(num_clients: int, clients_per_round: int) -> None:
    """Refuses a cohort (if sampled, an expected size) that is larger than the population."""
    if clients_per_round > num_clients:
        raise validation.UsageError(
            f"clients_per_round={clients_per_round} exceeds the {num_clients} training "
            f"users: lower it to {num_clients} or less."
        )


def noise_to_signal(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    num_parameters: int,
    num_rounds: int,
    clients_per_round: float,
    workload: workload_lib.Workload | None = None,
) -> float:
    """Computes `PrivacyPlan.noise_to_signal` of correlated noise with a fixed denominator."""
    # The noise of the last model, row n - 1 of B = A C⁻¹, over what updates would make of it.
    variance = float(strategy.model_noise_variance(num_rounds, workload)[-1])
    weight = num_rounds if workload is None else float(workload.apply(np.ones(num_rounds))[-1])
    noise = noise_multiplier * math.sqrt(variance * num_parameters)
    return noise / (weight * clients_per_round)


def noise_lines(
    strategy: strategy_lib.Strategy,
    noise_multiplier: float,
    memory_copies: int,
    workload: workload_lib.Workload | None = None,
) -> list[str]:
    """Returns correlated noise in two lines, for the start of a run."""
    optimised = "" if workload is None else f" Optimised for {workload.description}."
    return [
        f"Noise: {strategy.name}, z = {noise_multiplier:.6g}.{optimised}",
        f"State: the noise keeps {memory_copies or 'no'} "
        f"{'copy' if memory_copies == 1 else 'copies'} of the model between rounds.",
    ]


class Privacy(abc.ABC):
    """Request for privacy, before the population of the run is known."""

    @abc.abstractmethod
    def check(self, num_clients: int) -> None:
        """Refuses, without long computations, a population that `plan` would refuse.

        Args:
          num_clients: Number of training users.

        Raises:
          ValueError: If they cannot keep what is asked for, or a file that is named
            holds no strategy.
        """

    @abc.abstractmethod
    def plan(self, num_clients: int, num_parameters: int) -> FederatedPlan:
        """Chooses mechanism and noise for a new run.

        Args:
          num_clients: Number of training users.
          num_parameters: Number of trainable weights.

        Returns:
          The plan; its ε is not above the target, if there is one.

        Raises:
          ValueError: If the population cannot keep what is asked for.
        """

    @abc.abstractmethod
    def resumed(
        self, num_clients: int, num_parameters: int, derived: Mapping[str, Any]
    ) -> FederatedPlan:
        """Makes the plan of a run that has begun.

        Args:
          num_clients: Number of training users.
          num_parameters: Number of trainable weights.
          derived: Values that `PrivacyPlan.derived` recorded when the run began.

        Returns:
          The plan.
        """


@dataclasses.dataclass(frozen=True)
class PrivacyPlan(abc.ABC):
    """Plan of a run's privacy: its promise, and the mechanism that keeps it.

    Attributes:
      noise_multiplier: z, standard deviation of the noise per unit of sensitivity of one client's
        contribution to one round; 0 for none.
      clients_per_round: Number of clients in a cohort, the expected one if it is sampled.
      num_rounds: Largest number of rounds.
      deterministic_seed: Seed of the noise if the user gave one; the run is not private then.
      needs_secret_cohorts: Whether the guarantee rests on the secrecy of who took part.
      simulated: Larger run whose noise, scaled down with the cohort, this run has; None if the run
        stands for itself. All other attributes are those of this run.
      others: All else that the run releases about the same users; ε is that of the whole.
    """

    needs_secret_cohorts: ClassVar[bool]

    noise_multiplier: float
    clip_norm: float
    clients_per_round: float
    num_clients: int
    num_rounds: int
    delta: float
    deterministic_seed: int | None
    simulated: simulated_run.SimulatedRun | None
    others: tuple[parts.Part, ...] = dataclasses.field(default=(), kw_only=True)
    unit_of_privacy: statement.UnitOfPrivacy = dataclasses.field(default="user", kw_only=True)

    @property
    def wanted_noise_multiplier(self) -> float:
        """Noise multiplier z of the run that was asked for: the simulated one, if there is one."""
        return self.noise_multiplier if self.simulated is None else self.simulated.noise_multiplier

    @property
    def has_noise(self) -> bool:
        """Whether the aggregator adds any noise."""
        return self.noise_multiplier > 0.0

    @property
    def has_guarantee(self) -> bool:
        """Whether anything is promised: noise that nobody else can draw again."""
        return self.has_noise and self.deterministic_seed is None

    def delta_warnings(self) -> list[str]:
        """Returns why δ is too large for so many clients, if it is, for the start of a run."""
        if not self.has_guarantee:
            return []
        said = sentences.large_delta(self.delta, self.num_clients, self.unit_of_privacy)
        return [f"Warning: {reason}" for reason in said]

    @property
    def memory_copies(self) -> int:
        """Model-sized tensors that the noise keeps between rounds."""
        return 0

    def at_delta(self, delta: float) -> PrivacyPlan:
        """Returns the same plan with another δ of the statement."""
        return dataclasses.replace(self, delta=delta)

    @property
    @abc.abstractmethod
    def declared(self) -> schema_lib.MinSep:
        """Participation schema that the ledger enforces."""

    @property
    @abc.abstractmethod
    def rounds(self) -> parts.Weights:
        """All rounds' updates, without what else is released."""

    @abc.abstractmethod
    def epsilon_after(self, rounds_done: int) -> float | None:
        """Returns ε at δ of the models of the first rounds; None without guarantee."""

    def epsilon_of(self, seen: observed.ObservedParticipation) -> float:
        """Returns ε at δ of the rounds that were observed; inf without guarantee.

        Of secret samples only the number of rounds counts.
        """
        epsilon = self.epsilon_after(seen.num_rounds)
        return math.inf if epsilon is None else epsilon

    def budget_guard(self, max_epsilon: float | None) -> ledger.BudgetGuard | None:
        """Returns the ledger's last check before a round begins, on the observed participation."""
        if max_epsilon is None:
            return None

        def guard(seen: observed.ObservedParticipation) -> str | None:
            epsilon = self.epsilon_of(seen)
            if epsilon <= max_epsilon:
                return None
            return (
                f"epsilon would be {display.round_up(epsilon)}, above max_epsilon={max_epsilon:g}."
            )

        return guard

    @abc.abstractmethod
    def noise_to_signal(self, num_parameters: int) -> float:
        """Computes the ratio of noise to signal in the sum of all rounds.

        Args:
          num_parameters: Number of trainable weights.

        Returns:
          The expected L2 norm of the noise in the sum of all rounds, over the largest
          norm that the clients' part of that sum can have: all of them clipped, and all
          pointing the same way. Real updates add up to a fraction of that.
        """

    @abc.abstractmethod
    def describe(self) -> list[str]:
        """Returns mechanism, noise and participation in a few lines, for the start of a run."""

    @abc.abstractmethod
    def statement(
        self,
        seen: observed.ObservedParticipation,
        facts: facts_lib.Facts,
        *,
        charge_all_rounds: bool,
    ) -> statement.PrivacyStatement:
        """Makes the statement of a run, for the participation that was observed.

        Args:
          seen: Rounds, stride and participations that the ledger recorded.
          facts: Facts of the run that the plan does not have.
          charge_all_rounds: Whether all declared rounds are charged, not only those that
            were run; necessary if the data may have decided when it ended.

        Returns:
          A statement; one that says "no guarantee" where there is none.
        """

    def _facts(
        self, facts: facts_lib.Facts, parameters: dict[str, statement.Scalar]
    ) -> facts_lib.Facts:
        """Adds the plan's parameters, and those of the simulated run with its caveats."""
        if self.simulated is None:
            return facts.with_plan(parameters)
        return facts.with_plan(
            parameters | self.simulated.parameters(), headline_caveats=self.simulated.caveats()
        )

    @abc.abstractmethod
    def derived(self) -> dict[str, Any]:
        """Returns what was derived, as JSON-compatible values for `Privacy.resumed`."""


class FederatedPlan(PrivacyPlan):
    """The plan of a run whose rounds have cohorts of clients."""

    @abc.abstractmethod
    def sampler(self, seed: int) -> cohorts.CohortSampler:
        """Returns the sampler of the cohorts, which never break `declared`."""
