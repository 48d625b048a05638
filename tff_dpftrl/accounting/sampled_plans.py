"""Plans of runs with secret sampling: the noise that reaches a target, by clients a round.

They are compared by the same noise as those without sampling (`planner.noise_in_sum`). One party
has to draw the cohorts in secret; devices that check in by themselves cannot be sampled.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from scipy import stats

from tff_dpftrl import validation
from tff_dpftrl.accounting import calibrate, planner, samplings
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.mechanisms import table
from tff_dpftrl.participation import schema as schema_lib

_MOST_BANDS = 64


@dataclasses.dataclass(frozen=True)
class SampledPlan:
    """Plan of a run with secret sampling.

    Attributes:
      sampling: Name of the sampling in `samplings.SAMPLINGS`.
      options: Options of the sampling.
      strategy: Strategy of the noise.
      report_goal: Expected number of clients a round.
      noise_multiplier: z, standard deviation of the noise per unit clip norm.
      epsilon: ε of the run at the δ that was asked for, not above the target.
      noise_in_sum: Noise in the sum of the averaged updates (`planner.noise_in_sum`).
      memory_copies: Number of model-sized tensors that the noise keeps between rounds.
    """

    sampling: str
    options: samplings.Options
    strategy: strategy_lib.Strategy
    report_goal: int
    noise_multiplier: float
    epsilon: float
    noise_in_sum: float
    memory_copies: int

    @property
    def given(self) -> dict[str, Any]:
        """Options of the sampling that are not None, by name."""
        values = dataclasses.asdict(self.options)
        return {name: value for name, value in values.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON-compatible values."""
        return {
            "sampling": self.sampling,
            **self.given,
            "mechanism": self.strategy.name,
            "strategy": self.strategy.to_dict(),
            "report_goal": self.report_goal,
            "noise_multiplier": self.noise_multiplier,
            "epsilon": self.epsilon,
            "noise_in_sum": self.noise_in_sum,
            "memory_copies": self.memory_copies,
        }


def make_plans(
    sampling: str,
    *,
    population: int,
    num_rounds: int,
    report_goals: Sequence[int],
    target_epsilon: float,
    delta: float,
) -> list[SampledPlan]:
    """Makes plans for each number of clients a round; with cyclic sampling, by bands too.

    Args:
      sampling: Name of the sampling in `samplings.SAMPLINGS`.
      population: Number of clients who can be sampled.
      num_rounds: Number of rounds of the run.
      report_goals: Expected numbers of clients a round; those above the population are left out.
      target_epsilon: Largest allowed ε.
      delta: δ of the target.

    Returns:
      The plans, by report goal and bands.

    Raises:
      UsageError: If an argument is out of range, or all report goals are above the population.
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
    build = functools.lru_cache(maxsize=None)(table.build)
    plans = []
    for goal in goals:
        for options, mechanism in _choices(sampling, goal, population, num_rounds, delta):
            strategy = build(*mechanism)
            plans.append(
                _plan(sampling, options, strategy, goal, num_rounds, target_epsilon, delta)
            )
    return plans


_Mechanism: TypeAlias = tuple[str, schema_lib.MinSep, table.Options]
"""Arguments of `table.build`."""


def _choices(
    sampling: str, report_goal: int, population: int, num_rounds: int, delta: float
) -> Iterator[tuple[samplings.Options, _Mechanism]]:
    """Yields options with which a round expects so many clients, and mechanisms."""
    share = report_goal / population
    if sampling == "poisson":
        yield samplings.Options(sampling_probability=share), _banded(num_rounds, 1)
    elif sampling == "allocation":
        rounds = max(1, math.ceil(share * num_rounds - 1e-9))
        yield samplings.Options(rounds_per_client=rounds), _banded(num_rounds, 1)
    elif sampling == "truncated":
        # A larger cohort in any round costs a tenth of δ.
        tail = 0.1 * delta / num_rounds
        largest = int(stats.binom.isf(tail, population, share)) + 1
        yield (
            samplings.Options(
                sampling_probability=share,
                clients=population,
                largest_cohort=min(population, largest),
            ),
            _banded(num_rounds, 1),
        )
    elif sampling == "bins":
        bins = min(num_rounds, math.floor(1.0 / share + 1e-9))
        schema = schema_lib.MinSep.as_many_as_fit(num_rounds, bins)
        yield samplings.Options(bins=bins), ("blt", schema, table.DEFAULTS)
    else:
        bands = 1
        # With as many groups as bands, or as small a separation, draws are as rare as can be.
        while bands <= min(num_rounds, _MOST_BANDS) and share * bands <= 1.0:
            if sampling == "cyclic":
                options = samplings.Options(
                    sampling_probability=share * bands, sampling_groups=bands
                )
            else:  # Of the rounds, a client waits in (bands - 1) · share.
                probability = min(1.0, share / (1.0 - (bands - 1) * share))
                options = samplings.Options(sampling_probability=probability, min_sep=bands)
            yield options, _banded(num_rounds, bands)
            bands *= 2


def _banded(num_rounds: int, bands: int) -> _Mechanism:
    """Returns the banded mechanism of clients whose rounds share no noise."""
    # The best C is that for a single round.
    schema = schema_lib.MinSep(num_rounds, num_rounds, 1)
    if bands == 1:
        return "identity", schema, table.DEFAULTS
    return "bandtoep", schema, table.Options(bands=bands)


def _plan(
    sampling: str,
    options: samplings.Options,
    strategy: strategy_lib.Strategy,
    report_goal: int,
    num_rounds: int,
    target_epsilon: float,
    delta: float,
) -> SampledPlan:
    def epsilon(noise: float) -> float:
        return samplings.build(sampling, strategy, noise, num_rounds, options).epsilon(delta)

    noise_multiplier = calibrate.smallest_noise(
        epsilon, target_epsilon=target_epsilon, relative_tolerance=1e-3
    )
    return SampledPlan(
        sampling,
        options,
        strategy,
        report_goal,
        noise_multiplier,
        epsilon(noise_multiplier),
        planner.noise_in_sum(
            strategy,
            num_rounds=num_rounds,
            noise_multiplier=noise_multiplier,
            report_goal=report_goal,
        ),
        strategy.memory_copies(num_rounds),
    )


def least_noise(plans: Sequence[SampledPlan]) -> list[SampledPlan]:
    """Selects the plan of least noise for each report goal."""
    best: dict[int, SampledPlan] = {}
    for plan in plans:
        known = best.get(plan.report_goal)
        if known is None or plan.noise_in_sum < known.noise_in_sum:
            best[plan.report_goal] = plan
    return list(best.values())
