"""Tables of a sweep's results: `cells.csv`, `summary.csv` and `summary.md`.

The files for programs have settings in the order of the axes, that for people the best one first.
"""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl import durable_files
from tff_dpftrl.accounting import display
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.sweeps import axes as axes_lib
from tff_dpftrl.sweeps import results as results_lib

# Columns of `summary.md` by metric, and whether a metric is a share.
_METRICS = {
    results_lib.LOSS: ("loss", False),
    "eval_perplexity": ("perplexity", False),
    results_lib.BITS: ("bits per character", False),
    results_lib.ACCURACY: ("top-1", True),
    "best_" + results_lib.ACCURACY: ("best top-1", True),
    "eval_top1_with_earlier_text": ("top-1 with earlier text", True),
    "eval_picked_at_3": ("picked at 3", True),
    "eval_triggered": ("triggered", True),
    "eval_rescored": ("re-scored", True),
}
_SIMULATED = (
    "ε is that of the users who trained here. The simulated run's, and the noise multiplier, are "
    "of a larger run with the same noise on its averages, which did not take place: its ε protects "
    "nobody here."
)


def cell_rows(results: Sequence[results_lib.CellResult]) -> list[dict[str, Any]]:
    """Returns a row for each cell: axes, state, privacy, rounds and metrics, or None."""
    names, metrics = _axes(results), _metrics(results)
    rows = []
    for result in results:
        values = result.metrics
        rows.append(
            {name: _shown(result.cell.values, name) for name in names}
            | {
                "state": result.state,
                "epsilon": result.epsilon,
                "simulated_epsilon": result.simulated_epsilon,
                "delta": result.delta,
                "noise_multiplier": result.noise_multiplier,
                "rounds_done": len(result.rows),
            }
            | {name: values.get(name) for name in metrics}
        )
    return rows


def summary_rows(results: Sequence[results_lib.CellResult]) -> list[dict[str, Any]]:
    """Returns a row for each setting: mean and standard error over the finished seeds."""
    names = [name for name in _axes(results) if name != axes_lib.SEED]
    metrics = _metrics(results)
    rows = []
    for setting in results_lib.settings(results):
        row: dict[str, Any] = {name: _shown(setting.values, name) for name in names}
        row |= {
            "cells": len(setting.results),
            "epsilon": setting.epsilon,
            "simulated_epsilon": setting.simulated_epsilon,
            "delta": setting.results[0].delta,
            "noise_multiplier": setting.noise_multiplier,
        }
        for name in metrics:
            row[name] = setting.mean(name)
            row[f"{name}_se"] = setting.standard_error(name)
        rows.append(row)
    return rows


def _axes(results: Sequence[results_lib.CellResult]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.cell.values))


def _metrics(results: Sequence[results_lib.CellResult]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.metrics))


def _shown(values: Mapping[str, axes_lib.Value], name: str) -> str | None:
    """Returns a value as it is typed; None for an option of the noise with mechanism 'none'."""
    return axes_lib.shown(values[name]) if name in values else None


def markdown(results: Sequence[results_lib.CellResult]) -> str:
    """Returns the settings as a table of Markdown, for people: ε rounded up, noise rounded down."""
    ranked_by, settings = results_lib.ranked(results_lib.settings(results))
    lines = []
    if settings:
        metrics = {m: _METRICS[m] for m in _METRICS if any(s.mean(m) is not None for s in settings)}
        names = [n for n in _axes(results) if n not in (axes_lib.SEED, "noise_multiplier")]
        simulates = any(setting.simulated_epsilon is not None for setting in settings)
        head = [
            *names,
            "seeds",
            "ε",
            *(["ε, simulated run"] if simulates else []),
            "δ",
            "noise multiplier",
        ]
        head += [heading for heading, _ in metrics.values()]
        lines += [_line(head), _line(["---"] * len(head))]
        for setting in settings:
            row = [_short(setting.values, name) for name in names]
            row += [str(len(setting.results)), _epsilon(setting.epsilon)]
            if simulates:
                row.append(_epsilon(setting.simulated_epsilon))
            z = setting.noise_multiplier
            row += [
                display.delta(setting.results[0].delta) if setting.epsilon is not None else "–",
                "–" if z is None else display.round_down(z),
                *(_mean(setting, name, percent=share) for name, (_, share) in metrics.items()),
            ]
            lines.append(_line(row))
        if len(settings) > 1 and ranked_by in metrics:
            lines += ["", f"Settings with the lowest {metrics[ranked_by][0]} stand first."]
        if simulates:
            lines += ["", _SIMULATED]
        versions = sorted({r.code_version for s in settings for r in s.results if r.code_version})
        if len(versions) > 1:
            lines += [
                "",
                f"The cells were begun by tff_dpftrl {', '.join(versions)}, which may not count "
                "alike (see CHANGELOG.md): compare, and average, within one version.",
            ]
    states = [result.state for result in results]
    left = len(states) - states.count("finished")
    if left:
        failed = states.count("failed")
        lines += ["", f"{left} of {len(states)} cells are not finished, {failed} of them failed."]
    return "\n".join(lines).strip()


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _short(values: Mapping[str, axes_lib.Value], name: str) -> str:
    return axes_lib.short(name, values[name]) if name in values else "–"


def _epsilon(value: float | None) -> str:
    return "no guarantee" if value is None else display.round_up(value)


def _mean(setting: results_lib.Setting, metric: str, *, percent: bool) -> str:
    mean, error = setting.mean(metric), setting.standard_error(metric)
    if mean is None:
        return "–"
    if percent:
        return f"{mean:.2%}" + ("" if error is None else f" ± {100 * error:.2f}")
    return f"{mean:.4g}" + ("" if error is None else f" ± {error:.2g}")


def summary(results: Sequence[results_lib.CellResult], title: str) -> str:
    """Returns `summary.md`: the table, its explanation, and the cells that failed."""
    lines = [f"# {title}", "", markdown(results)]
    explained = (
        "Means over seeds ± one standard error (s / √n), after the last round of each run, on "
        "held-out users."
    )
    baselines = results_lib.common_baselines(results)
    if baselines:
        others = ", ".join(f"{name} {value:.2%}" for name, value in baselines.items())
        explained += f" Beside it, on the same users: {others}."
    lines += ["", explained]
    lines += ["", sentences.CHOICE_AMONG_RUNS]
    failures = [result for result in results if result.state == "failed"]
    if failures:
        lines += ["", "## Failed", ""]
        lines += [f"- {axes_lib.label(r.cell.values)}: {r.failure}" for r in failures]
    return "\n".join(lines) + "\n"


def write(output: pathlib.Path, results: Sequence[results_lib.CellResult], title: str) -> None:
    """Writes the tables into the folder of a sweep."""
    for name, rows in (("cells.csv", cell_rows(results)), ("summary.csv", summary_rows(results))):
        durable_files.write(output / name, _csv(rows).encode("utf-8"))
    durable_files.write(output / "summary.md", summary(results, title).encode("utf-8"))


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()
