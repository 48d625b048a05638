"""Sees all that is committed and all that leaves the server, and notes what breaks a law."""

from __future__ import annotations

import collections
import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any

from typing_extensions import override

from tff_dpftrl.runtime.actors import events, messages, population
from tff_dpftrl.runtime.store import interface
from verification.schedules import toy_task

_MASKED_VECTOR = 2  # Step of a secure sum from which on a device's report may be in it.
_NOISE = 1  # Step in which a noise party sends its noise.


class Law(enum.Enum):
    """Laws that hold in every schedule."""

    ONE_OWNER = "two Coordinators led the population under one epoch"
    GROWING_EPOCHS = "an epoch was given that is not larger than all before"
    FRESH_EPOCH = "a stale epoch has committed"
    ONE_COMMIT = "a round was committed twice, or out of order"
    COUNTED_ONCE = "a report is in a sum more than once"
    ENOUGH_REPORTS = "a sum has too few or too many reports"
    EXACT_COUNT = "a round counts another number of reports than its sum holds"
    EXACT_SUM = "a sum is of others than those that have sent their vectors for it"
    COMMIT_FIRST = "a result left the server that is not the committed one"
    ONE_ATTEMPT = "the reports of two attempts at a round were summed"
    OWN_DEVICES = "a sum has a device of another population"
    NOISE_ONCE = "a noise party has sent the noise of one row to two attempts"
    OWN_NOISE = "a round was committed with the noise of another round"
    SEPARATION = "a device is in two released rounds that are closer than the task allows"
    FEW_SKIPS = "more rounds were skipped in a row than devices have to rest"
    PROGRESS = "no round was released in time after the faults ended"


class Watch:
    """The books of one schedule, kept apart from all that the actors and the store know.

    Attributes:
      num_commits: How many rounds were committed, of all tasks.
      broken: Laws that were broken, with what happened, in order.
      seen: How often things happened, by name.
    """

    def __init__(self, served: population.Population, members: Iterable[int]):
        """Begins with empty books.

        Args:
          served: The population.
          members: Numbers of its devices.
        """
        self._served = served
        self._members = frozenset(map(str, members))
        self._owners: dict[int, str] = {}
        self._leaders: dict[int, str] = {}
        self._noised_by: dict[tuple[str, int], str] = {}  # Attempts by task and round.
        self._committed: dict[tuple[str, int], str] = {}
        self._known_good: set[str] = set()
        self._masked: dict[str, set[str]] = collections.defaultdict(set)
        self._rounds: dict[str, int] = {}  # Indices by attempt.
        self._noised: dict[tuple[str, int], str] = {}  # Attempts by noise party and row.
        self._notes = {
            messages.Configure: self._note_configure,
            events.RoundBegan: self._note_attempt,
            events.RoundReleased: self._note_release,
            messages.SelectDevices: self._note_leader,
            messages.ForwardDevices: self._note_leader,
            messages.CommitRound: self._note_result,
            messages.ReportRefused: self._note_refused_report,
            messages.SecureSumMessage: self._note_secure_sum,
            messages.PartialSum: self._note_groups,
            events.RoundLost: self._note_kind,
            messages.CommitRefused: self._note_kind,
        }
        self._done: collections.Counter[str] = collections.Counter()
        self._skips: collections.Counter[tuple[str, int]] = collections.Counter()
        self._last_round: dict[tuple[str, str], int] = {}
        self.num_commits = 0
        self.broken: list[tuple[Law, str]] = []
        self.seen: collections.Counter[str] = collections.Counter()

    def rounds_committed(self, task: str) -> int:
        """Returns how many rounds of a task are committed that were not skipped."""
        return self.seen[f"rounds of {task}"]

    def _break(self, law: Law, what: str) -> None:
        self.broken.append((law, what))

    def leased(self, lease: interface.Lease) -> None:
        """Notes a lease that the store gave."""
        owner = self._owners.get(lease.epoch)
        if owner is None:
            if lease.epoch <= max(self._owners, default=0):
                self._break(Law.GROWING_EPOCHS, f"{lease.owner} got epoch {lease.epoch}")
            self._owners[lease.epoch] = lease.owner
            self.seen["leases"] += 1
        elif owner != lease.owner:
            self._break(Law.ONE_OWNER, f"epoch {lease.epoch} of {owner} and {lease.owner}")

    def committed(self, task: str, round_index: int, epoch: int, metrics: Mapping) -> None:
        """Notes a commit that the store made."""
        latest = max(self._owners, default=0)
        if epoch != latest:
            self._break(Law.FRESH_EPOCH, f"round {round_index}: epoch {epoch}, not {latest}")
        if round_index != self._done[task]:
            self._break(Law.ONE_COMMIT, f"round {round_index} of {task}")
        self._done[task] += 1
        self.num_commits += 1
        if metrics.get(population.SKIPPED):
            self.seen[f"skipped rounds of {task}"] += 1
            self._skips[task, epoch] += 1
            if self._skips[task, epoch] > self._served.task(task).min_sep:
                self._break(Law.FEW_SKIPS, f"round {round_index} of {task}")
            return
        self.seen[f"rounds of {task}"] += 1
        text = metrics["noised"]
        result = toy_task.Noised.parse(text)
        devices, parties = result.devices, len(self._served.task(task).noise_parties)
        if parties:
            rows = "+".join([str(round_index)] * parties)
            if result.noise != f"{toy_task.NOISE_ROWS}{rows}":
                self._break(Law.OWN_NOISE, text)
        if len(set(devices)) != len(devices):
            self._break(Law.COUNTED_ONCE, text)
        if any(device.partition(".")[0] not in self._members for device in devices):
            self._break(Law.OWN_DEVICES, text)
        rounds = self._served.task(task).rounds
        if not rounds.least <= len(devices) <= rounds.wanted:
            self._break(Law.ENOUGH_REPORTS, text)
        if metrics["devices/reports"] != len(devices):
            self._break(Law.EXACT_COUNT, text)
        is_secure = self._served.task(task).secure_sum is not None
        if is_secure and not self._masked[metrics["attempt"]].issuperset(devices):
            self._break(Law.EXACT_SUM, text)
        for device in devices:
            owner = task, device.partition(".")[0]
            stride = round_index - self._last_round.get(owner, -math.inf)
            if stride < self._served.task(task).min_sep:
                self._break(Law.SEPARATION, f"{text}: device {owner[1]} after {stride}")
            self._last_round[owner] = round_index
        self._committed[task, round_index] = text

    def sent(self, sender: str, message: object) -> None:
        """Notes a message on its way, before anything can happen to it."""
        note = self._notes.get(type(message))
        if note is not None:
            note(sender, message)

    def _note_configure(self, sender: str, message: messages.Configure) -> None:
        del sender
        self._rounds[message.attempt] = message.round_index
        if message.model:
            self._leaves(message.model.decode())

    def _note_attempt(self, sender: str, message: events.RoundBegan) -> None:
        del sender
        for task, epoch in list(self._skips):
            if task == message.task:
                del self._skips[task, epoch]

    def _note_release(self, sender: str, message: events.RoundReleased) -> None:
        del sender
        self._leaves(message.metrics["noised"])

    def _note_leader(
        self, sender: str, message: messages.SelectDevices | messages.ForwardDevices
    ) -> None:
        leader = self._leaders.setdefault(message.epoch, sender)
        if leader != sender:
            self._break(Law.ONE_OWNER, f"epoch {message.epoch}: {leader} and {sender}")

    def _note_result(self, sender: str, message: messages.CommitRound) -> None:
        if not message.metrics.get(population.SKIPPED):
            first = self._noised_by.setdefault((message.task, message.round_index), sender)
            if first != sender:
                self._break(Law.ONE_ATTEMPT, f"round {message.round_index}: {first} and {sender}")

    def _note_refused_report(self, sender: str, message: messages.ReportRefused) -> None:
        del sender
        self.seen[f"reports refused: {message.refusal.value}"] += 1

    def _note_secure_sum(self, sender: str, message: messages.SecureSumMessage) -> None:
        if message.step == _MASKED_VECTOR:
            self._masked[message.attempt].add(sender)
        name = sender.partition(".")[0]
        if message.step == _NOISE and name not in self._members:
            row = self._rounds[message.attempt]
            if self._noised.setdefault((name, row), message.attempt) != message.attempt:
                self._break(Law.NOISE_ONCE, f"row {row} of {name}")

    def _note_groups(self, sender: str, message: messages.PartialSum) -> None:
        del sender
        for outcome in ("summed_groups", "lost_groups"):
            self.seen[outcome] += message.counts.get(outcome, 0)

    def _note_kind(self, sender: str, message: object) -> None:
        del sender
        self.seen[type(message).__name__] += 1

    def _leaves(self, text: str) -> None:
        if text in self._known_good:
            return
        left = toy_task.Noised.parse(text)
        if self._committed.get((left.task, left.round_index)) != text:
            self._break(Law.COMMIT_FIRST, text)
        else:
            self._known_good.add(text)

    def no_progress(self, what: str) -> None:
        """Notes that nothing was committed in time."""
        self._break(Law.PROGRESS, what)


class WatchedStore(interface.Store):
    """A store whose leases and commits are noted in the books of their populations' watches."""

    def __init__(self, store: interface.Store, watches: Mapping[str, Watch]):
        """Watches a store.

        Args:
          store: The store.
          watches: The books, by population.
        """
        self._store = store
        self._watches = watches

    @override
    def acquire(
        self, population: str, owner: str, *, now: float, duration: float
    ) -> interface.Lease:
        lease = self._store.acquire(population, owner, now=now, duration=duration)
        self._watches[population].leased(lease)
        return lease

    @override
    def renew(
        self, population: str, owner: str, epoch: int, *, now: float, duration: float
    ) -> interface.Lease:
        return self._store.renew(population, owner, epoch, now=now, duration=duration)

    @override
    def release(self, population: str, owner: str, epoch: int) -> None:
        self._store.release(population, owner, epoch)

    @override
    def lease(self, population: str) -> interface.Lease | None:
        return self._store.lease(population)

    @override
    def add_task(
        self, population: str, task: str, *, model: bytes, state: bytes
    ) -> interface.Commit:
        return self._store.add_task(population, task, model=model, state=state)

    @override
    def tasks(self, population: str) -> tuple[str, ...]:
        return self._store.tasks(population)

    @override
    def last_commit(self, population: str, task: str) -> interface.Commit:
        return self._store.last_commit(population, task)

    @override
    def begin_attempt(self, population: str, task: str, **values: Any) -> None:
        self._store.begin_attempt(population, task, **values)

    @override
    def commit(
        self,
        population: str,
        task: str,
        *,
        round_index: int,
        epoch: int,
        metrics: Mapping[str, Any],
        **values: Any,
    ) -> interface.Commit:
        done = self._store.commit(
            population, task, round_index=round_index, epoch=epoch, metrics=metrics, **values
        )
        self._watches[population].committed(task, round_index, epoch, metrics)
        return done

    @override
    def history(self, population: str, task: str) -> list[dict[str, Any]]:
        return self._store.history(population, task)

    @override
    def close(self) -> None:
        self._store.close()
