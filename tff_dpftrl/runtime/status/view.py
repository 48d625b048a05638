"""The status page as HTML, which needs no script; names and values in it are text."""

from __future__ import annotations

import dataclasses
import numbers
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tff_dpftrl.accounting import display
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.reports import markup
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.status import alerts, counters, next_round, past, task_figures
from tff_dpftrl.runtime.status import observations as observations_lib

_MAX_TEXT = 500
_MAX_DEPTH = 4
_MAX_NUMBER = 1e300
_WINDOWS = {"minutes": "last 10 minutes", "day": "last 24 hours", "week": "last 7 days"}
_COUNTED = {
    "committed": "rounds committed",
    "abandoned": "attempts abandoned",
    "configured": "devices that began to take part",
    "reports": "reports that count",
    "refused_reports": "reports refused",
    "dropped_participating": "devices that dropped out of a round",
    "sessions": "sessions",
    "refused_sessions": "sessions ended with an error",
    "sent_away": "devices told to come back",
    "store_failures": "failures of the store",
    "bytes_sent": "sent to devices",
    "bytes_received": "received from devices",
}
_OF_ROUND = {
    "devices/reports": "reports",
    "devices/dropped": "dropped out",
    "devices/outstanding": "not waited for",
    "devices/late": "late",
    "devices/unusable": "unusable",
    "devices/group lost": "in lost groups",
}
_LEGEND = (
    "- check-in, v plan, [ training began, ] ended, + upload began, ^ done, # refused by the "
    "server, ! interrupted, * error, ? attestation failed. Of the last two to four weeks, as "
    "devices told: nobody has verified it."
)
_NOT_COVERED = "Figures without noise are not covered by the privacy statement: do not publish them"


@dataclasses.dataclass(frozen=True)
class Details:
    """Details of the task that is shown.

    Attributes:
      privacy: Its privacy figures; None if there are none.
      privacy_error: Why they could not be read; empty if they were.
      past: Its committed rounds; None while they are not known.
      past_error: Why they could not be read; empty if they were.
      written: Names of the files of its report, and times of their last change.
    """

    privacy: Mapping[str, Any] | None
    privacy_error: str
    past: past.Past | None
    past_error: str
    written: Sequence[tuple[str, float]] = ()


def page(
    seen: observations_lib.Observations,
    shown: int,
    privacy: Mapping[str, Mapping[str, Any]],
    details: Details,
) -> str:
    """Makes the page, with the details of the task of index `shown`."""
    now = seen.now()
    name, task = list(seen.tasks.items())[shown]
    parts = {
        "alerts": _alerts(seen),
        "tasks": "<h2>Tasks</h2>" + _tasks(seen, shown, privacy),
        "devices": "<h2>Devices and rounds</h2>" + _counts(seen),
        "task": f"<h2>Task {markup.text(name)}</h2>" + _said_of(task),
        "outlook": _paragraphs(next_round.outlook(seen, name)),
        "privacy": "<h3>Privacy so far</h3>" + _privacy(details),
        "report": _report(details.written, shown),
        "past": "<h3>Committed rounds</h3>" + _past(details),
        "outcomes": "<h3>Since the server started</h3>" + _outcomes(task),
        "sessions": "<h2>Sessions</h2>" + _sessions(seen),
    }
    live = {"alerts", "outlook"}  # Screen readers hear what changes there.
    body = "".join(
        markup.element(
            "section", content, id=key, **({"aria_live": "polite"} if key in live else {})
        )
        for key, content in parts.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{markup.text(seen.served.name)} – federated learning server</title>
<link rel="icon" href="icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="page.css">
<script type="module" src="page.js"></script>
<noscript><meta http-equiv="refresh" content="10"></noscript>
</head>
<body>
<header id="header">{_header(seen, now)}</header>
<p id="silent" role="alert">The server does not answer: these figures are old.</p>
<main>
{body}
</main>
<footer class="muted"><p>Counts, sums and order statistics: no device is named, but a value can be
one device's. The same figures for Prometheus: <a href="metrics">metrics</a>.</p></footer>
</body>
</html>
"""


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str) -> str:
    """Makes a table of texts, or of one row that says that there is nothing."""
    cells = [[markup.text(cell) for cell in row] for row in rows]
    return markup.table(head, cells or [["none", *[""] * (len(head) - 1)]], caption)


def _paragraphs(lines: Iterable[str], kind: str = "") -> str:
    attributes = {"class_": kind} if kind else {}
    return "".join(markup.element("p", markup.text(line), **attributes) for line in lines)


def _header(seen: observations_lib.Observations, now: float) -> str:
    leads = f"lease epoch {seen.epoch}" if seen.epoch else "nobody leads"
    several = f" · {seen.leaders} Coordinators so far" if seen.leaders > 1 else ""
    said = f"Federated learning server, up {alerts.duration(now - seen.started_at)} · {leads}"
    title = markup.element("h1", markup.text(seen.served.name))
    return title + _paragraphs([f"{said}{several} · {_time(now)}"], "muted")


def _alerts(seen: observations_lib.Observations) -> str:
    found = alerts.find(seen)
    if not found:
        return _paragraphs(["No alerts."], "muted")
    return _paragraphs([f"{one.task or 'Population'}: {one.text}" for one in found], "alert")


def _tasks(
    seen: observations_lib.Observations, shown: int, privacy: Mapping[str, Mapping[str, Any]]
) -> str:
    rows = []
    for i, (name, task) in enumerate(seen.tasks.items()):
        kind = "chosen" if i == shown else "other"
        link = markup.element("a", markup.text(name), href=f"?task={i}", id=f"to-{i}", class_=kind)
        goal = task.settings.rounds.goal_count
        attempt = f"goal {goal:,} reports"
        if task.attempt is not None:
            attempt = (
                f"{task.attempt.reports:,} of {goal:,} reports, {task.attempt.devices:,} devices"
            )
        done = "–" if task.rounds_done is None else f"{task.rounds_done:,}"
        if task.rounds_done is not None and task.settings.num_rounds is not None:
            done += f" of {task.settings.num_rounds:,}"
        cells = (
            task.phase,
            attempt,
            done,
            f"{task.abandoned.total():,}",
            _seconds(task.round_seconds.quantile(0.5)),
            "–" if task.last_commit_at is None else _time(task.last_commit_at),
            _spent(privacy.get(name)),
        )
        rows.append([link, *map(markup.text, cells)])
    head = ("Task", "State", "This round", "Rounds done", "Abandoned", "Median round")
    return markup.table([*head, "Last commit", "ε so far, of all"], rows, "What each task does")


def _spent(figures: Mapping[str, Any] | None) -> str:
    """Returns ε so far and of all that may be spent."""
    if figures is None or "epsilon" not in figures:
        return "–"
    if past.number(figures["epsilon"]) is None:
        return "no guarantee"
    most = _most(figures)
    of_all = "" if most is None else f" of {display.round_up(most)}"
    return display.round_up(figures["epsilon"]) + of_all


def _most(figures: Mapping[str, Any]) -> float | None:
    values = [past.number(figures.get(name)) for name in ("declared_epsilon", "budget_epsilon")]
    return min((value for value in values if value is not None), default=None)


def _said_of(task: task_figures.TaskFigures) -> str:
    of = task.settings.model_of
    evaluates = f"Evaluates the model of {of}. " if of is not None else ""
    rounds = task.settings.rounds
    goal = f"A round is complete with {rounds.goal_count:,} reports, and needs {rounds.least:,}."
    return _paragraphs([evaluates + goal], "muted")


def _report(written: Sequence[tuple[str, float]], shown: int) -> str:
    if not written:
        none = "No report is written yet: tff-dpftrl task report writes one into the task’s folder."
        return _paragraphs([none], "muted")
    links = (
        markup.element("a", markup.text(name), href=f"report/{shown}/{name}", id=f"file-{name}")
        + f" ({_time(at)})"
        for name, at in written
    )
    return f"<p>Report, as it was last written: {', '.join(links)}</p>"


def _privacy(details: Details) -> str:
    figures = details.privacy
    error = _paragraphs([details.privacy_error], "alert") if details.privacy_error else ""
    if not isinstance(figures, Mapping):
        none = "No figures: nothing was released yet, or the task is not private."
        return error + _paragraphs([none], "muted")
    epsilon, budget = (
        past.number(figures.get("epsilon")),
        past.number(figures.get("budget_epsilon")),
    )
    if epsilon is None:
        reasons = _bullets(figures.get("no_guarantee"))
        parts = [error, _paragraphs(["No guarantee"], "big"), reasons]
    else:
        parts = [error, _paragraphs([f"ε = {display.round_up(epsilon)}"], "big")]
        parts.append(_paragraphs(_spent_so_far(figures), "muted"))
    if budget:
        share = display.round_up(100 * (epsilon or 0.0) / budget, 3)
        said = f"{share} % of the budget of ε = {display.round_up(budget)}"
        parts.append(_paragraphs([said], "muted"))
    if figures.get("stopped"):
        parts.append(_paragraphs([f"No further round: {figures['stopped']}."]))
    declared, observed = figures.get("declared"), figures.get("observed", figures)
    rows = [
        [title, *(_whole(of, key) for of in (declared, observed))]
        for key, title in (
            ("num_rounds", "rounds"),
            ("min_sep", "least separation, rounds (MinS)"),
            ("max_participations", "most times of a device (MaxP)"),
        )
    ]
    parts.append(_table(["", "declared", "reported by devices"], rows, "Participation"))
    parts.append(_bullets(figures.get("headline_caveats")))
    return "".join(parts)


def _spent_so_far(figures: Mapping[str, Any]) -> list[str]:
    """Says what ε counts, what one more round costs, and which ε to quote."""
    values = {
        name: past.number(figures.get(name)) for name in ("delta", "rho_zcdp", "next_epsilon")
    }
    of = []
    if values["delta"] is not None:
        of.append(f"δ = {display.delta(values['delta'])}")
    if values["rho_zcdp"] is not None:
        of.append(f"ρ = {display.round_up(values['rho_zcdp'])} (zCDP)")
    if figures.get("unit_of_privacy"):
        of.append(f"for each {figures['unit_of_privacy']}")
    said = [", ".join(of)]
    rounds = past.number(figures.get("num_rounds"))
    if rounds is None:
        rounds = past.number(_whole(figures.get("observed"), "num_rounds"))
    if rounds is not None:
        skipped = past.number(figures.get("skipped_rounds"))
        of_them = f", {skipped:,.0f} of them skipped" if skipped else ""
        said.append(f"Charged: {rounds:,.0f} committed rounds{of_them}.")
    if figures.get("stopped"):
        return said
    if values["next_epsilon"] is not None:
        said.append(
            "With one more round, such as one that runs: ε = "
            f"{display.round_up(values['next_epsilon'])}. A round whose devices took part is "
            "charged even if it fails."
        )
    if (most := _most(figures)) is not None:
        said.append(
            f"All rounds that there may be: ε = {display.round_up(most)}. Quote this one until "
            "the task is over, as the privacy statement does."
        )
    return said


def _whole(of: Any, name: str) -> Any:
    value = of.get(name) if isinstance(of, Mapping) else None
    return "–" if value is None else value


def _bullets(value: Any) -> str:
    lines = value if isinstance(value, list) else [value] if value else []
    return markup.bullets(map(markup.text, lines)) if lines else ""


def _past(details: Details) -> str:
    known = details.past
    if details.past_error:
        return _paragraphs([f"The committed rounds {details.past_error}."], "alert")
    if known is None:
        return _paragraphs(["They are being read."], "muted")
    if not known.last:
        return _paragraphs(["No round is released yet."], "muted")
    rows = []
    for row in known.last:
        at, index = past.number(row.get("committed_at")), past.number(row.get("round"))
        is_skipped = "skipped" if row.get(population.SKIPPED) else "committed"
        counts = [_figure(past.number(row.get(key))) for key in _OF_ROUND]
        rows.append(
            [_figure((index or 0.0) + 1), is_skipped, "" if at is None else _time(at), *counts]
        )
    head = ["round", "", "at", *_OF_ROUND.values()]
    metrics = [
        [name, _figure(value)]
        for name, value in known.metrics.items()
        if not name.startswith("devices/") and name != "privacy/delta"
    ]
    return "".join(
        [
            _table(
                head,
                rows,
                f"Last rounds; {strategy_lib.counted(known.num_released, 'round')} released",
            ),
            f'<div class="charts">{known.pictures}</div>',
            _table(["metric", "value"], metrics, f"Last released round. {_NOT_COVERED}"),
        ]
    )


def _outcomes(task: task_figures.TaskFigures) -> str:
    total = max(sum(task.reports.values()), 1)
    reports = [
        [name, f"{count:,}", f"{100 * count / total:.3g} %"]
        for name, count in task.reports.items()
        if count
    ]
    traffic = [
        ["to devices", display.data_size(task.bytes_sent)],
        ["from devices", display.data_size(task.bytes_received)],
    ]
    durations = {
        "round, from the choice of devices to the commit": task.round_seconds,
        "from there to a device’s report": task.report_seconds,
    }
    return "".join(
        [
            _table(["outcome", "count", "share"], reports, "Reports"),
            _table(["reason", "count"], _counted(task.abandoned), "Abandoned rounds"),
            _durations(durations),
            _table(["", "size"], traffic, "Traffic"),
        ]
    )


def _counts(seen: observations_lib.Observations) -> str:
    now = [[name, f"{seen.series.total(name):,.0f}"] for name in observations_lib.LEVELS]
    rows = []
    for name, title in _COUNTED.items():
        recent = (seen.series.recent(name, window) for window in _WINDOWS)
        values = [seen.series.total(name), *recent]
        shown = [display.data_size(v) if name.startswith("bytes") else f"{v:,.0f}" for v in values]
        rows.append([title, *shown])
    head = ["", "since the start", *_WINDOWS.values()]
    return _table(["state", "devices"], now, "Devices now") + _table(head, rows, "Counts")


def _sessions(seen: observations_lib.Observations) -> str:
    shapes = [
        [shape, f"{count:,}", "" if percent is None else f"{percent:.1f} %"]
        for shape, count, percent in seen.session_table.rows()
    ]
    versions = [
        [f"{name} {version}", f"{count:,}"]
        for name, counts in seen.versions.items()
        for version, count in counts.items()
    ]
    head = ["reason", "count"]
    return "".join(
        [
            _table(["shape", "count", "of those with a plan"], shapes, "Session shapes"),
            _paragraphs([_LEGEND], "muted"),
            _durations({"session with a plan, as devices told": seen.session_seconds}),
            _table(head, _counted(seen.refused_sessions), "Sessions ended with an error"),
            _table(head, _counted(seen.sent_away_reasons), "Devices told to come back"),
            _table(["version", "sessions"], versions, "Versions, as devices told"),
        ]
    )


def _durations(found: Mapping[str, counters.Distribution]) -> str:
    fractions = (0.1, 0.5, 0.9, 0.99)
    rows = [
        [name, f"{values.count:,}", *(_seconds(values.quantile(share)) for share in fractions)]
        for name, values in found.items()
    ]
    return _table(["", "count", "10 %", "median", "90 %", "99 %"], rows, "Durations")


def _counted(counts: counters.BoundedCounts) -> list[list[str]]:
    return [[label, f"{count:,}"] for label, count in counts.items()]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g} s" if value < 10 else alerts.duration(value)


def _time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):
        return "–"


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
