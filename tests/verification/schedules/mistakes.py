"""Servers with a mistake planted in them, for schedules to find."""

from __future__ import annotations

import dataclasses
import math

from tff_dpftrl.runtime.actors import (
    aggregator,
    coordinator,
    events,
    factory,
    master_aggregator,
    merging_aggregator,
    messages,
    roles,
    secure_aggregator,
    selector,
)
from tff_dpftrl.runtime.store import interface
from tff_dpftrl.secure_sums import secure_sum_pb2, vectors
from verification import memory_store


def factory_with(role_type, actor_type):
    """An actor factory that builds the actors of a role as another class."""

    class Factory(factory.ActorFactory):
        def build(self, address, role, randomness):
            made = super().build(address, role, randomness)
            if isinstance(role, role_type) and issubclass(actor_type, type(made)):
                made.__class__ = actor_type
            return made

        def selector(self, address, randomness):
            made = super().selector(address, randomness)
            if role_type is selector.Selector:
                made.__class__ = actor_type
            return made

    return Factory


class CommitsWithoutLookingAtTheEpoch(memory_store.MemoryStore):
    def commit(self, population, task, *, epoch, **values):
        latest = self.lease(population).epoch
        return super().commit(population, task, epoch=latest, **values)


class CommitsWithoutLookingAtTheRound(memory_store.MemoryStore):
    def commit(self, population, task, *, round_index, **values):
        done = self.last_commit(population, task).rounds_done
        return super().commit(population, task, round_index=done, **values)


class ForgetsAttempts(memory_store.MemoryStore):
    def begin_attempt(self, population, task, **values):
        pass


class GivesTheSameEpochAgain(memory_store.MemoryStore):
    def _keep(self, lease):
        return super()._keep(dataclasses.replace(lease, epoch=1))


class ReleasesBeforeTheCommit(master_aggregator.MasterAggregator):
    def _try_to_commit(self):
        made = self._result
        commit = interface.Commit(
            made.task, made.round_index + 1, made.epoch, made.model, made.state, made.metrics
        )
        self.send(self._role.coordinator, messages.RoundCommitted(self.address, made.epoch, commit))
        super()._try_to_commit()


class ShowsMetricsBeforeTheCommit(master_aggregator.MasterAggregator):
    """An attempt that fails afterwards has shown what no commit has."""

    def _try_to_commit(self):
        made = self._result
        if not self._role.skips:
            self.send(
                events.OBSERVER,
                events.RoundReleased(made.task, made.round_index, self.address, made.metrics),
            )
        super()._try_to_commit()


class ComputesAgainForARetry(master_aggregator.MasterAggregator):
    """Shows the last result, and the store may have kept an earlier one."""

    def _step(self, compute):
        self._compute = compute
        super()._step(compute)

    def _try_to_commit(self):
        if self._tries:
            self._result = dataclasses.replace(self._result, model=self._compute().model)
        super()._try_to_commit()

    def _stored(self, message):
        commit = dataclasses.replace(message.commit, model=self._result.model)
        super()._stored(messages.RoundStored(commit))


class CountsSumsTwice(master_aggregator.MasterAggregator):
    def _merge(self, message):
        if message.aggregator not in self._awaited and message.aggregator in self._progress:
            self._awaited.add(message.aggregator)
        super()._merge(message)


class TakesTooFewReports(master_aggregator.MasterAggregator):
    def _finish(self):
        self._counts["reports"] += 2
        super()._finish()


class MergesSumsTwice(merging_aggregator.MergingAggregator):
    def _merge(self, message):
        if message.aggregator in self._progress:
            self._awaited.add(message.aggregator)
        super()._merge(message)


class CountsWhatItDoesNotMerge(merging_aggregator.MergingAggregator):
    def _merge(self, message):
        if message.aggregator not in self._awaited and self._awaited:
            self._counts.update(message.counts)
        super()._merge(message)


class CountsReportsTwice(aggregator.Aggregator):
    def _report(self, message):
        if message.device in self._reported:
            self._reported.discard(message.device)
            self._outstanding.add(message.device)
        super()._report(message)


class AddsVectorsThatComeAgain(secure_aggregator.SecureAggregator):
    def _check(self, message):
        is_again = self._steps.get(message.device) == message.step == 2
        if is_again and not self._is_over and message.content != b"\xff":
            read = secure_sum_pb2.ToServer.FromString(message.content)
            layout = self._task.secure_sum.layout
            self._group._sum.add(vectors.unpack(read.masked_vector.content, layout))
        super()._check(message)


class CountsWhoWasThere(secure_aggregator.SecureAggregator):
    """Says that those are in the sum who were there when it began."""

    def _close(self, total, survivors=()):
        super()._close(total, tuple(self._steps) if survivors else ())


class NeverReadsAgain(coordinator.Coordinator):
    def _lose_attempt(self, address, reason, counts, used_devices=True):
        was_reading = self._is_reading
        super()._lose_attempt(address, reason, counts, used_devices)
        self._is_reading = was_reading


class NeverGivesUp(coordinator.Coordinator):
    """Waits for a Master Aggregator that is dead."""

    def _make_attempt(self, task):
        super()._make_attempt(task)
        self._attempt = dataclasses.replace(self._attempt, deadline=math.inf)


class TriesTheSameRoundAgain(coordinator.Coordinator):
    """Makes the next attempt at the round whose devices have counted it already."""

    def _skip_used_round(self):
        pass


class SkipsWithoutEnd(coordinator.Coordinator):
    """Skips rounds as long as too few devices wait."""

    _num_resting = 10**6

    def _has_rested(self, task):
        return False


class DoesNotCareWhoLeads(selector.Selector):
    def _spawn_coordinator(self):
        if self.now < 10:
            super()._spawn_coordinator()


MASTER = roles.MasterAggregatorRole
MASTERS = [
    ReleasesBeforeTheCommit,
    ShowsMetricsBeforeTheCommit,
    ComputesAgainForARetry,
    CountsSumsTwice,
    TakesTooFewReports,
]
FACTORIES = {
    **{actor_type.__name__: factory_with(MASTER, actor_type) for actor_type in MASTERS},
    "CountsReportsTwice": factory_with(roles.AggregatorRole, CountsReportsTwice),
    "NeverReadsAgain": factory_with(roles.CoordinatorRole, NeverReadsAgain),
    "NeverGivesUp": factory_with(roles.CoordinatorRole, NeverGivesUp),
    "TriesTheSameRoundAgain": factory_with(roles.CoordinatorRole, TriesTheSameRoundAgain),
    "SkipsWithoutEnd": factory_with(roles.CoordinatorRole, SkipsWithoutEnd),
    "DoesNotCareWhoLeads": factory_with(selector.Selector, DoesNotCareWhoLeads),
}
MERGING_FACTORIES = {
    actor_type.__name__: factory_with(roles.MergingAggregatorRole, actor_type)
    for actor_type in (MergesSumsTwice, CountsWhatItDoesNotMerge)
}
SECURE_FACTORIES = {
    actor_type.__name__: factory_with(roles.AggregatorRole, actor_type)
    for actor_type in (AddsVectorsThatComeAgain, CountsWhoWasThere)
}
STORES = {
    store.__name__: store
    for store in (
        CommitsWithoutLookingAtTheEpoch,
        CommitsWithoutLookingAtTheRound,
        ForgetsAttempts,
        GivesTheSameEpochAgain,
    )
}
