"""Metrics of the committed rounds as columns for curves, with at most 300 points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl.runtime.actors import population

_MAX_POINTS = 300
_MAX_COLUMNS = 64  # With the order statistics of four metrics.
_MAX_NAME = 80
_KEYS = ("round", "committed_at")


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Computes the curves of a task, in which each point is the mean of successive rounds.

    Args:
      rows: History of the task (`Store.history`). Skipped rounds have no metrics, and are left out.

    Returns:
      A JSON-compatible dictionary: "rounds", the number of released rounds; "round" and
      "committed_at", the index and commit time of the last round of each point; "columns", the
      means of each point by name of the metric (None where no round has a finite value).
    """
    rows = [row for row in rows if not row.get(population.SKIPPED)]
    groups = _groups(len(rows))
    names: dict[str, None] = {}
    for row in rows:
        for name, value in row.items():
            if name not in names and name not in _KEYS and _number(value) is not None:
                if len(names) < _MAX_COLUMNS:
                    names[name] = None
    names.pop("epoch", None)
    return {
        "rounds": len(rows),
        "round": [_number(rows[group[-1]].get("round")) for group in groups],
        "committed_at": [_number(rows[group[-1]].get("committed_at")) for group in groups],
        "columns": {
            name[:_MAX_NAME]: [_mean(rows, group, name) for group in groups] for name in names
        },
    }


def _groups(num_rows: int) -> list[range]:
    size = max(1, math.ceil(num_rows / _MAX_POINTS))
    return [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _mean(rows: Sequence[Mapping[str, Any]], group: range, name: str) -> float | None:
    values = [number for i in group if (number := _number(rows[i].get(name))) is not None]
    return float(f"{sum(values) / len(values):.6g}") if values else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None
