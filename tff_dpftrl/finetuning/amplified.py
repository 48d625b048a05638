"""Fine-tuning with correlated noise and secret samples: less noise than either alone.

Users are in groups that take turns; at its group's turn a user is sampled, or each of at most G
examples of the user in a pool is, and the noise of the steps is correlated by a strategy of as many
bands (Choquette-Choo et al. 2023). With one band, and so one group, this is DP-SGD (ULS or ELS);
where everybody of a group is in a step at its turn, it is passes. In between is often the least
noise. Users may also be in bins, or be left out for some steps after each of theirs (b-min-sep).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import amplified_banded, budget_shares, statement
from tff_dpftrl.finetuning import example_sampling, run_privacy
from tff_dpftrl.finetuning import group_size as group_sizes
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.mechanisms import table
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.participation import sampling as sampling_lib
from tff_dpftrl.runs import amplified_privacy

SAMPLINGS = amplified_privacy.SAMPLINGS
"""Names of the samplings."""

BANDED = amplified_privacy.CHOSEN
"""Mechanism of correlated noise whose bands are chosen."""

_CYCLIC, _BINS = sampling_lib.CyclicPoisson.kind, sampling_lib.BallsInBins.kind


@dataclasses.dataclass(frozen=True)
class Amplified:
    """Correlated noise with secret samples that is asked for.

    Attributes:
      sampling: One of `SAMPLINGS`.
      units_per_step: Number of users (or examples) expected in a step; bins may have some more.
      num_steps: Number of steps, T.
      delta: δ of the (ε, δ) statement, far below one over the number of users.
      group_size: G, the largest number of examples of one user in a step, or in the pool.
      sampled_unit: What is sampled, and clipped: "user", with the mean gradient of at most G
        examples drawn anew in each step; or, with cyclic sampling, "example", of a pool.
      bands: Number of bands of the strategy; None for the number of least noise at
        `target_epsilon`, or, where the mechanism is another one than `BANDED`, for its default.
      min_sep: Least number of steps from one of a user to the next: the number of groups of cyclic
        sampling, the b of b-min-sep; the bands if None. Bins follow from `units_per_step`.
      mechanism: A key of `mechanisms.table.MECHANISMS`; None for `BANDED`, or with bins for "blt".
      noise_multiplier: σ, the noise's standard deviation per unit of the clip norm; None if
        `target_epsilon` is given.
      target_epsilon: The largest ε that the run may spend; None if `noise_multiplier` is given.
      unit_of_privacy: "user", or "example" if every user is a single example of the data.
    """

    sampling: str
    units_per_step: int
    num_steps: int
    delta: float
    group_size: int = 1
    sampled_unit: str = plan_lib.USER
    bands: int | None = None
    min_sep: int | None = None
    mechanism: str | None = None
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    unit_of_privacy: statement.UnitOfPrivacy = "user"

    def __post_init__(self) -> None:
        if self.sampling not in SAMPLINGS:
            raise validation.UsageError(
                f"sampling must be one of {', '.join(SAMPLINGS)}, got {self.sampling!r}."
            )
        validation.integer("units_per_step", self.units_per_step, minimum=1)
        validation.integer("num_steps", self.num_steps, minimum=1)
        validation.delta(self.delta)
        example_sampling.check_group_size(self.group_size)
        for name in ("bands", "min_sep"):
            if getattr(self, name) is not None:
                validation.integer(name, getattr(self, name), minimum=1)
        if self.mechanism is not None:
            table.check(self.mechanism)
        if self.sampled_unit not in (plan_lib.USER, plan_lib.EXAMPLE):
            raise validation.UsageError(
                f"sampled_unit must be 'user' or 'example', got {self.sampled_unit!r}."
            )
        if self.sampled_unit == plan_lib.EXAMPLE and self.sampling != _CYCLIC:
            raise validation.UsageError(
                f"sampled_unit 'example' is for sampling {_CYCLIC!r}, not for {self.sampling!r}: "
                "take that, or sample users."
            )
        plan_lib.check_one_given(self.target_epsilon, self.noise_multiplier)
        if self.target_epsilon is not None:
            validation.positive("target_epsilon", self.target_epsilon)
        elif self.chooses_bands:
            raise validation.UsageError(
                "bands are chosen by their noise at one ε: give bands, or target_epsilon."
            )

    @property
    def chooses_bands(self) -> bool:
        """Whether the number of bands is to be chosen."""
        return self.bands is None and self._mechanism == BANDED and self.sampling != _BINS

    @property
    def rows_per_unit(self) -> int:
        """The most examples whose mean gradient is clipped as one."""
        return self.group_size if self.sampled_unit == plan_lib.USER else 1

    @property
    def _mechanism(self) -> str:
        return self.mechanism or ("blt" if self.sampling == _BINS else BANDED)

    def pool(self, users: example_sampling.Users) -> amplified_privacy.Pool | None:
        """Returns the pool of the users' examples; None if users are sampled."""
        if self.sampled_unit == plan_lib.USER:
            return None
        return amplified_privacy.Pool(users.pool_size(self.group_size), self.group_size)

    def asked(
        self,
        users: example_sampling.Users,
        *,
        clip_norm: float,
        deterministic_seed: int | None = None,
        workload: workload_lib.Workload | None = None,
    ) -> amplified_privacy.AmplifiedPrivacy:
        """Returns the privacy that a run requests; its bands are chosen when it is planned.

        `deterministic_seed` seeds noise and samples for debugging: the run is then not private. The
        mechanism is optimised for the workload, or for the prefix sums if that is None.
        """
        mechanism = self._mechanism
        options: dict[str, Any] = {"workload": workload}
        if self.bands is not None:
            options["bands"] = self.bands
        if mechanism == BANDED and self.bands == 1:
            mechanism, options = "identity", {}
        return amplified_privacy.AmplifiedPrivacy(
            sampling=self.sampling,
            num_rounds=self.num_steps,
            clients_per_round=self.units_per_step,
            clip_norm=clip_norm,
            delta=self.delta,
            mechanism=mechanism,
            options=table.Options(**options),
            min_sep=self.min_sep,
            noise_multiplier=self.noise_multiplier,
            target_epsilon=self.target_epsilon,
            deterministic_seed=deterministic_seed,
            unit_of_privacy=self.unit_of_privacy,
            pool=self.pool(users),
        )

    def with_bands(self, users: example_sampling.Users) -> Amplified:
        """Returns the request with the number of bands of least noise, if it is to be chosen."""
        if not self.chooses_bands:
            self.check_turns(users)
            return self
        return min(curve(self, users), key=lambda one: one.noise_of_average).asked

    def _most_turns(self, users: example_sampling.Users) -> int:
        pool = self.pool(users)
        return (len(users) if pool is None else pool.size) // self.units_per_step

    def check_turns(self, users: example_sampling.Users) -> None:
        """Refuses more groups, or a longer stride, than there are users for."""
        most, turns = self._most_turns(users), 1 if self.sampling == _BINS else self.min_sep
        name = "min_sep"
        if turns is None:
            turns, name = self.bands or 1, "bands"
        if turns > most:
            pool = self.pool(users)
            unit = "users that there are" if pool is None else "examples in the pool"
            what = unit if pool is not None else f"{len(users)} {unit}"
            lower = f"lower {name} to {most}" if most and turns > 1 else "lower it"
            raise validation.UsageError(
                f"{name}={turns} steps of {self.units_per_step} each, all different, need more "
                f"than the {what}: {lower}"
                + ("." if pool is not None else f", or take {len(users) // turns} in a step.")
            )


@dataclasses.dataclass(frozen=True)
class PlannedAmplified:
    """Request for correlated noise with secret samples, and its plan for a clip norm of 1."""

    asked: Amplified
    plan: amplified_privacy.AmplifiedPlan

    def with_figures(self, share: float) -> PlannedAmplified:
        """Returns the plan with figures of each step, which get a share of the same budget."""
        plan = dataclasses.replace(
            self.plan,
            noise_multiplier=self.plan.noise_multiplier * budget_shares.growth(share),
            others=(*self.plan.others, budget_shares.figures(self.plan.rounds, share)),
        )
        return dataclasses.replace(self, plan=plan)

    @property
    def name(self) -> str:
        """Name in a table or a sentence."""
        if self.asked.bands is None:
            return self.asked.sampling
        name = strategy_lib.counted(self.asked.bands, "band")
        return f"{name}, a pass" if self.is_pass else name

    @property
    def is_pass(self) -> bool:
        """Whether everybody whose turn it is takes part."""
        return getattr(self.plan.sampling, "sampling_probability", 0.0) == 1.0

    @property
    def epsilon(self) -> float:
        """ε of the whole run."""
        epsilon = self.plan.epsilon_after(self.plan.num_rounds)
        return math.inf if epsilon is None else epsilon

    @property
    def noise_of_average(self) -> float:
        """Standard deviation of independent noise of a step's average that is as much noise."""
        return run_privacy.noise_of_average(self.plan)

    def relative_noise(self, gradient_norm: group_sizes.GradientNorms) -> float:
        """Returns the noise of the average, each gradient clipped to its norm, as for sampling."""
        return gradient_norm(self.asked.rows_per_unit) * self.noise_of_average

    def expected_gradients(self, users: example_sampling.Users) -> float:
        """Returns the expected number of gradients in a step."""
        if self.plan.pool is not None:
            return self.plan.clients_per_round
        return self.plan.sampling.share_per_round * users.pool_size(self.asked.group_size)

    def share_of_examples_used(self, users: example_sampling.Users) -> float:
        """Returns the expected share of all examples that are in at least one step."""
        sizes, drawn = users.num_examples, self.plan.sampling
        taken = np.minimum(sizes, self.asked.group_size)
        if isinstance(drawn, sampling_lib.CyclicPoisson):
            groups, q = drawn.num_groups, drawn.sampling_probability
        elif isinstance(drawn, sampling_lib.BallsInBins):
            groups, q = drawn.num_bins, 1.0
        else:  # As if the steps were independent: a little too little.
            groups, q = 1, drawn.share_per_round
        # Number of steps of a group: one more for the first groups.
        steps, more = divmod(self.asked.num_steps, groups)
        if self.plan.pool is not None:
            missed, share = np.full(len(sizes), 1.0 - q), taken / sizes
        else:
            missed, share = 1.0 - q * taken / sizes, np.ones(len(sizes))
        never = missed**steps * (1.0 - more / groups * (1.0 - missed))
        return float((sizes * share * (1.0 - never)).sum() / sizes.sum())


def resumed(
    derived: Mapping[str, Any],
    num_users: int,
    *,
    deterministic_seed: int | None,
    unit_of_privacy: statement.UnitOfPrivacy = "user",
    workload: workload_lib.Workload | None = None,
) -> amplified_privacy.AmplifiedPlan:
    """Makes the plan of a run that has begun, from the values that it recorded then.

    The strategy and the workload are the recorded ones. `deterministic_seed` is the caller's seed
    of noise and samples, None for secret ones.
    """
    drawn, pool = derived["sampling"], derived.get("pool")
    asked = amplified_privacy.AmplifiedPrivacy(
        sampling=drawn["kind"],
        num_rounds=drawn["num_rounds"],
        clients_per_round=1,  # Follows from the sampling.
        clip_norm=derived["clip_norm"],
        delta=derived["delta"],
        options=table.Options(workload=workload),
        deterministic_seed=deterministic_seed,
        unit_of_privacy=unit_of_privacy,
        pool=None if pool is None else amplified_privacy.Pool(**pool),
    )
    return asked.resumed(num_users, 0, derived)


def curve(asked: Amplified, users: example_sampling.Users) -> list[PlannedAmplified]:
    """Plans a run for each number of bands that is worth a try; `asked` has a target.

    The plans meet the target. Numbers of bands grow from 1 (DP-SGD) to a whole pass, unless
    `min_sep` is given (`cyclic_optimize.try_bands`).
    """
    asked = dataclasses.replace(asked, bands=None)
    asked.check_turns(users)
    return [
        PlannedAmplified(
            dataclasses.replace(asked, bands=amplified_banded.num_bands(plan.strategy)), plan
        )
        for plan in asked.asked(users, clip_norm=1.0).curve(len(users))
    ]


def choices(
    users: example_sampling.Users,
    *,
    compute_budget: int,
    num_steps: int,
    target_epsilon: float,
    delta: float,
    sampling: str = _CYCLIC,
    bands: int | None = None,
    min_sep: int | None = None,
    mechanism: str | None = None,
    smallest_cohort: int = group_sizes.SMALLEST_COHORT,
) -> list[PlannedAmplified]:
    """Plans users' turns for all ways to spend a compute budget: group sizes, users, bands.

    The compute budget B is the number of gradients in a step: group size times users of a step. All
    numbers of bands that are worth a try are planned if `bands` is None. The plans meet the target.
    """
    found = []
    pairs = group_sizes.splits(
        compute_budget, num_users=len(users), smallest_cohort=smallest_cohort
    )
    if sampling == _BINS:
        fitting = [(g, m) for g, m in pairs if len(users) // m <= num_steps] or pairs[:1]
    else:
        least = max(bands or 1, min_sep or 1)
        fitting = [(g, m) for g, m in pairs if m * least <= len(users)] or pairs[-1:]
    for group_size, cohort in fitting:
        asked = Amplified(
            sampling=sampling,
            units_per_step=cohort,
            num_steps=num_steps,
            delta=delta,
            group_size=group_size,
            bands=bands,
            min_sep=min_sep,
            mechanism=mechanism,
            target_epsilon=target_epsilon,
        )
        if asked.chooses_bands:
            found += curve(asked, users)
        else:
            plan = asked.with_bands(users).asked(users, clip_norm=1.0)
            found.append(PlannedAmplified(asked, plan.plan(len(users), num_parameters=1)))
    return found


def best(
    plans: Sequence[PlannedAmplified], gradient_norm: group_sizes.GradientNorms
) -> PlannedAmplified:
    """Returns the plan with the least noise, relative to the gradient's norm."""
    return min(plans, key=lambda one: one.relative_noise(gradient_norm))


def least_by_bands(
    plans: Sequence[PlannedAmplified], gradient_norm: group_sizes.GradientNorms
) -> list[PlannedAmplified]:
    """Returns the plans of least relative noise with 1, 2 to 3, 4 to 7 ... bands, and of passes."""
    by_bands: dict[tuple[bool, int], list[PlannedAmplified]] = {}
    for one in plans:
        key = one.is_pass, 0 if one.is_pass else (one.asked.bands or 0).bit_length()
        by_bands.setdefault(key, []).append(one)
    found = [best(one, gradient_norm) for one in by_bands.values()]
    return sorted(found, key=lambda one: one.asked.bands or 0)
