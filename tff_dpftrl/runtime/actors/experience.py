"""Estimates of how many devices come and report, and how soon, from a task's earlier attempts."""

from __future__ import annotations

import math

from tff_dpftrl.runtime.actors import messages, population

_TO_FEWER = 0.5  # Weight of an attempt in which fewer devices reported than expected.
_TO_MORE = 0.25  # Weight of an attempt in which all undecided devices may have reported.
_FORGETTING = 0.25  # Weight of an attempt whose number is below the estimate.


class Experience:
    """Estimated share of the selected devices that report, and the time that reports take.

    Attributes:
      half_seconds: Seconds in which half of the goal's reports come; 0 while that is not known.
      selection_seconds: Seconds in which the devices of a selection come.
      num_devices: Largest number of devices that were known at a time: they waited, or rested.
    """

    def __init__(self, rounds: population.RoundSettings):
        """Begins with the share that the task's over-selection assumes."""
        self._rounds = rounds
        self._share = rounds.goal_count / rounds.wanted
        self._least_share = rounds.goal_count / rounds.most_wanted
        self.half_seconds = 0.0
        self.selection_seconds = rounds.selection_timeout
        self.num_devices = 0.0

    @property
    def wanted(self) -> int:
        """Number of devices to select so that the goal's number of reports is expected."""
        needed = math.ceil(self._rounds.goal_count / self._share - 1e-9)
        return min(max(needed, self._rounds.wanted), self._rounds.most_wanted)

    @property
    def enough(self) -> int:
        """Number of devices to select so that the least number of reports is likely.

        It is expected with one standard deviation to spare.
        """
        least = self._rounds.least + math.sqrt(self._rounds.least * (1 - self._share))
        return min(math.ceil(least / self._share - 1e-9), self.wanted)

    def selected(self, seconds: float, num_devices: int) -> None:
        """Updates the estimates of the devices that come.

        The last of `num_devices` waiting or resting devices came `seconds` after the selection
        opened.
        """
        if not self.num_devices:
            self.selection_seconds = seconds
        self.selection_seconds = _up_or_slowly(self.selection_seconds, seconds)
        self.num_devices = max(self.num_devices, num_devices)

    def committed(self, turnout: messages.Turnout) -> None:
        """Updates the estimates after an attempt that was committed."""
        self._learn(turnout)

    def abandoned(self, turnout: messages.Turnout) -> None:
        """Updates the estimates after an attempt without a commit.

        If too few devices reported and others were given up, they may have become slower: the next
        ones have twice as long.
        """
        self._learn(turnout)
        if turnout.has_given_up and turnout.reported < self._rounds.least:
            self.half_seconds = self._rounds.patience(self.half_seconds) / 2

    def _learn(self, turnout: messages.Turnout) -> None:
        if turnout.half_seconds:
            self.half_seconds = _up_or_slowly(self.half_seconds, turnout.half_seconds)
        least = turnout.reported / turnout.chosen
        most = min(1.0, (turnout.reported + turnout.undecided) / turnout.chosen)
        weight = _TO_FEWER if most < self._share else _TO_MORE
        share = self._share + weight * (most - self._share)
        self._share = max(least, share, self._least_share)


def _up_or_slowly(before: float, now: float) -> float:
    """Returns an estimate that rises at once and falls slowly."""
    return max(now, before + _FORGETTING * (now - before))
