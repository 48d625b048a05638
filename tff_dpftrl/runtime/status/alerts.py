"""Alerts for the operator, from a comparison of the newest figures with earlier ones.

The comparison uses the longest window with enough earlier steps: the week, otherwise the day,
otherwise ten minutes.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tff_dpftrl.runtime.status import counters, task_figures
from tff_dpftrl.runtime.status import observations as observations_lib

# Number of newest steps, and smallest number of earlier steps that form the baseline: two hours
# against ten, half an hour against two and a half, two minutes against ten.
_NEWEST = {"week": 2, "day": 6, "minutes": 24}
_MIN_BASELINE = {"week": 10, "day": 30, "minutes": 72}
_STANDARD_ERRORS = 4.0
_MIN_SHIFT = 0.05  # Smallest deviation of a share that matters.
_MIN_COUNT = 20  # Smallest number of cases from which a share is computed.
_RECENT = 600.0
_ERRORS = 0.05


@dataclasses.dataclass(frozen=True)
class Alert:
    """One alert.

    Attributes:
      kind: Rule of the alert, one of `KINDS`.
      task: Name of the task; empty for an alert about the population.
      text: One sentence for the operator.
    """

    kind: str
    task: str
    text: str


_SHARES = {
    "drop_outs": (
        "dropped_participating",
        ("configured",),
        "of the devices that take part drop out",
    ),
    "refused_reports": (
        "refused_reports",
        ("reports", "refused_reports"),
        "of reports are refused",
    ),
    "refused_sessions": ("refused_sessions", ("sessions",), "of sessions are refused"),
    "session_errors": ("told_errors", ("told_sessions",), "of sessions end with an error"),
}
KINDS = ("no_leader", "no_round", "few_rounds", "too_few_devices", "store", "untested", *_SHARES)
"""Names of all rules."""


def find(seen: observations_lib.Observations) -> list[Alert]:
    """Returns the present alerts, those of the population first."""
    now = seen.now()
    alerts = []
    if not seen.epoch and now - seen.started_at > 2 * seen.served.lease_seconds:
        text = "No server leads the population: no round can begin."
        alerts.append(Alert("no_leader", "", text))
    failed_at = seen.last_store_failure_at
    if failed_at is not None and now - failed_at < _RECENT:
        alerts.append(
            Alert("store", "", f"The store failed {_ago(now - failed_at)}: see the server's log.")
        )
    alerts += _deviations(seen)
    for name, task in seen.tasks.items():
        alerts += _of_task(seen, name, task, now)
    return alerts


def _of_task(
    seen: observations_lib.Observations, name: str, task: task_figures.TaskFigures, now: float
) -> list[Alert]:
    alerts = []
    rounds = task.settings.rounds
    if task.too_few is not None and not task.is_over:
        text = f"At the end of the last selection: {task.settings.shortage(task.too_few)}"
        alerts.append(Alert("too_few_devices", name, text))
    weights = sum(each.settings.weight for each in seen.tasks.values() if not each.is_over)
    turns = max(weights / task.settings.weight, 1.0)
    patience = 3 * turns * (rounds.selection_timeout + task.settings.longest)
    quiet = now - (task.last_commit_at or seen.started_at)
    if quiet > patience and not task.is_over:
        text = f"No round was committed for {duration(quiet)}."
        alerts.append(Alert("no_round", name, text))
    tested = task.settings.tested_tensorflow
    untested = _untested(seen, tested)
    if untested and not task.is_over:
        text = (
            f"Devices have TensorFlow {', '.join(untested)}, and the task was tested with "
            f"{', '.join(tested)}: see `task new --test-python`."
        )
        alerts.append(Alert("untested", name, text))
    return alerts


def _untested(seen: observations_lib.Observations, tested: tuple[str, ...]) -> list[str]:
    """Returns versions of TensorFlow that devices reported, of no tested minor version."""
    if not tested:
        return []
    minors = set(map(_minor, tested))
    told = [version for version, _ in seen.versions["tensorflow"].items()]
    return [one for one in told if one != counters.OTHER and _minor(one) not in minors]


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def _deviations(seen: observations_lib.Observations) -> list[Alert]:
    alerts = []
    for name in ("week", "day", "minutes"):
        window = seen.series.window(name)
        newest = _NEWEST[name]
        if len(window.values["sessions"]) >= newest + _MIN_BASELINE[name]:
            for kind, (part, whole, text) in _SHARES.items():
                now = _share(window, part, whole, slice(-newest, None))
                usual = _share(window, part, whole, slice(0, -newest))
                if now is not None and usual is not None:
                    alerts += _share_alert(kind, text, now, usual, window)
            alerts += _few_rounds(seen, window, newest)
            return alerts
    share = _share(seen.series.window("minutes"), "told_errors", ("told_sessions",), slice(None))
    if share is not None and share[0] > _ERRORS:
        text = f"{_percent(share[0])} of sessions end with an error."
        alerts.append(Alert("session_errors", "", text))
    return alerts


def _share(
    window: counters.Window, part: str, whole: tuple[str, ...], steps: slice
) -> tuple[float, float] | None:
    """Computes a share and the number of cases; None if there are too few cases."""
    cases = sum(float(window.values[name][steps].sum()) for name in whole)
    if cases < _MIN_COUNT:
        return None
    return min(float(window.values[part][steps].sum()) / cases, 1.0), cases


def _share_alert(
    kind: str,
    text: str,
    newest: tuple[float, float],
    usual: tuple[float, float],
    window: counters.Window,
) -> list[Alert]:
    share, cases = newest
    expected, earlier = usual
    error = math.sqrt(max(expected * (1 - expected), 1 / earlier) * (1 / cases + 1 / earlier))
    if share - expected <= max(_MIN_SHIFT, _STANDARD_ERRORS * error):
        return []
    length = _length(window, _NEWEST[window.name])
    before = _length(window, len(window.values["sessions"]))
    sentence = (
        f"{_percent(share)} {text} (last {length}); usual in the last {before}: "
        f"{_percent(expected)}."
    )
    return [Alert(kind, "", sentence)]


def _few_rounds(
    seen: observations_lib.Observations, window: counters.Window, newest: int
) -> list[Alert]:
    """Checks for fewer rounds than in nearly all earlier stretches of the same length."""
    if all(task.is_over for task in seen.tasks.values()):
        return []
    committed = window.values["committed"]
    stretches = np.convolve(committed, np.ones(newest), mode="valid")
    now, before = stretches[-1], stretches[:-newest]
    hours = newest * window.step / 3600
    usual = float(np.median(before))
    # Traffic varies over the day: the threshold is half of the quietest stretches.
    threshold = float(np.quantile(before, 0.05)) / 2
    # The number of rounds in a stretch has a standard error of about its square root.
    if now >= threshold or usual - now <= 3 * math.sqrt(usual):
        return []
    text = (
        f"{now / hours:.3g} rounds an hour (last {_length(window, newest)}); usual in the last "
        f"{_length(window, len(committed))}: {usual / hours:.3g}."
    )
    return [Alert("few_rounds", "", text)]


def _length(window: counters.Window, num_steps: int) -> str:
    return duration(num_steps * window.step)


def duration(seconds: float) -> str:
    """Returns a duration in the largest unit of which it has two or more."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _ago(seconds: float) -> str:
    return f"{duration(seconds)} ago"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
