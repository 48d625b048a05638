"""The figures of benchmarks/ROUND_COSTS.md: measures them, and writes them into the page.

    PYTHONPATH=. python benchmarks/figures.py                     # only writes the page
    PYTHONPATH=. python benchmarks/figures.py 4m quickstart many light
    PYTHONPATH=. python benchmarks/figures.py finetuning --opacus PYTHON --jax-privacy PYTHON

Each part runs its benchmark, which puts its tables into docs/reference/benchmarks.json. The page
has the tables of that file between comments that name them, and a test compares. Measure on a
machine where nothing else runs: where other programs had more than a twentieth of the cores, the
page shows processor time only, because ratios of the clock say little then.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

_DIRECTORY = pathlib.Path(__file__).resolve().parent
_DOCS = _DIRECTORY.parent / "docs"
FIGURES = _DOCS / "reference" / "benchmarks.json"
PAGE = _DIRECTORY / "ROUND_COSTS.md"

_MOST_FOR_OTHERS = 0.05
_PLACE = re.compile(r"(<!-- figures: (.+?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_PARTS = ("4m", "quickstart", "many", "light", "finetuning")


def record(path: str | pathlib.Path, tables: Sequence[Mapping[str, Any]]) -> None:
    """Puts tables into a file, in place of those of the same names.

    Args:
      path: The file; it is made if it is missing.
      tables: As `interleaving.print_table` returns them. The name is what their titles begin with.
    """
    path = pathlib.Path(path)
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    known |= {table["title"].partition(":")[0]: table for table in tables}
    text = json.dumps(known, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def markdown(table: Mapping[str, Any]) -> str:
    """Returns a table with what it was measured by, for a page."""
    is_quiet = table["others"] <= _MOST_FOR_OTHERS
    lines = [
        "| | divided by | processor time | clock (quartiles) |",
        "|---|---|---|---|",
    ]
    for row in table["rows"]:
        low, high = row["wall quartiles"]
        clock = f"{row['wall']:.2f} ({low:.2f} to {high:.2f})" if is_quiet else "not told"
        processor = f"{row['processor']:.2f}"
        if "processor quartiles" in row:  # Earlier tables have none.
            low, high = row["processor quartiles"]
            processor += f" ({low:.2f} to {high:.2f})"
        lines.append(f"| {row['what']} | {row['over']} | {processor} | {clock} |")
    versions = ", ".join(f"{name} {version}" for name, version in table["versions"].items())
    cores = "one core" if table["cores"] == 1 else f"{table['cores']} cores"
    measured = (
        f"{table['title']}. {table['date']}, {table['rounds']} interleaved rounds on {cores}, seed "
        f"0; other programs had {table['others']:.0%} of the time; {versions}."
    )
    if "GFLOP a core second" in table:
        speeds = (
            f"{framework} {' and '.join(f'{speed:.0f}' for speed in own)}"
            for framework, own in table["GFLOP a core second"].items()
        )
        measured += f" Matrix products, GFLOP for a second of one core: {', '.join(speeds)}."
    return "\n".join([*lines, "", *textwrap.wrap(measured, 120)])


def filled(page: str, figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the text of a page with the tables of `figures` at their places."""

    def table(place: re.Match[str]) -> str:
        known = figures.get(place[2])
        text = markdown(known) if known else "These figures have not been measured yet."
        return f"{place[1]}\n{text}\n\n{place[3]}"

    return _PLACE.sub(table, page)


def _measure(args: argparse.Namespace) -> None:
    common = ["--json", str(FIGURES), "--rounds", str(args.rounds)]
    for part in args.parts:
        if part == "finetuning":
            command = ["finetuning_peers.py"]
            for option in ("opacus", "jax_privacy"):
                python = getattr(args, option)
                command += [f"--{option.replace('_', '-')}", python] if python else []
        else:
            command = ["rounds.py", part, "--no-memory"]
        subprocess.run(
            [sys.executable, str(_DIRECTORY / command[0]), *command[1:], *common], check=True
        )


def main() -> None:
    """Measures the parts that are named, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=", ".join(_PARTS))
    parser.add_argument("--opacus", metavar="PYTHON", help="Python with Opacus")
    parser.add_argument("--jax-privacy", metavar="PYTHON", help="Python with jax_privacy")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    unknown = set(args.parts) - set(_PARTS)
    if unknown:
        parser.error(f"no part is called {sorted(unknown)[0]!r}")
    _measure(args)
    figures = json.loads(FIGURES.read_text("utf-8"))
    PAGE.write_text(filled(PAGE.read_text("utf-8"), figures), encoding="utf-8")


if __name__ == "__main__":
    main()
