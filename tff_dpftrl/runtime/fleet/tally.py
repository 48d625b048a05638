"""Counts of how a fleet's sessions ended, beside the shares that the paper reports."""

from __future__ import annotations

import collections
import dataclasses

from tff_dpftrl.runtime.device import device_runtime, session

_PAPER = {"-v[]+^": 0.75, "-v[]+#": 0.22, "-v[!": 0.02}
"""Bonawitz et al. 2019, table 1."""
_MEANINGS = {
    "-v[]+^": "report accepted",
    "-v[]+#": "report refused (most were late)",
    "-v[]+*": "upload failed",
    "-v[]+!": "went away while uploading",
    "-v[!": "went away while training",
    "-v[*": "training failed",
    "-v!": "went away before training",
    "-!": "went away before training",
    "-*": "no plan came, or it was refused",
}
_MAX_REASONS = 1000
_FAILED = (session.SessionOutcome.FAILED, session.SessionOutcome.ATTESTATION_FAILED)


@dataclasses.dataclass(frozen=True)
class SessionEnd:
    """The end of one session of a fleet.

    Attributes:
      shape: Events of the session, one of `session_shape.SHAPES`.
      outcome: Kind of the end.
      reason: Reason for the end, one sentence.
      task: Name of the task; empty if the device was not selected.
      round_index: Index of the round; -1 if the device was not selected.
    """

    shape: str
    outcome: session.SessionOutcome
    reason: str
    task: str = ""
    round_index: int = -1

    @classmethod
    def of(cls, ended: device_runtime.EndedSession) -> SessionEnd:
        """Extracts what `Tally` counts of a session."""
        result, work = ended.result, ended.work
        asked = {} if work is None else {"task": work.task, "round_index": work.round_index}
        return cls(result.report.shape, result.outcome, result.reason, **asked)


class Tally:
    """Counters of sessions."""

    def __init__(self):
        """Starts all counters at zero."""
        self.shapes: collections.Counter[str] = collections.Counter()
        """Shapes of the sessions that received a plan, without those that had to rest."""
        self.others: collections.Counter[session.SessionOutcome] = collections.Counter()
        """Outcomes of all other sessions."""
        self.refusals: collections.Counter[str] = collections.Counter()
        """Reasons that the server gave for refused reports."""
        self.failures: collections.Counter[str] = collections.Counter()
        """Reasons of failed sessions."""
        self.rounds: collections.Counter[tuple[str, int]] = collections.Counter()
        """Accepted reports, by task and round."""
        self.rests_in_a_row = 0
        """Sessions of devices that had to rest, since the last accepted report."""
        self.last_rest = ""
        """Reason of the last session of a device that had to rest."""

    def add(self, end: SessionEnd) -> None:
        """Counts a session."""
        if end.task and end.outcome is not session.SessionOutcome.RESTING:
            self.shapes[end.shape] += 1
        else:
            self.others[end.outcome] += 1
        if end.outcome is session.SessionOutcome.COMPLETED:
            self.rounds[end.task, end.round_index] += 1
            self.rests_in_a_row = 0
        elif end.outcome is session.SessionOutcome.RESTING:
            self.rests_in_a_row += 1
            self.last_rest = end.reason
        elif end.outcome is session.SessionOutcome.REPORT_REFUSED:
            _count(self.refusals, end.reason)
        elif end.outcome in _FAILED:
            _count(self.failures, end.reason)

    def table(self) -> list[list[str]]:
        """Formats the shapes of the sessions that received a plan, most frequent first.

        The first row names the columns: shape, sessions, share, share in the paper, meaning.
        """
        begun = sum(self.shapes.values())
        rows = [["shape  ", "sessions", "share", "paper", "what happened"]]
        shapes = sorted(self.shapes, key=lambda shape: (-self.shapes[shape], shape))
        for shape in shapes:
            count = self.shapes[shape]
            paper = f"{_PAPER[shape]:.0%}" if shape in _PAPER else ""
            share = f"{count / begun:.1%}"
            rows.append([f"{shape:7}", str(count), share, paper, _MEANINGS.get(shape, "")])
        return rows

    def summary(self, seconds: float) -> list[str]:
        """Formats the counters that are not in the table, after a fleet ran for some seconds."""
        total = sum(self.shapes.values()) + sum(self.others.values())
        counted = sum(self.rounds.values())
        others = ", ".join(f"{n} {outcome.value}" for outcome, n in self.others.most_common())
        lines = [
            f"{total} sessions in {seconds:.0f} s ({total / max(seconds, 1e-9):.1f}/s); reports of "
            f"{counted} counted, in {len(self.rounds)} rounds",
            f"nothing to do: {others or 0}",
        ]
        lines += [self.rests_advice] if self.rests_in_a_row else []
        for name, reasons in (("refused", self.refusals), ("failed", self.failures)):
            lines += [f"{name}, {n} times: {reason}" for reason, n in reasons.most_common(5)]
        return lines

    @property
    def rests_advice(self) -> str:
        """Sentence about devices that rest while no report is accepted, and its remedy."""
        return (
            f"{self.rests_in_a_row} sessions since the last report were of devices that have to "
            f"rest, the last of them: {self.last_rest} If this goes on, there are too few devices: "
            "take more, or a task with smaller clients_per_round or min_sep."
        )

    def to_dict(self, seconds: float) -> dict[str, object]:
        """Returns all counters, JSON-compatible, after a fleet ran for some seconds."""
        return {
            "seconds": seconds,
            "shapes": dict(self.shapes.most_common()),
            "others": {outcome.value: n for outcome, n in self.others.most_common()},
            "rounds": len(self.rounds),
            "reports": sum(self.rounds.values()),
            "refusals": dict(self.refusals.most_common()),
            "failures": dict(self.failures.most_common()),
        }


def _count(reasons: collections.Counter[str], reason: str) -> None:
    if reason in reasons or len(reasons) < _MAX_REASONS:
        reasons[reason] += 1
