"""Roles of actors: the data that an actor is built from, on any machine."""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

from tff_dpftrl.runtime.store import interface

_COORDINATOR = "/coordinator/"


def coordinator_address(population: str, name: str) -> str:
    """Returns the address of a Coordinator; those of the actors below it begin with it.

    Args:
      population: Name of the population that it leads.
      name: Name of the Coordinator, without a slash.
    """
    return f"{population}{_COORDINATOR}{name}"


def population_of(address: str) -> str:
    """Returns the population of a Coordinator, or of an actor below it; empty for other actors."""
    return address.rpartition(_COORDINATOR)[0]


@dataclasses.dataclass(frozen=True)
class CoordinatorRole:
    """Role of a Coordinator, which leads the population if it acquires the lease."""


@dataclasses.dataclass(frozen=True)
class MasterAggregatorRole:
    """Role of a Master Aggregator, which makes one attempt at a round, or skips it.

    Attributes:
      coordinator: Address of the Coordinator, which receives the outcome.
      epoch: Epoch of the lease under which the round is committed.
      commit: Last commit of the task, from which the round continues; secret.
      model: Serialised committed model that devices begin with.
      expected: Addresses of the Selectors that forward devices.
      skips: Whether the round is skipped: no device takes part, and nothing is released.
      half_seconds: Seconds in which half of the goal's reports came in earlier rounds; 0 if that
        is not known.
      parties: Addresses of the connections of the noise parties.
    """

    coordinator: str
    epoch: int
    commit: interface.Commit
    model: bytes = dataclasses.field(repr=False)
    expected: frozenset[str]
    skips: bool = False
    half_seconds: float = 0.0
    parties: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class AggregatorRole:
    """Role of an Aggregator, which sums the reports of some devices of an attempt.

    Attributes:
      attempt: Address of the Master Aggregator.
      task: Name of the task.
      round_index: Index of the round, from 0.
      model: Serialised committed model that devices begin with.
      devices: Addresses of the devices' connections.
      most_reports: Largest number of reports in the sum; the number of devices if None. Reports
        beyond it are refused.
      parent: Address of the actor that receives counts and the sum; the actor that spawns this one
        sets it.
      parties: Addresses of the connections of the noise parties.
    """

    attempt: str
    task: str
    round_index: int
    model: bytes = dataclasses.field(repr=False)
    devices: tuple[str, ...]
    most_reports: int | None = None
    parent: str = ""
    parties: tuple[str, ...] = ()
    levels: ClassVar[int] = 0  # Number of levels of merges.


@dataclasses.dataclass(frozen=True)
class MergingAggregatorRole:
    """Role of an Aggregator that merges the sums of other Aggregators, which it spawns.

    Attributes:
      task: Name of the task.
      children: Address and role of each of the Aggregators.
      parent: Address of the actor that receives counts and the sum; the actor that spawns this one
        sets it.
    """

    task: str
    children: tuple[tuple[str, AggregatorRole | MergingAggregatorRole], ...]
    parent: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        """Addresses of the connections of all devices below."""
        return tuple(itertools.chain.from_iterable(role.devices for _, role in self.children))

    @property
    def model(self) -> bytes:
        """Serialised committed model that devices begin with."""
        return self.children[0][1].model

    @property
    def levels(self) -> int:
        """Number of levels of merges, its own included."""
        return 1 + max(role.levels for _, role in self.children)
