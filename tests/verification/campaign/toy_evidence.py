"""Evidence of rounds that were committed without a server, in order or with a mistake."""

from __future__ import annotations

import hashlib

from tff_dpftrl.runtime.store import sql
from verification.campaign import (
    checks,
    database_log,
    devices,
    faults,
    stage,
    supervisor,
    tiny_tasks,
)

SEED = 5
FAULT = faults.draw(3, lease_seconds=2.5)


class Play:
    """A campaign of which every step is said."""

    def __init__(self, folder, store_type=sql.SqlStore, store_url=""):
        self.place = stage.Stage(folder)
        self.place.make(SEED, store_url)
        self.store = store_type(self.place.store)
        self.records = []
        self.told = []
        self.leading = []
        self.epoch = 0
        self._now = 0.0
        self._reports = 0

    def lead(self, owner):
        """Has somebody lead, once the lease before has ended."""
        self._now += 10.0
        lease = self.store.acquire(tiny_tasks.POPULATION, owner, now=self._now, duration=5.0)
        self.epoch = lease.epoch
        self.leading.append((tiny_tasks.POPULATION, lease.epoch))

    def last(self, task=tiny_tasks.CLEAR):
        return self.store.last_commit(tiny_tasks.POPULATION, task)

    def note(self, what, device, attempt, number, task=tiny_tasks.CLEAR, commit=None):
        commit = commit or self.last(task)
        model = hashlib.sha256(commit.model).hexdigest()
        record = devices.Record(what, device, task, commit.rounds_done, attempt, number, model)
        self.records.append(record)
        return record

    def attempt(self, attempt, cohort, task=tiny_tasks.CLEAR, *, times=1, commit=None):
        """A noised result; its devices have got the model and sent their reports."""
        if commit is None:
            commit = self.last(task)
            self.store.begin_attempt(
                tiny_tasks.POPULATION,
                task,
                round_index=commit.rounds_done,
                epoch=self.epoch,
                attempt=attempt,
            )
        total = tiny_tasks.VectorSum().zero()
        for device in cohort:
            self.note(devices.TOLD, device, attempt, 0, task, commit)
            self._reports += 1
            self.note(devices.SENT, device, attempt, self._reports, task, commit)
            own = tiny_tasks.sentinel(SEED, task, device)
            for _ in range(times):
                vector = tiny_tasks.vector(own, device, self._reports)
                total = tiny_tasks.VectorSum().merge(total, vector)
            self.note(devices.ACCEPTED, device, attempt, self._reports, task, commit)
        result = tiny_tasks.NoisyStep().apply(total, len(cohort), commit.model, commit.state)
        counts = {"devices/reports": len(cohort), "devices/lost_aggregators": 0}
        return commit, result, {**result.metrics, "attempt": attempt, **counts}

    def commit(self, made, *, epoch=None):
        """Commits a result."""
        before, result, metrics = made
        return self.store.commit(
            tiny_tasks.POPULATION,
            before.task,
            round_index=before.rounds_done,
            epoch=self.epoch if epoch is None else epoch,
            model=result.model,
            state=result.state,
            metrics=metrics,
            now=self._now,
        )

    def release(self, made):
        """An observer hears of a result."""
        before, _, metrics = made
        self.told.append(
            checks.Told("observer", before.task, before.rounds_done + 1, metrics["model"])
        )

    def round(self, attempt, cohort, task=tiny_tasks.CLEAR):
        """A whole round."""
        made = self.attempt(attempt, cohort, task)
        self.commit(made)
        self.release(made)

    def skip(self, task=tiny_tasks.CLEAR):
        """A skipped round."""
        commit = self.last(task)
        result = tiny_tasks.NoisyStep().skip(commit.model, commit.state)
        self.commit((commit, result, result.metrics))

    def good_rounds(self):
        """Rounds of two leaders, as they should be."""
        self.lead("first")
        self.round("a", (0, 1, 2))
        self.round("b", (3, 4, 5), tiny_tasks.SECURE)
        self.lead("second")
        self.round("c", (6, 7, 8))
        self.round("d", (0, 1, 9))

    def verdict(self, outcomes=(), **left):
        """What comes of it."""
        self.store.close()
        left = supervisor.Campaign(self.place, SEED, 30.0, list(outcomes), self.records, **left)
        evidence = checks.collect(left)
        evidence.told = [*evidence.told, *self.told]
        evidence.leading = self.leading
        return checks.judge(evidence)


def broken(verdict):
    return {law for law, _ in verdict.broken}


def lines(place):
    read = database_log.Reader(place.store)
    try:
        return read.lines_after(0)
    finally:
        read.close()
