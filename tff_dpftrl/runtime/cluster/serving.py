"""A population as `tff-dpftrl serve --engine ray` serves it: on the hosts of a Ray cluster.

Hosts read the tasks, and whatever else they need, from files of their own node. This process
starts them, shows what they observe, and may leave them alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.runtime import core_files, signing_keys
from tff_dpftrl.runtime import serving as serving_lib
from tff_dpftrl.runtime.cluster import cluster as cluster_lib
from tff_dpftrl.runtime.cluster import deployment as deployment_lib
from tff_dpftrl.runtime.cluster import observed
from tff_dpftrl.runtime.protocol import attestation as attestation_lib
from tff_dpftrl.runtime.server import server_folder as server_folder_lib
from tff_dpftrl.runtime.store import interface
from tff_dpftrl.runtime.tasks import planned_task

_BUILDER = f"{__name__}:build"
_LOOK_SECONDS = 0.5
_START_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Files:
    """What hosts read, at the same paths on every node.

    Attributes:
      tasks: Folders of tasks.
      plan_keys: Public keys of those who signed them; those in the folders if there is none.
      certificate: The server's certificate.
      private_key: Its key.
      attestation_keys: Public keys of issuers of attestation tokens; None to take any that
        connects for a device.
    """

    tasks: Sequence[str | os.PathLike[str]]
    plan_keys: Sequence[str | os.PathLike[str]]
    certificate: str | os.PathLike[str]
    private_key: str | os.PathLike[str]
    attestation_keys: Sequence[str | os.PathLike[str]] | None


def deployment(
    population: str,
    store: str,
    files: Files,
    settings: serving_lib.Settings,
    *,
    num_selectors: int,
    num_workers: int,
) -> deployment_lib.Deployment:
    """What hosts are built from.

    Args:
      population: Name of the population.
      store: Folder or URL of its store.
      files: What they read.
      settings: How to serve. With a port other than 0, each further Selector has the next one.
      num_selectors: How many processes devices connect to.
      num_workers: How many sum reports.

    Raises:
      ValueError: If there is no such port, or the store's URL has a password.
    """
    host, _, port = settings.address.rpartition(":")
    ports = [int(port) and int(port) + i for i in range(num_selectors)]
    if ports[-1] >= 2**16:
        raise validation.UsageError(
            f"address={settings.address!r} has no room for {num_selectors} Selectors, which take a "
            "port each: name a smaller port."
        )
    tasks, plan_keys = _absolute(files.tasks), _absolute(files.plan_keys)
    issuers = _absolute(files.attestation_keys or ())
    return deployment_lib.Deployment(
        population=population,
        builder=_BUILDER,
        store=store if "://" in store else deployment_lib.absolute(store),
        certificate=deployment_lib.absolute(files.certificate),
        private_key=deployment_lib.absolute(files.private_key),
        addresses=tuple(f"{host}:{port}" for port in ports),
        num_workers=num_workers,
        files=(*tasks, *plan_keys, *issuers),
        options={
            "tasks": tasks,
            "plan_keys": plan_keys,
            "attestation_keys": None if files.attestation_keys is None else issuers,
            "population_size": settings.population_size,
            "round_seconds": settings.round_seconds,
            "limits": settings.limits,
            "most_over_selection": settings.most_over_selection,
        },
    )


def _absolute(paths: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    return tuple(map(deployment_lib.absolute, paths))


def build(deployed: deployment_lib.Deployment) -> deployment_lib.Parts:
    """Builds what a host runs, of a `deployment`.

    Args:
      deployed: The deployment.

    Raises:
      ValueError: If a task or a key cannot be used.
      OSError: If a file cannot be read.
    """
    core_files.forbid()
    options = deployed.options
    keys = [signing_keys.load_public(path) for path in options["plan_keys"]]
    tasks = [planned_task.load(path, keys or None) for path in options["tasks"]]
    served = serving_lib.put_together(
        tasks,
        serving_lib.Settings(
            population_size=options["population_size"],
            round_seconds=options["round_seconds"],
            most_over_selection=options["most_over_selection"],
        ),
    )
    issuers = options["attestation_keys"]
    attestation = None
    if issuers is not None:
        attestation = attestation_lib.SignedTokens(
            map(signing_keys.load_public, issuers), clock=time.time
        )
    return deployment_lib.Parts(
        served.population, served.tasks, served.pace, attestation, options["limits"]
    )


class ClusterServing(serving_lib.Serving):
    """A population that hosts serve, looked at from here, from `start` to `stop`."""

    def __init__(
        self,
        deployed: deployment_lib.Deployment,
        tasks: Sequence[planned_task.PlannedTask],
        store: interface.Store,
        folder: server_folder_lib.ServerFolder,
        settings: serving_lib.Settings,
        *,
        ray_address: str | None = None,
        leave: bool = False,
        progress: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ):
        """Puts the parts together; nothing runs yet, and nothing is written.

        Args:
          deployed: What `deployment` returns for the following.
          tasks: The tasks.
          store: Their store, for this process.
          folder: See `serving.Serving`.
          settings: How to serve.
          ray_address: See `cluster.RayCluster`.
          leave: Whether `stop` leaves the hosts running.
          progress: Callback for progress lines.
          clock: Seconds since 1970.

        Raises:
          ValueError: See `serving.Serving`.
        """
        self._reader = observed.Reader(clock=clock)
        super().__init__(tasks, store, folder, settings, progress=progress, clock=self._reader.now)
        self._cluster = cluster_lib.RayCluster(deployed, ray_address=ray_address)
        self._leave = leave

    @override
    def _make_engine(self) -> serving_lib.Engine:
        return _Hosts(
            self._cluster,
            self._reader,
            self.seen,
            moved=self._say_where,
            progress=self._progress,
            leave=self._leave,
        )

    @override
    def _unsay_where(self) -> None:
        if self._leave:
            self._folder.write_endpoint(self.address, "")
        else:
            super()._unsay_where()


class _Hosts:
    """The hosts, and who looks at them."""

    def __init__(
        self,
        cluster: cluster_lib.RayCluster,
        reader: observed.Reader,
        seen: serving_lib.Narrator,
        *,
        moved: Callable[[], None],
        progress: Callable[[str], None],
        leave: bool,
    ):
        self._cluster, self._reader, self._seen = cluster, reader, seen
        self._moved, self._progress, self._leave = moved, progress, leave
        self._has_started = False
        self._looking: asyncio.Task | None = None
        self._said = ""

    @property
    def address(self) -> str:
        return ",".join(filter(None, self._cluster.addresses)) if self._has_started else ""

    async def start(self) -> None:
        await self._cluster.start(seconds=_START_SECONDS)
        self._has_started = True
        self._seen.is_quiet = True  # It may be long past.
        await self._look()
        self._seen.is_quiet = False
        self._looking = asyncio.get_running_loop().create_task(self._look_again())

    async def _look(self) -> None:
        await self._reader.replay(await self._cluster.observed(), self._seen)

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            before = self.address
            try:
                await self._look()
            except Exception as error:  # Whatever Ray says: the hosts may go on all the same.
                self._complain(f"The Ray cluster does not answer ({type(error).__name__}).")
                continue
            self._said = ""
            if self.address != before:
                self._progress(f"Devices:     {self.address}")
                self._moved()

    def _complain(self, line: str) -> None:
        if line != self._said:
            self._progress(line)
        self._said = line

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
        if self._leave:
            await asyncio.to_thread(self._cluster.leave)
        elif self._has_started:
            await self._cluster.stop()
