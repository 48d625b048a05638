"""Selector hosts, to which devices connect."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from typing import Any

import grpc
from typing_extensions import override

from tff_dpftrl.runtime.actors import events, factory, messages, roles
from tff_dpftrl.runtime.cluster import host as host_lib
from tff_dpftrl.runtime.cluster import mail as mail_lib
from tff_dpftrl.runtime.cluster import placement as placement_lib
from tff_dpftrl.runtime.cluster.deployment import Parts
from tff_dpftrl.runtime.server import binding
from tff_dpftrl.runtime.server import engine as engine_lib
from tff_dpftrl.runtime.server import service as service_lib

_KEPT_ATTEMPTS = 4


class SelectorHost(host_lib.Host):
    """Host of a Selector for each population, and of the gRPC service of their devices."""

    _keeps_store = False

    @override
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._service: service_lib.Service | None = None
        self._grpc: grpc.aio.Server | None = None
        self._selectors: dict[str, str] = {}  # Addresses of this host's, by population.
        self._address = ""
        self._leaders: dict[str, str] = {}  # By population.
        self._store_failure = ""
        self._seeking: dict[str, asyncio.Task] = {}  # By population.
        self._forwarded: dict[str, tuple[str, ...]] = {}  # Devices by attempt, the last few.

    @override
    def _made_engine(self, actors: list[factory.ActorFactory]) -> engine_lib.Engine:
        place = self._placement.selectors.index(self.name)
        self._selectors = {one.served.name: one.selectors[place] for one in actors}
        return engine_lib.Engine(
            actors,
            None,
            on_event=self._on_event,
            clock=self._clock,
            permanent=list(self._selectors.values()),
            on_selector_lost=lambda address: self._service.selector_lost(address),
            on_actor_gone=self._actor_gone,
            remote=self,
        )

    @override
    async def _begin(self, parts, attestation):
        self._service = service_lib.Service(
            [
                dataclasses.replace(one, observer=self._recorders[one.name])
                for one in parts.populations
            ],
            self._engine,
            selector_address=self.name,
            attestation=attestation,
            server_names=parts.server_names or self._identity.names,
            limits=parts.limits,
            clock=self._clock,
            randomness=random.SystemRandom(),
            device_prefix=placement_lib.device_prefix(self.name, self.life),
        )
        self._grpc = self._bound(parts)
        self._engine.start()
        await self._grpc.start()

    def _bound(self, parts: Parts) -> grpc.aio.Server:
        """Binds the configured address; after a restart the same port, if it is free."""
        wanted = self._deployment.addresses[self._placement.selectors.index(self.name)]
        host, _, port = wanted.rpartition(":")
        former = self._transport.remembered(self.name)
        ports = dict.fromkeys([port if port != "0" else former or port])
        if former:  # Another program may have taken it, or this may be another node.
            ports["0"] = None
        for number in ports:
            try:
                bound, port = binding.bind(
                    self._service, self._identity, f"{host}:{number}", parts.limits
                )
            except binding.ServerError:
                if number == list(ports)[-1]:
                    raise
            else:
                break
        self._transport.remember(self.name, str(port))
        is_any = host in ("0.0.0.0", "[::]")
        self._address = f"{self._transport.node_address() if is_any else host}:{port}"
        return bound

    @override
    async def stop(self) -> None:
        """Sends waiting devices away, ends all actors, and closes the port."""
        if self._service is not None:
            self._service.stop()
        await super().stop()
        if self._grpc is not None:
            await self._grpc.stop(1.0)

    @override
    def status(self) -> host_lib.HostStatus:
        return dataclasses.replace(
            super().status(),
            address=self._address,
            leader=",".join(self._leaders.values())
            if len(self._leaders) == len(self._recorders)
            else "",
            store_failure=self._store_failure,
        )

    @override
    def send(self, to: str, message: Any) -> bool:
        if type(message) is messages.DevicesForwarded:
            self._forwarded[to] = message.devices
            if len(self._forwarded) > _KEPT_ATTEMPTS:
                del self._forwarded[next(iter(self._forwarded))]
        return super().send(to, message)

    @override
    def spawn(self, parent: str, address: str, role: Any) -> bool:
        """Starts an actor on another host; the Coordinator's host is started first if needed."""
        if not isinstance(role, roles.CoordinatorRole):
            return super().spawn(parent, address, role)
        self._forget_children(parent)  # The former Coordinator.
        population = roles.population_of(address)
        seeking = self._seeking.get(population)
        if seeking is None or seeking.done():
            begin = mail_lib.Begin(address, role, parent)
            self._seeking[population] = self._job(self._seek_leader(begin))
        return True

    async def _seek_leader(self, begin: mail_lib.Begin) -> None:
        with contextlib.suppress(mail_lib.Unreachable):  # The Selector will retry.
            await self._transport.start_coordinator()
            self._outbox.post(placement_lib.COORDINATOR, begin)

    @override
    def _deliver(self, to: str, message: Any) -> None:
        if type(message) is messages.SelectDevices:
            self._leaders[roles.population_of(message.coordinator)] = message.coordinator
            self._store_failure = ""
        super()._deliver(to, message)

    @override
    def _on_notice(self, mail: mail_lib.Ended | mail_lib.EventNotice) -> None:
        if isinstance(mail, mail_lib.Ended):
            self._service.actor_gone(mail.address)
            return
        event = mail.named.event
        if isinstance(event, events.SelectionOpened):
            self._service.opened(mail.population, event)
        elif isinstance(event, events.StoreFailed):
            self._store_failure = event.reason
        self._recorders[mail.population].relay(mail.at, mail.named)

    @override
    def _do_without(self, host: str, life: str) -> None:
        if host == placement_lib.COORDINATOR:
            for population, leader in self._leaders.items():
                self._engine.deliver(self._selectors[population], messages.Lost(leader))
        elif placement_lib.is_worker(host):
            self._service.actors_lost(lambda actor: self._placement.host_of(actor) == host)
            for attempt, devices in self._forwarded.items():
                if self._placement.host_of(attempt) == host:
                    self._send_away(devices)
