"""A population of a server: its tasks, its pace, and its share of sessions and check-ins.

The populations of a server share its port, its threads and its store. Each has a Selector of its
own in every Selector's process, and a Coordinator and a lease of its own, so that none waits for
the rounds of another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tff_dpftrl import validation
from tff_dpftrl.runtime.actors import population as population_lib
from tff_dpftrl.runtime.actors import selector
from tff_dpftrl.runtime.server import observer as observer_lib
from tff_dpftrl.runtime.server import served_task


@dataclasses.dataclass(frozen=True)
class ServedPopulation:
    """A population in the form that actors and the devices' service take."""

    population: population_lib.Population  # Population with the tasks' settings of rounds.
    tasks: Mapping[str, served_task.ServedTask]
    pace: selector.Pace  # Pace steering, which says when devices are to check in again.
    observer: observer_lib.Observer = dataclasses.field(default_factory=observer_lib.Observer)
    # Share of sessions and check-ins that other populations leave to this one; None for an even
    # part of one half of them.
    share: float | None = None

    def __post_init__(self):
        tasks, members = self.tasks, self.population.tasks
        if len(tasks) != len(members) or [task.task for task in tasks.values()] != [
            self.population.task(name) for name in tasks
        ]:
            raise validation.UsageError(
                f"tasks has {sorted(tasks)}, and must have those of the population, by name: "
                f"{sorted(task.name for task in members)}."
            )

    @property
    def name(self) -> str:
        """Name of the population."""
        return self.population.name


def check(populations: Sequence[ServedPopulation]) -> None:
    """Raises ValueError for populations that one server cannot have."""
    names = [one.name for one in populations]
    if not names or len(set(names)) != len(names):
        raise validation.UsageError(
            f"populations must be distinct, and at least one, got {names}: name each once."
        )
    shares(populations)


def shares(populations: Sequence[ServedPopulation]) -> dict[str, float]:
    """Computes the share that each population has for itself; the rest is for whoever comes first.

    It raises ValueError for a share out of [0, 1], a sum above 1, or a population without a share.
    """
    alone = len(populations) == 1
    even = 0.0 if alone else 0.5 / len(populations)
    made = {}
    for one in populations:
        share = even if one.share is None else one.share
        made[one.name] = validation.number(f"share of {one.name!r}", share, at_least=0, at_most=1)
    total = sum(made.values())
    if total > 1 + 1e-9:
        raise validation.UsageError(
            f"shares are {total:g} together ("
            + ", ".join(f"{name}: {share:g}" for name, share in made.items())
            + "), and may be 1 at most: lower them."
        )
    if total > 1 - 1e-9 and (left := [name for name, share in made.items() if not share]):
        raise validation.UsageError(
            f"shares leave nothing for {', '.join(map(repr, left))}: lower the others."
        )
    return made


def address(place: str, name: str, populations: Sequence[ServedPopulation]) -> str:
    """Returns the address of a population's actor where each population has one.

    The actor of a single population has the address `place`.
    """
    return place if len(populations) == 1 else f"{place}/{name}"
