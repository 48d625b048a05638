"""A store in the memory of one process, for simulated schedules that run by the thousand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from tff_dpftrl.runtime.store import contents, interface


class MemoryStore(interface.Store):
    """A store that lives as long as its process; for one thread."""

    def __init__(self):
        self._leases: dict[str, interface.Lease] = {}
        self._commits: dict[tuple[str, str], interface.Commit] = {}
        self._history: dict[tuple[str, str], list[dict[str, Any]]] = {}

    @override
    def acquire(
        self, population: str, owner: str, *, now: float, duration: float
    ) -> interface.Lease:
        interface.check_lease(population, owner, now, duration)
        last = self._leases.get(population)
        epoch = 1 if last is None else last.epoch + 1
        if last is not None and interface.is_held(last, now):
            if last.owner != owner:
                raise interface.LeaseHeld(last, now)
            epoch = last.epoch
        return self._keep(interface.Lease(population, owner, epoch, now + duration))

    def _keep(self, lease: interface.Lease) -> interface.Lease:
        self._leases[lease.population] = lease
        return lease

    @override
    def renew(
        self, population: str, owner: str, epoch: int, *, now: float, duration: float
    ) -> interface.Lease:
        interface.check_lease(population, owner, now, duration)
        last = self._leases.get(population)
        if (
            last is None
            or (last.owner, last.epoch) != (owner, epoch)
            or not interface.is_held(last, now)
        ):
            raise interface.LeaseLost(population, owner, epoch)
        return self._keep(dataclasses.replace(last, expires_at=now + duration))

    @override
    def release(self, population: str, owner: str, epoch: int) -> None:
        last = self._leases.get(population)
        if last is not None and (last.owner, last.epoch) == (owner, epoch):
            self._keep(dataclasses.replace(last, owner=""))

    @override
    def lease(self, population: str) -> interface.Lease | None:
        return self._leases.get(population)

    @override
    def add_task(
        self, population: str, task: str, *, model: bytes, state: contents.Serialised
    ) -> interface.Commit:
        if (population, task) in self._commits:
            raise interface.TaskExists(population, task)
        added = interface.Commit(task, 0, 0, model, bytes(state))
        self._commits[population, task] = added
        self._history[population, task] = []
        return added

    @override
    def tasks(self, population: str) -> tuple[str, ...]:
        return tuple(sorted(task for owner, task in self._commits if owner == population))

    @override
    def last_commit(self, population: str, task: str) -> interface.Commit:
        try:
            return self._commits[population, task]
        except KeyError:
            raise interface.UnknownTask(population, task) from None

    @override
    def begin_attempt(
        self, population: str, task: str, *, round_index: int, epoch: int, attempt: str
    ) -> None:
        interface.check_commit(round_index, epoch)
        last = self._commit_under_lease(population, task, round_index, epoch)
        if last.attempt not in ("", attempt):
            raise interface.RoundUsedUp(task, round_index)
        self._commits[population, task] = dataclasses.replace(last, attempt=attempt)

    def _commit_under_lease(
        self, population: str, task: str, round_index: int, epoch: int
    ) -> interface.Commit:
        """Returns the last commit, after which the round may be made under the epoch."""
        lease = self._leases.get(population)
        latest = 0 if lease is None else lease.epoch
        if epoch != latest:
            raise interface.StaleEpoch(population, epoch, latest)
        last = self.last_commit(population, task)
        if round_index != last.rounds_done:
            raise interface.RoundConflict(task, round_index, last.rounds_done)
        return last

    @override
    def commit(
        self,
        population: str,
        task: str,
        *,
        round_index: int,
        epoch: int,
        model: bytes,
        state: contents.Serialised,
        metrics: Mapping[str, Any],
        now: float,
    ) -> interface.Commit:
        interface.check_commit(round_index, epoch)
        text = interface.metrics_text(metrics)
        self._commit_under_lease(population, task, round_index, epoch)
        kept = json.loads(text)
        done = interface.Commit(task, round_index + 1, epoch, model, bytes(state), kept)
        self._commits[population, task] = done
        self._history[population, task].append(
            {"task": task, "round": round_index, "epoch": epoch, "committed_at": now, **kept}
        )
        return done

    @override
    def history(self, population: str, task: str) -> list[dict[str, Any]]:
        self.last_commit(population, task)
        return [dict(row) for row in self._history[population, task]]

    @override
    def close(self) -> None:
        pass
