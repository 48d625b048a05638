"""Committed rounds of a task: the last of them as tables, all of them as two pictures.

Everything here takes time with the number of rounds: it runs on a thread (`read_behind`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl import packages
from tff_dpftrl.runtime.actors import population

_MAX_POINTS = 500
_MAX_CURVES = 6
_MAX_METRICS = 64  # With the order statistics of four metrics.
_NUM_LAST = 10
# Metrics to draw: the first of these that some metric has in its name.
_DRAWN = {"accuracy": ("accuracy", "top1"), "loss": ("loss",)}
_HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Past:
    """Content of the page about committed rounds.

    Attributes:
      num_released: Number of rounds with a result.
      last: The last rounds, newest first, as `Store.history` returns them.
      metrics: Metrics of the last round with a result.
      pictures: HTML of the pictures, or of a sentence about what is missing.
    """

    num_released: int
    last: list[Mapping[str, Any]]
    metrics: dict[str, float]
    pictures: str


def of_history(rows: Sequence[Mapping[str, Any]]) -> Past:
    """Summarizes the history of a task (`Store.history`)."""
    released = [row for row in rows if not row.get(population.SKIPPED)]
    known = [] if not released else [(k, number(v)) for k, v in released[-1].items()]
    metrics = {
        name[:80]: value
        for name, value in known[:_MAX_METRICS]
        if value is not None and name not in ("round", "committed_at", "epoch")
    }
    last = list(rows[-_NUM_LAST:])[::-1]
    return Past(len(released), last, metrics, _pictures(released))


def _pictures(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draws rounds over time, and accuracy (or else loss) over rounds."""
    if len(rows) < 2:
        return ""
    if packages.is_missing("matplotlib"):
        return f"<p>Pictures need {packages.remedy('matplotlib')}.</p>"
    from tff_dpftrl.reports import page  # Not before somebody looks: it takes time.

    size = math.ceil(len(rows) / _MAX_POINTS)
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    rounds = [(number(group[-1].get("round")) or 0.0) + 1.0 for group in groups]
    times = [number(group[-1].get("committed_at")) or 0.0 for group in groups]
    commits = {"committed": ([(time - times[0]) / _HOUR for time in times], rounds)}
    drawn = page.chart(
        commits, title="Committed rounds", x_label="hours since the first commit", y_label="round"
    )
    for what, words in _DRAWN.items():
        names = [name for name in rows[-1] if any(word in name.casefold() for word in words)]
        curves = {}
        for name in names:
            means = [_mean(group, name) for group in groups]
            points = [(x, y) for x, y in zip(rounds, means, strict=True) if y is not None]
            if points and len(curves) < _MAX_CURVES:
                curves[_label(name)] = tuple(zip(*points, strict=True))
        if curves:
            title = what.capitalize()
            return drawn + page.chart(curves, title=title, x_label="round", y_label=what)
    return drawn


def _label(name: str) -> str:
    """Returns a name that no picture takes for a formula or for a curve without a name."""
    return re.sub(r"[^A-Za-z0-9 ./_-]", "?", name)[:40].lstrip("_")


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [value for row in rows if (value := number(row.get(name))) is not None]
    return sum(values) / len(values) if values else None


def number(value: Any) -> float | None:
    """Returns a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
