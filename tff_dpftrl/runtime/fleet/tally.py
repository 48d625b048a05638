"""What became of a fleet's sessions: counts of their shapes, and rates, beside the paper's."""

from __future__ import annotations

import collections
import dataclasses

from tff_dpftrl.runtime.device import device_runtime, session

_PAPER = {"-v[]+^": 0.75, "-v[]+#": 0.22, "-v[!": 0.02}
"""Bonawitz et al. 2019, table 1."""
_MEANINGS = {
    "-v[]+^": "trained, and counted",
    "-v[]+#": "trained, and refused (most came late)",
    "-v[]+*": "upload failed",
    "-v[]+!": "went away while uploading",
    "-v[!": "went away while training",
    "-v[*": "training failed",
    "-v!": "went away before training",
    "-!": "went away before training",
    "-*": "no plan came, or it was refused",
}
_MOST_REASONS = 1000


@dataclasses.dataclass(frozen=True)
class SessionEnd:
    """How a session of a fleet ended.

    Attributes:
      shape: Its events.
      outcome: How.
      reason: In words.
      task: Name of the task; empty if it was not chosen.
      round_index: The round; -1 likewise.
    """

    shape: str
    outcome: session.Outcome
    reason: str
    task: str = ""
    round_index: int = -1

    @classmethod
    def of(cls, ended: device_runtime.EndedSession) -> SessionEnd:
        """What to count of a session."""
        result, work = ended.result, ended.work
        asked = {} if work is None else {"task": work.task, "round_index": work.round_index}
        return cls(result.report.shape, result.outcome, result.reason, **asked)


class Tally:
    """Counts sessions."""

    def __init__(self):
        """Has counted none."""
        self.shapes: collections.Counter[str] = collections.Counter()
        """Of sessions that were asked to do something, and did not rest."""
        self.others: collections.Counter[session.Outcome] = collections.Counter()
        """Outcomes of all others."""
        self.refusals: collections.Counter[str] = collections.Counter()
        """Reasons that the server gave for reports that did not count."""
        self.failures: collections.Counter[str] = collections.Counter()
        """Reasons of sessions that failed."""
        self.rounds: collections.Counter[tuple[str, int]] = collections.Counter()
        """Reports that counted, by task and round."""

    def add(self, end: SessionEnd) -> None:
        """Counts a session."""
        if end.task and end.outcome is not session.Outcome.RESTING:
            self.shapes[end.shape] += 1
        else:
            self.others[end.outcome] += 1
        if end.outcome is session.Outcome.COMPLETED:
            self.rounds[end.task, end.round_index] += 1
        elif end.outcome is session.Outcome.REPORT_REFUSED:
            _count(self.refusals, end.reason)
        elif end.outcome in (session.Outcome.FAILED, session.Outcome.ATTESTATION_FAILED):
            _count(self.failures, end.reason)

    def table(self) -> list[list[str]]:
        """Shapes of the sessions that were asked to do something, most frequent first.

        Returns:
          Rows of shape, sessions, share, share in the paper and meaning; the first is a head.
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
        """What the table does not say, in lines.

        Args:
          seconds: How long the fleet ran.
        """
        total = sum(self.shapes.values()) + sum(self.others.values())
        counted = sum(self.rounds.values())
        others = ", ".join(f"{n} {outcome.value}" for outcome, n in self.others.most_common())
        lines = [
            f"{total} sessions in {seconds:.0f} s ({total / max(seconds, 1e-9):.1f}/s); reports of "
            f"{counted} counted, in {len(self.rounds)} rounds",
            f"nothing to do: {others or 0}",
        ]
        for name, reasons in (("refused", self.refusals), ("failed", self.failures)):
            lines += [f"{name}, {n} times: {reason}" for reason, n in reasons.most_common(5)]
        return lines

    def to_dict(self, seconds: float) -> dict[str, object]:
        """All counts, for JSON.

        Args:
          seconds: How long the fleet ran.
        """
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
    if reason in reasons or len(reasons) < _MOST_REASONS:
        reasons[reason] += 1
