"""Estimates of how many selected devices report, and how soon, from a task's earlier attempts."""

from __future__ import annotations

import math

from tff_dpftrl.runtime.actors import messages, population

_TO_FEWER = 0.5  # Weight of an attempt in which fewer devices reported than expected.
_TO_MORE = 0.25  # Weight of an attempt in which all undecided devices may have reported.
_FORGETTING = 0.25  # Weight of an attempt that was quicker than expected.
_SLOWER = 1.5  # Factor of the expected time after an attempt with too few reports.


class Experience:
    """Estimated share of the selected devices that report, and the time that reports take.

    Attributes:
      half_seconds: Seconds in which half of the goal's reports come; 0 while that is not known.
    """

    def __init__(self, rounds: population.RoundSettings):
        """Begins with the share that the task's over-selection assumes.

        Args:
          rounds: Sizes and time-outs of the task's rounds.
        """
        self._rounds = rounds
        self._share = rounds.goal_count / rounds.wanted
        self._least_share = rounds.goal_count / rounds.most_wanted
        self.half_seconds = 0.0

    @property
    def wanted(self) -> int:
        """Number of devices to select so that the goal's number of reports is expected."""
        needed = math.ceil(self._rounds.goal_count / self._share - 1e-9)
        return min(max(needed, self._rounds.wanted), self._rounds.most_wanted)

    def committed(self, turnout: messages.Turnout) -> None:
        """Updates the estimates after an attempt that was committed."""
        self._learn_share(turnout)
        seconds = turnout.half_seconds
        if seconds:
            slowly = self.half_seconds + _FORGETTING * (seconds - self.half_seconds)
            self.half_seconds = max(seconds, slowly)

    def abandoned(self, turnout: messages.Turnout) -> None:
        """Updates the estimates after an attempt without a commit.

        If too few devices reported, the next ones get more time.

        Args:
          turnout: Numbers of devices that were chosen and that reported.
        """
        self._learn_share(turnout)
        if turnout.reported < self._rounds.least:
            self.half_seconds = min(_SLOWER * self.half_seconds, self._rounds.reporting_timeout)

    def _learn_share(self, turnout: messages.Turnout) -> None:
        least = turnout.reported / turnout.chosen
        most = min(1.0, (turnout.reported + turnout.undecided) / turnout.chosen)
        weight = _TO_FEWER if most < self._share else _TO_MORE
        share = self._share + weight * (most - self._share)
        self._share = max(least, share, self._least_share)
