"""The server of a campaign on two nodes of Ray, both on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pathlib
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable

from typing_extensions import override

from tff_dpftrl.execution import ray_sessions
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.actors import factory
from tff_dpftrl.runtime.cluster import cluster, deployment, observed, placement
from tff_dpftrl.runtime.protocol import attestation
from verification.campaign import engines, fault_injection, stage, tiny_tasks
from verification.campaign import events as events_lib

ray = ray_sessions.ray  # It says what to do where Ray is not installed.

START_SECONDS = 60.0  # Until a lost node is noticed, and its hosts have started elsewhere.
_NUM_SELECTORS = 2
_CLUSTER_SECONDS = 300.0  # On a machine that is busy.
_LOOK_SECONDS = 0.3
_ANSWER_SECONDS = 30.0  # Longer than a process takes to start on a machine that is busy.
_NODE = {"num_cpus": 1, "object_store_memory": 2**27}
_SYSTEM = {  # A node that is gone is found out within two seconds.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
    "kill_worker_timeout_milliseconds": 60_000,  # Who is stopped may return.
    "worker_niceness": 0,  # Ray's is 15: beside whatever else runs, nobody would start in time.
}


def build(deployed: deployment.ClusterDeployment) -> deployment.Parts:
    """Returns the parts of a host, with fault injection."""
    place = stage.Stage(pathlib.Path(deployed.options["folder"]))
    trigger = fault_injection.Trigger(place.folder)
    fault_injection.watch_transactions(trigger)
    step = fault_injection.ArmedStep(tiny_tasks.NoisyStep(), trigger)
    issuer = signing_keys.load_public(place.server_folder.issuer_public)
    return deployment.Parts(
        tiny_tasks.served_populations(place.populations, step),
        attestation=attestation.SignedTokens([issuer], clock=time.time),
        limits=tiny_tasks.LIMITS,
        actor_factory=functools.partial(
            fault_injection.ArmedFactory, trigger, factory.ActorFactory
        ),
    )


class RayServers(engines.Engines):
    """Hosts on two nodes, of which the second one may be lost."""

    def __init__(self, place: stage.Stage):
        """Starts nothing.

        Args:
          place: The folder.
        """
        super().__init__()
        self._place = place
        self._folder = ""  # Of Ray; a short path, since names of sockets have to be short.
        self._nodes = None
        self._second = None
        self._cluster: cluster.RayCluster | None = None
        self._processes: dict[str, int] = {}
        self._jobs: list[asyncio.Future] = []
        self._is_started = False

    @property
    def targets(self) -> tuple[Callable[[], str], ...]:
        """See the base class; one for each Selector."""
        return tuple(functools.partial(self._target, i) for i in range(_NUM_SELECTORS))

    def _target(self, number: int) -> str:
        addresses = () if self._cluster is None else self._cluster.addresses
        return addresses[number] if number < len(addresses) else ""

    @override
    async def begin(self) -> None:
        self._start_nodes()  # Not in a thread: it sets a signal's handler.
        self._cluster = cluster.RayCluster(
            deployment.ClusterDeployment(
                tuple(self._place.populations),
                f"{__name__}:build",
                str(self._place.store),
                str(self._place.server_folder.certificate),
                str(self._place.server_folder.private_key),
                addresses=("127.0.0.1:0",) * _NUM_SELECTORS,
                options={"folder": str(self._place.folder)},
                answer_seconds=_ANSWER_SECONDS,
            )
        )
        await self._cluster.start(seconds=_CLUSTER_SECONDS)
        self._is_started = True
        self._jobs.append(asyncio.ensure_future(self._follow()))

    def _start_nodes(self) -> None:
        from ray import cluster_utils

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        self._folder = tempfile.mkdtemp(prefix="campaign-", dir="/tmp")
        head = {
            **_NODE,
            "include_dashboard": False,
            "temp_dir": self._folder,
            "_system_config": _SYSTEM,
        }
        self._nodes = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        # Before there is another node, to which this process could be connected instead.
        ray_sessions.join(self._nodes.address)
        self._second = self._nodes.add_node(**_NODE)

    async def _follow(self) -> None:
        """Looks at what the hosts observe, and where they run."""
        readers = {name: observed.Reader() for name in self._place.populations}
        events = events_lib.Events(self._place.events / "hosts.jsonl")
        while True:
            try:
                for name, recordings in (await self._cluster.observed()).items():
                    await readers[name].replay(recordings, events)
                places = await asyncio.to_thread(self._cluster.processes)
                self._processes = {host: at.pid for host, at in sorted(places.items())}
            except ray.exceptions.RayError as error:  # Of a host that has just died.
                logging.getLogger(__name__).warning("%s", type(error).__name__)
            await asyncio.sleep(_LOOK_SECONDS)

    async def keep(self) -> None:
        """Raises what a job raised: Ray looks after hosts, and they after each other."""
        for job in self._jobs:
            if job.done():
                job.result()

    def victim(self, generator: random.Random) -> int | None:
        """Returns the process of any host."""
        return generator.choice(list(self._processes.values())) if self._processes else None

    @override
    async def lose_one(self, point: str) -> None:
        kind = "selector-0" if point.startswith("Selector") else placement.COORDINATOR
        if kind in self._processes:
            engines.send(self._processes[kind], signal.SIGKILL)

    def hides(self, pid: int) -> tuple[str, ...]:
        """Returns the secure task alone for Selectors and workers, which see clear reports."""
        is_coordinator = pid == self._processes.get(placement.COORDINATOR)
        return tiny_tasks.TASKS if is_coordinator else (tiny_tasks.SECURE,)

    def bystanders(self) -> tuple[int, ...]:
        """Returns the processes of Ray itself."""
        return tuple(
            info.process.pid
            for node in self._nodes.list_all_nodes()
            for kind, infos in node.all_processes.items()
            if kind in ("raylet", "gcs_server")
            for info in infos
            if info.process.poll() is None
        )

    async def retire(self) -> None:
        """Does nothing: Ray ends a host that comes back when others have taken its place."""

    @override
    async def start_anew(self) -> None:
        for pid in self._processes.values():
            engines.send(pid, signal.SIGKILL)

    @override
    async def lose_node(self) -> None:
        await asyncio.to_thread(self._nodes.remove_node, self._second, allow_graceful=False)
        self._second = self._nodes.add_node(**_NODE)

    async def end(self) -> None:
        """Stops Ray, and keeps what it has written in the campaign's folder."""
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        if self._is_started:
            with contextlib.suppress(ray.exceptions.RayError):
                await self._cluster.stop()
        if self._nodes is not None:
            await asyncio.to_thread(ray.shutdown)
            await asyncio.to_thread(self._nodes.shutdown)
        if self._folder:
            await asyncio.to_thread(self._keep_files)

    def _keep_files(self) -> None:
        """Keeps Ray's files, in which devices' vectors are looked for."""
        kept = self._place.folder / "ray"
        for path in pathlib.Path(self._folder).rglob("*"):
            if path.is_file() and not path.is_symlink():
                copy = kept / path.relative_to(self._folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        shutil.rmtree(self._folder, ignore_errors=True)
