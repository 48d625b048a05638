"""Passes over the data: users take turns, and the noise of the steps is correlated (DP-FTRL).

Nothing is sampled, so that no secret but the noise is needed (Kairouz et al. 2021). The order of
the turns is the same in every pass, or nearly so if the users of a step do not divide all users:
what the noise relies on is the participation schema, which the order keeps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import budget_shares, statement
from tff_dpftrl.finetuning import example_sampling, run_privacy
from tff_dpftrl.finetuning import group_size as group_sizes
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.mechanisms import table
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.runs import mechanism_plan, participants, privacy


@dataclasses.dataclass(frozen=True)
class Passes:
    """Passes that are asked for.

    Attributes:
      users_per_step: Number of users in every step, M.
      num_steps: Number of steps, T.
      delta: δ of the (ε, δ) statement, far below one over the number of users.
      group_size: G, the largest number of examples of one user in a step.
      mechanism: A key of `mechanisms.table.MECHANISMS`.
      noise_multiplier: σ, the noise's standard deviation per unit of the clip norm; None if
        `target_epsilon` is given.
      target_epsilon: The largest ε that the run may spend; None if `noise_multiplier` is given.
      unit_of_privacy: "user", or "example" if every user is a single example of the data.
    """

    users_per_step: int
    num_steps: int
    delta: float
    group_size: int = 1
    mechanism: str = "blt"
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    unit_of_privacy: statement.UnitOfPrivacy = "user"

    def __post_init__(self) -> None:
        validation.integer("users_per_step", self.users_per_step, minimum=1)
        validation.integer("num_steps", self.num_steps, minimum=1)
        validation.delta(self.delta)
        example_sampling.check_group_size(self.group_size)
        table.check(self.mechanism)
        plan_lib.check_one_given(self.target_epsilon, self.noise_multiplier)
        if self.target_epsilon is not None:
            validation.positive("target_epsilon", self.target_epsilon)
        if self.noise_multiplier is not None:
            validation.noise_multiplier(self.noise_multiplier)

    @property
    def rows_per_unit(self) -> int:
        """The most examples whose mean gradient is clipped as one."""
        return self.group_size

    def asked(
        self,
        *,
        clip_norm: float,
        deterministic_seed: int | None = None,
        workload: workload_lib.Workload | None = None,
    ) -> privacy.DpFtrl:
        """Returns the privacy that a run requests.

        A `deterministic_seed` of the noise is for debugging: the run is then not private. The
        mechanism is optimised for the workload, or for the prefix sums if that is None.
        """
        return privacy.DpFtrl(
            num_rounds=self.num_steps,
            clients_per_round=self.users_per_step,
            clip_norm=clip_norm,
            delta=self.delta,
            mechanism=self.mechanism,
            options=table.Options(workload=workload),
            noise_multiplier=self.noise_multiplier,
            target_epsilon=self.target_epsilon,
            deterministic_seed=deterministic_seed,
            data_in_one_place=True,
            unit_of_privacy=self.unit_of_privacy,
        )


@dataclasses.dataclass(frozen=True)
class PlannedPasses:
    """Passes with the σ that meets the target, to be compared with sampling.

    Attributes:
      epsilon: ε of the whole run.
      participations: Most steps of one user.
      noise_of_average: Standard deviation, for a clip norm of 1, of independent noise of a step's
        average that is as much noise (`run_privacy.noise_of_average`).
    """

    asked: Passes
    noise_multiplier: float
    epsilon: float
    participations: int
    noise_of_average: float

    def with_figures(self, share: float) -> PlannedPasses:
        """Returns the passes with figures of each step, which get a share of the same budget."""
        factor = budget_shares.growth(share)
        return dataclasses.replace(
            self,
            noise_multiplier=factor * self.noise_multiplier,
            noise_of_average=factor * self.noise_of_average,
        )

    def relative_noise(self, gradient_norm: group_sizes.GradientNorms) -> float:
        """Returns the noise of the average, each gradient clipped to its norm, as for sampling."""
        return gradient_norm(self.asked.group_size) * self.noise_of_average

    def expected_gradients(self, users: example_sampling.Users) -> float:
        """Returns the mean number of gradients in a step."""
        taken = users.pool_size(self.asked.group_size) / len(users)
        return self.asked.users_per_step * taken

    def share_of_examples_used(self, users: example_sampling.Users) -> float:
        """Returns the expected share of all examples that are in at least one step."""
        sizes = users.num_examples
        missed = 1.0 - np.minimum(sizes, self.asked.group_size) / sizes
        turns = self.asked.num_steps * self.asked.users_per_step / len(users)
        more = turns - math.floor(turns)  # Share of the users who have one turn more.
        never = missed ** math.floor(turns) * (1.0 - more + more * missed)
        return float((sizes * (1.0 - never)).sum() / sizes.sum())


def planned(
    users: example_sampling.Users,
    gradient_norm: group_sizes.GradientNorms,
    *,
    compute_budget: int,
    num_steps: int,
    target_epsilon: float,
    delta: float,
    smallest_cohort: int = group_sizes.SMALLEST_COHORT,
) -> PlannedPasses:
    """Plans the passes with the least noise, relative to the gradient, that meet a target.

    `gradient_norm` is L, a function of G. `compute_budget` is B, the number of gradients in a step:
    group size times users of a step.
    """
    splits = group_sizes.splits(
        compute_budget, num_users=len(users), smallest_cohort=smallest_cohort
    )
    found = []
    for group_size, cohort in splits:
        asked = Passes(
            users_per_step=cohort,
            num_steps=num_steps,
            delta=delta,
            group_size=group_size,
            target_epsilon=target_epsilon,
        )
        plan = asked.asked(clip_norm=1.0).plan(len(users), num_parameters=1)
        found.append(
            PlannedPasses(
                asked,
                plan.noise_multiplier,
                plan.epsilon_after(num_steps) or math.inf,
                plan.declared.effective_participations,
                run_privacy.noise_of_average(plan),
            )
        )
    return min(found, key=lambda one: one.relative_noise(gradient_norm))


def batches_of(
    plan: mechanism_plan.MechanismPlan, users: example_sampling.Users, group_size: int, seed: int
) -> Callable[[int], example_sampling.Batch]:
    """Returns a function from a step, counted from 0, to its batch, the same one each time.

    `seed` must be secret unless `plan` says that cohorts need not be. The guarantee of passes holds
    whoever knows whose turn it is.
    """
    if isinstance(plan, run_privacy.SampledFinetuning):
        return plan.plan.contributions(users, seed).batch
    drawn = plan.participation
    if isinstance(drawn, participants.Sampled) and drawn.pool is not None:
        return example_sampling.ExampleSampling(
            users,
            group_size=group_size,
            sampling_probability=drawn.cyclic.sampling_probability,
            num_steps=plan.num_rounds,
            seed=seed,
            num_groups=drawn.cyclic.num_groups,
        ).batch
    sampler = plan.sampler(seed)
    # Secret samples of one group have the batches of ULS.
    name = "turns" if isinstance(drawn, participants.Turns) else "rows"

    def turns(step: int) -> example_sampling.Batch:
        members = sampler.cohort(step)
        return example_sampling.batch_of_users(users, members, group_size, f"{name}/{seed}/{step}")

    return turns
