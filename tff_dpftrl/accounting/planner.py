"""Before a run: which mechanism, report goal, noise and separation reach a target.

A device that took part in round t may not come back before round t + min_sep. With
`report_goal` clients a round the population is used up after population / report_goal
rounds, so that is the largest separation there can be (Xu et al. 2023, section 2.2).

Plans are compared by the noise in what training sees: the sum, over the rounds so
far, of the averaged updates. It stands for utility by a *hypothesis* of both papers
(Xu et al. 2023, section 2.2; McMahan, Xu & Zhang 2024, section 5): with enough data,
utility stays the same if noise multiplier and report goal grow together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from tff_dpftrl.accounting import calibrate, guarantee
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.mechanisms import table, tree
from tff_dpftrl.participation import schema as schema_lib

HYPOTHESIS = (
    "Hypothesis, not theorem: with enough data, utility depends on the noise in the averaged "
    "updates, so that noise multiplier and report goal may grow together (Xu et al. 2023, section "
    "2.2; McMahan, Xu & Zhang 2024, section 5)."
)
DEFAULT_MECHANISMS = tuple(name for name in table.runnable() if table.MECHANISMS[name].quick)
DEFAULT_REPORT_GOALS = (100, 200, 500, 1000, 2000, 3000, 5000, 6500, 10_000, 20_000)
_BYTES_OF_FLOAT32 = 4

# Production models of Gboard: tree aggregation, z = 7, 6500 clients (Xu et al. 2023, Table 1).
_PRODUCTION_NOISE_MULTIPLIER = 7.0
_PRODUCTION_REPORT_GOAL = 6500


def largest_min_sep(population: int, report_goal: int) -> int:
    """Largest stride that a population allows, ⌊population / report_goal⌋.

    Raises:
      ValueError: If the population has fewer clients than a round needs.
    """
    if not 1 <= report_goal <= population:
        raise ValueError(
            f"report_goal must be between 1 and population={population}, got {report_goal!r}."
        )
    return population // report_goal


def min_sep_of_timer(timer_hours: float, rounds_per_day: float) -> int:
    """Stride that a timer on devices enforces at a given, steady speed of training.

    Args:
      timer_hours: Hours a device waits after it took part.
      rounds_per_day: Rounds committed in 24 hours. If training runs faster than
        this for a while, the stride is smaller: it has to be observed.

    Returns:
      ⌊timer_hours · rounds_per_day / 24⌋, at least 1.
    """
    if not (timer_hours > 0.0 and rounds_per_day > 0.0):
        raise ValueError(
            "timer_hours and rounds_per_day must be above 0, got "
            f"{timer_hours!r} and {rounds_per_day!r}."
        )
    return max(1, math.floor(timer_hours * rounds_per_day / 24.0))


def noise_in_sum(
    strategy: strategy_lib.Strategy, *, num_rounds: int, noise_multiplier: float, report_goal: int
) -> float:
    """Noise in the sum of the averaged updates so far, root mean square over rounds.

    Args:
      strategy: The strategy that generates the noise.
      num_rounds: Rounds of the run.
      noise_multiplier: z, standard deviation of the noise per unit clip norm.
      report_goal: The fixed number that sums are divided by.

    Returns:
      Standard deviation per coordinate and unit of clip norm.
    """
    return strategy.rms_error(num_rounds) * noise_multiplier / report_goal


def production_noise_in_sum(num_rounds: int) -> float:
    """`noise_in_sum` of Gboard's production models: tree, z = 7, 6500 clients a round."""
    return noise_in_sum(
        tree.Tree(num_rounds),
        num_rounds=num_rounds,
        noise_multiplier=_PRODUCTION_NOISE_MULTIPLIER,
        report_goal=_PRODUCTION_REPORT_GOAL,
    )


@dataclasses.dataclass(frozen=True)
class Request:
    """What is known, and what is wanted.

    Exactly one of the three targets is given.

    Attributes:
      population: Number of devices that may take part.
      num_rounds: Rounds to train for.
      delta: Delta of the guarantee.
      target_epsilon: Epsilon to reach; or
      target_rho: rho-zCDP to reach; or
      target_noise: `noise_in_sum` to keep, whatever epsilon that gives.
      report_goals: Clients a round to consider; those above the population are
        left out.
      min_sep: Stride to rely on; the largest that the population allows if None.
      min_sep_fraction: Share of the largest stride to rely on, if `min_sep` is
        None. Production saw 14 % to 81 % of it (Xu et al. 2023, Table 1).
      max_participations: Rounds of one device; as many as fit if None.
      num_parameters: Parameters of the model, for memory and upload.
      secagg_inflation: If not None, sums are taken by secure aggregation with
        the coarsest grid that inflates the clip norm by this factor at most.
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

    def __post_init__(self):
        targets = (self.target_epsilon, self.target_rho, self.target_noise)
        if sum(target is not None for target in targets) != 1:
            raise ValueError(
                f"Give exactly one of target_epsilon, target_rho and target_noise, got {targets!r}."
            )
        if self.target_noise is not None and not self.target_noise > 0.0:
            raise ValueError(f"target_noise must be above 0, got {self.target_noise!r}.")
        if not 0.0 < self.min_sep_fraction <= 1.0:
            raise ValueError(
                f"min_sep_fraction must be above 0 and at most 1, got {self.min_sep_fraction!r}."
            )
        for name in ("population", "num_rounds", "num_parameters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}.")

    def schema(self, report_goal: int) -> schema_lib.MinSep | None:
        """The participation schema at a report goal; None if there are too few devices."""
        if report_goal > self.population:
            return None
        most = largest_min_sep(self.population, report_goal)
        if self.min_sep is None:
            min_sep = max(1, math.floor(self.min_sep_fraction * most))
        elif self.min_sep <= most:
            min_sep = self.min_sep
        else:
            return None
        min_sep = min(min_sep, self.num_rounds)
        participations = self.max_participations or -(-self.num_rounds // min_sep)
        return schema_lib.MinSep(self.num_rounds, min_sep, participations)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to run.

    Attributes:
      mechanism: Its name in the table of mechanisms.
      strategy: The strategy, optimised for the schema.
      report_goal: Clients a round.
      guarantee: What it guarantees; holds noise multiplier and schema. With
        secure aggregation the noise multiplier is relative to the inflated norm.
      noise_in_sum: See the function; utility, by the hypothesis.
      noise_per_round: Noise in one round's averaged update, root mean square over
        rounds, per coordinate and unit of clip norm.
      memory_copies: Model-sized tensors that the server keeps between rounds.
      memory_bytes: The same in bytes, as float32.
      upload_bytes: What one client sends in a round.
    """

    mechanism: str
    strategy: strategy_lib.Strategy
    report_goal: int
    guarantee: guarantee.Guarantee
    noise_in_sum: float
    noise_per_round: float
    memory_copies: int
    memory_bytes: int
    upload_bytes: int

    def what_if(
        self,
        *,
        num_rounds: int | None = None,
        min_sep: int | None = None,
        max_participations: int | None = None,
    ) -> guarantee.Guarantee:
        """What the same noise guarantees if the run turns out otherwise.

        Args:
          num_rounds: Rounds actually run; as planned if None.
          min_sep: Stride actually observed; as planned if None.
          max_participations: Rounds of one device actually observed; if None, as
            many as fit.

        Returns:
          The guarantee.

        Raises:
          ValueError: If the strategy cannot run that long.
        """
        planned = self.guarantee.schema
        num_rounds = planned.num_rounds if num_rounds is None else num_rounds
        limit = self.strategy.max_rounds
        if limit is not None and num_rounds > limit:
            raise ValueError(
                f"the {self.mechanism} of this plan runs for at most {limit} rounds, got "
                f"num_rounds={num_rounds}."
            )
        min_sep = planned.min_sep if min_sep is None else min_sep
        if max_participations is None:
            max_participations = -(-num_rounds // min_sep)
        return guarantee.dp_ftrl_guarantee(
            self.strategy,
            noise_multiplier=self.guarantee.noise_multiplier,
            schema=schema_lib.MinSep(num_rounds, min_sep, max_participations),
            delta=self.guarantee.delta,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-compatible values."""
        return self.guarantee.to_dict() | {
            "mechanism": self.mechanism,
            "report_goal": self.report_goal,
            "noise_in_sum": self.noise_in_sum,
            "noise_per_round": self.noise_per_round,
            "memory_copies": self.memory_copies,
            "memory_bytes": self.memory_bytes,
            "upload_bytes": self.upload_bytes,
        }


def make_plans(request: Request, mechanisms: Iterable[str] = DEFAULT_MECHANISMS) -> list[Plan]:
    """One plan for each mechanism and report goal that the population allows.

    Args:
      request: What is known and wanted.
      mechanisms: Names of runnable ones, of the table `mechanisms.table`; by default
        those that are optimised in about a second.

    Returns:
      The plans, by report goal and mechanism.

    Raises:
      ValueError: If no report goal is possible, or a target is out of range.
    """
    mechanisms, plans = tuple(mechanisms), []
    for name in mechanisms:
        if not table.check(name).runnable:
            raise ValueError(
                f"mechanism {name!r} cannot be run, only compared; use some of "
                f"{', '.join(table.runnable())}."
            )
    for report_goal in sorted(set(request.report_goals)):
        schema = request.schema(report_goal)
        if schema is not None:
            for name in mechanisms:
                plans.append(_plan(request, name, report_goal, schema))
    if not plans:
        raise ValueError(
            f"no report goal of {request.report_goals!r} fits population={request.population} and "
            f"min_sep={request.min_sep!r}: min_sep · report goal must not exceed the population."
        )
    return plans


def _plan(
    request: Request,
    name: str,
    report_goal: int,
    schema: schema_lib.MinSep,
) -> Plan:
    strategy = table.build(name, schema)
    inflation, upload_bytes = 1.0, request.num_parameters * _BYTES_OF_FLOAT32
    if request.secagg_inflation is not None:
        encoding = grid.for_inflation(request.num_parameters, report_goal, request.secagg_inflation)
        inflation, upload_bytes = encoding.inflation, encoding.upload_bytes
    rounds = schema.num_rounds
    noise_of_one = inflation * noise_in_sum(
        strategy, num_rounds=rounds, noise_multiplier=1.0, report_goal=report_goal
    )
    if request.target_noise is None:
        noise_multiplier = calibrate.calibrate_noise_multiplier(
            strategy,
            schema,
            target_epsilon=request.target_epsilon,
            target_rho=request.target_rho,
            delta=request.delta,
        )
    else:
        noise_multiplier = request.target_noise / noise_of_one
    variance_of_one = float(strategy.round_noise_variance(rounds).mean())
    memory_copies = strategy.memory_copies(rounds)
    return Plan(
        mechanism=name,
        strategy=strategy,
        report_goal=report_goal,
        guarantee=guarantee.dp_ftrl_guarantee(
            strategy, noise_multiplier=noise_multiplier, schema=schema, delta=request.delta
        ),
        noise_in_sum=noise_multiplier * noise_of_one,
        noise_per_round=inflation * noise_multiplier * math.sqrt(variance_of_one) / report_goal,
        memory_copies=memory_copies,
        memory_bytes=memory_copies * request.num_parameters * _BYTES_OF_FLOAT32,
        upload_bytes=upload_bytes,
    )


def pareto(plans: Iterable[Plan]) -> list[Plan]:
    """The plans that no other plan beats in privacy, noise, report goal and memory.

    Costs that differ by less than a relative 1e-6 count as equal.

    Args:
      plans: Plans to compare.

    Returns:
      Those not dominated, in the order given.
    """
    plans = list(plans)

    def costs(plan: Plan) -> tuple[float, ...]:
        return (
            plan.guarantee.rho_zcdp,
            plan.noise_in_sum,
            float(plan.report_goal),
            float(plan.memory_copies),
        )

    def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        slack = 1.0 + 1e-6
        return all(a <= b * slack for a, b in zip(one, other, strict=True)) and any(
            a * slack < b for a, b in zip(one, other, strict=True)
        )

    return [plan for plan in plans if not any(beats(costs(rival), costs(plan)) for rival in plans)]


def recommend(plans: Iterable[Plan], largest_noise: float) -> Plan:
    """The plan to begin with: cheapest of those quiet enough, else the quietest.

    Args:
      plans: Plans that meet the same privacy target.
      largest_noise: `noise_in_sum` that is known to keep utility, such as
        `production_noise_in_sum`.

    Returns:
      Of the plans with at most that noise the one with the fewest clients a
      round, then the least memory; if there is none, the one with least noise.
    """
    plans = list(plans)
    quiet = [plan for plan in plans if plan.noise_in_sum <= largest_noise * (1.0 + 1e-9)]
    if quiet:
        return min(quiet, key=lambda plan: (plan.report_goal, plan.memory_copies))
    return min(plans, key=lambda plan: plan.noise_in_sum)
