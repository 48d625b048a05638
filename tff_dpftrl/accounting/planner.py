"""Before a run: which mechanism, report goal, noise and separation reach a target.

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

from tff_dpftrl import validation
from tff_dpftrl.accounting import calibrate, guarantee, planner_request
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
_BYTES_OF_FLOAT32 = 4
_NOISE_PER_DOUBLING = 0.8  # See `recommend`.
_MAX_COPIES = 8

# Production models of Gboard: tree aggregation, z = 7, 6500 clients (Xu et al. 2023, Table 1).
_PRODUCTION_NOISE_MULTIPLIER = 7.0
_PRODUCTION_REPORT_GOAL = 6500


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
    strategy_lib.check_strategy(strategy)
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

    def is_as_quiet_as(self, noise: float) -> bool:
        """Whether `noise_in_sum` is at most `noise`, but for rounding."""
        return self.noise_in_sum <= noise * (1.0 + 1e-9)

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
            raise validation.UsageError(
                f"the {self.mechanism} of this plan runs for at most {limit} rounds, got "
                f"num_rounds={num_rounds}."
            )
        min_sep = planned.min_sep if min_sep is None else min_sep
        schema = schema_lib.MinSep.as_many_as_fit(num_rounds, min_sep)
        if max_participations is not None:
            schema = dataclasses.replace(schema, max_participations=max_participations)
        return guarantee.dp_ftrl_guarantee(
            self.strategy,
            noise_multiplier=self.guarantee.noise_multiplier,
            schema=schema,
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


def make_plans(
    request: planner_request.Request, mechanisms: Iterable[str] = DEFAULT_MECHANISMS
) -> list[Plan]:
    """One plan for each mechanism and report goal that the population allows.

    Args:
      request: What is known and wanted.
      mechanisms: Names of runnable ones, of the table `mechanisms.table`; by default
        those that are optimised in about a second.

    Returns:
      The plans, by report goal and mechanism.

    Raises:
      ValueError: If no report goal is possible, a target is out of range, or a
        mechanism is unknown or cannot be run.
    """
    mechanisms = tuple(mechanisms)
    for name in mechanisms:
        if not table.check(name).runnable:
            raise validation.UsageError(
                f"mechanism {name!r} cannot be run, only compared; use some of "
                f"{', '.join(table.runnable())}."
            )
    request.check_feasible()
    return [
        _plan(request, name, report_goal, schema)
        for report_goal, schema in request.schemas()[0].items()
        for name in mechanisms
    ]


def _plan(
    request: planner_request.Request,
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


def recommend(plans: Iterable[Plan], quiet_enough: float | None) -> Plan:
    """The plan to begin with.

    Devices cost: a round asks `report_goal` of them, and a run asks each device
    report_goal · num_rounds / population times. Memory does, too: plans that keep more
    than 8 copies of the model, the most that a BLT keeps, are left to those who ask for
    them by name. So

    * of the plans whose noise is quiet enough the one with the fewest clients a round,
      then the least memory, then the least noise;
    * if there is none, the one from which doubling the clients a round would no longer
      lower the noise by a fifth: the least noise_in_sum · mu · report_goal^0.32, where mu
      (sensitivity over standard deviation) is the same for all plans with one target ε,
      and the noise for all with one target noise.

    Args:
      plans: Plans for one request.
      quiet_enough: `noise_in_sum` that is known to keep utility, such as
        `production_noise_in_sum`; None if it was the target, so that privacy decides.

    Returns:
      The recommended plan.
    """
    plans = list(plans)
    plans = [plan for plan in plans if plan.memory_copies <= _MAX_COPIES] or plans
    if quiet_enough is not None:
        quiet = [plan for plan in plans if plan.is_as_quiet_as(quiet_enough)]
        if quiet:
            return min(quiet, key=lambda p: (p.report_goal, p.memory_copies, p.noise_in_sum))
    exponent = -math.log2(_NOISE_PER_DOUBLING)
    return min(plans, key=lambda p: p.noise_in_sum * p.guarantee.mu * p.report_goal**exponent)
