"""Worker hosts: they run Master Aggregators, merging Aggregators and Aggregators."""

from __future__ import annotations

import asyncio
from typing import Any

from typing_extensions import override

from tff_dpftrl.runtime.actors import messages, roles
from tff_dpftrl.runtime.cluster import host as host_lib
from tff_dpftrl.runtime.cluster import mail as mail_lib
from tff_dpftrl.runtime.cluster import placement as placement_lib

_AHEAD_SECONDS = 5.0  # Time for which devices wait for an actor that is being started.


class WorkerHost(host_lib.Host):
    """Host of Master Aggregators, merging Aggregators and Aggregators."""

    @override
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._has_secure_sums = False
        self._devices: dict[str, tuple[str, ...]] = {}  # By Aggregator of this host.
        self._ahead: dict[str, list[messages.DevicesForwarded]] = {}

    @override
    def _load(self):
        parts = super()._load()
        for one in parts.populations:
            for task in one.population.tasks:
                task.summation.zero()  # Imports TensorFlow, for which its devices would wait.
        return parts

    @override
    async def _begin(self, parts, attestation):
        self._has_secure_sums = any(
            task.secure_sum for one in parts.populations for task in one.population.tasks
        )
        await super()._begin(parts, attestation)

    @override
    def _deliver(self, to: str, message: Any) -> None:
        if type(message) is messages.DevicesForwarded and not self._engine.has(to):
            # The devices may arrive before the request to start their actor.
            self._ahead.setdefault(to, []).append(message)
            asyncio.get_running_loop().call_later(_AHEAD_SECONDS, self._give_up, to)
        else:
            super()._deliver(to, message)

    def _give_up(self, address: str) -> None:
        for message in self._ahead.pop(address, ()):
            self._engine.undeliverable(message)

    @override
    def _begin_actor(self, begin: mail_lib.Begin) -> None:
        self._note_devices(begin.address, begin.role)
        super()._begin_actor(begin)
        for message in self._ahead.pop(begin.address, ()):
            self._engine.deliver(begin.address, message)

    @override
    def spawn(self, parent: str, address: str, role: Any) -> bool:
        is_elsewhere = super().spawn(parent, address, role)
        if not is_elsewhere:
            self._note_devices(address, role)
        return is_elsewhere

    def _note_devices(self, address: str, role: Any) -> None:
        """Notes the devices, and noise parties, whose loss an Aggregator must be notified of."""
        if not isinstance(role, roles.AggregatorRole):
            return
        connections = self._devices[address] = (*role.devices, *role.parties)
        lives = {
            (self._placement.host_of(device), placement_lib.life_of_device(device))
            for device in connections
        }
        for host, life in lives:
            if life < self._lives.get(host, ""):  # That process has ended in the meantime.
                asyncio.get_running_loop().call_soon(self._lose_devices, host, life)
            else:
                self._note_process(host, life)

    @override
    def _actor_gone(self, address: str) -> None:
        for host, children in self._children.items():
            for child, (parent, _) in children.items():
                if parent == address:  # Nobody will ask it for its sum.
                    self._outbox.post(host, mail_lib.End(child))
        super()._actor_gone(address)
        if self._devices.pop(address, None) is not None and self._has_secure_sums:
            for selector in self._placement.selectors:
                self._outbox.post(selector, mail_lib.Ended(address))

    @override
    def _do_without(self, host: str, life: str) -> None:
        if placement_lib.is_worker(host):
            self._engine.end_children(lambda parent: self._placement.host_of(parent) == host)
        self._lose_devices(host, life)

    def _lose_devices(self, host: str, life: str) -> None:
        prefix = placement_lib.device_prefix(host, life)
        for address, devices in list(self._devices.items()):
            for device in devices:
                if device.startswith(prefix):
                    self._engine.deliver(address, messages.DeviceGone(device))
