"""Output of the commands that compute: text for people, JSON on request."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any


def add_format(
    parser: argparse.ArgumentParser,
    choices: Sequence[str] = ("text", "json"),
    default: str | None = "text",
    when: str = "",
) -> None:
    """Adds --format; `when` is appended to its help."""
    text = f"Of standard output{when}. Default: text."
    parser.add_argument("--format", choices=choices, default=default, help=text)


def print_json(report: Any) -> None:
    """Prints JSON; infinities and NaN are not JSON and must not be in it."""
    print(json.dumps(report, indent=2, allow_nan=False))


def print_next(what: str, *commands: str) -> None:
    """Prints to standard error what may be typed next."""
    print("\n".join([f"\n{what}:", *(f"  {command}" for command in commands)]), file=sys.stderr)


def print_table(rows: Sequence[Sequence[str]], left: int) -> None:
    """Prints rows in columns, the column `left` to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if column == left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
