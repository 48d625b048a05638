"""`tff-dpftrl compare`: the papers' comparison figures for any set of strategies."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from tff_dpftrl import durable_files, pictures, validation
from tff_dpftrl.cli import mechanism_flags, output
from tff_dpftrl.mechanisms import table

_DESCRIPTION = """\
Compare strategies while the separation, the number of rounds, or the participations vary.

Each strategy is fixed and evaluated at every point, as in figures 3 to 6 of the BLT paper:
what happens when clients come back sooner, or training runs longer, than planned? A
strategy is a mechanism (optimised once for --rounds, --min-sep and --max-participations),
an entry of the zoo, or a file written by `tff-dpftrl optimize --output`. With
--optimize-at-each-point mechanisms are optimised anew at every point, as in figure 2.
"""

_EPILOG = """\
examples:
  # Planned for a separation of 400 of 2000 rounds; what if it is anything from 100 to 1000?
  tff-dpftrl compare blt tree bandtoep --rounds 2000 --min-sep 400 \\
      --vary min-sep --values 100:1000:50 --csv min_sep.csv --png min_sep.png

  # A table on the terminal.
  tff-dpftrl compare blt tree lambda-cgd --rounds 2000 --min-sep 400 --vary rounds \\
      --values 1000,2000,3000

  # The noise of the models of a server with momentum 0.9.
  tff-dpftrl compare blt tree bandtoep --rounds 2000 --min-sep 400 --vary rounds \\
      --values 1000,2000,3000 --workload momentum=0.9

  # A production BLT, run longer than planned, beside one of bounded decay.
  tff-dpftrl compare blt-gboard-b400 blt-n2000-b400-k5-bounded --rounds 2000 --min-sep 400 \\
      --vary rounds --values 400:8000:400 --error max --png rounds.png
"""

_VARIED = {"min-sep": "min_sep", "rounds": "num_rounds", "participations": "max_participations"}
_AXES = {
    "min-sep": "separation of two rounds of one client",
    "rounds": "rounds",
    "participations": "participations of one client",
}


@dataclasses.dataclass(frozen=True)
class Point:
    """Figures of one strategy, named as the user typed it without the folder, under one schema."""

    strategy: str
    mechanism: str
    num_rounds: int
    min_sep: int
    max_participations: int
    sensitivity: float
    sensitivity_exact: bool
    max_error: float
    rms_error: float
    max_loss: float
    rms_loss: float


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "compare",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("strategies", nargs="+", metavar="STRATEGY")
    mechanism_flags.add_schema_arguments(parser)
    parser.add_argument("--vary", choices=_VARIED, required=True, help="Parameter that varies.")
    parser.add_argument(
        "--values",
        type=_values,
        required=True,
        metavar="FIRST:LAST:STEP",
        help=("Values of the parameter: a range, ends included, or a list such as 100,200,400."),
    )
    parser.add_argument(
        "--optimize-at-each-point",
        action="store_true",
        help="Optimise mechanisms anew at every point instead of once.",
    )
    mechanism_flags.add_options(parser)
    output.add_format(
        parser,
        ("text", "json", "csv"),
        default=None,
        when="; with --csv or --png nothing is printed there unless this is given",
    )
    parser.add_argument("--csv", metavar="FILE", help="File for a table, one row a point.")
    parser.add_argument("--png", metavar="FILE", help="File for a plot of the losses.")


def _values(text: str) -> list[int]:
    try:
        if ":" in text:
            first, last, step = (int(part) for part in text.split(":"))
            values = list(range(first, last + 1, step))
        else:
            values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must look like 100:1000:50 or 100,200,400, got {text!r}"
        ) from None
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"must be at least one positive number, got {text!r}")
    return values


def run(args: argparse.Namespace) -> int:
    """Compares, writes table and figure; returns the exit status."""
    form = args.format
    if form is None and args.csv is None and args.png is None:
        form = "text"
    points = list(compare(args))
    if form == "text":
        output.print_table([_COLUMNS, *(_row(point) for point in points)], left=0)
    elif form == "json":
        output.print_json([_without_nan(point, None) for point in points])
    elif form == "csv":
        print(_as_csv(points), end="")
    if form == "text":
        output.print_next(
            "Make the strategy that you choose", "tff-dpftrl optimize --output strategy.json ..."
        )
    if args.csv is not None:
        _write(args.csv, "table", _as_csv(points).encode())
    if args.png is not None:
        _write(args.png, "figure", _drawing(points, args))
    return 0


def compare(args: argparse.Namespace) -> Iterator[Point]:
    """Evaluates every strategy at every value, strategy by strategy."""
    from tff_dpftrl.participation import schema as schema_lib

    _check_names(args.strategies)
    mechanism_flags.require(args, *mechanism_flags.SCHEMA)
    planned = mechanism_flags.schema_from(args)
    options = mechanism_flags.options_from(args, planned.num_rounds)
    for name in args.strategies:
        print(f"{name} ...", file=sys.stderr)
        again = args.optimize_at_each_point and name in table.MECHANISMS
        fixed = None if again else _strategy(name, planned, options)
        for value in args.values:
            schema = dataclasses.replace(planned, **{_VARIED[args.vary]: value})
            if args.max_participations is None and args.vary != "participations":
                schema = schema_lib.MinSep.as_many_as_fit(schema.num_rounds, schema.min_sep)
            workload = mechanism_flags.workload_from(args, schema.num_rounds)
            strategy = fixed
            if again:
                strategy = _strategy(name, schema, dataclasses.replace(options, workload=workload))
            yield _evaluate(name, strategy, schema, workload)


def _check_names(names: list[str]) -> None:
    """Refuses unknown names before anything is optimised."""
    from tff_dpftrl.mechanisms import zoo

    for name in names:
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


def _strategy(name: str, schema, options: table.Options):
    from tff_dpftrl.mechanisms import zoo

    if name in table.MECHANISMS:
        fitting = table.fitting(name, options)
        return table.build(name, schema, fitting, notify=mechanism_flags.notify)
    return zoo.find(name)


def _evaluate(name: str, strategy, schema, workload) -> Point:
    from tff_dpftrl.mechanisms import certificate as certificate_lib

    label = os.path.basename(name)
    limit = strategy.max_rounds
    if limit is not None and schema.num_rounds > limit:
        nothing = [math.nan] * 5
        return Point(
            label, strategy.name, *dataclasses.astuple(schema), nothing[0], False, *nothing[1:]
        )
    claim = certificate_lib.certify(strategy, schema, workload)
    return Point(
        label,
        strategy.name,
        *dataclasses.astuple(schema),
        claim.sensitivity,
        claim.sensitivity_exact,
        claim.max_error,
        claim.rms_error,
        claim.max_loss,
        claim.rms_loss,
    )


_COLUMNS = (
    "strategy",
    "rounds",
    "min-sep",
    "max",
    "sensitivity",
    "MaxError",
    "RmsError",
    "MaxLoss",
    "RmsLoss",
)


def _row(point: Point) -> list[str]:
    """Returns a line of the printed table; "≤" marks an upper bound of a sensitivity."""
    integers = [str(n) for n in (point.num_rounds, point.min_sep, point.max_participations)]
    floats = [point.sensitivity, point.max_error, point.rms_error, point.max_loss, point.rms_loss]
    texts = ["-" if math.isnan(value) else f"{value:.5g}" for value in floats]
    if not (point.sensitivity_exact or math.isnan(point.sensitivity)):
        texts[0] = "≤ " + texts[0]
    return [point.strategy, *integers, *texts]


def _without_nan(point: Point, instead: str | None) -> dict[str, Any]:
    return {
        name: instead if isinstance(value, float) and math.isnan(value) else value
        for name, value in dataclasses.asdict(point).items()
    }


def _as_csv(points: list[Point]) -> str:
    text = io.StringIO(newline="")
    names = [field.name for field in dataclasses.fields(Point)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_without_nan(point, "") for point in points)
    return text.getvalue()


def _write(path: str, what: str, content: bytes) -> None:
    try:
        durable_files.write(path, content)
    except OSError as error:
        raise validation.UsageError(
            f"Cannot write the {what} to {path}: {error.strerror}."
        ) from error


def _legend(points: list[Point]) -> str:
    """Returns a strategy's label: what the user typed, and the mechanism if it has another name."""
    label, names = points[0].strategy, {point.mechanism for point in points}
    return label if len(names) > 1 or label in names else f"{label}: {names.pop()}"


def _drawing(points: list[Point], args: argparse.Namespace) -> bytes:
    """Draws the losses as a PNG."""
    loss = "max_loss" if args.error == "max" else "rms_loss"
    drawing = pictures.new_figure(7, 4.5)
    from matplotlib import ticker

    axes = drawing.subplots()
    for label in dict.fromkeys(point.strategy for point in points):
        mine = [point for point in points if point.strategy == label]
        axes.plot(
            [getattr(point, _VARIED[args.vary]) for point in mine],
            [getattr(point, loss) for point in mine],
            marker="." if len(args.values) <= 40 else None,
            label=_legend(mine),
        )
    axes.set_xlabel(_AXES[args.vary])
    axes.set_ylabel("MaxLoss" if args.error == "max" else "RmsLoss")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ticker.ScalarFormatter())
    axes.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(2, 1)))
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    picture = io.BytesIO()
    drawing.savefig(picture, dpi=150, format="png")
    return picture.getvalue()
