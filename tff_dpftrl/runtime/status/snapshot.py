"""Snapshots of the observations for the status page, as JSON-compatible figures."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from tff_dpftrl.runtime.status import alerts, distribution, next_round, task_figures
from tff_dpftrl.runtime.status import observations as observations_lib

_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
_MAX_TEXT = 500
_MAX_DEPTH = 4
_MAX_NUMBER = 1e300


def of_population(
    seen: observations_lib.Observations, window: str, privacy: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Collects the figures of a population, without the details of its tasks.

    Args:
      seen: Observations of the server.
      window: Name of the resolution, one of `time_series.RESOLUTIONS`.
      privacy: Known privacy figures by task.

    Returns:
      The figures. Times are in seconds since 1970, sizes in bytes; series have one value a step,
      oldest first.
    """
    now = seen.now()
    series = seen.series.window(window)
    return {
        "now": now,
        "population": seen.served.name,
        "started_at": seen.started_at,
        "epoch": seen.epoch,
        "leaders": seen.leaders,
        "store_failures": int(seen.series.total("store_failures")),
        "window": {"name": window, "step": series.resolution.step, "end": series.end},
        "totals": {
            name: int(seen.series.total(name))
            for name in (*observations_lib.LEVELS, *observations_lib.COUNTERS)
        },
        "series": {
            name: [_short(value) for value in values] for name, values in series.values.items()
        },
        "session_shapes": [list(row) for row in seen.session_table.rows()],
        "session_seconds": _distribution(seen.session_seconds),
        "refused_sessions": seen.refused_sessions.items(),
        "sent_away": seen.sent_away_reasons.items(),
        "versions": {name: counts.items() for name, counts in seen.versions.items()},
        "alerts": [
            {"kind": alert.kind, "task": alert.task, "text": alert.text}
            for alert in alerts.find(seen)
        ],
        "tasks": [
            {
                **_task(name, task),
                "outlook": next_round.outlook(seen, name),
                **_spent(privacy.get(name)),
            }
            for name, task in seen.tasks.items()
        ],
    }


def _short(value: float) -> float:
    """Rounds to the digits that a chart can show."""
    return float(f"{value:.5g}") if value >= 1e-3 else 0.0


def _spent(figures: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns ε so far and of all that may be spent; nothing while they are not known."""
    if figures is None:
        return {}
    most = [figures.get(name) for name in ("declared_epsilon", "budget_epsilon")]
    known = [value for value in most if isinstance(value, int | float)]
    return {"epsilon": figures.get("epsilon"), "most_epsilon": min(known, default=None)}


def _task(name: str, task: task_figures.TaskFigures) -> dict[str, Any]:
    attempt = task.attempt
    return {
        "name": name,
        "phase": task.phase,
        "model_of": task.settings.model_of,
        "rounds_done": task.rounds_done,
        "num_rounds": task.settings.num_rounds,
        "committed": task.committed,
        "abandoned": task.abandoned.total(),
        "last_commit_at": task.last_commit_at,
        "round_seconds": task.round_seconds.quantile(0.5),
        "goal": task.settings.rounds.goal_count,
        "least": task.settings.rounds.least,
        "attempt": attempt
        and {
            "round": attempt.round_index,
            "began_at": attempt.began_at,
            "devices": attempt.devices,
            "reports": attempt.reports,
        },
    }


def of_task(task: task_figures.TaskFigures) -> dict[str, Any]:
    """Collects the details of a task.

    Args:
      task: Observations of the task.

    Returns:
      Distributions of durations, outcomes of reports and attempts, and traffic in bytes.
    """
    return {
        "round_seconds": _distribution(task.round_seconds),
        "report_seconds": _distribution(task.report_seconds),
        "reports": [[outcome, count] for outcome, count in task.reports.items() if count],
        "abandoned": task.abandoned.items(),
        "bytes_sent": task.bytes_sent,
        "bytes_received": task.bytes_received,
    }


def _distribution(values: distribution.Distribution) -> dict[str, Any]:
    """Returns the quantiles, and the counts from the smallest to the largest bucket in use."""
    used = [i for i, count in enumerate(values.counts) if count]
    low, high = (used[0], used[-1]) if used else (0, -1)
    return {
        "count": values.count,
        **{name: values.quantile(fraction) for name, fraction in _QUANTILES.items()},
        # Upper edge of bucket `low + i`; the last bucket has none.
        "edges": [values.edges[min(i, len(values.edges) - 1)] for i in range(low, high + 1)],
        "counts": values.counts[low : high + 1],
    }


def plain(value: Any, depth: int = 0) -> Any:
    """Converts a value of another component to JSON types, with a bounded size."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        if not -_MAX_NUMBER < value < _MAX_NUMBER:  # Also true of NaN.
            return None
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        items = list(value.items())[:100]
        return {str(key)[:_MAX_TEXT]: plain(each, depth + 1) for key, each in items}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [plain(each, depth + 1) for each in value[:100]]
    return str(value)[:_MAX_TEXT]
