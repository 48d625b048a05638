"""Puts the committed results into the pages of experiments: `python experiments/page.py`.

docs/experiments.md and experiments/RECORD.md are written by hand but for their tables, between

    <!-- table: NAME, AXIS, AXIS ... -->      <!-- heads: NAME -->
    <!-- end -->                         and  <!-- end -->

The first has a row for each setting in results/NAME/summary.csv, with those axes, and one for
each baseline; with shown=COLUMN in place of an axis also the share in that column, with
without=baselines only the settings; the second how many of a model's ten likeliest words are
frequent ones; a third, `csv: NAME`, is results/NAME.csv,
or with COLUMN=VALUE its rows of that value; `cross: NAME, ROW, COLUMN ...`
has the losses in results/NAME.csv, means over seeds, for each value of one axis and each setting
of others, or only those of AXIS=VALUE; with shown=COLUMN another column than the losses; with
best=COLUMN only rows with the value of that column that has the least loss with seed 0. With
--check nothing is written; the exit status says whether the page is up to date.
"""

from __future__ import annotations

import argparse
import collections
import csv
import math
import pathlib
import re
import statistics
import sys
from collections.abc import Mapping, Sequence

from tff_dpftrl.accounting import display

_HERE = pathlib.Path(__file__).resolve().parent
PAGES = (_HERE.parent / "docs" / "experiments.md", _HERE / "RECORD.md")
_BLOCK = re.compile(
    r"(<!-- (?P<kind>table|heads|csv|cross): (?P<what>[^>]+) -->\n).*?(<!-- end -->)", re.DOTALL
)
_ACCURACY = "eval_top1_in_vocab"


def table(name: str, axes: list[str]) -> str:
    """The table of one experiment.

    Args:
      name: Of its folder below results/.
      axes: Columns of summary.csv that say what a setting is; and "shown=NAME" for each column of
        shares that is shown behind the usual ones, "without=baselines" for settings alone.

    Returns:
      Markdown, ending with a newline.

    Raises:
      ValueError: If "NAME=" of an axis is not one of these.
    """
    folder = _HERE / "results" / name
    rows = _read(folder / "summary.csv")
    for axis in axes:
        if "=" in axis and not axis.startswith("shown=") and axis != "without=baselines":
            raise ValueError(
                f"Table {name} has {axis!r}; use shown=COLUMN, without=baselines or an axis."
            )
    shown = [axis.removeprefix("shown=") for axis in axes if axis.startswith("shown=")]
    has_baselines = "without=baselines" not in axes
    axes = [axis for axis in axes if "=" not in axis]
    # The ε of a simulation's own users is not small, and is said beside that of the larger run.
    epsilons = {"ε": "epsilon"}
    if any(row["simulated_epsilon"] for row in rows):
        epsilons = {"ε of the simulated run": "simulated_epsilon", "own ε": "epsilon"}
    usual = ["seeds", "top-1 accuracy", "top-3 accuracy", "perplexity"]
    lines = [[*axes, *epsilons, *usual, *(name.removeprefix("eval_") for name in shown)]]
    for row in rows:
        cells = [row[axis] for axis in axes]
        cells += [
            display.round_up(float(row[column])) if row[column] else "none"
            for column in epsilons.values()
        ]
        cells.append(row["cells"])
        cells += [_share(row, _ACCURACY), _share(row, "eval_top3_in_vocab")]
        cells.append(_with_error(row, "eval_perplexity", 1.0, 1))
        cells += [_share(row, name) for name in shown]
        lines.append(cells)
    for row in _read(folder / "baselines.csv") if has_baselines else []:
        before = len(axes) + len(epsilons)
        cells = [row["model"], *[""] * before, f"{100 * float(row[_ACCURACY]):.2f} %", "", ""]
        cells += [f"{100 * float(row[name]):.2f} %" if row.get(name) else "" for name in shown]
        lines.append(cells)
    return _markdown(lines)


def heads(name: str) -> str:
    """The table of frequent words among the ten likeliest, means over seeds.

    Args:
      name: Of the experiment's folder below results/.

    Returns:
      Markdown, ending with a newline.
    """
    rows = _read(_HERE / "results" / name / "head_words.csv")
    sizes = [column for column in rows[0] if column.startswith("of_")]
    settings = dict.fromkeys(row["setting"] for row in rows)
    lines = [["setting", *(f"of the {size[3:]} most frequent" for size in sizes)]]
    for setting in settings:
        found = [row for row in rows if row["setting"] == setting]
        means = [statistics.fmean(float(row[size]) for row in found) for size in sizes]
        lines.append([setting, *(f"{mean:.2f}" for mean in means)])
    return _markdown(lines)


def cross(name: str, axes: list[str]) -> str:
    """Losses of fine-tuning, or another column, crosswise: means over seeds, with standard errors.

    Args:
      name: Of the file below results/, without its suffix.
      axes: The column that tells rows from each other, and those that tell columns; of
        "NAME=VALUE" only the settings with that value are taken, but "shown=NAME" names the column
        that is averaged instead of "loss", and "best=NAME" one that was searched in.

    Returns:
      Markdown, ending with a newline; a setting that was not run is left empty.
    """
    shown, row_axis, column_axes, rows = _selected(name, axes)
    losses: dict[str, dict[tuple[str, ...], list[float]]] = {}
    columns: dict[tuple[str, ...], None] = {}
    for row in rows:
        column = tuple(row[axis] for axis in column_axes)
        columns[column] = None
        losses.setdefault(row[row_axis], {}).setdefault(column, []).append(float(row[shown]))
    in_order = sorted(columns, key=lambda column: [_order(value) for value in column])
    lines = [[row_axis, *(", ".join(column) for column in in_order)]]
    for value in sorted(losses, key=_order):
        lines.append([value, *(_mean(losses[value].get(column, [])) for column in in_order)])
    return _markdown(lines)


def _selected(
    name: str, axes: Sequence[str]
) -> tuple[str, str, list[str], Sequence[dict[str, str]]]:
    """The column that is averaged, the axes of rows and columns, and the rows of the file."""
    only = dict(axis.split("=") for axis in axes if "=" in axis)
    shown, searched = only.pop("shown", "loss"), only.pop("best", None)
    row_axis, *column_axes = (axis for axis in axes if "=" not in axis)
    rows = [r for r in _read(_HERE / "results" / f"{name}.csv") if only.items() <= r.items()]
    if searched is not None:
        rows = _best(rows, searched, [row_axis, *column_axes])
    return shown, row_axis, column_axes, rows


def num_seeds(kind: str, name: str, axes: Sequence[str]) -> int:
    """The least number of seeds behind a figure of a table.

    Args:
      kind: Kind of the block: table, heads, cross or csv.
      name: Name of the results, below results/.
      axes: What else the block says.

    Returns:
      The number; 0 if the results say nothing of seeds.
    """
    folder = _HERE / "results" / name
    match kind:
        case "table":
            return min(int(row["cells"]) for row in _read(folder / "summary.csv"))
        case "heads":
            cells = collections.Counter(r["setting"] for r in _read(folder / "head_words.csv"))
        case "cross":
            _, row_axis, others, rows = _selected(name, axes)
            cells = collections.Counter(
                tuple(r[axis] for axis in (row_axis, *others)) for r in rows
            )
        case _:
            rows = _read(folder.with_suffix(".csv"))
            return min((int(row["seeds"]) for row in rows if row.get("seeds")), default=0)
    return min(cells.values())


def _best(
    rows: Sequence[dict[str, str]], searched: str, axes: Sequence[str]
) -> list[dict[str, str]]:
    """Keeps the rows of each setting whose searched column is that of the least loss, seed 0."""
    first = [row for row in rows if row["seed"] == "0"]
    ordered = sorted(first, key=lambda row: float(row["loss"]), reverse=True)
    best = {tuple(row[axis] for axis in axes): row[searched] for row in ordered}
    return [row for row in rows if row[searched] == best[tuple(row[axis] for axis in axes)]]


def _order(value: str) -> tuple[float, str]:
    """Numbers by their size, before words by the alphabet."""
    try:
        return float(value), ""
    except ValueError:
        return math.inf, value


def _mean(values: Sequence[float]) -> str:
    """Mean and standard error."""
    if len(values) < 2:
        return "".join(f"{value:.3f}" for value in values)
    if len(set(values)) == 1:
        return f"{values[0]:g}"
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.3f} ± {error:.3f}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table, its titles first; ends with a newline."""
    titles, *rows = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([titles, "|" + "---|" * len(lines[0]), *rows]) + "\n"


def _read(path: pathlib.Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _share(row: Mapping[str, str], metric: str) -> str:
    return _with_error(row, metric, 100.0, 2) + " %"


def _with_error(row: Mapping[str, str], metric: str, unit: float, digits: int) -> str:
    """Mean and standard error; without an error for one seed."""
    error = row[f"{metric}_se"]
    mean = f"{unit * float(row[metric]):.{digits}f}"
    return f"{mean} ± {unit * float(error):.{digits}f}" if error else mean


def blocks(page: str) -> list[tuple[re.Match[str], str, list[str]]]:
    """Returns the blocks of tables of a page, each with the name of its results and its axes."""
    found = []
    for block in _BLOCK.finditer(page):
        name, *axes = (part.strip() for part in block["what"].split(","))
        found.append((block, name, axes))
    return found


def render(page: str) -> str:
    """Returns the page with tables made anew.

    Args:
      page: Its text.

    Returns:
      The same text, but for what stands in tables.
    """

    def fill(block: re.Match[str]) -> str:
        name, *axes = (part.strip() for part in block["what"].split(","))
        match block["kind"]:
            case "table":
                made = table(name, axes)
            case "heads":
                made = heads(name)
            case "cross":
                made = cross(name, axes)
            case "csv":
                only = dict(axis.split("=", 1) for axis in axes)
                rows = _read(_HERE / "results" / f"{name}.csv")
                rows = [row for row in rows if only.items() <= row.items()]
                made = _markdown([list(rows[0]), *(list(row.values()) for row in rows)])
        return block[1] + made + block[4]

    return _BLOCK.sub(fill, page)


def main() -> int:
    """Reads the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="Only say whether they are up to date."
    )
    args = parser.parse_args()
    before = {page: page.read_text(encoding="utf-8") for page in PAGES}
    after = {page: render(text) for page, text in before.items()}
    if args.check:
        print("up to date" if after == before else "not up to date: python experiments/page.py")
        return int(after != before)
    for page, text in after.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
