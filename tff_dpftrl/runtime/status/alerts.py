"""What an operator should look at: the newest figures against those of the week before.

Of the resolutions of `time_series`, the week's is compared where it has enough to tell what
is usual, otherwise the day's, otherwise the minutes'.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tff_dpftrl.runtime.status import observations as observations_lib
from tff_dpftrl.runtime.status import task_figures, time_series

# How many of the newest steps are looked at together, and how many at least stand for what
# is usual: two hours against ten, half an hour against two and a half, two minutes against ten.
_NEWEST = {"week": 2, "day": 6, "minutes": 24}
_LEAST_USUAL = {"week": 10, "day": 30, "minutes": 72}
_STANDARD_ERRORS = 4.0
_LEAST_SHIFT = 0.05  # Of a share, below which a deviation is no matter.
_LEAST_COUNT = 20  # Cases that a share is computed from.
_RECENT = 600.0
_ERRORS = 0.05


@dataclasses.dataclass(frozen=True)
class Alert:
    """Something to look at.

    Attributes:
      kind: Which rule found it, one of `KINDS`.
      task: The task it is about; empty if it is about the population.
      text: One sentence.
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
KINDS = ("no_leader", "no_round", "few_rounds", "too_few_devices", "store", *_SHARES)
"""Every rule."""


def find(seen: observations_lib.Observations) -> list[Alert]:
    """Looks at everything.

    Args:
      seen: What was observed.

    Returns:
      What stands out now, population first.
    """
    now = seen.now()
    found = []
    if not seen.epoch and now - seen.started_at > 2 * seen.served.lease_seconds:
        found.append(Alert("no_leader", "", "Nobody leads the population: no round can begin."))
    failed_at = seen.last_store_failure_at
    if failed_at is not None and now - failed_at < _RECENT:
        found.append(
            Alert("store", "", f"The store failed {_ago(now - failed_at)}: see the server's log.")
        )
    found += _deviations(seen)
    for name, task in seen.tasks.items():
        found += _of_task(seen, name, task, now)
    return found


def _of_task(
    seen: observations_lib.Observations, name: str, task: task_figures.TaskFigures, now: float
) -> list[Alert]:
    found = []
    rounds = task.settings.rounds
    if task.too_few is not None and not task.is_over:
        text = (
            f"{task.too_few} devices had come when the time for selection was over, and a round "
            f"needs {rounds.least}."
        )
        found.append(Alert("too_few_devices", name, text))
    weights = sum(each.settings.weight for each in seen.tasks.values() if not each.is_over)
    turns = max(weights / task.settings.weight, 1.0)
    patience = 3 * turns * (rounds.selection_timeout + task.settings.longest)
    quiet = now - (task.last_commit_at or seen.started_at)
    if quiet > patience and not task.is_over:
        text = f"No round was committed for {_duration(quiet)}."
        found.append(Alert("no_round", name, text))
    return found


def _deviations(seen: observations_lib.Observations) -> list[Alert]:
    found = []
    for name in ("week", "day", "minutes"):
        window = seen.series.window(name)
        newest = _NEWEST[name]
        if len(window.values["sessions"]) >= newest + _LEAST_USUAL[name]:
            for kind, (part, whole, text) in _SHARES.items():
                now = _share(window, part, whole, slice(-newest, None))
                usual = _share(window, part, whole, slice(0, -newest))
                if now is not None and usual is not None:
                    found += _share_alert(kind, text, now, usual, window)
            found += _few_rounds(seen, window, newest)
            return found
    share = _share(seen.series.window("minutes"), "told_errors", ("told_sessions",), slice(None))
    if share is not None and share[0] > _ERRORS:
        text = f"{_percent(share[0])} of sessions end with an error."
        found.append(Alert("session_errors", "", text))
    return found


def _share(
    window: time_series.Window, part: str, whole: tuple[str, ...], steps: slice
) -> tuple[float, float] | None:
    """A share and the number of cases; None if there are too few."""
    cases = sum(float(window.values[name][steps].sum()) for name in whole)
    if cases < _LEAST_COUNT:
        return None
    return min(float(window.values[part][steps].sum()) / cases, 1.0), cases


def _share_alert(
    kind: str,
    text: str,
    newest: tuple[float, float],
    usual: tuple[float, float],
    window: time_series.Window,
) -> list[Alert]:
    share, cases = newest
    expected, earlier = usual
    error = math.sqrt(max(expected * (1 - expected), 1 / earlier) * (1 / cases + 1 / earlier))
    if share - expected <= max(_LEAST_SHIFT, _STANDARD_ERRORS * error):
        return []
    length = _length(window, _NEWEST[window.resolution.name])
    before = _length(window, len(window.values["sessions"]))
    said = f"{_percent(share)} {text} (last {length}); usual in the last {before}: "
    return [Alert(kind, "", said + f"{_percent(expected)}.")]


def _few_rounds(
    seen: observations_lib.Observations, window: time_series.Window, newest: int
) -> list[Alert]:
    """Fewer rounds than in nearly all stretches of the same length before."""
    if all(task.is_over for task in seen.tasks.values()):
        return []
    committed = window.values["committed"]
    stretches = np.convolve(committed, np.ones(newest), mode="valid")
    now, before = stretches[-1], stretches[:-newest]
    hours = newest * window.resolution.step / 3600
    usual = float(np.median(before))
    # Days have tides: half of the quietest stretches is the mark.
    mark = float(np.quantile(before, 0.05)) / 2
    # The number of a stretch has an error of about its square root.
    if now >= mark or usual - now <= 3 * math.sqrt(usual):
        return []
    text = (
        f"{now / hours:.3g} rounds an hour (last {_length(window, newest)}); usual in the last "
        f"{_length(window, len(committed))}: {usual / hours:.3g}."
    )
    return [Alert("few_rounds", "", text)]


def _length(window: time_series.Window, num_steps: int) -> str:
    return _duration(num_steps * window.resolution.step)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _ago(seconds: float) -> str:
    return f"{_duration(seconds)} ago"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
