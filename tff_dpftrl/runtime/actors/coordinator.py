"""The Coordinator: leads a population as long as it holds the lease."""

from __future__ import annotations

import collections
import dataclasses
import random

from tff_dpftrl.runtime.actors import actor, messages, population, roles
from tff_dpftrl.runtime.store import interface

_TICK = "heartbeat"
_LONGEST_PAUSE = 32  # Heartbeats between two attempts while the store makes no commit.


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """The attempt that runs."""

    address: str
    task: str
    round_index: int
    deadline: float


class Coordinator(actor.Actor):
    """Chooses tasks, has devices chosen, and has one attempt at a round made after another.

    One attempt runs at a time, while the devices of the next one are chosen. Everything it
    knows is from the store; when it dies, the next one reads the same.
    """

    def __init__(
        self,
        address: str,
        served: population.Population,
        selectors: tuple[str, ...],
        keeper: str,
        randomness: random.Random,
    ):
        """See `cast.Cast.build`."""
        super().__init__(address)
        self._served = served
        self._selectors = selectors
        self._keeper = keeper
        self._random = randomness
        self._started_at = 0.0
        self._epoch = 0  # While it does not lead.
        self._lease_ends = 0.0
        self._commits: dict[str, interface.Commit] = {}
        self._is_reading = False
        self._request = 0
        self._abandoned: collections.Counter[str] = collections.Counter()
        self._attempt: _Attempt | None = None
        self._not_stored = 0  # Attempts since the last commit.
        self._paused_until = 0.0
        self._serial = 0
        self._forwards: dict[str, int] = {}  # The last serial that each Selector was sent.
        self._next: population.Task | None = None  # Whose devices are being chosen.
        self._opened_at = 0.0
        self._opening: messages.SelectionOpened | None = None  # What the observer was told.
        self._waiting: dict[str, int] = {}
        self._is_stopped = False

    def _begin(self) -> None:
        self._started_at = self.now
        self.send(self._keeper, messages.AcquireLease(self.address, self.now))
        self.after(self._served.heartbeat_seconds, _TICK)

    def _receive(self, message: object) -> None:
        if self._is_stopped:
            return
        if self._epoch and self.now >= self._lease_ends:
            self._stop("the lease has ended")
            return
        match message:
            case str() if message == _TICK:
                self._tick()
            case messages.LeaseGranted():
                self._granted(message)
            case messages.LeaseRefused():
                if message.epoch == self._epoch:
                    self._stop("the lease is lost")
            case messages.CommitsRead():
                self._read(message)
            case messages.DevicesWaiting():
                self._hear_who_waits(message)
            case messages.RoundCommitted():
                self._committed(message)
            case messages.RoundAbandoned():
                if message.not_stored:
                    self._pause()
                self._lose_attempt(message.attempt, message.reason, message.counts)
            case messages.Lost():
                self._lose_attempt(message.address, "its Master Aggregator is lost", {})
            case messages.Shutdown():
                if self._epoch:
                    self.send(self._keeper, messages.ReleaseLease(self.address, self._epoch))
                self._stop("the server stops")
            case _:
                raise self._unknown(message)

    # The lease.

    def _granted(self, message: messages.LeaseGranted) -> None:
        lease_ends = message.asked_at + self._served.lease_seconds
        if self._epoch:
            if message.epoch == self._epoch:
                self._lease_ends = max(self._lease_ends, lease_ends)
            else:  # It held the lease twice: nobody can tell what happened in between.
                self._stop("the lease is of another epoch")
        elif self.now < lease_ends:
            self._epoch = message.epoch
            self._lease_ends = lease_ends
            self._ask_for_commits()
            self._tell_selectors()

    def _stop(self, reason: str) -> None:
        self._is_stopped = True
        if self._attempt is not None:
            self.send(self._attempt.address, messages.AbandonRound(reason))
        self.stop(self.address)

    def _tick(self) -> None:
        if not self._epoch:
            if self.now - self._started_at >= self._served.lease_seconds:
                self._stop("nobody answered")
                return
            self.send(self._keeper, messages.AcquireLease(self.address, self.now))
        else:
            self.send(self._keeper, messages.RenewLease(self.address, self._epoch, self.now))
            attempt = self._attempt
            if attempt is not None and self.now >= attempt.deadline:
                self.send(attempt.address, messages.AbandonRound("its time is over"))
                self._lose_attempt(attempt.address, "its time is over", {})
            elif self._is_reading:
                self._ask_for_commits()
            serial = self._serial
            self._begin_round()
            if serial == self._serial:  # Otherwise they were told.
                self._tell_selectors()
        self.after(self._served.heartbeat_seconds, _TICK)

    # What is committed.

    def _ask_for_commits(self) -> None:
        self._is_reading = True
        self._request += 1
        names = tuple(task.name for task in self._served.tasks)
        self.send(self._keeper, messages.ReadCommits(self.address, self._request, names))

    def _read(self, message: messages.CommitsRead) -> None:
        if not self._is_reading or message.request != self._request:
            return
        self._is_reading = False
        if not self._commits:  # From now on devices are wanted.
            self.send(messages.OBSERVER, messages.Leading(self._served.name, self._epoch))
        for commit in message.commits:
            self._take(commit)
        self._choose_next()

    def _take(self, commit: interface.Commit) -> bool:
        """Notes a commit; returns whether it was news."""
        known = self._commits.get(commit.task)
        if known is not None and known.rounds_done >= commit.rounds_done:
            return False
        self._commits[commit.task] = commit
        self._not_stored, self._paused_until = 0, 0.0
        if commit.rounds_done:
            self.send(
                messages.OBSERVER,
                messages.RoundReleased(
                    commit.task,
                    commit.rounds_done - 1,
                    commit.metrics.get("attempt", ""),
                    commit.metrics,
                ),
            )
        attempt = self._attempt
        if attempt and (attempt.task, attempt.round_index) == (
            commit.task,
            commit.rounds_done - 1,
        ):
            if commit.metrics.get("attempt") != attempt.address:
                self.send(attempt.address, messages.AbandonRound("the round is committed"))
            self._attempt = None
        return True

    def _committed(self, message: messages.RoundCommitted) -> None:
        if message.epoch == self._epoch and self._take(message.commit):
            self._choose_next()

    # Tasks, selection, attempts.

    def _open_selection(self) -> None:
        """Opens the selection for the task that is furthest behind its share."""
        runs = None if self._attempt is None else self._attempt.task

        def share(task: population.Task) -> float:
            turns = self._commits[task.name].rounds_done + self._abandoned[task.name]
            return (turns + (task.name == runs)) / task.weight

        open_tasks = [
            task for task in self._served.tasks if not task.is_over(self._commits[task.name])
        ]
        chosen = min(open_tasks, key=share, default=None)
        if chosen is not self._next or self._next is None:
            self._next = chosen
            self._opened_at = self.now
            self._waiting.clear()
        self._tell_opening(runs)

    def _tell_opening(self, runs: str | None) -> None:
        opening = messages.SelectionOpened("", 0)
        if self._next is not None:
            name = self._next.name
            round_index = self._commits[name].rounds_done + (name == runs)
            opening = messages.SelectionOpened(name, round_index)
        if opening != self._opening:
            self._opening = opening
            self.send(messages.OBSERVER, opening)

    def _choose_next(self) -> None:
        self._open_selection()
        self._tell_selectors()

    def _tell_selectors(self) -> None:
        wish = self._wish()
        for selector in self._selectors:
            self.send(selector, wish)

    def _wish(self) -> messages.SelectDevices:
        chosen = self._next
        accepting = chosen is not None and (chosen.pipelined or self._attempt is None)
        return messages.SelectDevices(
            self._epoch,
            self.address,
            "" if chosen is None else chosen.name,
            0 if chosen is None else chosen.rounds.wanted,
            accepting,
        )

    def _hear_who_waits(self, message: messages.DevicesWaiting) -> None:
        if message.epoch != self._epoch or self._next is None:
            return
        # While an attempt runs, a Selector may not have forwarded its devices yet.
        is_old = self._attempt is not None and message.serial < self._forwards.get(
            message.selector, 0
        )
        if message.task == self._next.name and not is_old:
            self._waiting[message.selector] = message.waiting
            self._begin_round()

    def _begin_round(self) -> None:
        """Begins an attempt if nothing stands in its way and enough devices wait."""
        task = self._next
        if task is None or self._attempt is not None or self._is_reading:
            return
        if self.now < self._paused_until:
            return
        waiting = sum(self._waiting.values())
        if waiting < task.rounds.wanted:
            if self.now - self._opened_at < task.rounds.selection_timeout:
                return
            if waiting < task.rounds.least:
                self._opened_at = self.now
                self.send(
                    messages.OBSERVER,
                    messages.TooFewDevices(task.name, waiting, task.rounds.least),
                )
                return
        self._make_attempt(task)

    def _make_attempt(self, task: population.Task) -> None:
        chosen = self._random.sample(
            list(self._waiting),
            min(task.rounds.wanted, sum(self._waiting.values())),
            counts=self._waiting.values(),
        )
        from_selector = collections.Counter(chosen)
        self._serial += 1
        commit = self._commits[task.name]
        address = f"{self.address}/round/{self._serial}"
        model = self._commits[task.model_of or task.name].model
        role = roles.MasterAggregatorRole(
            self.address, self._epoch, commit, model, frozenset(from_selector)
        )
        self.spawn(address, role)
        self._attempt = _Attempt(address, task.name, commit.rounds_done, self.now + task.longest)
        began = messages.RoundBegan(task.name, commit.rounds_done, address, len(chosen))
        self.send(messages.OBSERVER, began)
        self._next = None
        self._open_selection()
        wish = self._wish()
        for selector in self._selectors:
            count = from_selector[selector]
            if count:
                self._forwards[selector] = self._serial
                forward = messages.ForwardDevices(
                    self._epoch, self._serial, address, task.name, count, wish
                )
                self.send(selector, forward)
            else:
                self.send(selector, wish)

    def _pause(self) -> None:
        """Begins no attempt for a while: each costs devices a participation, as on a full disk."""
        pause = min(2**self._not_stored, _LONGEST_PAUSE) * self._served.heartbeat_seconds
        self._paused_until = self.now + pause
        self._not_stored += 1

    def _lose_attempt(self, address: str, reason: str, counts: dict[str, int]) -> None:
        attempt = self._attempt
        if attempt is None or attempt.address != address:
            return
        self._attempt = None
        self._abandoned[attempt.task] += 1
        self.send(
            messages.OBSERVER,
            messages.RoundLost(attempt.task, attempt.round_index, address, reason, counts),
        )
        # Its commit may have been made, or be on its way: only the store knows.
        self._ask_for_commits()
