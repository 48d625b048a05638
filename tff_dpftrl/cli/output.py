"""Output of the commands that compute: text for people, JSON on request."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from tff_dpftrl import validation

_PAGE = b"<!DOCTYPE html>"


def add_format(
    parser: argparse.ArgumentParser,
    choices: Sequence[str] = ("text", "json"),
    default: str | None = "text",
    when: str = "",
) -> None:
    """Adds --format; `when` is appended to its help."""
    text = f"Format of standard output{when}. Default: text."
    parser.add_argument("--format", choices=choices, default=default, help=text)


def file(flag: str, name: str | None) -> pathlib.Path | None:
    """Returns the path of a file to be written, None if not given; refuses impossible paths."""
    if name is None:
        return None
    path = pathlib.Path(name)
    if path.is_dir():
        raise validation.UsageError(f"{flag} {name} is a folder: name a file.")
    if not path.absolute().parent.is_dir():
        raise validation.UsageError(f"{flag} {name}: there is no folder {path.parent}, make it.")
    return path


def page(flag: str, name: str | None) -> pathlib.Path | None:
    """Returns the path of a page to be written, like `file`; only pages may be replaced."""
    path = file(flag, name)
    if path is None or not path.exists():
        return path
    if path.is_file():
        with path.open("rb") as existing:
            if existing.read(len(_PAGE)) in (b"", _PAGE):
                return path
    raise validation.UsageError(f"{flag} {name} exists and is no page: name another file.")


def print_json(report: Any) -> None:
    """Prints JSON; infinities and NaN are not JSON and must not be in it."""
    print(json.dumps(report, indent=2, allow_nan=False))


def print_next(what: str, *commands: str) -> None:
    """Prints to standard error what may be typed next, after all of standard output."""
    sys.stdout.flush()
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
