"""Placement of actors on hosts: a function of the actor's address, the same on every host."""

from __future__ import annotations

import dataclasses
import re

from tff_dpftrl import validation

COORDINATOR = "coordinator"
"""Name of the Coordinator's host."""

_SELECTOR, _WORKER = "selector", "worker"
_OF_SELECTOR = re.compile(r"(selector-\d+)(?:/|\Z)")
_OF_COORDINATOR = re.compile(
    r"/coordinator/[0-9a-f]+(?:/round/(?P<attempt>\d+)(?:/(?:aggregator|merger)/(?P<i>\d+))?)?\Z"
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The hosts of a population, and the placement of its actors.

    The Aggregators of an attempt are spread over the workers, and so are successive attempts:
    a lost worker does not delay the next attempt. The Master Aggregator and the merging
    Aggregators are on different workers if there are as many. Then no worker receives more sums
    than one of them merges.

    Attributes:
      num_selectors: Number of hosts with a Selector.
      num_workers: Number of hosts with Master, merging and other Aggregators.
    """

    num_selectors: int
    num_workers: int

    def __post_init__(self):
        validation.integer("num_selectors", self.num_selectors, minimum=1)
        validation.integer("num_workers", self.num_workers, minimum=1)

    @property
    def selectors(self) -> tuple[str, ...]:
        """Names of the Selectors' hosts, which are also the Selectors' addresses."""
        return tuple(f"{_SELECTOR}-{i}" for i in range(self.num_selectors))

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers."""
        return tuple(f"{_WORKER}-{i}" for i in range(self.num_workers))

    @property
    def permanent(self) -> tuple[str, ...]:
        """Names of the hosts that always run: all but the Coordinator's."""
        return (*self.selectors, *self.workers)

    def host_of(self, address: str) -> str:
        """Returns the name of the host of an actor, or of a device's connection.

        It is empty if the address is not of one host, like that of the StoreActors.
        """
        match = _OF_COORDINATOR.search(address)
        if match is None:
            selector = _OF_SELECTOR.match(address)
            return "" if selector is None else selector[1]
        if match["attempt"] is None:
            return COORDINATOR
        number = int(match["attempt"])
        if match["i"] is not None:
            number += 1 + int(match["i"])
        return f"{_WORKER}-{number % self.num_workers}"


def is_selector(host: str) -> bool:
    """Returns whether a name is that of a Selector's host."""
    return host.startswith(f"{_SELECTOR}-")


def is_worker(host: str) -> bool:
    """Returns whether a name is that of a worker."""
    return host.startswith(f"{_WORKER}-")


def device_prefix(host: str, life: str) -> str:
    """Returns the common prefix of the addresses of a Selector's devices.

    `life` is the id of the process of the Selector's host, which a restart changes.
    """
    return f"{host}/{life}/device/"


def life_of_device(address: str) -> str:
    """Returns the id of the host's process to which a device was connected."""
    return address.split("/", 2)[1]
