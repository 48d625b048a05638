"""A server on many machines: one object to start, observe and stop it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.execution import ray_sessions
from tff_dpftrl.runtime.cluster import observed, ray_hosts
from tff_dpftrl.runtime.cluster import placement as placement_lib
from tff_dpftrl.runtime.cluster.deployment import ClusterDeployment
from tff_dpftrl.runtime.server import binding
from tff_dpftrl.runtime.store import interface, sql

ray = ray_sessions.ray

_OBJECT_STORE_BYTES = 1 << 28
_ANSWER_SECONDS = 5.0
_NODE_SECONDS = 60.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.2


class RayCluster:
    """The hosts of a server, on a Ray cluster or on this machine.

    Hosts are detached: they go on when this program ends, and another one finds them. The
    exception is a Ray cluster that this program started, which ends with it.
    """

    def __init__(self, deployment: ClusterDeployment, *, ray_address: str | None = None):
        """Prepares the hosts; nothing runs before `start`.

        `ray_address` is "host:port", or "auto" for a cluster with a node on this machine. If it is
        None, Ray is started here, on loopback, unless this program is already connected to a
        cluster.
        """
        self._deployment = deployment
        self._ray_address = ray_address
        self._temp_dir: str | None = None
        self._is_connected = False  # Whether this object has connected to Ray.
        self._is_new = False  # Whether this object has begun to start new hosts.
        self._gives_up = threading.Event()
        self._handles: dict[str, Any] = {}
        self._addresses: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """HOST:PORT for devices, one for each Selector, as of the last call of `observed`.

        A Selector that was restarted, for instance on another node, may have another one.
        """
        return self._addresses

    async def start(self, *, seconds: float = 120.0) -> None:
        """Starts the missing hosts, and waits until Coordinators lead.

        The timeout includes waiting for the lease of another server. Raises ServerError if nodes
        lack files, hosts of another deployment run, or no Coordinator leads in time.
        """
        starting = asyncio.ensure_future(asyncio.to_thread(self._start, seconds))
        try:
            await asyncio.shield(starting)
        except BaseException:
            self._gives_up.set()
            await asyncio.wait([starting])
            await asyncio.to_thread(self._stop if self._is_new else self._disconnect)
            raise

    def _start(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._connect()
        deployment = self._deployment
        self._check_nodes()
        with sql.SqlStore(deployment.store) as store:
            for population in deployment.populations:
                if not store.tasks(population):
                    raise binding.ServerError(
                        f"The store has no task of the population {population!r}: add them first."
                    )
            is_new = not self._has_hosts()
            if is_new:
                for population in deployment.populations:
                    self._wait_for_lease(store, population, until)
        if self._gives_up.is_set():
            return
        self._is_new = is_new
        for host in deployment.placement.permanent:
            self._handles[host] = ray_hosts.create(deployment, host)
        self._wait(until)

    def _wait_for_lease(self, store: interface.Store, name: str, until: float) -> None:
        """Waits until the lease of a crashed server expires; refuses one that is renewed."""
        first = lease = store.lease(name)
        while lease is not None and interface.is_held(lease, time.time()):
            if lease != first or time.monotonic() > until:
                raise binding.another_leads(name)
            if self._gives_up.wait(_POLL_SECONDS):
                return
            lease = store.lease(name)

    def _connect(self) -> None:
        if ray.is_initialized():
            if self._ray_address is not None:
                raise validation.UsageError(
                    f"ray_address must be None, got {self._ray_address!r}: the program is "
                    "connected to Ray already, call ray.shutdown() first."
                )
            return
        if self._ray_address is not None:
            ray_sessions.join(self._ray_address)
        else:
            self._temp_dir = tempfile.mkdtemp(prefix="tff_dpftrl-ray-", dir="/tmp")
            ray_sessions.start(2, _OBJECT_STORE_BYTES, self._temp_dir)
        self._is_connected = True

    def _disconnect(self) -> None:
        self._handles.clear()
        if self._is_connected:
            ray.shutdown()
            self._is_connected = False
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            self._temp_dir = None

    def _check_nodes(self) -> None:
        views = list(ray_hosts.look_at_nodes(self._deployment, _NODE_SECONDS))
        for view in views:
            if view.missing:
                raise binding.ServerError(
                    f"The node {view.name} lacks {', '.join(view.missing)}: every node needs the "
                    "same files at the same paths."
                )
        if len({view.store for view in views}) > 1:
            raise binding.ServerError(
                f"store={self._deployment.store!r} is a folder, and the nodes are of several "
                "machines: name a database that all reach, like postgresql://user@host/name."
            )

    def _has_hosts(self) -> bool:
        """Returns whether hosts run already; raises if they are of another deployment."""
        hosts = (*self._deployment.placement.permanent, placement_lib.COORDINATOR)
        handles = ray_hosts.find_all(self._deployment.name, hosts)
        if not handles:
            return False
        statuses = ray_hosts.ask_all(handles, lambda handle: handle.status.remote(), _NODE_SECONDS)
        fingerprint = self._deployment.fingerprint()
        others = sorted(host for host, one in statuses.items() if one.fingerprint != fingerprint)
        if others:
            raise binding.ServerError(
                f"Hosts of the population {self._deployment.name!r} run already with other "
                f"settings ({', '.join(others)}): stop that server (tff-dpftrl serve --stop), or "
                "start this one as it was started."
            )
        return True

    def _wait(self, until: float) -> None:
        """Waits until all hosts serve, and all Selectors follow a Coordinator."""
        deployment = self._deployment
        while True:
            statuses = self._statuses()
            for host, one in statuses.items():
                if one.failure:
                    raise binding.ServerError(f"{host} cannot start: {one.failure}")
                if one.store_failure:
                    raise binding.ServerError(one.store_failure)
            read = [one.tasks for one in statuses.values() if one.tasks]
            if any(tasks != read[0] for tasks in read):
                raise binding.ServerError(
                    "The nodes have different tasks at the same paths: copy them from one node to "
                    "all others, and stop what runs of this server (tff-dpftrl serve --stop)."
                )
            selectors = [statuses.get(host) for host in deployment.placement.selectors]
            if all(
                host in statuses and statuses[host].is_serving
                for host in deployment.placement.permanent
            ) and all(one.leader for one in selectors):
                return
            if time.monotonic() > until:
                raise self._too_late(statuses)
            if self._gives_up.wait(_POLL_SECONDS):
                return

    def _too_late(self, statuses: dict[str, Any]) -> binding.ServerError:
        name = self._deployment.name
        missing = [
            host
            for host in self._deployment.placement.permanent
            if host not in statuses or not statuses[host].is_serving
        ]
        if missing:
            return binding.ServerError(
                f"The hosts {missing} of the population {name!r} have not started in time: check "
                "whether the nodes have enough memory for them."
            )
        return binding.another_leads(name)

    def _statuses(self) -> dict[str, Any]:
        statuses = ray_hosts.ask_all(
            self._handles, lambda handle: handle.status.remote(), _ANSWER_SECONDS
        )
        known = self._addresses or ("",) * len(self._deployment.addresses)
        self._addresses = tuple(
            statuses[host].address if host in statuses else before
            for host, before in zip(self._deployment.placement.selectors, known, strict=True)
        )
        return statuses

    async def observed(self) -> dict[str, list[observed.Recording]]:
        """Takes what the Selectors' hosts have recorded, by population, for `observed.Reader`s.

        Hosts that do not answer within seconds are left out; the next call gets their records.
        """
        return await asyncio.to_thread(self._observed)

    def _observed(self) -> dict[str, list[observed.Recording]]:
        self._statuses()
        selectors = {host: self._handles[host] for host in self._deployment.placement.selectors}
        taken = ray_hosts.ask_all(
            selectors, lambda handle: handle.take_observed.remote(), _ANSWER_SECONDS
        )
        return {
            name: [taken[host][name] for host in sorted(taken)]
            for name in self._deployment.populations
        }

    def processes(self) -> dict[str, ray_hosts.Place]:
        """Returns node and process id of each running host, whether or not it answers."""
        return ray_hosts.places(self._deployment.name)

    async def stop(self) -> tuple[str, ...]:
        """Ends all hosts, those of other programs and deployments too; returns their names.

        The lease is released, and a round that is not committed is abandoned.
        """
        return await asyncio.to_thread(self._stop)

    def _stop(self) -> tuple[str, ...]:
        server = self._deployment.name
        if not ray.is_initialized():
            self._connect()
        try:
            running = ray_hosts.names(server)
            # Selectors first, or they would start another Coordinator.
            for is_one in (
                placement_lib.is_selector,
                lambda host: host == placement_lib.COORDINATOR,
                placement_lib.is_worker,
            ):
                handles = ray_hosts.find_all(server, filter(is_one, running))
                if not handles:
                    continue
                ray_hosts.ask_all(handles, lambda handle: handle.stop.remote(), _STOP_SECONDS)
                for handle in handles.values():
                    ray_hosts.kill(handle)
            ray_hosts.forget_ports(server, filter(placement_lib.is_selector, running))
            return running
        finally:
            self._disconnect()

    def leave(self) -> None:
        """Disconnects from the cluster; the hosts go on, unless this program started Ray."""
        self._disconnect()
