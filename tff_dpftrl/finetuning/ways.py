"""Ways to fine-tune at one ε and compute, whose noise is compared before a run begins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import budget_shares
from tff_dpftrl.finetuning import example_sampling, run_privacy
from tff_dpftrl.finetuning import group_size as group_sizes
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.runs import mechanism_plan, participants


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to fine-tune: a plan for a clip norm of 1, and the group size.

    Attributes:
      plan: The plan; it meets the target.
      group_size: G, the largest number of examples of one user in the pool or in a step.
      asked: Request that the plan was made of; None for ELS and ULS.
    """

    plan: mechanism_plan.MechanismPlan
    group_size: int
    asked: Any = None

    @property
    def rows_per_unit(self) -> int:
        """The most examples whose mean gradient is clipped as one."""
        return run_privacy.rows_per_unit(self.plan, self.group_size)

    @property
    def noise_of_average(self) -> float:
        """Standard deviation of independent noise of a step's average that is as much noise."""
        return run_privacy.noise_of_average(self.plan)

    def relative_noise(self, gradient_norm: group_sizes.GradientNorms) -> float:
        """Returns L(rows of a unit) · σ / M: noise of the average, gradients clipped to their norm.

        It orders the losses of fine-tuning runs of one length and compute budget (own
        measurements). It has the unit of the gradient's norm as given.
        """
        return gradient_norm(self.rows_per_unit) * self.noise_of_average

    def with_figures(self, share: float) -> Way:
        """Returns the way with figures of each step, for a share in (0, 1) of the same budget."""
        figures = budget_shares.figures(self.plan.rounds, share)
        plan = run_privacy.with_part(self.plan, figures, budget_shares.growth(share))
        return dataclasses.replace(self, plan=plan)

    @property
    def _turns(self) -> tuple[float, float]:
        """The number of steps after which it is a user's turn again, and the chance to come."""
        drawn = self.plan.participation
        if isinstance(drawn, participants.Sampled):
            chance = getattr(drawn.sampling, "sampling_probability", 1.0)
            return drawn.declared.min_sep, chance
        return drawn.num_clients / drawn.clients_per_round, 1.0

    def expected_gradients(self, users: example_sampling.Users) -> float:
        """Returns the expected number of gradients in a step."""
        every, chance = self._turns
        return chance / every * users.pool_size(self.group_size)

    def share_of_examples_used(self, users: example_sampling.Users) -> float:
        """Returns the expected share of all examples that are in at least one step."""
        every, chance = self._turns
        sizes = users.num_examples
        taken = np.minimum(sizes, self.group_size) / sizes
        missed, share = 1.0 - chance * taken, np.ones(len(sizes))
        if run_privacy.has_pool(self.plan):
            missed, share = np.full(len(sizes), 1.0 - chance), taken
        turns = self.plan.num_rounds / every
        more = turns - math.floor(turns)  # Share of the users who have one turn more.
        never = missed ** math.floor(turns) * (1.0 - more * (1.0 - missed))
        return float((sizes * share * (1.0 - never)).sum() / sizes.sum())


def choices(
    users: example_sampling.Users,
    *,
    compute_budget: int,
    num_steps: int,
    target_epsilon: float,
    delta: float | None = None,
    example_group_sizes: Sequence[int] | None = None,
    smallest_cohort: int = group_sizes.SMALLEST_COHORT,
) -> list[Way]:
    """Returns every way to spend a compute budget: ELS for several group sizes, ULS for all splits.

    The budget is the number of gradients in a step: B for ELS, G · M for ULS. Each plan meets the
    target. By default δ is `default_delta`, and the group sizes of ELS are powers of two from a
    quarter of the users' median to four times it. ELS comes first, each with growing group size.
    Plans with a pool or a population smaller than what a step expects are left out.
    """
    compute_budget = validation.integer("compute_budget", compute_budget, minimum=1)
    if example_group_sizes is None:
        median = group_sizes.median_choice(users.num_examples).group_size
        factors = (0.25, 0.5, 1, 2, 4)
        example_group_sizes = [int(median * f) for f in factors if median * f >= 1]
    kwargs = {"num_steps": num_steps, "target_epsilon": target_epsilon, "delta": delta}
    pairs = group_sizes.splits(
        compute_budget, num_users=len(users), smallest_cohort=smallest_cohort
    )
    sizes = [
        (plan_lib.EXAMPLE, g, compute_budget)
        for g in example_group_sizes
        if users.pool_size(example_sampling.check_group_size(g)) >= compute_budget
    ]
    sizes += [(plan_lib.USER, g, m) for g, m in pairs]
    if not sizes:
        raise validation.UsageError(
            f"compute_budget={compute_budget} exceeds what {len(users)} users with "
            f"{int(users.num_examples.sum())} examples can give in a step: lower it."
        )
    return [
        Way(plan_lib.make_plan(users, sampling=unit, group_size=g, expected_units=m, **kwargs), g)
        for unit, g, m in sizes
    ]
