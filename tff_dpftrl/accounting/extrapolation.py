"""Privacy at fixed utility, as the Gboard and BLT papers extrapolate it.

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
    """Privacy along one varying quantity.

    Attributes:
      label: What is fixed.
      x: Values of the varying quantity.
      rho: rho-zCDP at each of them.
      epsilon: Epsilon at each of them, exact.
    """

    label: str
    x: tuple[int, ...]
    rho: tuple[float, ...]
    epsilon: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A mechanism at the noise with which it was trained.

    Attributes:
      label: Name for a legend.
      strategy: Builds the strategy for a number of rounds.
      noise_multiplier: z, at `report_goal` clients a round.
      report_goal: Clients a round that `noise_multiplier` belongs to.
    """

    label: str
    strategy: Callable[[int], strategy_lib.Strategy]
    noise_multiplier: float
    report_goal: int

    def guarantee(
        self, schema: schema_lib.MinSep, report_goal: int, delta: float
    ) -> guarantee.Guarantee:
        """The guarantee at another report goal, with the noise scaled in proportion.

        Args:
          schema: The participation schema; the strategy is built for its rounds.
          report_goal: Clients a round.
          delta: The δ to state ε for.

        Returns:
          The guarantee, with noise multiplier z · report_goal / `self.report_goal`.

        Raises:
          ValueError: If an argument is out of range.
        """
        return guarantee.dp_ftrl_guarantee(
            self.strategy(schema.num_rounds),
            noise_multiplier=self.noise_multiplier * report_goal / self.report_goal,
            schema=schema,
            delta=delta,
        )


def gboard_tree() -> Mechanism:
    """Tree aggregation as in Gboard: z = 7 with 6500 clients a round."""
    return Mechanism("TreeAgg", tree.Tree, 7.0, 6500)


def _schema(num_rounds: int, min_sep: int) -> schema_lib.MinSep:
    return schema_lib.MinSep.as_many_as_fit(num_rounds, min(min_sep, num_rounds))


def _curve(label: str, x: Sequence[int], found: Sequence[guarantee.Guarantee]) -> Curve:
    return Curve(
        label,
        tuple(x),
        tuple(one.rho_zcdp for one in found),
        tuple(one.epsilon for one in found),
    )


def by_rounds_and_report_goal(
    mechanism: Mechanism,
    *,
    population: int,
    report_goals: Sequence[int],
    rounds: Sequence[int],
    delta: float = defaults.DELTA,
) -> list[Curve]:
    """Over rounds, one curve for each report goal (Gboard Figure 4 a, b; BLT Figure 8 b).

    Args:
      mechanism: What is run; its noise is scaled with the report goal.
      population: Devices; the separation is population / report goal.
      report_goals: Clients a round.
      rounds: Numbers of rounds.
      delta: Delta of epsilon.

    Returns:
      The curves.
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
    mechanism: Mechanism,
    *,
    min_seps: Sequence[int],
    rounds: Sequence[int],
    delta: float = defaults.DELTA,
) -> list[Curve]:
    """Over rounds, one curve for each separation (Gboard Figure 4 c).

    Args:
      mechanism: What is run, at its own report goal and noise.
      min_seps: Strides.
      rounds: Numbers of rounds.
      delta: Delta of epsilon.

    Returns:
      The curves; participations are as many as fit.
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
    mechanisms: Sequence[Mechanism],
    *,
    population: int,
    num_rounds: int,
    report_goals: Sequence[int],
    delta: float = defaults.DELTA,
) -> list[Curve]:
    """Over report goals, one curve for each mechanism (BLT Figure 8 a).

    Args:
      mechanisms: What is run; their noise is scaled with the report goal.
      population: Devices; the separation is population / report goal.
      num_rounds: Rounds of the run.
      report_goals: Clients a round.
      delta: Delta of epsilon.

    Returns:
      The curves.
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
    mechanisms: Sequence[Mechanism],
    *,
    min_sep: int,
    rounds: Sequence[int],
    delta: float = defaults.DELTA,
) -> list[Curve]:
    """Over rounds, one curve for each mechanism (BLT Figure 9).

    Args:
      mechanisms: What is run, at their own report goals and noise.
      min_sep: The fixed stride.
      rounds: Numbers of rounds; a mechanism's curve ends where its strategy does.
      delta: Delta of epsilon.

    Returns:
      The curves.
    """
    curves = []
    for mechanism in mechanisms:
        found = {}
        for n in rounds:
            limit = mechanism.strategy(n).max_rounds
            if limit is None or n <= limit:
                found[n] = mechanism.guarantee(_schema(n, min_sep), mechanism.report_goal, delta)
        curves.append(_curve(mechanism.label, list(found), list(found.values())))
    return curves
