"""The table of session shapes (Bonawitz et al. 2019, table 1).

Devices report the shapes, perhaps wrongly. So old counts are dropped.
"""

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.runtime.device import session_shape
from tff_dpftrl.runtime.status import counters

_VERSION = 2
_PERIOD_SECONDS = 14 * 86_400.0
_LABELS = session_shape.SHAPES | {counters.OTHER}
_WITH_PLAN = session_shape.Event.CHECKED_IN.value + session_shape.Event.PLAN_DOWNLOADED.value
_ERRORS = (session_shape.Event.ERROR.value, session_shape.Event.ATTESTATION_FAILED.value)


class SessionTable:
    """Counters of the sessions of the last two to four weeks by shape, which a file can keep.

    An unknown shape counts as "other". Only the counts of two periods of two weeks are kept: the
    file reveals neither the time of a session more precisely, nor its device.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time):
        """Creates an empty table."""
        self._clock = clock
        self._since = clock()  # Start of the present period.
        self._former: collections.Counter[str] = collections.Counter()
        self._present: collections.Counter[str] = collections.Counter()

    def add(self, shape: str) -> str:
        """Counts a session by its shape, which is untrusted; drops the counts of old periods.

        Returns the label under which the session counts.
        """
        label = shape if shape in _LABELS else counters.OTHER
        passed = self._clock() - self._since
        if passed >= _PERIOD_SECONDS:
            is_next = passed < 2 * _PERIOD_SECONDS
            self._former = self._present if is_next else collections.Counter()
            self._present = collections.Counter()
            self._since += passed
        self._present[label] += 1
        return label

    @property
    def total(self) -> int:
        """Number of counted sessions."""
        return self._former.total() + self._present.total()

    def rows(self) -> list[tuple[str, int, float | None]]:
        """Returns rows of shape, count, and percentage of the sessions that received a plan.

        As in the paper, percentages are of the sessions with a plan, which come first. The
        others, mostly of devices that were sent away, have None. Each part is in the order of
        falling counts.
        """
        ordered = sorted(
            (self._former + self._present).items(),
            key=lambda item: (not got_plan(item[0]), -item[1], item[0]),
        )
        total = sum(count for shape, count in ordered if got_plan(shape))
        return [
            (shape, count, 100 * count / total if got_plan(shape) and total else None)
            for shape, count in ordered
        ]

    def to_markdown(self) -> str:
        """Formats the table as in the paper."""
        lines = ["| session shape | count | of those with a plan |", "|---|---:|---:|"]
        for shape, count, percent in self.rows():
            share = "" if percent is None else f"{percent:.1f} %"
            lines.append(f"| `{shape}` | {count:,} | {share} |")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the counts to a file, atomically."""
        content = {
            "version": _VERSION,
            "since": self._since,
            "session_shapes": dict(self._present),
            "former_session_shapes": dict(self._former),
        }
        durable_files.write(path, (json.dumps(content, indent=2) + "\n").encode())

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time
    ) -> SessionTable:
        """Reads a file of `save`, or of its first version, whose counts had no period.

        The table is empty if there is no file. One with other content is refused (ValueError).
        """
        table = cls(clock=clock)
        problem = f"{path} holds no counts of sessions: move it away, or bring the right one back."
        try:
            content = json_text.parse(pathlib.Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return table
        except ValueError as error:
            raise validation.UsageError(problem) from error
        if isinstance(content, dict) and content.get("version") == 1:
            counts = content.get("session_shapes")
            content = {"since": table._since, "session_shapes": {}, "former_session_shapes": counts}
        elif not isinstance(content, dict) or content.get("version") != _VERSION:
            raise validation.UsageError(problem)
        since = content.get("since")
        present, former = content.get("session_shapes"), content.get("former_session_shapes")
        if type(since) not in (int, float) or not 0 <= since < math.inf:
            raise validation.UsageError(problem)
        if not (_are_counts(present) and _are_counts(former)):
            raise validation.UsageError(problem)
        table._since = min(since, table._since)  # The clock may have been set back.
        table._present.update(present)
        table._former.update(former)
        return table


def _are_counts(counts: Any) -> bool:
    return isinstance(counts, dict) and all(
        shape in _LABELS and type(count) is int and count >= 0 for shape, count in counts.items()
    )


def got_plan(label: str) -> bool:
    """Returns whether a session of this shape received a plan."""
    return label.startswith(_WITH_PLAN)


def is_error(label: str) -> bool:
    """Returns whether a session of this shape ended with an error, or with a failed attestation."""
    return label.endswith(_ERRORS)
