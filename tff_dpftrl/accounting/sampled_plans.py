"""Plans of runs with secret sampling: the noise that reaches a target, by clients a round.

They are compared by the same noise as those without sampling (`planner.noise_in_sum`). One party
has to draw the cohorts in secret; devices that check in by themselves cannot be sampled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.accounting import (
    budget_shares,
    calibrate,
    cyclic_optimize,
    parts,
    planner,
    samplings,
)
from tff_dpftrl.mechanisms import identity, table
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import sampling as sampling_lib
from tff_dpftrl.participation import schema as schema_lib

# Each but one is a copy of the model that the noise keeps.
_MOST_BANDS = 64
_OF_ROUNDS = "metrics"  # Share of what each round releases of its cohort.


@dataclasses.dataclass(frozen=True)
class SampledPlan:
    """Plan of a run with secret sampling, whose ε is not above the target.

    `report_goal` is the expected number of clients a round. `memory_copies` counts the model-sized
    tensors that the noise keeps between rounds. `costs` are those of the weights and all else that
    the run releases; none for weights alone.
    """

    name: str
    sampling: sampling_lib.Sampling
    strategy: strategy_lib.Strategy
    report_goal: int
    noise_multiplier: float
    epsilon: float
    noise_in_sum: float
    memory_copies: int
    costs: tuple[parts.Cost, ...] = ()

    @property
    def given(self) -> dict[str, Any]:
        """Options of the sampling, by the names of `samplings.SAMPLINGS`."""
        values, needs = vars(self.sampling), samplings.SAMPLINGS[self.name].needs
        return {name: values[samplings.FIELDS.get(name, name)] for name in needs}

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON-compatible values."""
        return {
            "sampling": self.name,
            **self.given,
            "mechanism": self.strategy.name,
            "strategy": self.strategy.to_dict(),
            "report_goal": self.report_goal,
            "noise_multiplier": self.noise_multiplier,
            "epsilon": self.epsilon,
            "noise_in_sum": self.noise_in_sum,
            "memory_copies": self.memory_copies,
            **({"parts": [dataclasses.asdict(cost) for cost in self.costs]} if self.costs else {}),
        }


def make_plans(
    sampling: str,
    *,
    population: int,
    num_rounds: int,
    report_goals: Sequence[int],
    target_epsilon: float,
    delta: float,
    shares: Mapping[str, float] = MappingProxyType({}),
) -> list[SampledPlan]:
    """Makes plans for each number of clients a round; with cyclic sampling, by bands too.

    Report goals above the population are left out. `shares` are those of the budget that others
    than the weights get (`budget_shares`).
    """
    population = validation.integer("population", population, minimum=1)
    num_rounds = validation.integer("num_rounds", num_rounds, minimum=1)
    validation.delta(delta)
    goals = sorted(goal for goal in set(report_goals) if goal <= population)
    if not goals:
        raise validation.UsageError(
            f"report_goals must have one of at most population={population}, got "
            f"{', '.join(map(str, report_goals))}."
        )
    budget_shares.check(shares)
    apart = {name: share for name, share in shares.items() if name != _OF_ROUNDS}
    others = budget_shares.planned(target_epsilon, delta, apart)
    make = _Maker(
        sampling, population, num_rounds, target_epsilon, delta, others, shares.get(_OF_ROUNDS, 0.0)
    )
    return [plan for goal in goals for plan in make.plans(goal)]


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Maker of plans for several report goals, with the arguments of `make_plans`.

    `others` are the parts with shares, but for figures of rounds, whose share is
    `share_of_figures`.
    """

    name: str
    population: int
    num_rounds: int
    target_epsilon: float
    delta: float
    others: tuple[parts.Part, ...] = ()
    share_of_figures: float = 0.0

    def plans(self, goal: int) -> list[SampledPlan]:
        """Makes the plans in which a round expects so many clients."""
        rounds = self.num_rounds
        expected = {"num_clients": self.population, "clients_per_round": goal}
        match self.name:
            case "cyclic":
                choice = cyclic_optimize.best_cyclic(
                    rounds,
                    self.population,
                    goal,
                    self.target_epsilon,
                    self.delta,
                    max_bands=_MOST_BANDS,
                )
                return [
                    self._plan(
                        goal,
                        sampling_lib.CyclicPoisson.for_cohorts(rounds, run.num_groups, **expected),
                        run.strategy if run.num_bands > 1 else identity.Identity(),
                        None if self.others else run.noise_multiplier,
                    )
                    for run in choice.curve
                ]
            case "b-min-sep":

                def waiting(bands: int) -> SampledPlan:
                    # With as small a separation as there are bands, draws are as rare as can be.
                    drawn = sampling_lib.MinSepPoisson.for_cohorts(rounds, bands, **expected)
                    return self._plan(goal, drawn, _banded(rounds, bands))

                most = min(_MOST_BANDS, self.population // goal)
                return cyclic_optimize.try_bands(
                    waiting, lambda plan: plan.noise_in_sum, rounds, most
                )
            case "bins":
                drawn = sampling_lib.BallsInBins(rounds, min(rounds, self.population // goal))
                return [self._plan(goal, drawn, table.build("blt", drawn.schema, table.DEFAULTS))]
        poisson = sampling_lib.CyclicPoisson.for_cohorts(rounds, 1, **expected)
        return [self._plan(goal, poisson, identity.Identity())]

    def _plan(
        self,
        goal: int,
        sampling: sampling_lib.Sampling,
        strategy: strategy_lib.Strategy,
        noise_multiplier: float | None = None,
    ) -> SampledPlan:
        """Makes a plan with the smallest noise that meets the target, if it is not given."""

        def rounds(noise: float) -> parts.Weights:
            run = samplings.zero_out(sampling, strategy, noise_multiplier=noise)
            return samplings.rounds_of(run, self.name)

        def beside(others: tuple[parts.Part, ...]) -> float:
            return calibrate.noise_beside(
                rounds,
                others,
                target_epsilon=self.target_epsilon,
                delta=self.delta,
                relative_tolerance=1e-3,
            )

        others = self.others
        if self.share_of_figures:  # A share of the whole, whatever else has a share of it.
            whole = beside(()) if noise_multiplier is None else noise_multiplier
            others += (budget_shares.figures(rounds(whole), self.share_of_figures),)
            if not self.others:
                noise_multiplier = whole * budget_shares.growth(self.share_of_figures)
        if noise_multiplier is None:
            noise_multiplier = beside(others)
        weights = rounds(noise_multiplier)
        return SampledPlan(
            self.name,
            sampling,
            strategy,
            goal,
            noise_multiplier,
            parts.compose(weights, others, self.delta),
            planner.noise_in_sum(
                strategy,
                num_rounds=self.num_rounds,
                noise_multiplier=noise_multiplier,
                report_goal=goal,
            ),
            strategy.memory_copies(self.num_rounds),
            parts.costs(weights, strategy.name, others, self.delta),
        )


@functools.lru_cache(maxsize=256)
def _banded(num_rounds: int, bands: int) -> strategy_lib.Strategy:
    """Returns the strategy of clients whose rounds share no noise: the best C for one round."""
    schema = schema_lib.MinSep(num_rounds, num_rounds, 1)
    if bands == 1:
        return identity.Identity()
    return table.build("bandtoep", schema, table.Options(bands=bands))


def least_noise(plans: Sequence[SampledPlan]) -> list[SampledPlan]:
    """Selects the plan of least noise for each report goal."""
    best: dict[int, SampledPlan] = {}
    for plan in plans:
        known = best.get(plan.report_goal)
        if known is None or plan.noise_in_sum < known.noise_in_sum:
            best[plan.report_goal] = plan
    return list(best.values())
