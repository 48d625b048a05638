"""Figures of one task: its rounds, its reports, and their durations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tff_dpftrl.runtime.actors import events, messages, population
from tff_dpftrl.runtime.status import counters

# From an eighth of a second to more than a week.
_MIN_SECONDS, _MAX_SECONDS = 0.125, 2**20
_OTHER_REASONS = 12

ACCEPTED = "accepted"
OUTCOMES = (ACCEPTED, *(refusal.value for refusal in messages.Refusal), counters.OTHER)
"""Outcomes of a report."""

GROUPS = ("summed", "lost")
"""Outcomes of a group of secure aggregation."""


def seconds_distribution() -> counters.Distribution:
    """Creates an empty histogram of durations."""
    return counters.Distribution(_MIN_SECONDS, _MAX_SECONDS)


@dataclasses.dataclass
class Attempt:
    """The running attempt at a round.

    Attributes:
      name: Unique name of the attempt.
      round_index: Index of the round, from 0.
      began_at: Time of the selection of its devices, in seconds since 1970.
      devices: Number of selected devices.
      reports: Number of accepted reports so far.
    """

    name: str
    round_index: int
    began_at: float
    devices: int
    reports: int = 0


class TaskFigures:
    """Figures of a task since the server started.

    Attributes:
      settings: Task as the server knows it.
      rounds_done: Number of committed rounds, also before the start; None if not yet known.
      committed: Number of rounds committed with a result since the start.
      skipped: Number of rounds committed as skipped since the start.
      last_commit_at: Time of the last commit with a result, in seconds since 1970; None if
        there was none.
      abandoned: Numbers of abandoned attempts by reason.
      attempt: Running attempt; None if none runs.
      last_lost: Reason why the last attempt was abandoned; empty if it was committed.
      stopped: Reason why the task has no further round; empty if it has, or if it is not known.
      too_few: Event of the last selection whose time was over with too few devices; None if a
        round has begun since.
      party_away: Event of noise parties that the next round waits for, or has to be skipped for;
        None if there is none.
      reports: Numbers of reports by outcome, one of `OUTCOMES`.
      groups: Numbers of groups of secure aggregation by outcome, one of `GROUPS`.
      bytes_sent: Size of all plans, models and messages of secure sums sent to devices, in
        bytes.
      bytes_received: Size of all reports of devices, in bytes.
      round_seconds: Durations from the selection of devices to the commit.
      report_seconds: Durations from the selection of devices to each accepted report.
    """

    def __init__(self, settings: population.Task):
        """Starts all figures at zero."""
        self.settings = settings
        self.rounds_done: int | None = None
        self.committed = 0
        self.skipped = 0
        self.last_commit_at: float | None = None
        self.abandoned = counters.BoundedCounts(room=_OTHER_REASONS)
        self.attempt: Attempt | None = None
        self.last_lost = ""
        self.stopped = ""
        self.too_few: events.TooFewDevices | None = None
        self.party_away: events.PartyAway | None = None
        self.reports = dict.fromkeys(OUTCOMES, 0)
        self.groups = dict.fromkeys(GROUPS, 0)
        self.bytes_sent = 0
        self.bytes_received = 0
        self.round_seconds = seconds_distribution()
        self.report_seconds = seconds_distribution()

    @property
    def is_over(self) -> bool:
        """Whether all rounds of the task are done, or it was stopped."""
        wanted = self.settings.num_rounds
        return bool(self.stopped) or wanted is not None and (self.rounds_done or 0) >= wanted

    @property
    def phase(self) -> str:
        """Phase of the task, in a few words."""
        if self.attempt is not None:
            if self.attempt.reports >= self.settings.rounds.goal_count:
                return "committing"
            return "reporting"
        if self.is_over:
            return "over"
        if self.party_away is not None:
            is_away = not self.party_away.to_skip
            return "waiting for a noise party" if is_away else "skipping rounds"
        return "waiting for devices" if self.too_few is None else "too few devices"

    def began(self, event: events.RoundBegan, now: float) -> None:
        """Handles the selection of a round's devices."""
        self.attempt = Attempt(event.attempt, event.round_index, now, event.devices)
        self.rounds_done = max(self.rounds_done or 0, event.round_index)
        self.too_few = self.party_away = None

    def released(self, event: events.RoundReleased, now: float) -> bool:
        """Handles a commit, whose event may be a repetition.

        Returns whether the commit is new, and later than the start of the server.
        """
        is_known = self.rounds_done is not None and event.round_index < self.rounds_done
        is_first = self.rounds_done is None
        self.rounds_done = max(self.rounds_done or 0, event.round_index + 1)
        attempt = self.attempt
        if attempt is not None and attempt.round_index <= event.round_index:
            self.attempt = None
            if attempt.name == event.attempt:
                self.round_seconds.add(now - attempt.began_at)
        elif is_first:  # The last round of an earlier server.
            return False
        if is_known:
            return False
        self.committed += 1
        self.last_lost = ""
        self.last_commit_at = now
        self._count_groups(event.metrics, "devices/")
        return True

    def was_skipped(self, event: events.RoundSkipped) -> None:
        """Handles the commit of a skipped round, whose event may be a repetition."""
        is_new = self.rounds_done is None or event.round_index >= self.rounds_done
        if is_new and self.party_away is not None and self.party_away.to_skip:
            left = dataclasses.replace(self.party_away, to_skip=self.party_away.to_skip - 1)
            self.party_away = left if left.to_skip else None
        # The first event of a task may be about a round before the server's start.
        if self.rounds_done is not None and is_new:
            self.skipped += 1
        self.rounds_done = max(self.rounds_done or 0, event.round_index + 1)

    def _count_groups(self, counts: Mapping[str, Any], prefix: str) -> None:
        for outcome in GROUPS:
            self.groups[outcome] += counts.get(f"{prefix}{outcome}_groups", 0)

    def lost(self, attempt: str, reason: str, counts: Mapping[str, int]) -> None:
        """Handles the end of an abandoned attempt."""
        self.abandoned.add(reason)
        self._count_groups(counts, "")
        self.last_lost = reason
        if self.attempt is not None and self.attempt.name == attempt:
            self.attempt = None

    def reported(self, outcome: str, num_bytes: int, now: float) -> str:
        """Counts a report; returns its outcome, one of `OUTCOMES`.

        The given outcome is the reason of a refusal, empty if the report counts.
        """
        outcome = outcome.partition(":")[0] or ACCEPTED
        if outcome not in self.reports:
            outcome = counters.OTHER
        self.reports[outcome] += 1
        self.bytes_received += num_bytes
        if outcome == ACCEPTED and self.attempt is not None:
            self.attempt.reports += 1
            self.report_seconds.add(now - self.attempt.began_at)
        return outcome
