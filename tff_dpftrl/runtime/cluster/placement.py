"""Where an actor is: a function of its address, the same on every host."""

from __future__ import annotations

import dataclasses
import re

from tff_dpftrl import validation

COORDINATOR = "coordinator"
"""Name of the Coordinator's host."""

_SELECTOR, _WORKER = "selector", "worker"
_OF_SELECTOR = re.compile(r"(selector-\d+)(?:/|\Z)")
_OF_COORDINATOR = re.compile(
    r"/coordinator/[0-9a-f]+(?:/round/(?P<attempt>\d+)(?:/aggregator/(?P<group>\d+))?)?\Z"
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The hosts of a population, and who is where.

    Aggregators of an attempt are spread over the workers, and so are attempts that follow one
    another: a worker that is lost does not hold up the next one.

    Attributes:
      num_selectors: How many hosts have a Selector.
      num_workers: How many have Master Aggregators and Aggregators.
    """

    num_selectors: int
    num_workers: int

    def __post_init__(self):
        validation.integer("num_selectors", self.num_selectors, minimum=1)
        validation.integer("num_workers", self.num_workers, minimum=1)

    @property
    def selectors(self) -> tuple[str, ...]:
        """Names of the Selectors' hosts, which are the Selectors' addresses too."""
        return tuple(f"{_SELECTOR}-{i}" for i in range(self.num_selectors))

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers."""
        return tuple(f"{_WORKER}-{i}" for i in range(self.num_workers))

    @property
    def permanent(self) -> tuple[str, ...]:
        """Names of the hosts that are always there: all but the Coordinator's."""
        return (*self.selectors, *self.workers)

    def host_of(self, address: str) -> str:
        """The host of an actor, or of a device's connection.

        Args:
          address: Its address.

        Returns:
          The host's name; empty if the address is not of one host, like that of the StoreActors.
        """
        found = _OF_COORDINATOR.search(address)
        if found is None:
            selector = _OF_SELECTOR.match(address)
            return "" if selector is None else selector[1]
        if found["attempt"] is None:
            return COORDINATOR
        number = int(found["attempt"])
        if found["group"] is not None:
            number += 1 + int(found["group"])
        return f"{_WORKER}-{number % self.num_workers}"


def is_selector(host: str) -> bool:
    """Whether a host is that of a Selector."""
    return host.startswith(f"{_SELECTOR}-")


def is_worker(host: str) -> bool:
    """Whether a host is one of the workers."""
    return host.startswith(f"{_WORKER}-")


def device_prefix(host: str, life: str) -> str:
    """What addresses of the devices of a Selector's host begin with.

    Args:
      host: The host.
      life: Names its process; another one after a restart.

    Returns:
      The prefix.
    """
    return f"{host}/{life}/device/"


def life_of_device(address: str) -> str:
    """Which process of its host a device was connected to.

    Args:
      address: The device's, which begins with a `device_prefix`.
    """
    return address.split("/", 2)[1]
