"""The host of the Coordinators, of which each population has one."""

from __future__ import annotations

import asyncio
from typing import Any

from typing_extensions import override

from tff_dpftrl.runtime.actors import events, roles
from tff_dpftrl.runtime.cluster import host as host_lib
from tff_dpftrl.runtime.cluster import mail as mail_lib

_IDLE_SECONDS = 60.0  # Time after which a host without a Coordinator ends.


class CoordinatorHost(host_lib.Host):
    """Host of the Coordinators, which outlives them for a minute.

    A Coordinator stops if the lease of a former one has not expired. The next Coordinator then
    starts quickly, because the tasks are loaded.
    """

    @override
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._openings: dict[str, mail_lib.EventNotice] = {}  # By population.
        self._ending: asyncio.Task | None = None

    @override
    async def _begin(self, parts, attestation):
        await super()._begin(parts, attestation)
        asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._end_if_idle)

    @override
    def _begin_actor(self, begin: mail_lib.Begin) -> None:
        """Starts a Coordinator, unless one of its population runs here."""
        led = map(roles.population_of, self._engine.coordinators)
        if roles.population_of(begin.address) not in led:
            super()._begin_actor(begin)

    @override
    def spawn(self, parent: str, address: str, role: Any) -> bool:
        """Starts an actor on another host; a Coordinator has one attempt at a time."""
        self._forget_children(parent)
        return super().spawn(parent, address, role)

    @override
    def _on_event(self, now: float, event: Any, population: str) -> mail_lib.EventNotice:
        notice = super()._on_event(now, event, population)
        if isinstance(event, events.SelectionOpened):
            self._openings[population] = notice
        return notice

    @override
    def _note_process(self, host: str, life: str) -> None:
        """Notes a process, and sends the openings of selection to a new Selectors' host."""
        known = self._lives.get(host)
        super()._note_process(host, life)
        is_new = self._lives.get(host) != known  # False while this host stops.
        if is_new and host in self._placement.selectors:
            for opening in self._openings.values():
                self._outbox.post(host, opening)

    @override
    def _actor_gone(self, address: str) -> None:
        super()._actor_gone(address)
        asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if not self._engine.coordinators and not self._is_stopping:
            self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        await self.stop()
        await self._transport.leave()
