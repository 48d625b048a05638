"""Progress lines: what a person should know while a run starts and goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable

import tqdm

Progress = Callable[[str], None]
"""Callback for progress lines."""


def to_stderr(line: str) -> None:
    """Prints a progress line to standard error, beside a progress bar."""
    tqdm.tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()
