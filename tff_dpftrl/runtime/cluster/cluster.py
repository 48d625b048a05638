"""A server on many machines: one object to start it, to look at it, and to stop it."""

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
from tff_dpftrl.runtime.cluster.deployment import Deployment
from tff_dpftrl.runtime.server import binding
from tff_dpftrl.runtime.store import interface, sql

ray = ray_sessions.ray

_OBJECT_STORE_BYTES = 1 << 28
_ANSWER_SECONDS = 5.0
_NODE_SECONDS = 60.0
_STOP_SECONDS = 30.0
_LOOK_SECONDS = 0.2


class RayCluster:
    """The hosts of a population, on a cluster of Ray or on this machine.

    Hosts are detached: they go on when this program ends, and another one finds them. Not
    those of a Ray that was started here, which ends with this program.
    """

    def __init__(self, deployment: Deployment, *, ray_address: str | None = None):
        """Says what is to run where; nothing does before `start`.

        Args:
          deployment: What runs.
          ray_address: A cluster to join, "host:port" or "auto" for one that has a node on this
            machine; if None, Ray is started here, on loopback, unless this program is
            connected to one already.
        """
        self._deployment = deployment
        self._ray_address = ray_address
        self._temp_dir: str | None = None
        self._is_connected = False  # By this object.
        self._is_new = False  # Whether it has begun to start hosts where there were none.
        self._gives_up = threading.Event()
        self._handles: dict[str, Any] = {}
        self._addresses: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Hosts and ports that devices connect to, in the order of the deployment's.

        They were looked at when `observed` was last called; a Selector that was started anew,
        on another node for instance, may have another one.
        """
        return self._addresses

    async def start(self, *, seconds: float = 120.0) -> None:
        """Starts the hosts that do not run already, and waits until somebody leads.

        Args:
          seconds: How long that may take; leases of others are waited for, too.

        Raises:
          binding.ServerError: If the nodes lack files, hosts of another deployment run, a host
            cannot start, or nobody leads in time.
          ConnectionError: If there is no Ray cluster at the address.
          ValueError: If the address, or something of the deployment, cannot be used.
          OSError: If a file or the store cannot be used.
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
            if not store.tasks(deployment.population):
                raise binding.ServerError(
                    f"The store has no task of the population {deployment.population!r}: add them "
                    "first."
                )
            is_new = not self._found_own()
            if is_new:
                self._wait_for_lease(store, until)
        if self._gives_up.is_set():
            return
        self._is_new = is_new
        for host in deployment.placement.permanent:
            self._handles[host] = ray_hosts.create(deployment, host)
        self._wait(until)

    def _wait_for_lease(self, store: interface.Store, until: float) -> None:
        """Waits until the lease of a server that has crashed is over; refuses one that lives."""
        name = self._deployment.population
        found = lease = store.lease(name)
        while lease is not None and interface.is_held(lease, time.time()):
            if lease != found or time.monotonic() > until:
                raise binding.another_leads(self._deployment.population)
            if self._gives_up.wait(_LOOK_SECONDS):
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

    def _found_own(self) -> bool:
        """Whether hosts run already; refuses to go on with those of another deployment."""
        hosts = (*self._deployment.placement.permanent, placement_lib.COORDINATOR)
        found = ray_hosts.find_all(self._deployment.population, hosts)
        if not found:
            return False
        standings = ray_hosts.ask_all(found, lambda handle: handle.standing.remote(), _NODE_SECONDS)
        own = self._deployment.fingerprint()
        others = sorted(host for host, one in standings.items() if one.fingerprint != own)
        if others:
            raise binding.ServerError(
                f"Hosts of the population {self._deployment.population!r} run already with other "
                f"settings ({', '.join(others)}): stop that server (tff-dpftrl serve --stop), or "
                "start this one as it was started."
            )
        return True

    def _wait(self, until: float) -> None:
        """Waits until all hosts serve, and all Selectors have heard of a Coordinator."""
        deployment = self._deployment
        while True:
            standings = self._standings()
            for host, one in standings.items():
                if one.failure:
                    raise binding.ServerError(f"{host} cannot start: {one.failure}")
                if one.store_failure:
                    raise binding.ServerError(one.store_failure)
            read = [one.tasks for one in standings.values() if one.tasks]
            if any(tasks != read[0] for tasks in read):
                raise binding.ServerError(
                    "The nodes have different tasks at the same paths: copy them from one node to "
                    "all others, and stop what runs of this server (tff-dpftrl serve --stop)."
                )
            selectors = [standings.get(host) for host in deployment.placement.selectors]
            if all(
                host in standings and standings[host].is_serving
                for host in deployment.placement.permanent
            ) and all(one.leader for one in selectors):
                return
            if time.monotonic() > until:
                raise self._too_late(standings)
            if self._gives_up.wait(_LOOK_SECONDS):
                return

    def _too_late(self, standings: dict[str, Any]) -> binding.ServerError:
        name = self._deployment.population
        missing = [
            host
            for host in self._deployment.placement.permanent
            if host not in standings or not standings[host].is_serving
        ]
        if missing:
            return binding.ServerError(
                f"The hosts {missing} of the population {name!r} have not started in time: look "
                "whether the nodes have the memory for them."
            )
        return binding.another_leads(self._deployment.population)

    def _standings(self) -> dict[str, Any]:
        standings = ray_hosts.ask_all(
            self._handles, lambda handle: handle.standing.remote(), _ANSWER_SECONDS
        )
        known = self._addresses or ("",) * len(self._deployment.addresses)
        self._addresses = tuple(
            standings[host].address if host in standings else before
            for host, before in zip(self._deployment.placement.selectors, known, strict=True)
        )
        return standings

    async def observed(self) -> list[observed.Taken]:
        """What the Selectors' hosts have recorded since the last call, for an `observed.Reader`.

        Hosts that do not answer at once are left out; what they recorded comes with the next
        call, if they live.
        """
        return await asyncio.to_thread(self._observed)

    def _observed(self) -> list[observed.Taken]:
        self._standings()
        selectors = {host: self._handles[host] for host in self._deployment.placement.selectors}
        taken = ray_hosts.ask_all(
            selectors, lambda handle: handle.take_observed.remote(), _ANSWER_SECONDS
        )
        return [taken[host] for host in sorted(taken)]

    def processes(self) -> dict[str, ray_hosts.Place]:
        """Node and process id of each host that runs, whether or not it answers."""
        return ray_hosts.places(self._deployment.population)

    async def stop(self) -> tuple[str, ...]:
        """Ends all hosts; the lease is given back, and a round that is not committed abandoned.

        They are found if another program started them, with other settings even.

        Returns:
          The names of those that ran.

        Raises:
          ConnectionError: If there is no Ray cluster at the address.
        """
        return await asyncio.to_thread(self._stop)

    def _stop(self) -> tuple[str, ...]:
        population = self._deployment.population
        if not ray.is_initialized():
            self._connect()
        try:
            found = ray_hosts.names(population)
            # Selectors first, or they would start another Coordinator.
            for is_one in (
                placement_lib.is_selector,
                lambda host: host == placement_lib.COORDINATOR,
                placement_lib.is_worker,
            ):
                handles = ray_hosts.find_all(population, filter(is_one, found))
                if not handles:
                    continue
                ray_hosts.ask_all(handles, lambda handle: handle.stop.remote(), _STOP_SECONDS)
                for handle in handles.values():
                    ray_hosts.kill(handle)
            ray_hosts.forget_ports(population, filter(placement_lib.is_selector, found))
            return found
        finally:
            self._disconnect()

    def leave(self) -> None:
        """Disconnects from the cluster; the hosts go on, except those of a Ray of this program."""
        self._disconnect()
