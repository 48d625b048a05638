"""Builds actors from roles; what an engine keeps where actors may run."""

from __future__ import annotations

import random
from typing import Any

from tff_dpftrl.runtime.actors import (
    actor,
    aggregator,
    coordinator,
    keeper,
    master_aggregator,
    population,
    roles,
    secure_aggregator,
    selector,
)
from tff_dpftrl.runtime.store import interface


class Cast:
    """All that actors of a population are built with, besides their roles.

    Attributes:
      served: The population.
      selectors: Addresses of its Selectors.
      keeper_address: Address of the keeper of its store.
      pace: When devices are to check in again.
    """

    def __init__(
        self,
        served: population.Population,
        *,
        selectors: tuple[str, ...],
        pace: selector.Pace,
        keeper_address: str = "keeper",
        verify_identity: secure_aggregator.VerifyIdentity | None = None,
    ):
        """Names the parts.

        Args:
          served: The population.
          selectors: Addresses of its Selectors; one for each process that devices
            connect to.
          pace: When devices are to check in again.
          keeper_address: Address of the keeper of its store.
          verify_identity: Who is a genuine device in a secure sum that does not trust the
            server; anybody whom the other devices believe if None.
        """
        self._verify_identity = verify_identity
        self.served = served
        self.selectors = selectors
        self.keeper_address = keeper_address
        self.pace = pace

    def selector(self, address: str, randomness: random.Random) -> selector.Selector:
        """A Selector, to begin with, and again after its process has died.

        Args:
          address: One of `selectors`.
          randomness: Seeded by the operating system, except in tests.

        Returns:
          The actor, not started.
        """
        return selector.Selector(address, self.served, randomness, self.pace)

    def keeper(self, store: interface.Store) -> keeper.Keeper:
        """The keeper of a store.

        Args:
          store: Where the population's tasks are.

        Returns:
          The actor, not started.
        """
        return keeper.Keeper(self.keeper_address, self.served, store)

    def build(self, address: str, role: Any, randomness: random.Random) -> actor.Actor:
        """The actor of a `Spawn`.

        Args:
          address: Its address.
          role: Its role.
          randomness: Seeded by the operating system, except in tests.

        Returns:
          The actor, not started.

        Raises:
          TypeError: If there is no such role.
        """
        match role:
            case roles.CoordinatorRole():
                return coordinator.Coordinator(
                    address, self.served, self.selectors, self.keeper_address, randomness
                )
            case roles.MasterAggregatorRole():
                task = self.served.task(role.commit.task)
                return master_aggregator.MasterAggregator(address, self.keeper_address, task, role)
            case roles.AggregatorRole():
                task = self.served.task(role.task)
                if task.secure_sum is None:
                    return aggregator.Aggregator(address, task, role, randomness, self.pace)
                return secure_aggregator.SecureAggregator(
                    address, task, role, randomness, self.pace, self._verify_identity
                )
        raise TypeError(f"There is no actor for the role {role!r}.")
