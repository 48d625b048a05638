"""Builds actors from roles, wherever an engine runs them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tff_dpftrl.runtime.actors import (
    actor,
    aggregator,
    coordinator,
    master_aggregator,
    merging_aggregator,
    population,
    roles,
    secure_aggregator,
    selector,
    store_actor,
)
from tff_dpftrl.runtime.store import interface


class ActorFactory:
    """Builder of a population's actors: it holds all that they need besides their roles."""

    def __init__(
        self,
        served: population.Population,
        *,
        selectors: tuple[str, ...],
        pace: selector.Pace,
        store_address: str = "store",
        verify_identity: secure_aggregator.VerifyIdentity | None = None,
        yields: Callable[[], bool] = lambda: False,
    ):
        """Stores the parts.

        There is one Selector for each process that devices connect to. `pace` draws when a device
        is to check in again. `verify_identity` verifies devices' identity keys in a secure sum that
        does not trust the server; if None, any key passes that the other devices accept. The
        StoreActor grants and renews no lease while `yields` returns True: the population is left to
        another server.
        """
        self._yields = yields
        self._verify_identity = verify_identity
        self.served = served
        self.selectors = selectors
        self.store_address = store_address
        self.pace = pace

    def selector(self, address: str, randomness: random.Random) -> actor.Actor:
        """Builds a Selector, also to replace one whose process has died.

        The operating system seeds `randomness`, except in tests.
        """
        return selector.Selector(address, self.served, randomness, self.pace)

    def store_actor(self, store: interface.Store) -> actor.Actor:
        """Builds the actor in front of a store."""
        return store_actor.StoreActor(self.store_address, self.served, store, self._yields)

    def build(self, address: str, role: Any, randomness: random.Random) -> actor.Actor:
        """Builds, but does not start, the actor of a `Spawn`; `role` is one of `roles`."""
        match role:
            case roles.CoordinatorRole():
                return coordinator.Coordinator(
                    address, self.served, self.selectors, self.store_address, randomness
                )
            case roles.MasterAggregatorRole():
                task = self.served.task(role.commit.task)
                return master_aggregator.MasterAggregator(address, self.store_address, task, role)
            case roles.MergingAggregatorRole():
                return merging_aggregator.MergingAggregator(
                    address, self.served.task(role.task), role
                )
            case roles.AggregatorRole():
                task = self.served.task(role.task)
                if task.secure_sum is None:
                    return aggregator.Aggregator(address, task, role, randomness, self.pace)
                return secure_aggregator.SecureAggregator(
                    address, task, role, randomness, self.pace, self._verify_identity
                )
        raise TypeError(f"There is no actor for the role {role!r}.")
