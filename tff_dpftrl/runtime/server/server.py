"""The server of some populations on one machine: one call starts it, one stops it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from tff_dpftrl.runtime import addresses, tls
from tff_dpftrl.runtime.actors import events, factory, selector
from tff_dpftrl.runtime.actors import population as population_lib
from tff_dpftrl.runtime.protocol import attestation as attestation_lib
from tff_dpftrl.runtime.server import attesting, binding, served_population, served_task, service
from tff_dpftrl.runtime.server import engine as engine_lib
from tff_dpftrl.runtime.server import limits as limits_lib
from tff_dpftrl.runtime.server import observer as observer_lib
from tff_dpftrl.runtime.store import holders, interface

_logger = logging.getLogger(__name__)

_SELECTOR, _STORE = "selector", "store"
_LOOK_SECONDS = 0.5  # Seconds between two looks at another server's lease.

ServerError = binding.ServerError
"""Error of a server that cannot start; the message is one line and says what to do."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Address of a server, its certificate, and the devices and traffic that it lets in."""

    certificate: str | os.PathLike[str]  # File of the server's certificate in PEM.
    key: str | os.PathLike[str]  # File of the certificate's private key in PEM.
    _: dataclasses.KW_ONLY
    attestation: attestation_lib.Attestation | None  # None: every connection is a device.
    limits: limits_lib.Limits = limits_lib.Limits()  # Limits on what devices may use.
    address: str = addresses.DEFAULT_ADDRESS  # Host and port to listen on; port 0: any free one.
    # Names under which devices may know the server, for their tokens; those in the certificate if
    # empty.
    names: Sequence[str] = ()


class Server:
    """Actors, store and gRPC service of one population or several, on the running event loop.

    A committed round is never lost: whatever ends the server, the next one goes on from there. Two
    servers never lead one population.
    """

    def __init__(
        self,
        populations: Sequence[served_population.ServedPopulation],
        store: interface.Store,
        *,
        endpoint: Endpoint,
        clock: Callable[[], float] = time.time,
        randomness: random.Random | None = None,
        progress: Callable[[str], None] = _logger.warning,
    ):
        """Sets a server up; nothing runs, and nothing is bound, before `start`.

        The store must have the populations' tasks; `stop` leaves it open. The clock returns the
        seconds since 1970. `randomness`, by default the operating system's, decides choices among
        devices. `progress` gets the lines of `start`, while it waits for a lease.
        """
        served_population.check(populations)
        self._populations = tuple(populations)
        self._observers = {one.name: one.observer for one in populations}
        self._store = store
        self._identity = tls.load(endpoint.certificate, endpoint.key)
        self._attestation = (
            None
            if endpoint.attestation is None
            else attesting.LockedAttestation(endpoint.attestation)
        )
        self._wanted_address = endpoint.address
        self._names = tuple(endpoint.names) or self._identity.names
        self._limits = endpoint.limits
        self._clock = clock
        self._random = random.SystemRandom() if randomness is None else randomness
        self._progress = progress
        self._address = ""
        self._grpc: grpc.aio.Server | None = None
        self._service: service.Service | None = None
        self._engine: engine_lib.Engine | None = None
        self._first: dict[str, asyncio.Future] = {}  # First event of each population's leader.

    @classmethod
    def of(
        cls,
        population: population_lib.Population,
        tasks: Mapping[str, served_task.ServedTask],
        store: interface.Store,
        *,
        pace: selector.Pace,
        observer: observer_lib.Observer | None = None,
        **options: Any,
    ) -> Server:
        """Sets up a server of one population; `options` are further arguments of `Server`."""
        observer = observer_lib.Observer() if observer is None else observer
        served = served_population.ServedPopulation(population, tasks, pace, observer)
        return cls([served], store, **options)

    @property
    def address(self) -> str:
        """Host and port that devices connect to; empty before `start`."""
        return self._address

    async def start(self) -> None:
        """Listens, acquires the lease of each population, and serves.

        If another server holds a lease, it waits until the lease ends, unless that server's process
        is known to have ended. If the lease is renewed in the meantime, its holder lives, and this
        raises `ServerError`. It raises the same if the store cannot be used or lacks tasks, or the
        address cannot be bound.
        """
        populations = self._populations
        actors = [
            self._actor_factory(
                one.population,
                selectors=(served_population.address(_SELECTOR, one.name, populations),),
                pace=one.pace,
                store_address=served_population.address(_STORE, one.name, populations),
                verify_identity=attesting.verifier(self._attestation, one.name),
                yields=functools.partial(self._yields, one.name),
            )
            for one in populations
        ]
        loop = asyncio.get_running_loop()
        self._first = {one.name: loop.create_future() for one in populations}
        engine = self._engine = engine_lib.Engine(
            actors,
            self._store,
            on_event=self._on_event,
            clock=self._clock,
            randomness=self._random,
            on_selector_lost=lambda address: devices.selector_lost(address),
            on_actor_gone=lambda address: devices.actor_gone(address),
        )
        devices = self._service = service.Service(
            populations,
            engine,
            selector_address=_SELECTOR,
            attestation=self._attestation,
            server_names=self._names,
            limits=self._limits,
            clock=self._clock,
            randomness=self._random,
        )
        try:
            self._grpc, port = binding.bind(
                devices, self._identity, self._wanted_address, self._limits
            )
            for one in populations:
                await self._check_store(engine, one)
                await self._wait_for_lease(engine, one.population)
            engine.start()
            for one in populations:
                await self._lead(engine, one.population)
            await self._grpc.start()
        except BaseException:
            await self.stop()
            raise
        self._address = f"{self._wanted_address.rpartition(':')[0]}:{port}"

    def _actor_factory(self, *args: Any, **kwargs: Any) -> factory.ActorFactory:
        """Makes the factory of a population's actors."""
        return factory.ActorFactory(*args, **kwargs)

    async def stop(self) -> None:
        """Sends devices away, releases the leases, and closes what `start` opened.

        A round that is not committed is abandoned; nothing of it was released.
        """
        if self._service is not None:
            self._service.stop()
        if self._engine is not None:
            await self._engine.stop()
        if self._grpc is not None:
            await self._grpc.stop(1.0)
        self._service = self._engine = self._grpc = None

    def _on_event(self, now: float, event: Any, population: str) -> None:
        first = self._first[population]
        if not first.done() and isinstance(event, (events.Leading, events.StoreFailed)):
            first.set_result(event)
        if isinstance(event, events.SelectionOpened) and self._service is not None:
            self._service.opened(population, event)
        self._observers[population].on_event(now, event)

    async def _check_store(
        self, engine: engine_lib.Engine, served: served_population.ServedPopulation
    ) -> None:
        try:
            known = await engine.in_store_thread(lambda: self._store.tasks(served.name))
        except interface.StoreError as error:
            raise ServerError(str(error)) from None
        missing = sorted(set(served.tasks) - set(known))
        if missing:
            raise ServerError(
                f"The store has no tasks {missing} of the population {served.name!r}: add them "
                "first."
            )

    async def _foreign_lease(
        self, engine: engine_lib.Engine, population: str
    ) -> interface.Lease | None:
        """Returns the lease of a population that another server holds now, or None."""
        try:
            return await engine.in_store_thread(lambda: self._read_foreign(engine, population))
        except interface.StoreError as error:
            raise ServerError(str(error)) from None

    def _read_foreign(self, engine: engine_lib.Engine, population: str) -> interface.Lease | None:
        lease = self._store.lease(population)
        if lease is None or engine.has_led(lease.owner) or holders.is_gone(lease.owner):
            return None
        return lease if interface.is_held(lease, self._clock()) else None

    def _yields(self, population: str) -> bool:
        """Returns whether another server leads a population whose name is before this one's.

        Otherwise two servers, one of which was stopped for longer than its leases, might each lead
        one population for ever. Devices find only one of the two.
        """
        engine = self._engine
        return engine is not None and any(
            self._read_foreign(engine, one.name) is not None
            for one in self._populations
            if one.name < population
        )

    async def _wait_for_lease(
        self, engine: engine_lib.Engine, population: population_lib.Population
    ) -> None:
        first_seen = None
        while True:
            lease = await self._foreign_lease(engine, population.name)
            if lease is None:
                return
            if first_seen is None:
                first_seen = lease
                self._progress(
                    f"The population {population.name!r} is led by another server, or one "
                    f"that has crashed: waiting for its lease to end, for up to "
                    f"{lease.expires_at - self._clock():.0f} seconds."
                )
            elif lease != first_seen:
                raise binding.another_leads(population.name)
            await asyncio.sleep(min(_LOOK_SECONDS, population.heartbeat_seconds))

    async def _lead(self, engine: engine_lib.Engine, population: population_lib.Population) -> None:
        """Waits until a Coordinator of this server leads a population, which is the first event."""
        first = self._first[population.name]
        deadline = asyncio.get_running_loop().time() + 2 * population.lease_seconds
        while not first.done():
            await asyncio.wait([first], timeout=_LOOK_SECONDS)
            if not first.done() and await self._foreign_lease(engine, population.name) is not None:
                raise binding.another_leads(population.name)  # The other server was faster.
            if asyncio.get_running_loop().time() > deadline:
                raise ServerError("No Coordinator has taken the lease: the store does not answer.")
        if isinstance(first.result(), events.StoreFailed):
            raise ServerError(first.result().reason)
