"""`tff-dpftrl compare-runs`: what differs between results folders."""

from __future__ import annotations

import argparse
import pathlib
import sys

from tff_dpftrl import durable_files
from tff_dpftrl.cli import output
from tff_dpftrl.reports import comparison

_DESCRIPTION = """\
Compare runs by their folders: the options that differ, ε and δ and what they are for,
participation, accuracy and loss on held-out users, and how these went.

It warns of figures that do not compare: ε for other units, other neighbours, another δ, or another
trust. It reads only what may be published, and no data. `tff-dpftrl compare` is for mechanisms.
"""

_EPILOG = """\
examples:
  # What has the second run changed, and was it worth it?
  tff-dpftrl compare-runs results/first results/second

  # With curves, as one page.
  tff-dpftrl compare-runs results/blt results/tree results/bandtoep --html compared.html

  # Runs of a sweep, for a script.
  tff-dpftrl compare-runs results/sweep/cells/* --format json | jq '.runs[].epsilon'
"""

_LONGEST = 40  # Characters of a value in a table.
_MOST_ROUNDS = 12  # Rows of the table of accuracies.


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "compare-runs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "run_folders",
        nargs="+",
        metavar="RUN",
        help="Folders that train, finetune or task report wrote to; two or more.",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="File for the comparison as one HTML page, with curves."
    )
    output.add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Compares, and returns the exit status."""
    target = output.page("--html", args.html)
    found = comparison.of([pathlib.Path(name) for name in args.run_folders])
    if args.format == "json":
        output.print_json(found.as_dict())
    else:
        _print(found)
    if target is not None:
        durable_files.write(target, found.to_html().encode("utf-8"))
        print(f"The page is in {target}", file=sys.stderr)
    return 0


def _print(found: comparison.Comparison) -> None:
    """Prints tables and warnings."""
    head = ["", *found.labels]
    _print_table([head, *([name, *row] for name, row in found.facts().items())])
    options = found.options()
    if options:
        print("\nOptions and derived values that differ:")
        _print_table([head, *([name, *values] for name, values in options.items())])
    else:
        print("\nNo option differs.")
    rows = found.accuracies()
    if len(rows) > 1:
        print("\nTop-1 accuracy on held-out users, by round:")
        step = -(-len(rows) // _MOST_ROUNDS)
        _print_table([head, *rows[::-1][::step][::-1]])
    print("\n" + "\n".join(found.warnings()))


def _print_table(rows: list[list[str]]) -> None:
    output.print_table([[_shortened(cell) for cell in row] for row in rows], left=0)


def _shortened(cell: str) -> str:
    """Returns a cell without what a terminal would obey, and not too long."""
    shown = "".join(c if c.isprintable() else "�" for c in cell)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
