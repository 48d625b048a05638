"""The actor in front of the store: leases and commits as messages."""

from __future__ import annotations

from collections.abc import Callable

from tff_dpftrl.runtime.actors import actor, events, messages, population
from tff_dpftrl.runtime.store import holders, interface

_YIELDS = "another server leads a population that goes before this one"


class StoreActor(actor.Actor):
    """Carries out requests to the store, one at a time, and answers them.

    Several actors may share one store: the store decides. Each step waits for the disk; an engine
    that must not wait runs the actor in a thread of its own.
    """

    def __init__(
        self,
        address: str,
        served: population.Population,
        store: interface.Store,
        yields: Callable[[], bool] = lambda: False,
    ):
        """Stores the parts; `factory.ActorFactory` documents them."""
        super().__init__(address)
        self._yields = yields
        self._served = served
        self._store = store

    def _begin(self) -> None:
        pass

    def _receive(self, message: object) -> None:
        try:
            self._carry_out(message)
        except (interface.StoreError, interface.UnknownTask) as error:
            # The sender asks again, or gives up at its time-out.
            self.send(events.OBSERVER, events.StoreFailed(str(error)))
            if isinstance(message, (messages.BeginAttempt, messages.CommitRound)):
                self.send(message.reply_to, messages.CommitRefused(str(error)))

    def _carry_out(self, message: object) -> None:
        match message:
            case messages.AcquireLease():
                self._acquire(message)
            case messages.RenewLease():
                self._renew(message)
            case messages.ReleaseLease():
                self._release(message)
            case messages.ReadCommits():
                commits = tuple(
                    self._store.last_commit(self._served.name, task) for task in message.tasks
                )
                self.send(message.reply_to, messages.CommitsRead(message.request, commits))
            case messages.BeginAttempt():
                self._begin_attempt(message)
            case messages.CommitRound():
                self._commit(message)
            case _:
                raise self._unknown(message)

    def _acquire(self, message: messages.AcquireLease) -> None:
        if self._yields():
            self.send(message.owner, messages.LeaseRefused(0, _YIELDS))
            return
        try:
            lease = self._lease_for(holders.name_of(message.owner))
        except interface.LeaseHeld as held:
            self.send(message.owner, messages.LeaseRefused(0, str(held)))
        else:
            self.send(message.owner, messages.LeaseGranted(lease.epoch, message.asked_at))

    def _lease_for(self, holder: str) -> interface.Lease:
        """Acquires the lease, also from a holder that has ended without releasing it."""
        lease = self._store.lease(self._served.name)
        if lease is not None and holders.is_gone(lease.owner):
            self._store.release(self._served.name, lease.owner, lease.epoch)
        return self._store.acquire(
            self._served.name, holder, now=self.now, duration=self._served.lease_seconds
        )

    def _release(self, message: messages.ReleaseLease | messages.RenewLease) -> None:
        holder = holders.name_of(message.owner)
        self._store.release(self._served.name, holder, message.epoch)

    def _renew(self, message: messages.RenewLease) -> None:
        if self._yields():
            self._release(message)
            self.send(message.owner, messages.LeaseRefused(message.epoch, _YIELDS))
            return
        try:
            self._store.renew(
                self._served.name,
                holders.name_of(message.owner),
                message.epoch,
                now=self.now,
                duration=self._served.lease_seconds,
            )
        except interface.LeaseLost as lost:
            self.send(message.owner, messages.LeaseRefused(message.epoch, str(lost)))
        else:
            self.send(message.owner, messages.LeaseGranted(message.epoch, message.asked_at))

    def _begin_attempt(self, message: messages.BeginAttempt) -> None:
        try:
            self._store.begin_attempt(
                self._served.name,
                message.task,
                round_index=message.round_index,
                epoch=message.epoch,
                attempt=message.reply_to,
            )
        except ValueError as refusal:  # Refused by a law of the store.
            self.send(message.reply_to, messages.CommitRefused(str(refusal)))
        else:
            self.send(message.reply_to, messages.AttemptBegun())

    def _commit(self, message: messages.CommitRound) -> None:
        try:
            commit = self._store.commit(
                self._served.name,
                message.task,
                round_index=message.round_index,
                epoch=message.epoch,
                model=message.model,
                state=message.state,
                metrics=message.metrics,
                now=self.now,
            )
        except ValueError as refusal:  # Refused by a law of the store, or for its metrics.
            self.send(message.reply_to, messages.CommitRefused(str(refusal)))
        else:
            self.send(message.reply_to, messages.RoundStored(commit))
