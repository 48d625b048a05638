"""How the sessions of devices went: the table of their shapes (Bonawitz et al. 2019, table 1)."""

from __future__ import annotations

import collections
import json
import os
import pathlib

from tff_dpftrl import durable_files, json_text
from tff_dpftrl.runtime.device import session_shape
from tff_dpftrl.runtime.status import bounded_counts

_VERSION = 1
_LABELS = session_shape.SHAPES | {bounded_counts.OTHER}
_WITH_PLAN = session_shape.Event.CHECKED_IN.value + session_shape.Event.PLAN_DOWNLOADED.value
_ERRORS = (session_shape.Event.ERROR.value, session_shape.Event.ATTESTATION_FAILED.value)


class SessionTable:
    """Counts sessions by shape, and lasts as a file.

    What is no shape counts as "other". Nothing but counts is kept: a file of them says of no
    session when it was, nor whose.
    """

    def __init__(self):
        """Starts empty."""
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, shape: str) -> str:
        """Counts a session.

        Returns:
          The label it counts under.
        """
        label = shape if shape in _LABELS else bounded_counts.OTHER
        self._counts[label] += 1
        return label

    @property
    def total(self) -> int:
        """How many sessions there were."""
        return self._counts.total()

    def rows(self) -> list[tuple[str, int, float | None]]:
        """Shape, count and percentage, as the paper counts: of sessions that got a plan.

        Returns:
          Those first, and then the others (of devices that were sent away, mostly) without a
          percentage; each from the most frequent on.
        """
        ordered = sorted(
            self._counts.items(), key=lambda item: (not got_plan(item[0]), -item[1], item[0])
        )
        total = sum(count for shape, count in ordered if got_plan(shape))
        return [
            (shape, count, 100 * count / total if got_plan(shape) and total else None)
            for shape, count in ordered
        ]

    def to_markdown(self) -> str:
        """The table as the paper prints it."""
        lines = ["| session shape | count | of those with a plan |", "|---|---:|---:|"]
        for shape, count, percent in self.rows():
            share = "" if percent is None else f"{percent:.1f} %"
            lines.append(f"| `{shape}` | {count:,} | {share} |")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the counts to a file, in one step.

        Raises:
          OSError: If it cannot be written.
        """
        content = {"version": _VERSION, "session_shapes": dict(self._counts)}
        durable_files.write(path, (json.dumps(content, indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SessionTable:
        """Reads what `save` wrote.

        Returns:
          The table; an empty one if there is no file.

        Raises:
          OSError: If it cannot be read.
          ValueError: If the file holds something else.
        """
        table = cls()
        problem = f"{path} holds no counts of sessions: move it away, or bring the right one back."
        try:
            content = json_text.parse(pathlib.Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return table
        except ValueError as error:
            raise ValueError(problem) from error
        if not isinstance(content, dict) or content.get("version") != _VERSION:
            raise ValueError(problem)
        counts = content.get("session_shapes")
        if not isinstance(counts, dict) or not all(
            shape in _LABELS and type(count) is int and count >= 0
            for shape, count in counts.items()
        ):
            raise ValueError(problem)
        table._counts.update(counts)
        return table


def got_plan(label: str) -> bool:
    """Whether a session of this shape was to train."""
    return label.startswith(_WITH_PLAN)


def is_error(label: str) -> bool:
    """Whether a session of this shape ended with an error, of the device or its attestation."""
    return label.endswith(_ERRORS)
