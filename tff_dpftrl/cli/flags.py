"""Short ways to add flags to a parser, and to read lists."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add(group: Any, *rows: tuple[str, Callable[[str], Any], str, str]) -> None:
    """Adds flags to a parser or a group of one, by name, type, metavar and help; a bool is none."""
    for name, kind, metavar, text in rows:
        if kind is bool:
            group.add_argument(f"--{name}", action="store_true", help=text)
        else:
            group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)


def listed(kind: Callable[[str], Any], example: str) -> Callable[[str], tuple[Any, ...]]:
    """Returns the type of a flag that takes numbers with commas between them."""

    def read(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"must look like {example}, got {text!r}") from None

    return read
