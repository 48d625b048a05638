"""Requests to the planner: known facts, a target, and the participation schema they imply.

With `report_goal` clients a round, the population is used up after population / report_goal rounds:
no larger separation is possible (Xu et al. 2023, section 2.2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from tff_dpftrl import validation
from tff_dpftrl.accounting import budget_shares, parts
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.participation import cohorts
from tff_dpftrl.participation import schema as schema_lib

DEFAULT_REPORT_GOALS = (100, 200, 500, 1000, 2000, 3000, 5000, 6500, 10_000, 20_000)


def largest_min_sep(population: int, report_goal: int) -> int:
    """Computes the largest stride that a population allows, ⌊population / report_goal⌋."""
    validation.integer("report_goal", report_goal, minimum=1)
    if report_goal > population:
        raise validation.UsageError(
            f"report_goal must be at most population={population}, got {report_goal!r}."
        )
    return cohorts.largest_feasible_min_sep(population, report_goal)


def min_sep_of_timer(timer_hours: float, rounds_per_day: float) -> int:
    """Computes the stride that a timer on devices enforces at a steady speed of training.

    It is ⌊timer_hours · rounds_per_day / 24⌋, at least 1. If training commits more rounds in 24
    hours for a while, the stride is smaller: it has to be observed.
    """
    validation.positive("timer_hours", timer_hours)
    validation.positive("rounds_per_day", rounds_per_day)
    return max(1, math.floor(timer_hours * rounds_per_day / 24.0))


@dataclasses.dataclass(frozen=True)
class Request:
    """Request to the planner: known facts about a run, and exactly one target.

    Attributes:
      population: Number of devices that train.
      num_rounds: Number of rounds to train for.
      delta: Delta of the guarantee.
      target_epsilon: Epsilon to reach; None if another target is given.
      target_rho: Rho of zCDP to reach; None if another target is given.
      target_noise: `noise_in_sum` to keep, whatever epsilon it gives; None if another
        target is given.
      report_goals: Numbers of clients a round to consider. Those that the population cannot
        keep up, with `min_sep` and `max_participations`, are left out by `schemas`.
      min_sep: Stride to rely on; the largest that the population allows if None.
      min_sep_fraction: Share of the largest stride to rely on, if `min_sep` is
        None. Production saw 14 % to 81 % of it (Xu et al. 2023, Table 1).
      max_participations: Largest number of rounds of one device; as many as fit if None.
        The population implies at least report goal · num_rounds / population.
      num_parameters: Number of parameters of the model, for memory and upload.
      secagg_inflation: Largest factor by which the grid of secure aggregation inflates the
        clip norm; the coarsest such grid is used. None for sums without secure aggregation.
      workload: Workload of the run, whose models' noise counts; None for the prefix sums.
      noise_parties: Number of parties that each add the whole noise within the secure sums; 0 if
        the server adds it. The target epsilon holds with the noise of one of them alone.
      shares: Shares of the budget of all else that the run releases (`budget_shares`); the target
        is for the whole. None without `target_epsilon`.
    """

    population: int
    num_rounds: int
    delta: float
    target_epsilon: float | None = None
    target_rho: float | None = None
    target_noise: float | None = None
    report_goals: tuple[int, ...] = DEFAULT_REPORT_GOALS
    min_sep: int | None = None
    min_sep_fraction: float = 1.0
    max_participations: int | None = None
    num_parameters: int = 4_050_000
    secagg_inflation: float | None = None
    workload: workload_lib.Workload | None = None
    noise_parties: int = 0
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        targets = (self.target_epsilon, self.target_rho, self.target_noise)
        if sum(target is not None for target in targets) != 1:
            raise validation.UsageError(
                f"Give exactly one of target_epsilon, target_rho and target_noise, got {targets!r}."
            )
        if self.target_noise is not None:
            validation.positive("target_noise", self.target_noise)
        if self.shares and self.target_epsilon is None:
            raise validation.UsageError("budget_shares are shares of target_epsilon: give it.")
        validation.integer("noise_parties", self.noise_parties, minimum=0)
        if self.noise_parties and (self.secagg_inflation is None or self.shares):
            what = "have secagg_inflation: give it" if not self.shares else "have no budget_shares"
            raise validation.UsageError(
                f"noise_parties={self.noise_parties} add noise within the secure sums of tasks, "
                f"which {what}."
            )
        validation.probability("min_sep_fraction", self.min_sep_fraction)
        validation.delta(self.delta)
        for name in ("population", "num_rounds", "num_parameters"):
            validation.integer(name, getattr(self, name), minimum=1)
        for report_goal in self.report_goals:
            validation.integer("report_goals", report_goal, minimum=1)
        for name in ("min_sep", "max_participations"):
            if getattr(self, name) is not None:
                remedy = "Leave it out for as many as fit." if name != "min_sep" else ""
                validation.integer(name, getattr(self, name), minimum=1, remedy=remedy)

    @property
    def others(self) -> tuple[parts.Part, ...]:
        """All else that the run releases about the same clients."""
        if self.target_epsilon is None:
            return ()
        return budget_shares.planned(self.target_epsilon, self.delta, self.shares)

    def schema(self, report_goal: int) -> schema_lib.MinSep:
        """Computes the participation schema at a report goal."""
        most = largest_min_sep(self.population, report_goal)
        if self.min_sep is None:
            min_sep = max(1, math.floor(self.min_sep_fraction * most))
        elif self.min_sep <= most:
            min_sep = self.min_sep
        else:
            raise validation.UsageError(
                f"min_sep={self.min_sep} with report_goal={report_goal} needs "
                f"{self.min_sep * report_goal} devices, and population={self.population}: the "
                f"largest min_sep is {most}."
            )
        schema = schema_lib.MinSep.as_many_as_fit(self.num_rounds, min(min_sep, self.num_rounds))
        if self.max_participations is not None:
            schema = dataclasses.replace(schema, max_participations=self.max_participations)
        least = cohorts.implied_participations(self.population, report_goal, self.num_rounds)
        if schema.max_participations < least:
            raise validation.UsageError(
                f"max_participations={schema.max_participations} is too few: {self.num_rounds} "
                f"rounds of {report_goal} out of {self.population} devices make some device take "
                f"part {least} times; give {least} or more, a smaller report goal or fewer rounds."
            )
        return schema

    def check_feasible(self) -> None:
        """Refuses a population that allows no report goal; says what the smallest one lacks."""
        feasible, left_out = self.schemas()
        if not feasible:
            least = min(left_out)
            raise validation.UsageError(
                f"no report goal can be kept up by population={self.population}: give smaller "
                f"report goals. Of {least}, the smallest: {left_out[least]}"
            )

    def schemas(self) -> tuple[dict[int, schema_lib.MinSep], dict[int, str]]:
        """Computes the feasible schemas by report goal, and why other goals are left out."""
        feasible, left_out = {}, {}
        for report_goal in sorted(set(self.report_goals)):
            try:
                feasible[report_goal] = self.schema(report_goal)
            except ValueError as error:
                left_out[report_goal] = str(error)
        return feasible, left_out
