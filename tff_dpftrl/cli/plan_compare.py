"""Answer of `tff-dpftrl plan --compare`: figures of strategies as in the papers' comparisons."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tff_dpftrl import pictures, validation
from tff_dpftrl.accounting import planner_plots
from tff_dpftrl.cli import mechanism_flags, output
from tff_dpftrl.mechanisms import certificate, table, zoo
from tff_dpftrl.participation import schema as schema_lib

if TYPE_CHECKING:
    from matplotlib import figure as figure_lib

_VARIED = {"min-sep": "min_sep", "rounds": "num_rounds", "participations": "max_participations"}
_AXES = {
    "min-sep": "separation of two rounds of one client",
    "rounds": "rounds",
    "participations": "participations of one client",
}
_FIGURES = ("sensitivity", "sensitivity_exact", "max_error", "rms_error", "max_loss", "rms_loss")
_COLUMNS = {
    "strategy": "strategy",
    "num_rounds": "rounds",
    "min_sep": "min-sep",
    "max_participations": "max",
    "sensitivity": "sensitivity",
    "max_error": "MaxError",
    "rms_error": "RmsError",
    "max_loss": "MaxLoss",
    "rms_loss": "RmsLoss",
}

Point = dict[str, Any]
"""Figures of one strategy under one schema; None beyond the rounds of the strategy."""


def print_comparison(args: argparse.Namespace) -> None:
    """Evaluates strategies while one parameter varies, prints the table, and draws --plot."""
    if args.plot is not None:
        planner_plots.format_of(args.plot)  # Refuses what could not be written.
    for name in args.compare:
        if name not in table.MECHANISMS and os.path.isdir(name):
            raise validation.UsageError(
                f"{name!r} is a folder, not a strategy: tff-dpftrl compare-runs compares results "
                "folders."
            )
        if not (name in table.MECHANISMS or os.path.exists(name) or name in zoo.names()):
            raise validation.UsageError(
                f"{name!r} is no mechanism ({', '.join(table.MECHANISMS)}), no file, and no entry "
                f"of the zoo ({', '.join(zoo.names())})."
            )
    points = list(_points(args))
    if args.format == "json":
        output.print_json(points)
    elif args.format == "csv":
        writer = csv.DictWriter(sys.stdout, points[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(points)
    else:
        output.print_table([list(_COLUMNS.values()), *map(_row, points)], left=0)
        output.print_next(
            "Make the strategy that you choose",
            "tff-dpftrl plan --mechanism NAME ... --output strategy.json",
        )
    if args.plot is not None:
        planner_plots.save(args.plot, _drawn(points, args))


def _points(args: argparse.Namespace) -> Iterator[Point]:
    """Evaluates every strategy at every value, strategy by strategy."""
    planned = mechanism_flags.schema_from(args)
    options = mechanism_flags.options_from(args, planned.num_rounds)
    for name in args.compare:
        print(f"{name} ...", file=sys.stderr)
        again = args.optimize_at_each_point and name in table.MECHANISMS
        strategy: Any = None if again else _strategy(name, planned, options)
        for value in args.values:
            schema = dataclasses.replace(planned, **{_VARIED[args.vary]: value})
            if args.max_participations is None and args.vary != "participations":
                schema = schema_lib.MinSep.as_many_as_fit(schema.num_rounds, schema.min_sep)
            workload = mechanism_flags.workload_from(args, schema.num_rounds)
            if again:
                strategy = _strategy(name, schema, dataclasses.replace(options, workload=workload))
            point = {"strategy": os.path.basename(name), "mechanism": strategy.name}
            point |= {**dataclasses.asdict(schema), **dict.fromkeys(_FIGURES)}
            point["sensitivity_exact"] = False
            if schema.num_rounds <= (strategy.max_rounds or schema.num_rounds):
                claim = certificate.certify(strategy, schema, workload).to_dict()
                point |= {name: claim[name] for name in _FIGURES}
            yield point


def _strategy(name: str, schema, options: table.Options):
    if name in table.MECHANISMS:
        fitting = table.fitting(name, options)
        return table.build(name, schema, fitting, notify=mechanism_flags.notify)
    return zoo.find(name)


def _row(point: Point) -> list[str]:
    """Returns a line of the printed table; "≤" marks an upper bound of a sensitivity."""
    cells = {}
    for name, column in _COLUMNS.items():
        value = point[name]
        cells[column] = f"{value:.5g}" if isinstance(value, float) else str(value)
        if value is None:
            cells[column] = "-"
        elif name == "sensitivity" and not point["sensitivity_exact"]:
            cells[column] = f"≤ {cells[column]}"
    return list(cells.values())


def _drawn(points: Sequence[Point], args: argparse.Namespace) -> figure_lib.Figure:
    """Draws the losses."""
    loss = "max_loss" if args.error == "max" else "rms_loss"
    drawing = pictures.new_figure(7, 4.5)
    from matplotlib import ticker

    axes = drawing.subplots()
    for label in dict.fromkeys(point["strategy"] for point in points):
        mine = [point for point in points if point["strategy"] == label]
        names = {point["mechanism"] for point in mine}
        is_said = len(names) > 1 or label in names
        axes.plot(
            [point[_VARIED[args.vary]] for point in mine],
            [math.nan if point[loss] is None else point[loss] for point in mine],
            marker="." if len(args.values) <= 40 else None,
            label=label if is_said else f"{label}: {names.pop()}",
        )
    axes.set_xlabel(_AXES[args.vary])
    axes.set_ylabel(_COLUMNS[loss])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ticker.ScalarFormatter())
    axes.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(2, 1)))
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return drawing
