"""What was seen of one task: its rounds, its reports, how long they took."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tff_dpftrl.runtime.actors import events, messages, population
from tff_dpftrl.runtime.status import bounded_counts, distribution

# Tenths of a second to more than a week.
_LEAST_SECONDS, _MOST_SECONDS = 0.125, 2**20
_OTHER_REASONS = 12

ACCEPTED = "accepted"
OUTCOMES = (ACCEPTED, *(refusal.value for refusal in messages.Refusal), bounded_counts.OTHER)
"""What becomes of a report."""

GROUPS = ("summed", "lost")
"""What becomes of a group of devices that sum their reports securely."""


def seconds_distribution() -> distribution.Distribution:
    """An empty distribution of durations."""
    return distribution.Distribution(_LEAST_SECONDS, _MOST_SECONDS)


@dataclasses.dataclass
class Attempt:
    """The attempt at a round that runs.

    Attributes:
      name: Which one.
      round_index: The round, from 0.
      began_at: When its devices were chosen.
      devices: How many.
      reports: Reports that count, so far.
    """

    name: str
    round_index: int
    began_at: float
    devices: int
    reports: int = 0


class TaskFigures:
    """What was seen of a task since the server started.

    Attributes:
      settings: The task.
      rounds_done: Committed rounds, those before the start included; None if not yet known.
      committed: Rounds that were seen to be committed with a result.
      skipped: Rounds that were seen to be committed as skipped.
      last_commit_at: When the last of them was; None if none.
      abandoned: Attempts that came to nothing, by reason.
      attempt: The one that runs; None if none does.
      stopped: Why it has no further round, when somebody has said so; else empty.
      too_few: How many devices waited when there were too few for too long; None if there
        were enough since.
      reports: What became of reports, by one of `OUTCOMES`.
      groups: What became of groups of secure sums, by one of `GROUPS`.
      bytes_sent: Plans and models sent to devices.
      bytes_received: Reports of devices.
      round_seconds: From the choice of devices to the commit.
      report_seconds: From there to each report that counts.
    """

    def __init__(self, settings: population.Task):
        """Nothing has been seen."""
        self.settings = settings
        self.rounds_done: int | None = None
        self.committed = 0
        self.skipped = 0
        self.last_commit_at: float | None = None
        self.abandoned = bounded_counts.BoundedCounts(room=_OTHER_REASONS)
        self.attempt: Attempt | None = None
        self.stopped = ""
        self.too_few: int | None = None
        self.reports = dict.fromkeys(OUTCOMES, 0)
        self.groups = dict.fromkeys(GROUPS, 0)
        self.bytes_sent = 0
        self.bytes_received = 0
        self.round_seconds = seconds_distribution()
        self.report_seconds = seconds_distribution()

    @property
    def is_over(self) -> bool:
        """Whether all the rounds that were asked for are done, or it was stopped."""
        wanted = self.settings.num_rounds
        return bool(self.stopped) or wanted is not None and (self.rounds_done or 0) >= wanted

    @property
    def phase(self) -> str:
        """What it does, in a few words."""
        if self.attempt is not None:
            if self.attempt.reports >= self.settings.rounds.goal_count:
                return "committing"
            return "reporting"
        if self.is_over:
            return "over"
        return "waiting for devices" if self.too_few is None else "too few devices"

    def began(self, event: events.RoundBegan, now: float) -> None:
        """Devices were chosen."""
        self.attempt = Attempt(event.attempt, event.round_index, now, event.devices)
        self.rounds_done = max(self.rounds_done or 0, event.round_index)
        self.too_few = None

    def released(self, event: events.RoundReleased, now: float) -> bool:
        """A round is committed, or was said to be once more.

        Returns:
          Whether it was committed since the server started, and was not heard of before.
        """
        is_known = self.rounds_done is not None and event.round_index < self.rounds_done
        first_word = self.rounds_done is None
        self.rounds_done = max(self.rounds_done or 0, event.round_index + 1)
        attempt = self.attempt
        if attempt is not None and attempt.round_index <= event.round_index:
            self.attempt = None
            if attempt.name == event.attempt:
                self.round_seconds.add(now - attempt.began_at)
        elif first_word:  # The last round of an earlier server.
            return False
        if is_known:
            return False
        self.committed += 1
        self.last_commit_at = now
        self._count_groups(event.metrics, "devices/")
        return True

    def was_skipped(self, event: events.RoundSkipped) -> None:
        """A round is committed as skipped, or was said to be once more."""
        # The first word of a task's rounds may be of a round before the server's start.
        if self.rounds_done is not None and event.round_index >= self.rounds_done:
            self.skipped += 1
        self.rounds_done = max(self.rounds_done or 0, event.round_index + 1)
        self.too_few = None

    def _count_groups(self, counts: Mapping[str, Any], prefix: str) -> None:
        for outcome in GROUPS:
            self.groups[outcome] += counts.get(f"{prefix}{outcome}_groups", 0)

    def lost(self, attempt: str, reason: str, counts: Mapping[str, int]) -> None:
        """An attempt was abandoned."""
        self.abandoned.add(reason)
        self._count_groups(counts, "")
        if self.attempt is not None and self.attempt.name == attempt:
            self.attempt = None

    def reported(self, outcome: str, num_bytes: int, now: float) -> str:
        """A report came.

        Args:
          outcome: Why it was refused, as observers hear it; empty if it counts.
          num_bytes: Its size.
          now: Seconds since 1970.

        Returns:
          The outcome, one of `OUTCOMES`.
        """
        outcome = outcome.partition(":")[0] or ACCEPTED
        if outcome not in self.reports:
            outcome = bounded_counts.OTHER
        self.reports[outcome] += 1
        self.bytes_received += num_bytes
        if outcome == ACCEPTED and self.attempt is not None:
            self.attempt.reports += 1
            self.report_seconds.add(now - self.attempt.began_at)
        return outcome
