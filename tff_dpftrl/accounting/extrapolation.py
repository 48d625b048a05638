"""Extrapolations of privacy at fixed utility, as in the Gboard and BLT papers.

The curves of Figure 4 of Xu et al. 2023 and Figures 8 and 9 of McMahan, Xu & Zhang
2024. They rest on `planner.HYPOTHESIS`: noise multiplier and report goal grow
together, and the separation is the largest that the population allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tff_dpftrl.accounting import defaults, guarantee, planner_request
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.mechanisms import tree
from tff_dpftrl.participation import schema as schema_lib


@dataclasses.dataclass(frozen=True)
class Curve:
    """Curve of exact ρ and ε over one varying quantity `x`, with a label for a legend."""

    label: str
    x: tuple[int, ...]
    rho: tuple[float, ...]
    epsilon: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class TrainedMechanism:
    """Mechanism with the noise multiplier z and the report goal of a training.

    `strategy` builds the strategy for a number of rounds; `label` is for a legend.
    """

    label: str
    strategy: Callable[[int], strategy_lib.Strategy]
    noise_multiplier: float
    report_goal: int

    def guarantee(
        self, schema: schema_lib.MinSep, report_goal: int, delta: float
    ) -> guarantee.Guarantee:
        """Computes the guarantee with noise multiplier z · report_goal / `self.report_goal`."""
        return guarantee.dp_ftrl_guarantee(
            self.strategy(schema.num_rounds),
            noise_multiplier=self.noise_multiplier * report_goal / self.report_goal,
            schema=schema,
            delta=delta,
        )


def gboard_tree() -> TrainedMechanism:
    """Returns tree aggregation as in Gboard: z = 7 with 6500 clients a round."""
    return TrainedMechanism("TreeAgg", tree.Tree, 7.0, 6500)


def _schema(num_rounds: int, min_sep: int) -> schema_lib.MinSep:
    return schema_lib.MinSep.as_many_as_fit(num_rounds, min(min_sep, num_rounds))


def _curve(label: str, x: Sequence[int], guarantees: Sequence[guarantee.Guarantee]) -> Curve:
    return Curve(
        label,
        tuple(x),
        tuple(one.rho_zcdp for one in guarantees),
        tuple(one.epsilon for one in guarantees),
    )


def by_rounds_and_report_goal(
    mechanism: TrainedMechanism,
    *,
    population: int,
    report_goals: Sequence[int],
    rounds: Sequence[int],
    delta: float = defaults.DELTA,
) -> list[Curve]:
    """Computes a curve over rounds for each report goal (Gboard Fig. 4 a, b; BLT Fig. 8 b).

    The noise is scaled with the report goal, and the separation is population / report goal.
    """
    return [
        _curve(
            f"report goal {goal}",
            rounds,
            [
                mechanism.guarantee(
                    _schema(n, planner_request.largest_min_sep(population, goal)), goal, delta
                )
                for n in rounds
            ],
        )
        for goal in report_goals
    ]


def by_rounds_and_min_sep(
    mechanism: TrainedMechanism,
    *,
    min_seps: Sequence[int],
    rounds: Sequence[int],
    delta: float = defaults.DELTA,
) -> list[Curve]:
    """Computes a curve over rounds for each separation (Gboard Figure 4 c).

    Separations are strides. Clients take part as often as fits.
    """
    return [
        _curve(
            f"min-sep {min_sep}",
            rounds,
            [
                mechanism.guarantee(_schema(n, min_sep), mechanism.report_goal, delta)
                for n in rounds
            ],
        )
        for min_sep in min_seps
    ]


def by_report_goal(
    mechanisms: Sequence[TrainedMechanism],
    *,
    population: int,
    num_rounds: int,
    report_goals: Sequence[int],
    delta: float = defaults.DELTA,
) -> list[Curve]:
    """Computes a curve over report goals for each mechanism (BLT Figure 8 a).

    The noise is scaled with the report goal, and the separation is population / report goal.
    """
    return [
        _curve(
            mechanism.label,
            report_goals,
            [
                mechanism.guarantee(
                    _schema(num_rounds, planner_request.largest_min_sep(population, goal)),
                    goal,
                    delta,
                )
                for goal in report_goals
            ],
        )
        for mechanism in mechanisms
    ]


def by_rounds(
    mechanisms: Sequence[TrainedMechanism],
    *,
    min_sep: int,
    rounds: Sequence[int],
    delta: float = defaults.DELTA,
) -> list[Curve]:
    """Computes a curve over rounds for each mechanism (BLT Figure 9).

    A mechanism's curve ends at its strategy's `max_rounds`.
    """
    curves = []
    for mechanism in mechanisms:
        guarantees = {}
        for n in rounds:
            limit = mechanism.strategy(n).max_rounds
            if limit is None or n <= limit:
                schema = _schema(n, min_sep)
                guarantees[n] = mechanism.guarantee(schema, mechanism.report_goal, delta)
        curves.append(_curve(mechanism.label, list(guarantees), list(guarantees.values())))
    return curves
