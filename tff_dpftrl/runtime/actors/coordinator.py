"""The Coordinator: leads a population as long as it holds the lease."""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from collections.abc import Iterable, Mapping

from tff_dpftrl.runtime import exponential_backoff
from tff_dpftrl.runtime.actors import actor, events, experience, messages, population, roles
from tff_dpftrl.runtime.store import interface

_TICK = "heartbeat"
_SKIP_EXCHANGES = 6  # Exchanges with the store that a skipped round may take.
_GAPS = 8  # Multiple of the mean time between two arrivals after which none is expected.
_LONGEST_PAUSE = 32  # Heartbeats between two attempts while commits fail.


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """The running attempt at a round, or at skipping it."""

    address: str  # Address of its Master Aggregator.
    task: str
    round_index: int
    deadline: float  # Time at which the attempt is abandoned, in seconds.
    skips: bool


class Coordinator(actor.Actor):
    """Leader of a population: chooses tasks, opens selections and starts attempts at rounds.

    One attempt runs at a time, while the devices of the next one are selected. All that a
    Coordinator needs is in the store: when it dies, its successor reads the same.

    Devices of a failed attempt may have counted the round as a participation. The attempt therefore
    uses its round up: the round is committed as skipped, so that the devices' separations go on.
    The store has a note of the attempt, so that a successor does the same.

    A round is also skipped when too few devices wait while resting devices check in. At most
    `min_sep` rounds in a row are skipped for rests: then no device has to rest any more.

    Where a task names noise parties, a round waits until all of them are connected. A party keeps
    its own durable record of the rounds whose noise it has given, and names the next one at
    check-in. Earlier rounds are committed as skipped before an attempt begins. So a round whose
    noise has left a party uses its index up, even if all servers were killed meanwhile.
    """

    def __init__(
        self,
        address: str,
        served: population.Population,
        selectors: tuple[str, ...],
        store_address: str,
        randomness: random.Random,
    ):
        """Stores the parts; `factory.ActorFactory` documents them."""
        super().__init__(address)
        self._served = served
        self._selectors = selectors
        self._store_address = store_address
        self._random = randomness
        self._started_at = 0.0
        self._epoch = 0  # 0 while it does not lead.
        self._lease_ends = 0.0
        self._commits: dict[str, interface.Commit] = {}
        self._is_reading = False
        self._request = 0
        self._abandoned: collections.Counter[str] = (
            collections.Counter()
        )  # Attempts whose round is not skipped.
        self._skip_to: dict[str, int] = {}  # Rounds before which too few will have rested, by task.
        self._known_from: dict[str, int] = {}  # First rounds whose attempts are all known, by task.
        # Estimated numbers of devices that rest from attempts, by task and round.
        self._took_part: collections.Counter[tuple[str, int]] = collections.Counter()
        self._last_used: dict[str, int] = {}  # Last round that devices may have counted, by task.
        self._attempt: _Attempt | None = None
        self._experience = {task.name: experience.Experience(task.rounds) for task in served.tasks}
        self._not_stored = 0  # Attempts since the last commit.
        self._paused_until = 0.0
        self._serial = 0
        self._forwards: dict[str, int] = {}  # Serial of the last forward, by Selector.
        self._next: population.Task | None = None  # Task whose selection is open.
        self._opened_at = 0.0
        self._came_at = 0.0  # Time at which the last of the waiting devices had come.
        self._most_waiting = 0  # Largest number of waiting devices since the opening.
        self._waited_before = 0  # Number of waiting devices at the opening.
        self._opening: events.SelectionOpened | None = None  # The last one sent to the observer.
        self._waiting: dict[str, int] = {}  # Number of waiting devices, by Selector.
        self._heard: dict[str, float] = {}  # Time of the last answer, by Selector.
        self._parties: dict[str, tuple[messages.PartyReady, ...]] = {}  # By Selector.
        self._given: set[str] = set()  # Addresses of parties that were given to an attempt.
        self._away: events.PartyAway | None = None  # Found at the last heartbeat.
        self._said_away = 0  # Number of parties that the observer takes to be away.
        self._said_given: dict[str, int] = {}  # Rounds to skip up to, that the observer knows of.
        self._progress: events.SelectionProgress | None = None  # The last one sent.
        self._resting: dict[str, int] = {}  # Check-ins of resting devices, by Selector.
        self._resting_before: dict[str, int] = {}  # The same when the last attempt ended.
        self._free_since = 0.0  # Time at which the last attempt ended.
        self._is_stopped = False

    def _begin(self) -> None:
        self._started_at = self.now
        self.send(self._store_address, messages.AcquireLease(self.address, self.now))
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
                self._count_waiting(message)
            case messages.RoundCommitted():
                self._committed(message)
            case messages.RoundAbandoned():
                if message.not_stored:
                    self._pause()
                attempt = self._attempt
                if attempt and attempt.address == message.attempt:
                    key = (attempt.task, attempt.round_index)
                    self._took_part[key] -= message.counts.get("dropped", 0)
                if message.turnout and attempt and attempt.address == message.attempt:
                    self._experience[attempt.task].abandoned(message.turnout)
                self._lose_attempt(
                    message.attempt, message.reason, message.counts, message.used_devices
                )
            case messages.Lost():
                self._lose_attempt(message.address, "its Master Aggregator is lost", {})
            case messages.Shutdown():
                if self._epoch:
                    self.send(self._store_address, messages.ReleaseLease(self.address, self._epoch))
                self._stop("the server stops")
            case _:
                raise self._unknown(message)

    # The lease.

    def _granted(self, message: messages.LeaseGranted) -> None:
        lease_ends = message.asked_at + self._served.lease_seconds
        if self._epoch:
            if message.epoch == self._epoch:
                self._lease_ends = max(self._lease_ends, lease_ends)
            else:  # Between the two leases, another Coordinator may have led.
                self._stop("the lease is of another epoch")
        elif self.now < lease_ends:
            self._epoch = message.epoch
            self._lease_ends = lease_ends
            self._request_commits()
            self._notify_selectors()

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
            self.send(self._store_address, messages.AcquireLease(self.address, self.now))
        else:
            self.send(self._store_address, messages.RenewLease(self.address, self._epoch, self.now))
            attempt = self._attempt
            if attempt is not None and self.now >= attempt.deadline:
                self.send(attempt.address, messages.AbandonRound("its time is over"))
                self._lose_attempt(attempt.address, "its time is over", {})
            elif self._is_reading:
                self._request_commits()
            serial = self._serial
            self._begin_round()
            if serial == self._serial:  # Otherwise the attempt has notified the Selectors.
                self._notify_selectors()
            self._report_selection()
            self._report_parties()
        self.after(self._served.heartbeat_seconds, _TICK)

    # Commits.

    def _request_commits(self) -> None:
        self._is_reading = True
        self._request += 1
        names = tuple(task.name for task in self._served.tasks)
        self.send(self._store_address, messages.ReadCommits(self.address, self._request, names))

    def _read(self, message: messages.CommitsRead) -> None:
        if not self._is_reading or message.request != self._request:
            return
        self._is_reading = False
        if not self._commits:  # The first read: from now on devices are selected.
            self.send(events.OBSERVER, events.Leading(self._served.name, self._epoch))
        for commit in message.commits:
            if commit.task not in self._last_used:
                # Another Coordinator may have made an attempt at the next round.
                self._last_used[commit.task] = commit.rounds_done
                self._known_from[commit.task] = commit.rounds_done + 1
            self._take(commit)
            if self._commits[commit.task].rounds_done == commit.rounds_done:
                self._commits[commit.task] = commit  # With the attempt that has begun since.
        self._choose_next()
        self._skip_used_round()

    def _take(self, commit: interface.Commit) -> bool:
        """Notes a commit; returns whether it is newer than the known one."""
        known = self._commits.get(commit.task)
        if known is not None and known.rounds_done >= commit.rounds_done:
            return False
        self._commits[commit.task] = commit
        rested = commit.rounds_done - self._served.task(commit.task).min_sep
        self._took_part.pop((commit.task, rested), None)
        if not commit.metrics.get(population.SKIPPED):
            last = max(self._last_used[commit.task], commit.rounds_done - 1)
            self._last_used[commit.task] = last
        self._not_stored, self._paused_until = 0, 0.0
        if commit.rounds_done:
            self.send(events.OBSERVER, self._event(commit))
        attempt = self._attempt
        if attempt and (attempt.task, attempt.round_index) == (
            commit.task,
            commit.rounds_done - 1,
        ):
            if commit.metrics.get("attempt") != attempt.address:
                self.send(attempt.address, messages.AbandonRound("the round is committed"))
            self._end_attempt()
        return True

    def _event(self, commit: interface.Commit) -> events.RoundReleased | events.RoundSkipped:
        """Returns the observers' event for the last round of a commit."""
        round_index, attempt = commit.rounds_done - 1, commit.metrics.get("attempt", "")
        if commit.metrics.get(population.SKIPPED):
            return events.RoundSkipped(commit.task, round_index, attempt)
        return events.RoundReleased(commit.task, round_index, attempt, commit.metrics)

    def _committed(self, message: messages.RoundCommitted) -> None:
        if message.epoch == self._epoch and self._take(message.commit):
            commit = message.commit
            key = (commit.task, commit.rounds_done - 1)
            self._took_part[key] -= commit.metrics.get("devices/dropped", 0)
            if message.turnout is not None:
                self._experience[commit.task].committed(message.turnout)
            self._choose_next()

    # Tasks, selection, attempts.

    def _open_selection(self) -> None:
        """Opens the selection for the task with the fewest rounds for its weight."""

        def share(task: population.Task) -> float:
            return (self._next_round(task.name) + self._abandoned[task.name]) / task.weight

        open_tasks = [
            task for task in self._served.tasks if not task.is_over(self._commits[task.name])
        ]
        chosen = min(open_tasks, key=share, default=None)
        if chosen is not self._next or self._next is None:
            self._next = chosen
            self._waiting.clear()
            self._begin_selection()
        self._announce_opening()

    def _begin_selection(self) -> None:
        """Begins the time of the selection, with the devices that wait already."""
        self._opened_at = self._came_at = self.now
        self._most_waiting = self._waited_before = sum(self._waiting.values())

    def _next_round(self, task: str) -> int:
        """Returns the index of the round for which a task's next devices are selected."""
        commit = self._commits[task]
        runs = self._attempt is not None and self._attempt.task == task
        return commit.rounds_done + (runs or bool(commit.attempt))

    def _announce_opening(self) -> None:
        opening = events.SelectionOpened("", 0)
        if self._next is not None:
            name = self._next.name
            opening = events.SelectionOpened(name, self._next_round(name))
        if opening != self._opening:
            self._opening = opening
            self.send(events.OBSERVER, opening)

    def _report_selection(self) -> None:
        """Sends the observer the state of the selection, if it has changed."""
        if not self._commits:
            return
        chosen, silence = self._next, self._served.silence_seconds
        progress = events.SelectionProgress(
            "" if chosen is None else chosen.name,
            waiting=sum(self._waiting.values()),
            wanted=0 if chosen is None else self._experience[chosen.name].wanted,
            resting=self._num_resting,
            min_sep_is_over=chosen is not None and self._has_rested(chosen),
            selectors=len(self._selectors),
            silent_selectors=sum(
                self.now - self._heard.get(selector, self._started_at) >= silence
                for selector in self._selectors
            ),
            not_stored=self._not_stored,
            pause_seconds=max(math.ceil(self._paused_until - self.now), 0),
            is_reading=self._is_reading,
        )
        if progress != self._progress:
            self._progress = progress
            self.send(events.OBSERVER, progress)

    def _choose_next(self) -> None:
        self._open_selection()
        self._notify_selectors()

    def _notify_selectors(self) -> None:
        wish = self._wish()
        for selector in self._selectors:
            self.send(selector, wish)

    def _wish(self) -> messages.SelectDevices:
        chosen = self._next
        is_free = self._attempt is None or self._attempt.skips
        accepting = chosen is not None and (chosen.pipelined or is_free)
        return messages.SelectDevices(
            self._epoch,
            self.address,
            "" if chosen is None else chosen.name,
            0 if chosen is None else self._experience[chosen.name].wanted,
            accepting,
            # Before the commits are read, nobody knows.
            bool(self._commits) and chosen is None and self._attempt is None,
        )

    def _count_waiting(self, message: messages.DevicesWaiting) -> None:
        if message.epoch != self._epoch:
            return
        self._heard[message.selector] = self.now
        self._parties[message.selector] = message.parties
        if self._next is None:
            return
        # A Selector may not have forwarded the devices of the running attempt yet.
        is_old = self._attempt is not None and message.serial < self._forwards.get(
            message.selector, 0
        )
        if message.task == self._next.name and not is_old:
            self._waiting[message.selector] = message.waiting
            self._resting[message.selector] = message.resting
            waiting = sum(self._waiting.values())
            if waiting > self._most_waiting:
                self._most_waiting, self._came_at = waiting, self.now
            self._begin_round()

    def _begin_round(self) -> None:
        """Begins an attempt if none runs and enough devices wait."""
        self._skip_used_round()
        task = self._next
        if task is None or self._is_busy:
            return
        parties = self._waiting_parties(task)
        if len(parties) < len(task.noise_parties):
            return
        given = max((party.next_round for party in parties), default=0)
        if given > self._commits[task.name].rounds_done:
            self._skip_given(task, given)  # To attempts that nobody here knows of.
            return
        waiting = sum(self._waiting.values())
        if waiting < self._experience[task.name].wanted:
            has_few = waiting < task.rounds.least
            if has_few and self._commits[task.name].rounds_done < self._skip_to.get(task.name, 0):
                self._skip(task)
                return
            is_late = self.now - self._opened_at >= task.rounds.selection_timeout
            if not is_late and self._may_more_come(task, waiting):
                return
            if has_few:
                self._lack_devices(task, waiting, is_late)
                return
        self._make_attempt(task)

    def _may_more_come(self, task: population.Task, waiting: int) -> bool:
        """Returns whether to wait for more devices.

        The selection ends when no device has come for as long as the devices took to come. It then
        takes at most twice as long as if the server knew who can come. Where all known devices wait
        or rest, a few times the mean time between two devices suffices. Where a round would be
        skipped, or would probably fail without the missing devices, the wait is the time of earlier
        rounds.
        """
        known = self._experience[task.name]
        took = self._came_at - self._opened_at
        missing = known.num_devices - self._num_accounted(task, waiting)
        came = self._most_waiting - self._waited_before
        patience = took if missing > 0 else took * min(1.0, _GAPS / max(came, 1))
        if waiting < task.rounds.least or waiting < known.enough <= waiting + missing:
            patience = max(took, known.selection_seconds)
        return self.now - self._came_at < max(patience, self._served.heartbeat_seconds)

    def _lack_devices(self, task: population.Task, waiting: int, is_late: bool) -> None:
        """Reports too few devices, and skips rounds if the resting devices would be enough."""
        least, resting, is_over = task.rounds.least, self._num_resting, self._has_rested(task)
        # If as many have come by as rest, the others have had the time to come.
        all_came = resting >= self._num_accounted(task, 0)
        skips = not is_over and waiting + resting >= least and (is_late or all_came)
        # While an attempt ran, Selectors may have sent devices away.
        has_time = self.now - self._free_since < task.rounds.selection_timeout
        if not skips and (not is_late or has_time):
            return
        if is_late:  # Others have left.
            self._experience[task.name].num_devices = self._num_accounted(task, waiting)
        self._begin_selection()
        done = self._commits[task.name].rounds_done
        few = events.TooFewDevices(task.name, waiting, least, resting, is_over, done)
        self.send(events.OBSERVER, few)
        if skips:
            if all_came:
                self._skip_to[task.name] = self._rested_at(task, waiting)
            self._skip(task)

    def _num_accounted(self, task: population.Task, waiting: int) -> int:
        """Returns the number of devices that wait, or rest after attempts of this Coordinator."""
        index = self._commits[task.name].rounds_done
        rest = range(index - task.min_sep + 1, index)
        return waiting + sum(self._took_part[task.name, each] for each in rest)

    def _rested_at(self, task: population.Task, waiting: int) -> int:
        """Returns the next round for which enough devices may have rested."""
        index = self._commits[task.name].rounds_done
        able: float = waiting
        while able < task.rounds.least and index < self._last_used[task.name] + task.min_sep:
            index += 1
            last = index - task.min_sep  # The last round of those that have just rested.
            is_known = last < 0 or last >= self._known_from[task.name]
            able += self._took_part[task.name, last] if is_known else math.inf
        return index

    def _waiting_parties(self, task: population.Task) -> tuple[messages.PartyReady, ...]:
        """Returns the noise parties of a task that wait, one connection of each."""
        found = {}
        for selector, parties in self._parties.items():
            if self.now - self._heard[selector] < self._served.silence_seconds:
                for party in parties:
                    if party.task == task.name and party.address not in self._given:
                        found[party.key] = party
        return tuple(found[key] for key in task.noise_parties if key in found)

    def _report_parties(self) -> None:
        """Sends the observer how many parties are away at a second heartbeat, or all are back."""
        task = self._next
        if task is None or self._attempt is not None:
            return
        promised = len(task.noise_parties)
        away = events.PartyAway(task.name, promised - len(self._waiting_parties(task)), promised)
        is_sure = not away.away or away == self._away
        if is_sure and away.away != self._said_away:
            self._said_away = away.away
            self.send(events.OBSERVER, away)
        self._away = away

    def _skip_given(self, task: population.Task, given: int) -> None:
        """Skips a round whose noise was given; reports once how many rounds will be skipped."""
        if self._said_given.get(task.name) != given:
            self._said_given[task.name] = given
            to_skip = given - self._commits[task.name].rounds_done
            away = events.PartyAway(task.name, 0, len(task.noise_parties), to_skip)
            self.send(events.OBSERVER, away)
        self._skip(task)

    @property
    def _is_busy(self) -> bool:
        """Whether no attempt may begin now."""
        return self._attempt is not None or self._is_reading or self.now < self._paused_until

    def _has_rested(self, task: population.Task) -> bool:
        """Returns whether no device has to rest for a task any more."""
        stride = self._commits[task.name].rounds_done - self._last_used[task.name]
        return stride >= task.min_sep

    @property
    def _num_resting(self) -> int:
        """Number of check-ins of resting devices since the last attempt ended."""
        return sum(
            max(count - self._resting_before.get(selector, 0), 0)
            for selector, count in self._resting.items()
        )

    def _skip_used_round(self) -> None:
        """Skips a round that a failed attempt has used up, if there is one and no attempt runs."""
        for task in self._served.tasks:
            if self._is_busy:
                return
            commit = self._commits[task.name]
            if commit.attempt and not task.is_over(commit):
                self._skip(task)

    def _spawn_attempt(
        self,
        task: population.Task,
        longest: float,
        model: bytes = b"",
        selectors: Iterable[str] = (),
        half_seconds: float = 0.0,
        *,
        skips: bool = False,
        parties: tuple[str, ...] = (),
    ) -> _Attempt:
        """Spawns the Master Aggregator of an attempt at the next round, and notes the attempt.

        The attempt is abandoned after `longest` seconds. In `half_seconds` half of the goal's
        reports came in earlier rounds; 0 if that is not known.
        """
        self._serial += 1
        commit = self._commits[task.name]
        address = f"{self.address}/round/{self._serial}"
        role = roles.MasterAggregatorRole(
            self.address,
            self._epoch,
            commit,
            model,
            frozenset(selectors),
            skips,
            half_seconds,
            parties,
        )
        self.spawn(address, role)
        attempt = _Attempt(address, task.name, commit.rounds_done, self.now + longest, skips)
        self._attempt = attempt
        return attempt

    def _skip(self, task: population.Task) -> None:
        """Has the next round of a task committed as skipped."""
        self._spawn_attempt(task, _SKIP_EXCHANGES * task.rounds.exchange_timeout, skips=True)
        self._choose_next()

    def _make_attempt(self, task: population.Task) -> None:
        """Begins an attempt with devices drawn at random from those that wait at all Selectors."""
        chosen = self._random.sample(
            list(self._waiting),
            min(self._experience[task.name].wanted, sum(self._waiting.values())),
            counts=self._waiting.values(),
        )
        from_selector = collections.Counter(chosen)
        model = self._commits[task.model_of or task.name].model
        half_seconds = self._experience[task.name].half_seconds
        parties = tuple(party.address for party in self._waiting_parties(task))
        self._given.update(parties)
        self._away, self._said_away = None, 0
        self._experience[task.name].selected(
            self._came_at - self._opened_at, self._num_accounted(task, self._most_waiting)
        )
        self._skip_to.pop(task.name, None)
        attempt = self._spawn_attempt(
            task, task.longest, model, from_selector, half_seconds, parties=parties
        )
        self._took_part[task.name, attempt.round_index] += len(chosen)
        began = events.RoundBegan(task.name, attempt.round_index, attempt.address, len(chosen))
        self.send(events.OBSERVER, began)
        self._next = None
        self._open_selection()
        wish = self._wish()
        for selector in self._selectors:
            count = from_selector[selector]
            if count:
                self._forwards[selector] = self._serial
                forward = messages.ForwardDevices(
                    self._epoch, self._serial, attempt.address, task.name, count, wish
                )
                self.send(selector, forward)
            else:
                self.send(selector, wish)

    def _pause(self) -> None:
        """Backs off: each attempt costs devices a participation, and the store makes no commit."""
        self._not_stored += 1
        first = self._served.heartbeat_seconds
        pause = exponential_backoff.exponential_s(self._not_stored, first, _LONGEST_PAUSE * first)
        self._paused_until = self.now + pause

    def _end_attempt(self) -> None:
        self._attempt = None
        self._free_since = self.now
        if self._next is not None and not self._next.pipelined:  # Devices could not wait before.
            self._begin_selection()
        self._resting_before = dict(self._resting)

    def _lose_attempt(
        self, address: str, reason: str, counts: Mapping[str, int], used_devices: bool = True
    ) -> None:
        attempt = self._attempt
        if attempt is None or attempt.address != address:
            return
        self._end_attempt()
        if attempt.skips:
            if self.now >= self._paused_until:
                self._pause()  # Otherwise the skip would be retried at once, again and again.
        elif used_devices:
            self._last_used[attempt.task] = attempt.round_index
        else:
            self._abandoned[attempt.task] += 1
        if not attempt.skips:  # A skip is lost with the store, whose failure is reported already.
            lost = events.RoundLost(attempt.task, attempt.round_index, address, reason, counts)
            self.send(events.OBSERVER, lost)
        # The attempt's commit may have been made, or be on its way: only the store knows.
        self._request_commits()
