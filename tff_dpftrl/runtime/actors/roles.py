"""Roles of actors: the data that an actor is built from, on any machine."""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

from tff_dpftrl.runtime.store import interface

_COORDINATOR = "/coordinator/"


def coordinator_address(population: str, name: str) -> str:
    """Returns the address of a Coordinator; those of the actors below it begin with it."""
    return f"{population}{_COORDINATOR}{name}"


def population_of(address: str) -> str:
    """Returns the population of a Coordinator, or of an actor below it; empty for other actors."""
    return address.rpartition(_COORDINATOR)[0]


@dataclasses.dataclass(frozen=True)
class CoordinatorRole:
    """Role of a Coordinator, which leads the population if it acquires the lease."""


@dataclasses.dataclass(frozen=True)
class MasterAggregatorRole:
    """Role of a Master Aggregator, which makes one attempt at a round, or skips it."""

    coordinator: str  # Address of the Coordinator, which receives the outcome.
    epoch: int  # Epoch of the lease under which the round is committed.
    commit: interface.Commit  # Last commit of the task, from which the round continues; secret.
    model: bytes = dataclasses.field(repr=False)  # Committed model that devices begin with.
    expected: frozenset[str]  # Addresses of the Selectors that forward devices.
    skips: bool = False  # Whether the round is skipped: without devices, nothing is released.
    half_seconds: float = 0.0  # Seconds in which half of the goal's reports came; 0 if unknown.
    parties: tuple[str, ...] = ()  # Addresses of the connections of the noise parties.


@dataclasses.dataclass(frozen=True)
class AggregatorRole:
    """Role of an Aggregator, which sums the reports of some devices of an attempt."""

    attempt: str  # Address of the Master Aggregator.
    task: str
    round_index: int
    model: bytes = dataclasses.field(repr=False)  # Committed model that devices begin with.
    devices: tuple[str, ...]  # Addresses of the devices' connections.
    most_reports: int | None = None  # Further reports are refused; None for all devices.
    parent: str = ""  # Address of the receiver of counts and sum, set by the spawning actor.
    parties: tuple[str, ...] = ()  # Addresses of the connections of the noise parties.
    levels: ClassVar[int] = 0  # Number of levels of merges.


@dataclasses.dataclass(frozen=True)
class MergingAggregatorRole:
    """Role of an Aggregator that merges the sums of other Aggregators, which it spawns."""

    task: str
    # Address and role of each of the Aggregators.
    children: tuple[tuple[str, AggregatorRole | MergingAggregatorRole], ...]
    parent: str = ""  # Address of the receiver of counts and sum, set by the spawning actor.

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
