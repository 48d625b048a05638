"""The plan of fine-tuning by sampling, as the kernel of a run takes it."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from tff_dpftrl import durable_files, validation
from tff_dpftrl.accounting import budget_shares, statement
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.finetuning import example_sampling
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import observed, sampling
from tff_dpftrl.runs import mechanism_plan, participants, released_metrics

WHAT_IS_RELEASED = "loss on the users or examples of each step"
"""Words of a statement for the figures that fine-tuning releases."""

FinetuningPlan = mechanism_plan.MechanismPlan

SWAMPED = 2.0
"""`MechanismPlan.noise_to_signal` above which a fine-tuning run gets a hint.

It is larger than for federated rounds (`runs.mechanism_plan.SWAMPED`). A pretrained model needs
small changes only, and Adam divides by the gradient's size, so that noise does not lengthen its
steps. Noisier runs have not been tested. A transformer of 361,124 weights improved in each run of
60 steps of Adam on commit messages by author, from a loss of 5.04 nats a word: by 0.24 at a ratio
of 1.93 (independent noise, ε = 1, 32 users in a step), by 0.17 at 1.62 (passes, ε = 1, 64 users).
"""


def strategy_of(plan: mechanism_plan.MechanismPlan) -> strategy_lib.Strategy:
    """Returns the strategy of a run's noise: the identity where it is independent."""
    return identity.Identity() if plan.strategy is None else plan.strategy


def figures_of_steps(vocabulary_size: int) -> released_metrics.Figures:
    """Returns the figures that fine-tuning releases with noise, of units with a mean loss each.

    The logarithm of the vocabulary's size bounds the loss.
    """
    return released_metrics.Figures(
        bounds={"loss_sum": math.log(vocabulary_size), "num_units": 1.0},
        means=(
            released_metrics.Mean(
                "noised_loss",
                "cross-entropy, mean over the step's users or examples, with noise and within the "
                "budget; one with a larger loss than its bound counts for less",
                "loss_sum",
                "num_units",
            ),
        ),
    )


def with_figures(
    plan: mechanism_plan.MechanismPlan,
    target_epsilon: float | None,
    share: float | None,
    *,
    meets_target: bool,
) -> mechanism_plan.MechanismPlan:
    """Adds figures of each step to a plan of the updates alone.

    Their budget is a largest ε of the figures alone, or a share of the whole. With `meets_target`
    the updates get so much more noise that the whole costs what `plan` does; else they keep their
    noise.
    """
    figures = released_metrics.part(plan, target_epsilon, share, WHAT_IS_RELEASED)
    others, growth = (*plan.others, figures), 1.0
    if meets_target:
        noise = figures.noise_multiplier_of_round
        assert noise is not None
        taken = (plan.rounds.noise_of_figure() / noise) ** 2
        if taken >= 1.0:
            raise validation.UsageError(
                f"metrics_epsilon={target_epsilon:g} leaves nothing of target_epsilon for the "
                "model: lower it."
            )
        growth = budget_shares.growth(taken)
    noise_multiplier = growth * plan.noise_multiplier
    if not isinstance(plan, SampledFinetuning):
        return dataclasses.replace(plan, others=others).with_noise(multiplier=noise_multiplier)
    return SampledFinetuning.of(
        dataclasses.replace(plan.plan, noise_multiplier=noise_multiplier, others=others),
        clip_norm=plan.clip_norm,
        deterministic_seed=plan.deterministic_seed,
    )


def rows_per_unit(plan: mechanism_plan.MechanismPlan, group_size: int) -> int:
    """Returns the most examples whose mean gradient is clipped as one: 1, or the group size."""
    if isinstance(plan, SampledFinetuning):
        return plan.plan.rows_per_unit
    return 1 if _has_pool(plan) else group_size


def _has_pool(plan: mechanism_plan.MechanismPlan) -> bool:
    drawn = plan.participation
    return isinstance(drawn, participants.Sampled) and drawn.pool is not None


def keep_pool(
    plan: mechanism_plan.MechanismPlan,
    users: example_sampling.Users,
    group_size: int,
    output: pathlib.Path,
) -> None:
    """Keeps the size of each user's part of the pool with a run's secrets, for a recount."""
    if _has_pool(plan):
        sizes = np.minimum(users.num_examples, group_size).tolist()
        text = json.dumps({"examples_of_users": sizes}) + "\n"
        durable_files.write(output / "private" / "pool.json", text.encode(), private=True)


def noise_of_average(plan: mechanism_plan.MechanismPlan) -> float:
    """Computes the independent noise of a step's average that is as much as correlated noise.

    It is a standard deviation for a clip norm of 1. Both kinds of noise have the same root mean
    square over the steps of the standard deviation of the sum of all noise up to the step.
    """
    return plan.noise_multiplier * _noise_of_sums(plan) / plan.clients_per_round


def _noise_of_sums(plan: mechanism_plan.MechanismPlan) -> float:
    """Computes `noise_of_average` for the noise multiplier 1 and one unit in a step."""
    steps = plan.num_rounds
    correlated = float(np.mean(strategy_of(plan).prefix_noise_variance(steps)))
    independent = (steps + 1) / 2
    return math.sqrt(correlated / independent)


def noise_of_step(plan: mechanism_plan.MechanismPlan) -> float:
    """Computes the noise of one step, relative to independent noise with the same error of sums.

    It is the root mean square of the noise of a step's average over all steps, divided by
    `noise_of_average`. It is 1 for independent noise, and without noise. Adam divides by the size
    of a step's noisy gradient, so its best learning rate is larger by about this factor
    (docs/experiments.md, "Correlated noise with secret samples").
    """
    one_step = float(np.mean(strategy_of(plan).round_noise_variance(plan.num_rounds)))
    return math.sqrt(one_step) / _noise_of_sums(plan)


def rate_hint(plan: mechanism_plan.MechanismPlan) -> str | None:
    """Returns what correlated noise asks of the learning rate of Adam; None for little of it."""
    ratio = noise_of_step(plan)
    if plan.noise_multiplier == 0.0 or ratio < 1.5:
        return None
    return (
        f"One step has {ratio:.1f} times the noise that independent noise with the same error of "
        "sums would have, and Adam divides by it: a learning rate that is good for independent "
        "noise is too small here, by about this factor."
    )


@dataclasses.dataclass(frozen=True)
class SampledFinetuning(mechanism_plan.MechanismPlan):
    """Plan of ELS or ULS as that of a run. Its rounds are steps, its clients users."""

    plan: plan_lib.Plan = dataclasses.field(kw_only=True)

    @classmethod
    def of(
        cls, plan: plan_lib.Plan, *, clip_norm: float, deterministic_seed: int | None
    ) -> SampledFinetuning:
        """Makes the plan of a run; a `deterministic_seed` is the caller's, of noise and samples."""
        pool = None
        if plan.sampling == plan_lib.EXAMPLE:
            pool = participants.Pool(plan.num_units, plan.group_size)
        drawn = sampling.CyclicPoisson(plan.num_steps, 1, plan.sampling_probability)
        return cls(
            participants.Sampled(plan.num_users, plan.expected_units, drawn, pool),
            mechanism_plan.Clipping(clip_norm),
            mechanism_plan.Noise(identity.Identity(), plan.noise_multiplier, deterministic_seed),
            plan.delta,
            others=plan.others,
            plan=plan,
        )

    def of_users(self, num_users: int) -> SampledFinetuning:
        """Returns the plan for so many users: the owners of all rows, if rows have several."""
        drawn = dataclasses.replace(self.participation, num_clients=num_users)
        plan = dataclasses.replace(self.plan, num_users=num_users)
        return dataclasses.replace(self, participation=drawn, plan=plan)

    @override
    def at_delta(self, delta: float) -> SampledFinetuning:
        plan = dataclasses.replace(self.plan, delta=delta)
        return dataclasses.replace(self, delta=delta, plan=plan)

    @override
    def epsilon_after(self, rounds_done: int) -> float | None:
        return self.plan.epsilon_after(rounds_done) if self.has_guarantee else None

    @override
    def describe(self) -> list[str]:
        return self.plan.describe()

    @override
    def statement(
        self,
        seen: observed.ObservedParticipation,
        facts: facts_lib.Facts,
        *,
        charge_all_rounds: bool,
    ) -> statement.PrivacyStatement:
        return self.plan.statement(
            facts.with_plan({"clip_norm": self.clip_norm, "num_steps": seen.num_rounds}),
            steps_done=None if charge_all_rounds else seen.num_rounds,
            seed_is_known=self.deterministic_seed is not None,
        )

    @override
    def derived(self) -> dict[str, Any]:
        plan = dataclasses.asdict(self.plan)
        if not self.others:
            del plan["others"]
        return {"plan": plan, "clip_norm": self.clip_norm}

    @classmethod
    def resumed(
        cls, derived: Mapping[str, Any], *, deterministic_seed: int | None
    ) -> SampledFinetuning:
        """Makes the plan of a run that has begun, from what `derived` recorded."""
        return cls.of(
            plan_lib.Plan(**derived["plan"]),
            clip_norm=derived["clip_norm"],
            deterministic_seed=deterministic_seed,
        )
