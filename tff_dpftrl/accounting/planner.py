"""Plans of runs: mechanism, report goal, noise and separation that reach a target.

Plans are compared by the noise in the sum, over the rounds so far, of the averaged
updates. It stands for utility by a *hypothesis* of both papers
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
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.participation import schema as schema_lib

HYPOTHESIS = (
    "Hypothesis, not theorem: with enough data, utility depends on the noise in the averaged "
    "updates, so that noise multiplier and report goal may grow together (Xu et al. 2023, section "
    "2.2; McMahan, Xu & Zhang 2024, section 5)."
)
_BYTES_OF_FLOAT32 = 4
_NOISE_PER_DOUBLING = 0.8  # See `recommend`.
_MAX_COPIES = 8

# Production models of Gboard: tree aggregation, z = 7, 6500 clients (Xu et al. 2023, Table 1).
_PRODUCTION_NOISE_MULTIPLIER = 7.0
_PRODUCTION_REPORT_GOAL = 6500


def noise_in_sum(
    strategy: strategy_lib.Strategy,
    *,
    num_rounds: int,
    noise_multiplier: float,
    report_goal: int,
    workload: workload_lib.Workload | None = None,
) -> float:
    """Computes the noise in the sum of the averaged updates, root mean square over rounds.

    It is the standard deviation per coordinate and unit of clip norm. Each sum is divided by
    `report_goal`. With `workload`, it is the noise in the models rather than in the sums.
    """
    strategy_lib.check_strategy(strategy)
    return strategy.rms_error(num_rounds, workload) * noise_multiplier / report_goal


def production_noise_in_sum(
    num_rounds: int, workload: workload_lib.Workload | None = None
) -> float:
    """Computes `noise_in_sum` of Gboard's production models: tree, z = 7, 6500 clients."""
    return noise_in_sum(
        tree.Tree(num_rounds),
        num_rounds=num_rounds,
        noise_multiplier=_PRODUCTION_NOISE_MULTIPLIER,
        report_goal=_PRODUCTION_REPORT_GOAL,
        workload=workload,
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a run: a mechanism with its noise, report goal and costs.

    With secure aggregation the noise multiplier of `guarantee` is relative to the inflated norm.
    `noise_in_sum` is that of all noise parties together; it stands for utility, by the hypothesis.
    `noise_per_round` is that in one round's averaged update, root mean square over rounds, per
    coordinate and unit of clip norm. `memory_copies` counts the model-sized tensors that the server
    keeps between rounds, and `memory_bytes` is their size as float32. `upload_bytes` are sent by
    one client in a round.
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
        """Returns whether `noise_in_sum` is at most `noise`, up to rounding."""
        return self.noise_in_sum <= noise * (1.0 + 1e-9)

    def what_if(
        self,
        *,
        num_rounds: int | None = None,
        min_sep: int | None = None,
        max_participations: int | None = None,
    ) -> guarantee.Guarantee:
        """Computes what the same noise guarantees if the run differs from its plan.

        `num_rounds` and `min_sep` are as planned if None; participations are then as many as fit.
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
            others=self.guarantee.others,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON-compatible values."""
        return self.guarantee.to_dict() | {
            "mechanism": self.mechanism,
            "report_goal": self.report_goal,
            "noise_in_sum": self.noise_in_sum,
            "noise_per_round": self.noise_per_round,
            "memory_copies": self.memory_copies,
            "memory_bytes": self.memory_bytes,
            "upload_bytes": self.upload_bytes,
        }


def default_mechanisms(num_rounds: int) -> tuple[str, ...]:
    """Returns the mechanisms that can be run, and optimised for these rounds in about a second."""
    return tuple(
        name
        for name in table.runnable()
        if table.MECHANISMS[name].quick
        and num_rounds <= (table.MECHANISMS[name].max_rounds or num_rounds)
    )


def make_plans(
    request: planner_request.Request, mechanisms: Iterable[str] | None = None
) -> list[Plan]:
    """Makes one plan for each mechanism and report goal that the population allows.

    `mechanisms` are names in `mechanisms.table`, `default_mechanisms` if None. The plans are sorted
    by report goal and mechanism.
    """
    if mechanisms is None:
        mechanisms = default_mechanisms(request.num_rounds)
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
    options = table.fitting(name, table.Options(workload=request.workload))
    strategy = table.build(name, schema, options)
    rounds, encoding = schema.num_rounds, None
    inflation = math.sqrt(max(request.noise_parties, 1))  # Each adds the noise of all.
    if request.secagg_inflation is not None:
        encoding = grid.for_inflation(request.num_parameters, report_goal, request.secagg_inflation)
        inflation *= encoding.inflation
    noise_of_one = inflation * noise_in_sum(
        strategy,
        num_rounds=rounds,
        noise_multiplier=1.0,
        report_goal=report_goal,
        workload=request.workload,
    )
    if request.target_noise is None:
        noise_multiplier = calibrate.calibrate_noise_multiplier(
            strategy,
            schema,
            target_epsilon=request.target_epsilon,
            target_rho=request.target_rho,
            delta=request.delta,
            others=request.others,
        )
    else:
        noise_multiplier = request.target_noise / noise_of_one
    round_noise = strategy.round_noise(rounds)
    upload_bytes = request.num_parameters * _BYTES_OF_FLOAT32
    if encoding is not None:
        largest = noise_multiplier * math.sqrt(request.noise_parties * round_noise.largest)
        upload_bytes = dataclasses.replace(encoding, noise_ratio=largest).upload_bytes
    memory_copies = strategy.memory_copies(rounds)
    return Plan(
        mechanism=name,
        strategy=strategy,
        report_goal=report_goal,
        guarantee=guarantee.dp_ftrl_guarantee(
            strategy,
            noise_multiplier=noise_multiplier,
            schema=schema,
            delta=request.delta,
            others=request.others,
        ),
        noise_in_sum=noise_multiplier * noise_of_one,
        noise_per_round=inflation * noise_multiplier * math.sqrt(round_noise.mean) / report_goal,
        memory_copies=memory_copies,
        memory_bytes=memory_copies * request.num_parameters * _BYTES_OF_FLOAT32,
        upload_bytes=upload_bytes,
    )


def pareto(plans: Iterable[Plan]) -> list[Plan]:
    """Selects the plans that no other plan beats in privacy, noise, report goal and memory.

    Costs that differ by less than a relative 1e-6 count as equal. The order is kept.
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
    """Recommends one of several plans of one request.

    Devices cost: a round asks `report_goal` of them, and a run asks each device
    report_goal · num_rounds / population times. Memory costs, too: plans that keep more
    than 8 copies of the model, the most that a BLT keeps, are only recommended if there
    are no others. The recommendation is

    * among the plans whose noise is quiet enough, the one with the fewest clients a round,
      then the least memory, then the least noise;
    * if there is none, the plan from which doubling the clients a round would no longer
      lower the noise by a fifth. It has the least noise_in_sum · mu · report_goal^0.32. mu
      (sensitivity over standard deviation) is the same for all plans with one target ε,
      and the noise is the same for all plans with one target noise.

    `quiet_enough` is a `noise_in_sum` that is known to keep utility, such as
    `production_noise_in_sum`; None if the noise was the target, so that privacy decides.
    """
    plans = list(plans)
    plans = [plan for plan in plans if plan.memory_copies <= _MAX_COPIES] or plans
    if quiet_enough is not None:
        quiet = [plan for plan in plans if plan.is_as_quiet_as(quiet_enough)]
        if quiet:
            return min(quiet, key=lambda p: (p.report_goal, p.memory_copies, p.noise_in_sum))
    exponent = -math.log2(_NOISE_PER_DOUBLING)
    return min(plans, key=lambda p: p.noise_in_sum * p.guarantee.mu * p.report_goal**exponent)
