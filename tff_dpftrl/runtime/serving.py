"""Populations as `tff-dpftrl serve` serves them: tasks, store, devices' service, status page."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.runtime import addresses
from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.actors import population as population_lib
from tff_dpftrl.runtime.protocol import attestation as attestation_lib
from tff_dpftrl.runtime.protocol import pace_steering
from tff_dpftrl.runtime.server import day_curve, served_population
from tff_dpftrl.runtime.server import limits as limits_lib
from tff_dpftrl.runtime.server import server as server_lib
from tff_dpftrl.runtime.server import server_folder as server_folder_lib
from tff_dpftrl.runtime.status import access, observations, page
from tff_dpftrl.runtime.store import interface
from tff_dpftrl.runtime.tasks import planned_task, task_folder

_HOUR = 3600.0
_LEARN_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a server."""

    address: str = addresses.DEFAULT_ADDRESS  # Host and port for devices; port 0 takes a free one.
    status_address: str | None = addresses.DEFAULT_ADDRESS  # None for no status page.
    status_access: access.Access = access.Access()  # Readers of the status page.
    # Host names and addresses that devices connect to. A certificate is made here for them, or one
    # that was made before has to have them; None for loopback, or those that it has.
    names: Sequence[str] | None = None
    # Approximate number of devices that are available at a time, of each population or by its name,
    # to begin with. The waiting times that devices get follow from it, until check-ins show the
    # number.
    population_size: float | Mapping[str, float] = 1000.0
    # Relative numbers of available devices at each full hour of UTC, to begin with; shape [24].
    availability: Sequence[float] = (1.0,) * 24
    round_seconds: float = 60.0  # Approximate seconds from one selection to the next.
    limits: limits_lib.Limits = dataclasses.field(default_factory=limits_lib.Limits)
    # Largest number of devices chosen for each report of a round's goal, where many have not
    # reported.
    most_over_selection: float = 3.0
    # Shares of sessions and check-ins that populations have for themselves, by name; see
    # `served_population.ServedPopulation`.
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def size_of(self, population: str) -> float:
        """Returns the approximate number of devices of a population."""
        size = self.population_size
        return size[population] if isinstance(size, Mapping) else size


class Engine(Protocol):
    """Engine that runs the actors: `server.Server`, or hosts on many machines."""

    @property
    def address(self) -> str:
        """Host and port for devices, or several with commas; empty before `start`."""
        ...

    async def start(self) -> None:
        """Begins to serve devices."""

    async def stop(self) -> None:
        """Stops serving devices."""


def put_together(
    tasks: Sequence[planned_task.PlannedTask], settings: Settings
) -> list[served_population.ServedPopulation]:
    """Makes populations of tasks, with their pace, in the order of the tasks.

    It raises ValueError if they cannot be served together, or a setting is out of range.
    """
    by_population: dict[str, list[planned_task.PlannedTask]] = {}
    for task in tasks:
        by_population.setdefault(task.population, []).append(task)
    if strangers := sorted(set(settings.shares) - set(by_population)):
        raise validation.UsageError(
            f"shares name the populations {strangers}, which have no task: leave them out."
        )
    made = [_populate(name, own, settings) for name, own in by_population.items()]
    served_population.check(made)
    return made


def _populate(
    name: str, tasks: Sequence[planned_task.PlannedTask], settings: Settings
) -> served_population.ServedPopulation:
    served = {task.name: _resting(task, settings) for task in tasks}
    if len(served) != len(tasks):
        raise validation.UsageError(
            f"tasks has a name twice: {sorted(task.name for task in tasks)}."
        )
    population = population_lib.Population(name, tuple(task.task for task in served.values()))
    wanted = max(task.rounds.wanted for task in population.tasks)
    steering = pace_steering.PaceSteering(
        wanted, settings.round_seconds, settings.size_of(name), tuple(settings.availability)
    )
    return served_population.ServedPopulation(
        population,
        served,
        pace_steering.TurnsAhead(steering),
        share=settings.shares.get(name),
    )


class Serving:
    """Populations that are served, from `start` to `stop`, on one event loop."""

    def __init__(
        self,
        tasks: Sequence[planned_task.PlannedTask],
        store: interface.Store,
        folder: server_folder_lib.ServerFolder,
        settings: Settings,
        *,
        certificate: str | os.PathLike[str] | None = None,
        private_key: str | os.PathLike[str] | None = None,
        attestation: attestation_lib.Attestation | None = None,
        progress: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ):
        """Puts the parts together; nothing runs yet, and nothing is written.

        New tasks are added to the store, which is left open. The folder has the certificate, if
        none is given, and what lasts over a restart. `private_key` is given if and only if the
        certificate is. With `attestation` None, every device is accepted. The clock returns the
        seconds since 1970. It raises ValueError if the tasks cannot be served together, or a
        setting is out of range.
        """
        self._tasks = {(task.population, task.name): task for task in tasks}
        self._store, self._folder, self._settings = store, folder, settings
        self._certificate, self._private_key = certificate, private_key
        self._attestation, self._progress, self._clock = attestation, progress, clock
        served = put_together(tasks, settings)
        self._is_alone = len(served) == 1
        self.seen = {one.name: self._observe(one, clock) for one in served}
        """Observations of devices and rounds, by population."""
        self._served = [dataclasses.replace(one, observer=self.seen[one.name]) for one in served]
        self.done = asyncio.Event()
        """Set when no task may have another round."""
        self._server: Engine | None = None
        self._page: page.StatusServer | None = None
        self._paces: dict[str, day_curve.LearnedPace] = {}
        self._learning: asyncio.Task | None = None
        self._looks: set[asyncio.Task] = set()
        self._looking = asyncio.Lock()

    def _observe(
        self, served: served_population.ServedPopulation, clock: Callable[[], float]
    ) -> LoggedObservations:
        """Makes the observations of a population."""
        before = self._label(served.name)
        return LoggedObservations(
            served.population,
            population_size=self._settings.size_of(served.name),
            clock=clock,
            progress=lambda line: self._progress(f"{before}{line}"),
            released=lambda task: self._look_at(served.name, task),
            checked_in=lambda: self._checked_in(served.name),
        )

    def _label(self, population: str) -> str:
        """Returns what a population's progress lines begin with: its name, where there are more."""
        return "" if self._is_alone else f"{population}, "

    def _sessions(self, population: str) -> pathlib.Path:
        """Returns the file of a population's counts of sessions."""
        return self._folder.sessions if self._is_alone else self._folder.sessions_of(population)

    @property
    def address(self) -> str:
        """Host and port for devices; empty before `start`."""
        return "" if self._server is None else self._server.address

    @property
    def page_address(self) -> str:
        """URL of the status page; empty if there is none."""
        return "" if self._page is None else self._page.address

    async def start(self) -> None:
        """Adds new tasks to the store, takes the leases, and serves devices and page.

        It raises `ServerError` if another server leads, or an address cannot be bound; ValueError
        if certificate, key or a task in the store cannot be used; OSError if a file, the store or
        the status page's address cannot be used.
        """
        self._folder.make(self._settings.names, certificate=self._certificate is None, issuer=False)
        for name, seen in self.seen.items():
            seen.load_counts(self._sessions(name))
        self._paces = self._learned_paces()
        for task in self._tasks.values():
            commit = await asyncio.to_thread(task.add_to, self._store)
            plan, done = task.folder.terms.server_plan, commit.rounds_done
            self._folder.check_rounds(task.population, task.name, plan, done)
            self._progress(f"{self._label(task.population)}{_where_it_stands(task, commit)}")
            if task.folder.repeats_noise:
                name = f"{self._label(task.population)}{task.name}"
                self._progress(f"{name}: {task_folder.REPEATS_NOISE}")
        for one in self._served:
            for task in one.population.tasks:
                if advice := task.rests_advice(self._settings.size_of(one.name)):
                    self._progress(f"{self._label(one.name)}{task.name}: {advice}")
        self._server = self._make_engine()
        try:
            if self._settings.status_address is not None:
                await self._start_page(self._settings.status_address)
            await self._server.start()
            self._write_endpoint()
        except BaseException:
            await self.stop()
            raise
        self._learning = asyncio.get_running_loop().create_task(self._learn())
        self._look_at("", "")

    async def load(self) -> None:
        """Gets the first rounds ready: imports TensorFlow and traces graphs, beside the event loop.

        That takes seconds, in which devices can check in already. A round that comes before waits.
        """
        for task in self._tasks.values():
            await asyncio.to_thread(task.load)

    def _learned_paces(self) -> dict[str, day_curve.LearnedPace]:
        """Loads the curves of the day by population; none if others draw the turns."""
        return {
            one.name: day_curve.LearnedPace(
                one.pace, self._folder.day_curve_of(one.name), self._clock
            )
            for one in self._served
            if isinstance(one.pace, pace_steering.TurnsAhead)
        }

    def _checked_in(self, population: str) -> None:
        if population in self._paces:
            self._paces[population].checked_in()

    async def _learn(self) -> None:
        """Learns the curves of the day, also while nobody comes, and keeps them."""
        while True:
            await asyncio.sleep(_LEARN_SECONDS)
            for pace in self._paces.values():
                pace.learn()
            await asyncio.to_thread(self._write, self._save_paces)

    def _save_paces(self) -> None:
        for pace in self._paces.values():
            pace.save()

    def _make_engine(self) -> Engine:
        """Makes the engine that runs the actors."""
        return server_lib.Server(
            self._served,
            self._store,
            endpoint=server_lib.Endpoint(
                self._certificate or self._folder.certificate,
                self._private_key or self._folder.private_key,
                attestation=self._attestation,
                limits=self._settings.limits,
                address=self._settings.address,
            ),
            clock=self._clock,
            progress=self._progress,
        )

    def _write_endpoint(self) -> None:
        """Writes the server's address to a file, for devices on this machine."""
        self._folder.write_endpoint(self.address, self.page_address)

    async def stop(self) -> None:
        """Stops engine and page. Commits stay; a round that is not committed is abandoned."""
        for look in list(self._looks):
            look.cancel()
        if self._learning is not None:
            self._learning.cancel()
        if self._server is not None:
            has_served = bool(self._server.address)  # Otherwise the files may be another server's.
            if has_served:
                self._write(self._remove_endpoint)
            await self._server.stop()
            if has_served:
                await asyncio.to_thread(self._write, self._save_counts)
                await asyncio.to_thread(self._write, self._save_paces)
            self._server = None
        if self._page is not None:
            await self._page.stop()
            self._page = None

    def _write(self, write: Callable[[], None]) -> None:
        """Writes a file; a failure is reported and stops nothing."""
        try:
            write()
        except OSError as error:
            self._progress(f"Cannot write to {self._folder.path}: {error}")

    def _save_counts(self) -> None:
        for name, seen in self.seen.items():
            seen.save_counts(self._sessions(name))

    def _remove_endpoint(self) -> None:
        self._folder.remove_endpoint()

    async def _start_page(self, address: str) -> None:
        host, port = addresses.split(address, "status_address", can_listen=True)
        self._page = page.StatusServer(
            [self._shown(one.name) for one in self._served],
            host=host,
            port=port,
            allowed=self._settings.status_access,
        )
        await self._page.start()
        if self._settings.status_access.is_open and not addresses.is_loopback(host):
            self._progress(
                f"Warning: whoever reaches {self.page_address} can read the status page."
            )

    def _shown(self, population: str) -> page.Shown:
        """Returns what the status page shows of a population."""
        tasks = {name: task for (whose, name), task in self._tasks.items() if whose == population}
        return page.Shown(
            self.seen[population],
            privacy=lambda task: self._privacy(tasks[task]),
            history=lambda task: self._store.history(population, task),
            reports=lambda task: tasks[task].folder.path / task_folder.REPORT,
        )

    def _privacy(self, task: planned_task.PlannedTask) -> dict[str, Any]:
        """Returns what a task has spent by its last commit, for the status page."""
        commit = self._store.last_commit(task.population, task.name)
        so_far = task.privacy(commit)
        reasons = [] if so_far.budget_epsilon is not None else [_no_guarantee(task)]
        return {
            **dataclasses.asdict(so_far),
            "no_guarantee": reasons,
            "headline_caveats": task.headline_caveats(commit),
            "declared": dataclasses.asdict(task.folder.terms.schema),
            "unit_of_privacy": "device",
            "stopped": task.refusal(commit),
        }

    def _look_at(self, population: str, task: str) -> None:
        """Starts a check of which tasks may go on after a commit, beside the event loop."""
        look = asyncio.get_running_loop().create_task(self._look(population, task))
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    async def _look(self, population: str, task: str) -> None:
        try:
            async with self._looking:
                reasons = await asyncio.to_thread(self._refusals)
                await asyncio.to_thread(self._save_counts)
        except OSError as error:
            self._progress(f"Cannot look at the store, or write counts: {error}")
            return
        if task and (reason := reasons[population, task]) is not None:
            self._progress(f"{self._label(population)}{task}: no further round: {reason}.")
        if all(reason is not None for reason in reasons.values()):
            self.done.set()

    def _refusals(self) -> dict[tuple[str, str], str | None]:
        """Returns why each task may have no further round, and records the number of commits."""
        commits = {key: self._store.last_commit(*key) for key in self._tasks}
        self._folder.keep_rounds(
            {
                "/".join(key): (task.folder.terms.server_plan, commits[key].rounds_done)
                for key, task in self._tasks.items()
            }
        )
        return {key: task.refusal(commits[key]) for key, task in self._tasks.items()}


def _resting(task: planned_task.PlannedTask, settings: Settings) -> Any:
    """Sets the seconds after which a task's devices have rested, estimated from its rounds."""
    kept = task.folder.server.participation
    rest = max((kept.min_sep_rounds - 1) * settings.round_seconds, kept.min_sep_hours * _HOUR)
    inner = dataclasses.replace(
        task.served.task,
        rest_seconds=rest,
        rounds=dataclasses.replace(
            task.served.task.rounds, most_over_selection=settings.most_over_selection
        ),
    )
    return dataclasses.replace(task.served, task=inner)


def _no_guarantee(task: planned_task.PlannedTask) -> str:
    if task.folder.terms.kind == "evaluation":
        return "The task evaluates only: its metrics have no noise."
    return "The task adds no noise: its models promise nothing to anybody."


def _where_it_stands(task: planned_task.PlannedTask, commit: interface.Commit) -> str:
    total = task.served.task.num_rounds
    if commit.rounds_done:
        return f"{task.name}: goes on after round {commit.rounds_done} of {total}."
    return f"{task.name}: {total} rounds."


class LoggedObservations(observations.Observations):
    """Observations that also write a progress line for each event of interest.

    No lines are written while `is_quiet`, such as while old events are replayed.
    """

    def __init__(
        self,
        served: population_lib.Population,
        *,
        population_size: float | None = None,
        clock: Callable[[], float],
        progress: Callable[[str], None],
        released: Callable[[str], None],
        checked_in: Callable[[], None] = lambda: None,
    ):
        super().__init__(served, population_size=population_size, clock=clock)
        self._progress, self._after, self._checked_in = progress, released, checked_in
        self._last = ""
        self.is_quiet = False

    @override
    def on_event(self, now: float, event: Any) -> None:
        before = self._commits()
        super().on_event(now, event)
        if self.is_quiet:
            return
        line = _line(event, self.served)
        is_commit = isinstance(event, (events.RoundReleased, events.RoundSkipped))
        if is_commit and self._commits() == before:  # An old commit, which was reported.
            line = ""
        if line and line != self._last:
            self._last = line
            self._progress(line)
        if is_commit:
            self._after(event.task)

    @override
    def waiting(self) -> None:
        super().waiting()  # Whoever is sent away before has shown no token.
        self._checked_in()

    def _commits(self) -> int:
        return sum(task.committed + task.skipped for task in self.tasks.values())


_CONTRADICTIONS = {
    "participation/contradicting_reports": "reports against the declared participation",
    "participation/unknown_rounds": "rounds with impossible participation histograms",
}


def _line(event: Any, served: population_lib.Population) -> str:
    """Describes an event in a line; returns "" for an event of no interest."""
    match event:
        case events.RoundReleased():
            figures = [f"{event.metrics.get('devices/reports', '?')} reports"]
            figures += [
                f"{short} {event.metrics[label]:.4g}"
                for label, short in _shown(event.metrics)
                if isinstance(event.metrics[label], (int, float))
            ]
            figures += [
                f"{event.metrics[label]} {what} so far"
                for label, what in _CONTRADICTIONS.items()
                if event.metrics.get(label)
            ]
            done = f"round {event.round_index + 1} of {served.task(event.task).num_rounds}"
            return f"{event.task}: {done} committed: {', '.join(figures)}."
        case events.RoundSkipped():
            done = f"round {event.round_index + 1} of {served.task(event.task).num_rounds}"
            return f"{event.task}: {done} skipped: nothing of it is released."
        case events.RoundLost():
            reason = event.reason.removesuffix(".")
            return f"{event.task}: round {event.round_index + 1} abandoned: {reason}."
        case events.TooFewDevices():
            return f"{event.task}: {served.task(event.task).shortage(event)}"
        case events.PartyAway():
            return f"{event.task}: {served.task(event.task).wait_for_parties(event)}"
        case events.StoreFailed():
            return f"The store fails: {event.reason}"
    return ""


def _shown(metrics: Any) -> list[tuple[str, str]]:
    """Returns the labels of metrics to show, and their names in a line."""
    losses = [(label, "loss") for label in metrics if label.endswith("/loss")][:1]
    return losses + ([("privacy/epsilon", "ε so far")] if "privacy/epsilon" in metrics else [])


def folder_for(store: str, given: str | None) -> server_folder_lib.ServerFolder:
    """Returns the server's folder: beside the files of a store in a folder, unless one is named.

    It raises ValueError if none is named, and the store is in a database elsewhere.
    """
    if given is None and "://" in store:
        raise validation.UsageError(
            f"--store {store.partition('://')[0]}://... is no folder: name one for the server's "
            "certificate and keys with --server-folder."
        )
    return server_folder_lib.of(given or pathlib.Path(store) / "server")
