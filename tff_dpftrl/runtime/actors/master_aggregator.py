"""The Master Aggregator: one attempt at a round, from the chosen devices to the commit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from tff_dpftrl.runtime.actors import merging, messages, population, roles
from tff_dpftrl.runtime.store import interface

_COMMIT_TRIES = 3
_Phase = merging.Phase


@dataclasses.dataclass(frozen=True)
class _GiveUp:
    """Timer at which silent devices are dropped, or reporting is closed."""

    half_seconds: float  # Seconds that the time follows from; if they change, the timer is void.
    is_last: bool = False  # Whether reporting is closed, rather than silent devices dropped.


class MasterAggregator(merging.Merging):
    """Maker of one attempt: spawns Aggregators, merges their sums, adds the noise, and commits.

    No device takes part before the store has noted the attempt: so no other attempt at the round
    follows, whatever dies. Before the store has confirmed the noised result, it goes to the store
    and to nobody else. An attempt that ends in any other way has released nothing.
    """

    def __init__(
        self,
        address: str,
        store_address: str,
        served: population.Task,
        role: roles.MasterAggregatorRole,
    ):
        """Stores the parts; `factory.ActorFactory` documents them."""
        super().__init__(address, served)
        self._store_address = store_address
        self._rounds = served.rounds
        self._role = role
        self._selectors = set(role.expected)
        self._devices: dict[str, None] = {}  # In the order of arrival.
        self._children: tuple[merging.Child, ...] = ()
        self._began_at = 0.0
        self._half_seconds = role.half_seconds
        self._turnout = messages.Turnout(0, 0, 0, 0.0)
        self._result: messages.CommitRound | None = None
        self._tries = 0

    def _begin(self) -> None:
        if self._role.skips:
            commit = self._role.commit
            self._step(lambda: self._task.server_step.skip(commit.model, commit.state))
        else:
            self._wait(self._rounds.exchange_timeout)

    def _wait(self, seconds: float) -> None:
        self.after(seconds, self._phase)

    def _receive(self, message: object) -> None:
        match message:
            case messages.DevicesForwarded():
                self._forwarded(message)
            case messages.ReportsCounted():
                self._counted(message)
            case messages.PartialSum():
                self._merge(message)
            case messages.RoundStored():
                self._stored(message)
            case messages.AttemptBegun():
                if self._phase is _Phase.BEGINNING:
                    self._configure()
            case messages.CommitRefused():
                if self._phase in (_Phase.BEGINNING, _Phase.COMMITTING):
                    self._abandon(message.reason, not_stored=True)
            case messages.AbandonRound():
                self._abandon(message.reason)
            case messages.Lost():
                self._lose(message.address)
            case _GiveUp():
                if message.half_seconds == self._half_seconds and self._phase is _Phase.REPORTING:
                    self._give_up(message)
            case _Phase():
                if message is self._phase:
                    self._time_is_over()
            case _:
                raise self._unknown(message)

    def _time_is_over(self) -> None:
        if self._phase is _Phase.SELECTION:
            self._begin_attempt()
        elif self._phase is _Phase.BEGINNING:
            self._abandon(self._phase.value, not_stored=True)
        elif self._phase is _Phase.REPORTING:
            self._close()
        elif self._phase is _Phase.CLOSING:
            self._finish()
        elif self._phase is _Phase.COMMITTING:
            self._try_to_commit()

    # Selection and configuration.

    def _forwarded(self, message: messages.DevicesForwarded) -> None:
        if self._phase is not _Phase.SELECTION:
            if message.selector in self._selectors:
                self._selectors.discard(message.selector)
                self._send_away(message.devices)
            return
        self._selectors.discard(message.selector)
        self._devices.update(dict.fromkeys(message.devices))
        if not self._selectors:
            self._begin_attempt()

    def _send_away(self, devices: tuple[str, ...]) -> None:
        for device in devices:
            self.send(device, messages.ComeBack(device, (0.0,), "the round was abandoned"))

    def _begin_attempt(self) -> None:
        """Has the store note the attempt, if there are enough devices."""
        devices = tuple(self._devices)
        if len(devices) < self._rounds.least:
            self._abandon(self._phase.value)
            return
        most_reports = min(len(devices), self._rounds.wanted)
        groups = self._task.num_groups(most_reports)
        if not groups:
            self._abandon("too few devices for the groups of a secure sum")
            return
        commit = self._role.commit
        aggregators = [
            (
                f"{self.address}/aggregator/{i}",
                roles.AggregatorRole(
                    self.address,
                    commit.task,
                    commit.rounds_done,
                    self._role.model,
                    devices[i::groups],
                    most_reports // groups + (i < most_reports % groups),
                    parties=self._role.parties,  # Then there is one group.
                ),
            )
            for i in range(groups)
        ]
        self._children = merging.tree(aggregators, self._task, self.address)
        self._phase = _Phase.BEGINNING
        self.send(
            self._store_address,
            messages.BeginAttempt(self.address, self._role.epoch, commit.task, commit.rounds_done),
        )
        self._wait(self._rounds.exchange_timeout)

    def _configure(self) -> None:
        self._spawn_aggregators(self._children)
        self._began_at = self.now
        self._turnout = messages.Turnout(len(self._devices), 0, 0, 0.0)
        self._wait(self._rounds.reporting_timeout)
        if self._half_seconds:
            self._expect(self._half_seconds)

    # Reporting.

    def _progressed(self) -> None:
        if not self._progress:
            self._abandon("all Aggregators are lost")
            return
        together = self._all_progress
        accepted, outstanding = together.accepted, together.outstanding
        is_complete = accepted >= self._rounds.goal_count
        if not self._turnout.half_seconds and accepted >= math.ceil(self._rounds.goal_count / 2):
            self._half_has_come(self.now - self._began_at)
        self._turnout = dataclasses.replace(
            self._turnout, reported=accepted, undecided=outstanding if is_complete else 0
        )
        if (is_complete and not together.is_short) or not outstanding:
            self._close()

    def _half_has_come(self, seconds: float) -> None:
        self._turnout = dataclasses.replace(self._turnout, half_seconds=seconds)
        if seconds > self._half_seconds:
            self._half_seconds = seconds
            self._expect(seconds)

    def _expect(self, half_seconds: float) -> None:
        """Sets the timer at which devices that have sent nothing are dropped.

        `half_seconds` is the time until half of the report goal has come.
        """
        passed = self.now - self._began_at
        self.after(self._rounds.patience(half_seconds) - passed, _GiveUp(half_seconds))

    def _give_up(self, timer: _GiveUp) -> None:
        """Has silent devices dropped; devices that are sending get as much time again."""
        if timer.is_last:
            self._close()
            return
        self._turnout = dataclasses.replace(self._turnout, has_given_up=True)
        self._drop_silent()
        self.after(
            self._rounds.patience(timer.half_seconds), _GiveUp(timer.half_seconds, is_last=True)
        )

    # Noise, then commit, then release.

    def _use(self, total: Any) -> None:
        late = self._counts[messages.Refusal.LATE.value]
        self._turnout = dataclasses.replace(self._turnout, undecided=self._turnout.undecided + late)
        reports = self._counts["reports"]
        if reports < self._rounds.least:
            why = ", after devices that had sent nothing were given up" * self._turnout.has_given_up
            self._abandon(f"{_Phase.REPORTING.value}{why}")
            return
        secure_sum = self._task.secure_sum
        if secure_sum is not None and reports > (secure_sum.most_devices or 0):
            self._abandon("more devices in the sum than its moduli have room for")
            return
        state = self._role.commit.state
        self._step(lambda: self._task.server_step.apply(total, reports, self._role.model, state))

    def _step(self, compute: Callable[[], population.StepResult]) -> None:
        """Has the result of the server's step stored, unless the state cannot be read."""
        try:
            result = compute()
        except (interface.StoreError, interface.StoreRefusal) as error:
            self._abandon(str(error), not_stored=True)
        else:
            self._commit(result)

    def _commit(self, result: population.StepResult) -> None:
        """Has the result of a round, or of a skipped round, stored."""
        self._phase = _Phase.COMMITTING
        commit = self._role.commit
        self._result = messages.CommitRound(
            self.address,
            self._role.epoch,
            commit.task,
            commit.rounds_done,
            result.model,
            result.state,
            {
                **result.metrics,
                "attempt": self.address,
                **{f"devices/{name}": count for name, count in self._counts.items()},
            },
        )
        self._try_to_commit()

    def _try_to_commit(self) -> None:
        if self._tries == _COMMIT_TRIES:
            self._abandon(_Phase.COMMITTING.value)
            return
        self._tries += 1
        self.send(self._store_address, self._result)
        self._wait(self._rounds.exchange_timeout)

    def _stored(self, message: messages.RoundStored) -> None:
        if self._phase is _Phase.COMMITTING:
            self.send(
                self._role.coordinator,
                messages.RoundCommitted(
                    self.address, self._role.epoch, message.commit, self._known_turnout()
                ),
            )
            self._end()

    def _abandon(self, reason: str, *, not_stored: bool = False) -> None:
        is_early = self._phase in (_Phase.SELECTION, _Phase.BEGINNING)
        if is_early:
            self._send_away((*self._devices, *self._role.parties))
        if self._phase is not _Phase.OVER:
            used_devices = not is_early and not self._role.skips
            self.send(
                self._role.coordinator,
                messages.RoundAbandoned(
                    self.address,
                    reason,
                    dict(self._counts),
                    not_stored,
                    used_devices,
                    self._known_turnout(),
                ),
            )
            self._end()

    def _known_turnout(self) -> messages.Turnout | None:
        is_known = self._turnout.chosen and not self._counts["lost_aggregators"]
        return self._turnout if is_known else None

    def _end(self) -> None:
        self._phase = _Phase.OVER
        self._result = None
        for aggregator in self._progress:
            self.stop(aggregator)
        self.stop(self.address)
