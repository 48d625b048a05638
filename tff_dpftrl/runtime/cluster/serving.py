"""Serving of populations on a Ray cluster, for `tff-dpftrl serve --engine ray`.

Hosts read tasks and keys from files on their node. This process starts the hosts and shows what
they observe; it can end without ending them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.runtime import core_files, signing_keys
from tff_dpftrl.runtime import serving as serving_lib
from tff_dpftrl.runtime.cluster import cluster as cluster_lib
from tff_dpftrl.runtime.cluster import deployment as deployment_lib
from tff_dpftrl.runtime.cluster import observed
from tff_dpftrl.runtime.server import attesting, day_curve, served_population
from tff_dpftrl.runtime.server import server_folder as server_folder_lib
from tff_dpftrl.runtime.store import interface
from tff_dpftrl.runtime.tasks import planned_task

_BUILDER = f"{__name__}:build"
_POLL_SECONDS = 0.5
_START_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Files:
    """Paths of the files that hosts read, the same on every node.

    Attributes:
      tasks: Folders of tasks.
      plan_keys: Public keys of the plan signers; the keys in the folders if empty.
      certificate: Certificate of the server.
      private_key: Private key of the certificate.
      attestation_keys: Public keys of the issuers of attestation tokens; None to accept every
        client as a device, or for `attestation_roots`.
      attestation_roots: Certificates of a platform's roots, in place of issuers.
      attestation_revoked: Serial numbers of revoked certificates.
    """

    tasks: Sequence[str | os.PathLike[str]]
    plan_keys: Sequence[str | os.PathLike[str]]
    certificate: str | os.PathLike[str]
    private_key: str | os.PathLike[str]
    attestation_keys: Sequence[str | os.PathLike[str]] | None
    attestation_roots: str | os.PathLike[str] | None = None
    attestation_revoked: str | os.PathLike[str] | None = None


def deployment(
    populations: tuple[str, ...],
    store: str,
    files: Files,
    settings: serving_lib.Settings,
    *,
    num_selectors: int,
    num_workers: int,
) -> deployment_lib.ClusterDeployment:
    """Builds the description of the server for its hosts.

    Devices connect to the Selectors, and workers sum reports. If the port is not 0, each further
    Selector has the next port. Raises ValueError if there are too few ports, or the store's URL has
    a password.
    """
    host, _, port = settings.address.rpartition(":")
    ports = [int(port) and int(port) + i for i in range(num_selectors)]
    if ports[-1] >= 2**16:
        raise validation.UsageError(
            f"address={settings.address!r} has no room for {num_selectors} Selectors, which need "
            "one port each: name a smaller port."
        )
    tasks, plan_keys = _absolute(files.tasks), _absolute(files.plan_keys)
    issuers = _absolute(files.attestation_keys or ())
    platform = {
        "attestation_roots": files.attestation_roots,
        "attestation_revoked": files.attestation_revoked,
    }
    platform = {name: path and deployment_lib.absolute(path) for name, path in platform.items()}
    return deployment_lib.ClusterDeployment(
        populations=populations,
        builder=_BUILDER,
        store=store if "://" in store else deployment_lib.absolute(store),
        certificate=deployment_lib.absolute(files.certificate),
        private_key=deployment_lib.absolute(files.private_key),
        addresses=tuple(f"{host}:{port}" for port in ports),
        num_workers=num_workers,
        files=(*tasks, *plan_keys, *issuers, *filter(None, platform.values())),
        options={
            "tasks": tasks,
            "plan_keys": plan_keys,
            "attestation_keys": None if files.attestation_keys is None else issuers,
            **platform,
            "population_size": settings.population_size,
            "availability": tuple(settings.availability),
            "round_seconds": settings.round_seconds,
            "limits": settings.limits,
            "most_over_selection": settings.most_over_selection,
            "shares": settings.shares,
        },
    )


def _absolute(paths: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    return tuple(map(deployment_lib.absolute, paths))


def build(deployed: deployment_lib.ClusterDeployment) -> deployment_lib.Parts:
    """Builds the parts of a host from the result of `deployment`."""
    core_files.forbid()
    options = deployed.options
    keys = [signing_keys.load_public(path) for path in options["plan_keys"]]
    tasks = [planned_task.load(path, keys or None) for path in options["tasks"]]
    populations = serving_lib.put_together(
        tasks,
        serving_lib.Settings(
            population_size=options["population_size"],
            availability=options["availability"],
            round_seconds=options["round_seconds"],
            most_over_selection=options["most_over_selection"],
            shares=options["shares"],
        ),
    )
    attestation = attesting.from_files(
        options["attestation_keys"], options["attestation_roots"], options["attestation_revoked"]
    )
    return deployment_lib.Parts(populations, attestation, options["limits"])


class ClusterServing(serving_lib.Serving):
    """Serving of populations by hosts of a Ray cluster, from `start` to `stop`."""

    def __init__(
        self,
        deployed: deployment_lib.ClusterDeployment,
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
        """Prepares the hosts; nothing runs yet, and nothing is written.

        `deployed` is the result of `deployment` for these tasks and settings. The folder has the
        certificate, if none is given, and the files that outlast a restart. With `leave`, `stop`
        leaves the hosts running. Raises ValueError if the tasks cannot be served together.
        """
        self._readers: dict[str, observed.Reader] = {}
        super().__init__(tasks, store, folder, settings, progress=progress, clock=clock)
        self._cluster = cluster_lib.RayCluster(deployed, ray_address=ray_address)
        self._leave = leave

    @override
    def _observe(
        self, served: served_population.ServedPopulation, clock: Callable[[], float]
    ) -> serving_lib.LoggedObservations:
        """Makes the observations of a population, whose time is that of what is replayed."""
        reader = self._readers[served.name] = observed.Reader(clock=clock)
        return super()._observe(served, reader.now)

    @override
    async def load(self) -> None:
        """Does nothing: rounds are computed in other processes."""

    @override
    def _learned_paces(self) -> dict[str, day_curve.LearnedPace]:
        """Returns none: Selectors in other processes draw turns by the curve that was given."""
        return {}

    @override
    def _make_engine(self) -> serving_lib.Engine:
        return _Hosts(
            self._cluster,
            {name: (reader, self.seen[name]) for name, reader in self._readers.items()},
            moved=self._write_endpoint,
            progress=self._progress,
            leave=self._leave,
        )

    @override
    def _remove_endpoint(self) -> None:
        if self._leave:
            self._folder.write_endpoint(self.address, "")
        else:
            super()._remove_endpoint()


class _Hosts:
    """Engine that starts the hosts and polls what they observe."""

    def __init__(
        self,
        cluster: cluster_lib.RayCluster,
        readers: Mapping[str, tuple[observed.Reader, serving_lib.LoggedObservations]],
        *,
        moved: Callable[[], None],
        progress: Callable[[str], None],
        leave: bool,
    ):
        self._cluster, self._readers = cluster, readers
        self._moved, self._progress, self._leave = moved, progress, leave
        self._has_started = False
        self._polling: asyncio.Task | None = None
        self._last_warning = ""

    @property
    def address(self) -> str:
        return ",".join(filter(None, self._cluster.addresses)) if self._has_started else ""

    async def start(self) -> None:
        await self._cluster.start(seconds=_START_SECONDS)
        self._has_started = True
        for _, seen in self._readers.values():
            seen.is_quiet = True  # The first events may be old.
        await self._read()
        for _, seen in self._readers.values():
            seen.is_quiet = False
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    async def _read(self) -> None:
        for name, recordings in (await self._cluster.observed()).items():
            reader, seen = self._readers[name]
            await reader.replay(recordings, seen)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            before = self.address
            try:
                await self._read()
            except Exception as error:  # The hosts may go on although Ray does not answer.
                self._warn(f"The Ray cluster does not answer ({type(error).__name__}).")
                continue
            self._last_warning = ""
            if self.address != before:
                self._progress(f"Devices:     {self.address}")
                self._moved()

    def _warn(self, line: str) -> None:
        if line != self._last_warning:
            self._progress(line)
        self._last_warning = line

    async def stop(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._polling
        if self._leave:
            await asyncio.to_thread(self._cluster.leave)
        elif self._has_started:
            await self._cluster.stop()
