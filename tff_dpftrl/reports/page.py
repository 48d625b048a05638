"""`report.html`: a results folder as one page, without scripts and without references.

By default it holds what may be published only. A page for the operator, with exact figures of the
training users, says so in a banner.
"""

from __future__ import annotations

import base64
import io
import json
import math
import pathlib
import re
import shlex
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tff_dpftrl import packages, pictures, validation, version
from tff_dpftrl.accounting import display, statement_text
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.reports import markup
from tff_dpftrl.reports import results as results_lib

NAME = "report.html"

_CSS = pathlib.Path(__file__).with_name("page.css")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_PRIVATE = (
    "For the operator only: this page has exact figures of the training users, without noise, "
    "which no statement covers. Do not publish it."
)
_PUBLISHABLE = (
    "Without exact figures of those who are protected: what is measured on the data that the model "
    "is trained on is left out."
)
HELD_OUT = (
    "Columns eval_… are exact, of the data that the run was evaluated on. No guarantee covers what "
    "they say about the people in that data."
)
_NO_PROMISE = {
    "pretraining": "Nothing of this model is private: whoever has it may learn the text.",
    "sweep": sentences.CHOICE_AMONG_RUNS,
    "task": "There is no privacy statement: evaluation on devices promises nothing.",
}
_NO_STATEMENT = "There is no privacy statement."
UNITS = {"finetuning": "step", "custom finetuning": "step", "pretraining": "epoch"}
TITLES = {
    "training": "Training run",
    "finetuning": "Fine-tuning",
    "custom finetuning": "Training of a model of one's own",
    "pretraining": "Pretraining on public text",
    "sweep": "Sweep",
    "task": "Task served to devices",
    "handed on": "Results that were handed on",
}
_MAY = {
    "yes": "may be published",
    "yes, but": "may be published where its content may be seen",
    "no": "for the operator",
    "never": "never hand it on",
}
_NAMES = {
    "epsilon": "ε",
    "delta": "δ",
    "simulated_epsilon": "ε, simulated run",
    "noise_multiplier": "noise multiplier",
    "eval_loss": "loss",
    results_lib.ACCURACY: "top-1",
    f"best_{results_lib.ACCURACY}": "best top-1",
    "cells": "runs",
}
_LARGEST_PICTURE = 4 * 2**20
_PNG = b"\x89PNG\r\n\x1a\n"
MOST_SERIES = 8
"""Number of curves that can be told apart: a chart leaves out later ones, and counts them."""

_LONGEST_LABEL = 60  # Characters; longer labels would leave no room for the curves.


def of(found: results_lib.Results) -> str:
    """Returns the page of a results folder, as HTML."""
    sections = [
        ("Privacy", _privacy(found)),
        ("Participation", _participation(found)),
        ("Settings of the sweep", _settings(found)),
        ("Results", _measured(found)),
        ("What a recount found", _recount(found)),
        ("Configuration", _configuration(found)),
        (
            "What is missing",
            markup.bullets(map(markup.text, found.missing)) if found.missing else "",
        ),
        ("Files", _files(found)),
    ]
    title = f"{TITLES[found.kind]}: {found.data}"
    return document(title, headline(found), sections, is_private=found.is_private)


def document(
    title: str, lead: str, sections: Iterable[tuple[str, str]], *, is_private: bool
) -> str:
    """Makes a page of sections, pairs of a heading and HTML; empty sections are left out.

    Title, lead and headings are not escaped yet. `is_private` says whether there are exact figures
    of the training users.
    """
    parts = []
    for number, (heading, content) in enumerate(sections):
        if content:
            head = markup.element("h2", markup.text(heading), id=f"s{number}")
            parts.append(markup.element("section", head + content, aria_labelledby=f"s{number}"))
    banner = markup.element("p", markup.text(_PRIVATE), class_="private") if is_private else ""
    notice = "" if is_private else markup.element("p", markup.text(_PUBLISHABLE), class_="muted")
    made_by = f"Made by tff_dpftrl {version.__version__} from the files of results folders."
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{markup.text(title)}</title>
<style>
{_CSS.read_text(encoding="utf-8")}</style>
</head>
<body>
<header>
<h1>{markup.text(title)}</h1>
<p class="lead">{markup.text(lead)}</p>
{banner}{notice}
</header>
<main>
{chr(10).join(parts)}
</main>
<footer><p>{markup.text(made_by)}</p></footer>
</body>
</html>
"""


def headline(found: results_lib.Results) -> str:
    """Returns what a folder promises, in a sentence."""
    stated = found.statement
    if found.kind == "sweep":
        begun = f"{len(found.cells)} runs have begun"
        return f"{begun}; {len(found.settings)} settings have a finished one."
    if stated is None:
        return _NO_PROMISE.get(found.kind, _NO_STATEMENT)
    if not found.may_be_published:
        return sentences.ONE_OF_A_CHOICE
    if stated.epsilon is None:
        return "No differential privacy guarantee."
    if stated.is_refuted:
        return "An audit has refuted what is claimed here: rely on none of it."
    is_conditional = stated.headline_caveats or stated.participation_record == "assumed"
    also = " Read below what must stand beside it when it is quoted." if is_conditional else ""
    return (
        f"{display.epsilon_at(stated.epsilon, stated.delta)}, for one "
        f"{stated.unit_of_privacy}.{also}"
    )


def _privacy(found: results_lib.Results) -> str:
    if found.statement is None:
        return markup.element("p", markup.text(_NO_PROMISE.get(found.kind, _NO_STATEMENT)))
    stated = statement_text.markdown(found.statement).split("\n", 1)
    whole = stated[1] if stated[0].startswith("# ") else "\n".join(stated)
    return _picture(found.folder) + markup.of_markdown(whole, level=2)


def _picture(folder: pathlib.Path) -> str:
    """Returns a figure with a picture of the promise, if the folder has one."""
    try:
        path = validation.file_in(folder, "privacy.png", max_bytes=_LARGEST_PICTURE)
        content = path.read_bytes()
    except (OSError, validation.UsageError):
        return ""
    if not content.startswith(_PNG):
        return ""
    source = "data:image/png;base64," + base64.b64encode(content).decode()
    said = "Trade-off of an attacker's errors under this promise, and ε against δ."
    image = f'<img src="{source}" alt="{said}">'
    return markup.element("figure", image + markup.element("figcaption", said))


def _participation(found: results_lib.Results) -> str:
    stated = found.statement
    if stated is None:
        return ""
    if stated.accounted is None:
        if not stated.has_guarantee:
            return ""
        says = "The guarantee rests on secret random sampling: who took part must stay in private/."
        return markup.element("p", says)
    is_reported = sentences.REPORTED_BY_DEVICES in stated.assumptions
    rows = []
    for name, seen in (
        ("declared before the run", stated.declared),
        ("accounted for", stated.accounted),
        ("reported by devices" if is_reported else "on record", stated.observed),
    ):
        if seen is None:
            rows.append([name, "not recorded", "", ""])
            continue
        apart = "none was seen twice" if seen.min_sep is None else f"{seen.min_sep} or more"
        rows.append([name, str(seen.num_rounds), apart, f"{seen.max_participations} or fewer"])
    unit = stated.unit_of_privacy
    head = ["", "rounds", "rounds from one turn to the next", f"turns of one {unit}"]
    return markup.table(head, rows, f"How often one {unit} takes part")


def chart(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
) -> str:
    """Draws curves with Matplotlib, as an image whose `alt` text describes them.

    `series` has, by label, the x and the y of a curve's points, sorted by x; points that are not
    finite are left out. Equal arguments make equal HTML. Without Matplotlib, it is a sentence that
    says what to install; without points, "".
    """
    curves = {}
    for label, (xs, ys) in series.items():
        points = [p for p in zip(xs, ys, strict=True) if all(map(math.isfinite, p))]
        if points:
            curves[label] = points
    if not curves:
        return ""
    if packages.is_missing("matplotlib"):
        why = f"Charts are left out: they need {packages.remedy('matplotlib')}."
        return markup.element("p", markup.text(why), class_="muted")
    shown = dict(list(curves.items())[:MOST_SERIES])
    figure = pictures.new_figure(6.0, 3.6 + 0.2 * len(shown))  # Each label has a line.
    axes = figure.add_subplot()
    lines = []
    for label, points in shown.items():
        marker = "o" if len(points) <= 40 else None
        lines += axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=3)
    if all(y >= 0.0 for points in shown.values() for _, y in points):
        axes.set_ylim(bottom=0.0)
    axes.grid(alpha=0.3)
    axes.set_title(_legible(title), parse_math=False)
    axes.set_xlabel(_legible(x_label), parse_math=False)
    axes.set_ylabel(_legible(y_label), parse_math=False)
    num_left_out = len(curves) - len(shown)
    more = f"{num_left_out} more are not drawn" if num_left_out else ""
    legend = figure.legend(
        lines, map(_legible, shown), title=more, loc="outside lower center", fontsize="small"
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Characters that the font lacks; `alt` has them.
        figure.savefig(written, format="png", dpi=110, metadata={"Software": None})
    ends = [
        f"{label}: from {_number(points[0][1])} at {x_label} {points[0][0]:g} to "
        f"{_number(points[-1][1])} at {x_label} {points[-1][0]:g}"
        for label, points in shown.items()
    ]
    said = "; ".join([*ends, more] if more else ends)
    source = "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
    return f'<img alt="{markup.text(f"{title}. {y_label} by {x_label}. {said}.")}" src="{source}">'


def _legible(label: str) -> str:
    """Returns a label that Matplotlib shows: it hides those that begin with an underscore."""
    label = label if len(label) <= _LONGEST_LABEL else f"{label[:_LONGEST_LABEL]} …"
    return f" {label}" if label.startswith("_") else label


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"


def charts(
    runs: Mapping[str, Sequence[results_lib.Row]],
    *,
    unit: str,
    is_of_words: bool,
    levels: Mapping[str, float] | None = None,
) -> str:
    """Draws accuracy, loss and ε of runs, whose rows are given by label; "" for a single run.

    If not all models read words (`is_of_words`), each metric has a chart under its name. `levels`
    are accuracies of simpler models, drawn as horizontal lines.
    """

    def curves(*columns: tuple[str, str], scale: float = 1.0) -> dict[str, tuple[list, list]]:
        """Returns the curves of pairs of a column and whose data it was measured on."""
        found = {}
        for run, rows in runs.items():
            for number, (column, of_whom) in enumerate(columns):
                label = f"{run}, {of_whom}" if run and number else run or of_whom
                points = results_lib.series(rows, column)
                found[label] = [x for x, _ in points], [scale * y for _, y in points]
        return found

    held_out = "held-out users" if is_of_words else "held-out data"
    drawn = []
    if is_of_words:
        accuracies = curves(
            (results_lib.ACCURACY, held_out), ("top1", "training cohort"), scale=100.0
        )
        across = [x for xs, _ in accuracies.values() for x in xs]
        if across:
            ends = [min(across), max(across)]
            for label, level in (levels or {}).items():
                accuracies[label] = ends, [100.0 * level] * 2
        title, y_label = "Accuracy of the first guess", "% of words in the vocabulary"
        drawn.append(chart(accuracies, title=title, x_label=unit, y_label=y_label))
    losses = curves((results_lib.LOSS, held_out), ("loss", "training cohort"))
    y_label = "cross-entropy, nats per word or sub-word" if is_of_words else "loss"
    drawn.append(chart(losses, title="Loss", x_label=unit, y_label=y_label))
    if not is_of_words:
        names = {name for rows in runs.values() for row in rows for name in row}
        others = sorted(n for n in names if n.startswith("eval_") and n != results_lib.LOSS)
        for name in others[:6]:
            title, values = name.removeprefix("eval_"), curves((name, held_out))
            drawn.append(chart(values, title=title, x_label=unit, y_label="as measured"))
    spent = curves(("epsilon", "for the declared participation"))
    drawn.append(chart(spent, title="ε spent", x_label=unit, y_label="ε at the run's δ"))
    parts = [
        markup.element("figure", part) if part.startswith("<img") else part
        for part in dict.fromkeys(drawn)  # What to install is said once.
    ]
    content = "".join(parts)
    return markup.element("div", content, class_="charts") if content else ""


def _metric(found: results_lib.Results, name: str) -> str:
    """Returns what a metric of a text model is, in words; other names as they are."""
    if not found.is_of_words:
        return name
    share = re.fullmatch(r"top(\d)_(in_vocab|oov_wrong)", name)
    if share is None:
        meanings = {
            "loss": "loss (cross-entropy, nats per word or sub-word)",
            "bits_per_character": "bits per character of the text",
        }
        return meanings.get(name, name)
    of = "words in the vocabulary" if share[2] == "in_vocab" else "all words"
    guesses = "first guess" if share[1] == "1" else f"first {share[1]} guesses"
    return f"share of next words that the {guesses} found, of {of}"


def _measured(found: results_lib.Results) -> str:
    unit = UNITS.get(found.kind, "round")
    baselines = found.baselines
    drawn = charts(
        found.cells or {"": found.rows},
        unit=unit,
        is_of_words=found.is_of_words,
        levels=results_lib.levels(baselines),
    )
    parts = [drawn]
    if found.evaluations:
        last = found.evaluations[-1]
        rows = [
            [markup.text(_metric(found, name.removeprefix("eval_"))), f"{value:.4g}"]
            for name, value in last.items()
            if name.startswith("eval_")
        ]
        rows += [[f"top-1 accuracy of {markup.text(k)}", f"{v:.4g}"] for k, v in baselines.items()]
        parts.append(
            markup.table(
                ["metric", "value"],
                rows,
                f"{found.held_out.capitalize()}, after {unit} {last.get('round', 0):g}",
            )
        )
    if found.evaluations or found.cells:
        parts.append(markup.element("p", markup.text(HELD_OUT), class_="muted"))
    has_ngrams = found.is_of_words and found.kind not in ("pretraining", "task")
    if drawn and has_ngrams and not found.is_private:
        parts.append(
            markup.element(
                "p",
                "Compare with n-gram models (unigrams to 4-grams): they are counted on "
                "the training users, hence only on the page that --private makes.",
                class_="muted",
            )
        )
    return "".join(parts)


def _settings(found: results_lib.Results) -> str:
    if not found.settings:
        return "No run of the sweep has finished." if found.kind == "sweep" else ""
    columns = list(dict.fromkeys(name for row in found.settings for name in row))
    head = [_NAMES.get(name) or _NAMES.get(name.removesuffix("_se"), name) for name in columns]
    head = [f"± {h}" if c.endswith("_se") else h for c, h in zip(columns, head, strict=True)]
    rows = (
        [markup.text(_short(name, row.get(name, "–"))) for name in columns]
        for row in found.settings
    )
    explained = "Means over seeds after the last round, on held-out users; ±: standard errors."
    return markup.table(head, rows, explained)


def _short(column: str, text: str) -> str:
    """Shortens a number of a table; ε and δ are rounded up, and noise down."""
    try:
        number = float(text)
    except ValueError:
        return text
    if column == "noise_multiplier":
        return display.round_down(number)
    return display.round_up(number) if column.endswith(("epsilon", "delta")) else f"{number:.4g}"


def recount_command(found: results_lib.Results) -> str:
    """Returns the command that recounts a folder, from the folder above it."""
    return f"tff-dpftrl audit --run {shlex.quote(found.folder.absolute().name)} --state"


def _recount(found: results_lib.Results) -> str:
    if found.kind in ("sweep", "pretraining") or found.statement is None:
        return ""
    parts = []
    if found.statement.audits:
        parts.append(markup.bullets(map(markup.text, found.statement.audits)))
    verdict = (found.audit or {}).get("verdict")
    if verdict and not found.statement.audits:
        parts.append(markup.element("p", f"audit.json in the folder says: {markup.text(verdict)}."))
    if found.audit and found.is_private:
        findings = found.audit.get("findings")
        rows = [
            [markup.text(one.get(name, "")) for name in ("test", "outcome", "says")]
            for one in (findings if isinstance(findings, list) else [])
            if isinstance(one, dict)
        ]
        parts.append(
            markup.table(["test", "outcome", "what it says"], rows, "Tests of the recount")
        )
    if not parts:
        parts.append(
            "<p>It was not recounted. Deriving the statement again from the run's records: "
            f"<code>{markup.text(recount_command(found))}</code></p>"
        )
    return "".join(parts)


def _configuration(found: results_lib.Results) -> str:
    parts = []
    for caption, values in (
        ("Options", found.options),
        ("Derived from them", found.derived),
        ("Versions", found.versions),
    ):
        rows = [[markup.text(k), markup.text(shown(v))] for k, v in flat(values).items()]
        if rows:
            parts.append(markup.table(["name", "value"], rows, caption))
    return "".join(parts)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested mappings under dotted names, without those that are None."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[f"{prefix}{name}"] = value
    return found


def shown(value: Any) -> str:
    """Returns a value for people: a string as it is, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _files(found: results_lib.Results) -> str:
    rows = [
        [f"<code>{file.name}</code>", markup.text(file.what), _MAY[file.publish]]
        for file in found.present_files()
    ]
    return markup.table(["file", "what it is", "who may see it"], rows, "Files of the folder")
