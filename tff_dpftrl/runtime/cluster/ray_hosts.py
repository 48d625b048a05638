"""Hosts as detached, named Ray actors; the only module here that depends on Ray's actors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from typing_extensions import override

from tff_dpftrl.execution import ray_sessions
from tff_dpftrl.runtime.cluster import host as host_lib
from tff_dpftrl.runtime.cluster import host_kinds, mail, observed, transport
from tff_dpftrl.runtime.cluster import placement as placement_lib
from tff_dpftrl.runtime.cluster.deployment import ClusterDeployment
from tff_dpftrl.runtime.server import garbage

ray = ray_sessions.ray  # Its errors name the remedy where Ray is not installed.

_logger = logging.getLogger(__name__)

_NAMESPACE = "tff_dpftrl"
_MAX_CALLS = 10_000  # Concurrent calls; each other host has a pending one that watches this one.
_LARGE = 1 << 16  # Bytes for which Ray may have to free memory, which takes time.
_BEFORE_EXIT = 5.0  # Seconds for which a host that could not start reports the reason.


class _HostActor:
    """Ray actor with a host."""

    def __init__(self, name: str, deployment: ClusterDeployment):
        """Starts the host, which takes seconds; it accepts mail at once."""
        self._host: host_lib.Host | None = None
        self._failure = ""
        self._fingerprint = deployment.fingerprint()
        try:
            self._host = host_kinds.make(name, deployment, _RayTransport(deployment))
        except (ValueError, OSError) as error:
            self._failure = str(error)
        self._starting = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        if not self._failure:
            try:
                await self._host.start()
                garbage.settle()
                return
            except (ValueError, OSError, RuntimeError) as error:
                self._failure = str(error)
            except Exception as error:
                self._failure = f"it failed with {type(error).__name__}."
        _logger.error("a host cannot start: %s", self._failure)
        await asyncio.sleep(_BEFORE_EXIT)
        os._exit(1)  # Ray restarts the process.

    async def take(self, sealed: bytes) -> str:
        try:
            return await self._host.take(sealed)
        except Exception as error:  # Its text may quote the decrypted mail.
            raise RuntimeError(type(error).__name__) from None

    async def watch(self, life: str) -> None:
        """Answers only if this process has another id."""
        if self._host is not None and self._host.life == life:
            await asyncio.Event().wait()

    async def status(self) -> host_lib.HostStatus:
        if self._failure or self._host is None:
            return host_lib.HostStatus(self._fingerprint, False, self._failure)
        return self._host.status()

    async def take_observed(self) -> dict[str, observed.Recording]:
        return self._host.take_observed()

    async def stop(self) -> None:
        if not self._failure:
            await self._starting
            await self._host.stop()


class _RayTransport(transport.Transport):
    """Connection from one host of a server to the others, by Ray."""

    def __init__(self, deployment: ClusterDeployment):
        self._deployment = deployment
        self._handles: dict[str, Any] = {}

    async def _handle(self, host: str) -> Any:
        handle = self._handles.get(host)
        if handle is None:
            try:
                handle = await asyncio.to_thread(find, self._deployment.name, host)
            except (ValueError, ray.exceptions.RayError):
                raise mail.Unreachable from None
            self._handles[host] = handle
        return handle

    @override
    async def call(self, host: str, sealed: bytes) -> str:
        handle = await self._handle(host)
        try:
            if len(sealed) > _LARGE:
                return await (await asyncio.to_thread(handle.take.remote, sealed))
            return await handle.take.remote(sealed)
        except ray.exceptions.RayError:
            self._forget(host, handle)
            raise mail.Unreachable from None

    @override
    async def watch(self, host: str, life: str) -> None:
        handle = await self._handle(host)
        try:
            await handle.watch.remote(life)
        except ray.exceptions.RayError:
            self._forget(host, handle)

    def _forget(self, host: str, handle: Any) -> None:
        if self._handles.get(host) is handle:
            del self._handles[host]

    @override
    async def start_coordinator(self) -> None:
        try:
            await asyncio.to_thread(create, self._deployment, placement_lib.COORDINATOR)
        except (ValueError, ray.exceptions.RayError):
            raise mail.Unreachable from None

    @override
    async def restart(self, host: str) -> None:
        handle = await self._handle(host)
        self._forget(host, handle)
        is_coordinator = host == placement_lib.COORDINATOR
        await asyncio.to_thread(ray.kill, handle, no_restart=is_coordinator)

    @override
    async def leave(self) -> None:
        this_actor = ray.get_runtime_context().current_actor
        await asyncio.to_thread(ray.kill, this_actor)

    @override
    def node_address(self) -> str:
        return ray.util.get_node_ip_address()

    @override
    def remember(self, name: str, value: str) -> None:
        _kv()._internal_kv_put(self._key(name), value.encode(), namespace=_NAMESPACE.encode())

    @override
    def remembered(self, name: str) -> str:
        value = _kv()._internal_kv_get(self._key(name), namespace=_NAMESPACE.encode())
        return "" if value is None else value.decode()

    def _key(self, name: str) -> bytes:
        return f"{self._deployment.name}/{name}".encode()


def _kv() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


def _full_name(server: str, host: str) -> str:
    return f"{server}/{host}"


def find(server: str, host: str) -> Any:
    """Returns Ray's handle of a host; blocks until Ray answers. Raises ValueError without one."""
    return ray.get_actor(_full_name(server, host), namespace=_NAMESPACE)


def find_all(server: str, hosts: Iterable[str]) -> dict[str, Any]:
    """Returns Ray's handles of those of the hosts that exist, by name; blocks likewise."""
    handles = {}
    for host in hosts:
        with contextlib.suppress(ValueError):
            handles[host] = find(server, host)
    return handles


def create(deployment: ClusterDeployment, host: str) -> Any:
    """Finds or creates a host, and returns Ray's handle of it; concurrent calls create one host."""
    actor_class = ray.remote(_HostActor)
    return actor_class.options(
        name=_full_name(deployment.name, host),
        namespace=_NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=0 if host == placement_lib.COORDINATOR else -1,
        max_concurrency=_MAX_CALLS,
        num_cpus=0,
        scheduling_strategy="SPREAD",
    ).remote(host, deployment)


def forget_ports(server: str, selectors: Iterable[str]) -> None:
    """Deletes the stored ports of Selectors."""
    for host in selectors:
        key = _full_name(server, host).encode()
        _kv()._internal_kv_del(key, namespace=_NAMESPACE.encode())


class Place(NamedTuple):
    """The location of a process.

    Attributes:
      node: Ray's id of the node.
      pid: Process id on the node.
    """

    node: str
    pid: int


def places(server: str) -> dict[str, Place]:
    """Returns the locations of a server's running hosts, whether or not they answer."""
    return {
        host: Place(actor["Address"]["NodeID"], actor["Pid"])
        for host, actor in _actors(server)
        if actor["State"] == "ALIVE"
    }


def names(server: str) -> tuple[str, ...]:
    """Returns the names of a server's hosts that run or are being restarted."""
    return tuple(sorted(host for host, actor in _actors(server) if actor["State"] != "DEAD"))


def _actors(server: str) -> Iterator[tuple[str, dict[str, Any]]]:
    from ray._private import state

    prefix = _full_name(server, "")
    for actor in state.actors().values():
        if actor["Name"].startswith(prefix):
            yield actor["Name"][len(prefix) :], actor


def ask_all(
    handles: Mapping[str, Any], question: Callable[[Any], Any], seconds: float
) -> dict[str, Any]:
    """Calls hosts concurrently; returns answers by name, without hosts that fail or are late."""
    calls = {question(handle): name for name, handle in handles.items()}
    answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=seconds)
    answers = {}
    for call in answered:
        try:
            answers[calls[call]] = ray.get(call)
        except ray.exceptions.RayError:
            continue
    return answers


class NodeView(NamedTuple):
    """The files of a deployment on one node.

    Attributes:
      name: Address of the node.
      missing: Paths that the node lacks.
      store: Identity of the store's folder, which differs between machines; None if the store is
        not a folder.
    """

    name: str
    missing: tuple[str, ...]
    store: tuple[str, int, int] | None


def _look(deployment: ClusterDeployment) -> NodeView:
    missing = tuple(path for path in deployment.needed_paths if not os.path.exists(path))
    store = None
    if deployment.store_is_folder and deployment.store not in missing:
        folder = os.stat(deployment.store)
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        store = boot.strip(), folder.st_dev, folder.st_ino
    return NodeView(ray.util.get_node_ip_address(), missing, store)


def look_at_nodes(deployment: ClusterDeployment, seconds: float) -> Iterable[NodeView]:
    """Checks the files of a deployment on each node.

    Raises ConnectionError if a node does not answer in the seconds for all of them together.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    look = ray.remote(num_cpus=0)(_look)
    strategy = functools.partial(ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy)
    calls = [
        look.options(scheduling_strategy=strategy(node, soft=False)).remote(deployment)
        for node in nodes
    ]
    try:
        return ray.get(calls, timeout=seconds)
    except ray.exceptions.RayError as error:
        raise ConnectionError(
            f"A node of the Ray cluster does not answer ({type(error).__name__}): check whether it "
            "has this package, of the same version."
        ) from None


def kill(handle: Any) -> None:
    """Ends a host for good."""
    ray.kill(handle)
