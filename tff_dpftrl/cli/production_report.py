"""`production.md`: the noise that a sweep's target bears, and the plans that keep it."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from tff_dpftrl import durable_files, pictures
from tff_dpftrl.accounting import display, planner, planner_plots, planner_request
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.cli import plan_report
from tff_dpftrl.sweeps import axes as axes_lib
from tff_dpftrl.sweeps import plots, production
from tff_dpftrl.sweeps import results as results_lib

_NOISE_PLOT = "noise.png"
_PLANS_PLOT = "plans.png"
_REPORT = "production.md"


def write(
    output: pathlib.Path,
    results: Sequence[results_lib.CellResult],
    target_accuracy: float,
    population: int,
) -> str:
    """Chooses the noise, plans with it and writes `production.md`, `noise.png`, `plans.png`.

    Args:
      output: Folder of the sweep.
      results: Results of all its cells. Cells that are not finished are left out.
      target_accuracy: Wanted mean top-1 accuracy, between 0 and 1.
      population: Number of devices that will train in production.

    Returns:
      The text of the report, for the terminal.

    Raises:
      ValueError: If a cell's files cannot be read.
      OSError: If a file cannot be written.
    """
    families = production.families(results)
    if not families:
        return "No cell with noise is finished: there is nothing to plan with."
    baselines = results_lib.common_baselines(results)
    pictures.write(output / _NOISE_PLOT, plots.noise(families, target_accuracy, baselines))
    choices = production.choose(families, target_accuracy, output)
    title = [f"# Production at {target_accuracy:.1%} top-1 accuracy", ""]
    picture = ["", f"![accuracy against noise]({_NOISE_PLOT})", ""]
    if not choices:
        said = [_none_meets(families, target_accuracy)]
        document = [*title, *said, *picture]
        (output / _PLANS_PLOT).unlink(missing_ok=True)  # Of an earlier target.
    else:
        said = _chosen(choices, results)
        table, advice = _plans(output, choices[0], population)
        document = [
            *title,
            *said,
            *picture,
            f"## Plans for {population:,} devices",
            "",
            *_as_markdown(table),
            "",
            f"![plans]({_PLANS_PLOT})",
            "",
            "```text",
            advice.strip(),
            "```",
            "",
        ]
        said = [*said, *_as_markdown(table), advice]
    document += [sentences.CHOICE_AMONG_RUNS, ""]
    durable_files.write(output / _REPORT, "\n".join(document).encode("utf-8"))
    return "\n".join([*said, "", f"The same with plots: {output / _REPORT}"])


def _none_meets(families: Sequence[production.Family], target_accuracy: float) -> str:
    best = production.nearest(families)
    return (
        f"No noise multiplier meets the target of {target_accuracy:.2%}. Nearest came "
        f"{best.setting.label} with {_accuracy(best)}: sweep over smaller noise multipliers, or "
        "find options that learn more."
    )


def _accuracy(point: production.Point) -> str:
    error = point.standard_error
    return f"{point.accuracy:.2%}" + ("" if error is None else f" ± {100 * error:.2f} points")


def _chosen(
    choices: Sequence[production.Choice], results: Sequence[results_lib.CellResult]
) -> list[str]:
    best = choices[0]
    seeds = len(best.point.setting.results)
    lines = [
        f"{_named(best)} is the largest noise that meets the target: {_accuracy(best.point)}, "
        f"{f'a mean over {seeds} seeds' if seeds > 1 else 'of one seed only'}. The noise in the "
        f"sum of its averaged updates is {best.noise_in_sum:.3g} per unit of clip norm.",
    ]
    for other in choices[1:]:
        lines.append(
            f"{_named(other)} meets it too, with less noise in the sum, {other.noise_in_sum:.3g}."
        )
    if best.missed:
        missed = ", ".join(axes_lib.shown(z) for z in best.missed)
        lines.append(
            f"But less noise missed it (z = {missed}): seeds differ by as much as noise does here; "
            "add some."
        )
    if best.point is best.family.points[-1]:
        lines.append("No larger noise multiplier was swept over: more may do, too.")
    if any(result.state != "finished" for result in results):
        lines.append("Not all cells are finished: these are the results of the others.")
    return lines


def _named(choice: production.Choice) -> str:
    values = choice.family.values
    others = f" ({axes_lib.label(values)})" if values else ""
    return (
        f"z = {choice.point.noise_multiplier:.6g} at {choice.report_goal} clients a round{others}"
    )


def _plans(
    output: pathlib.Path, choice: production.Choice, population: int
) -> tuple[list[list[str]], str]:
    """Returns the table of plans, its heading first, and the advice; draws the plans."""
    request = planner_request.Request(
        population,
        choice.num_rounds,
        choice.delta,
        target_noise=choice.noise_in_sum,
        num_parameters=choice.num_parameters,
    )
    plans = planner.make_plans(request)
    shown = planner.pareto(plans)
    title = (
        f"{population:,} devices, {choice.num_rounds:,} rounds, δ = {display.delta(choice.delta)}"
    )
    planner_plots.save_plans(output / _PLANS_PLOT, plans, title)
    table = plan_report.rows(shown, [None] * len(shown))
    command = (
        f"tff-dpftrl plan --population {population} --rounds {choice.num_rounds} "
        f"--target-noise {choice.noise_in_sum!r} --delta {choice.delta!r} "
        f"--parameters {choice.num_parameters}"
    )
    advice = plan_report.advice(planner.recommend(plans, None), request)
    return table, f"{advice}\n\nThe same, to go on from: {command}"


def _as_markdown(table: Sequence[Sequence[str]]) -> list[str]:
    head, *rows = table
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
