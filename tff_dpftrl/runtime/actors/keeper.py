"""The keeper of the store: leases and commits as messages."""

from __future__ import annotations

from tff_dpftrl.runtime.actors import actor, messages, population
from tff_dpftrl.runtime.store import interface


class Keeper(actor.Actor):
    """Asks the store, one question at a time, and answers.

    Several may keep one store: it is the store that decides. Each step waits for the disk;
    an engine that must not wait runs it in a thread of its own.
    """

    def __init__(self, address: str, served: population.Population, store: interface.Store):
        """See `cast.Cast.keeper`."""
        super().__init__(address)
        self._served = served
        self._store = store

    def _begin(self) -> None:
        pass

    def _receive(self, message: object) -> None:
        try:
            self._ask(message)
        except (interface.StoreError, interface.UnknownTask) as error:
            # Who asked asks again, or gives up when its time is over.
            self.send(messages.OBSERVER, messages.StoreFailed(str(error)))
            if isinstance(message, messages.CommitRound):
                self.send(message.reply_to, messages.CommitRefused(str(error)))

    def _ask(self, message: object) -> None:
        match message:
            case messages.AcquireLease():
                self._acquire(message)
            case messages.RenewLease():
                self._renew(message)
            case messages.ReleaseLease():
                self._store.release(self._served.name, message.owner, message.epoch)
            case messages.ReadCommits():
                commits = tuple(
                    self._store.last_commit(self._served.name, task) for task in message.tasks
                )
                self.send(message.reply_to, messages.CommitsRead(message.request, commits))
            case messages.CommitRound():
                self._commit(message)
            case _:
                raise self._unknown(message)

    def _acquire(self, message: messages.AcquireLease) -> None:
        try:
            lease = self._store.acquire(
                self._served.name,
                message.owner,
                now=self.now,
                duration=self._served.lease_seconds,
            )
        except interface.LeaseHeld as held:
            self.send(message.owner, messages.LeaseRefused(0, str(held)))
        else:
            self.send(message.owner, messages.LeaseGranted(lease.epoch, message.asked_at))

    def _renew(self, message: messages.RenewLease) -> None:
        try:
            self._store.renew(
                self._served.name,
                message.owner,
                message.epoch,
                now=self.now,
                duration=self._served.lease_seconds,
            )
        except interface.LeaseLost as lost:
            self.send(message.owner, messages.LeaseRefused(message.epoch, str(lost)))
        else:
            self.send(message.owner, messages.LeaseGranted(message.epoch, message.asked_at))

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
        except ValueError as refusal:  # By a law of the store, or for metrics it cannot keep.
            self.send(message.reply_to, messages.CommitRefused(str(refusal)))
        else:
            self.send(message.reply_to, messages.RoundStored(commit))
