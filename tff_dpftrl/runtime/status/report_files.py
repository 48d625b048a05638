"""Files of a task's report that the status page hands out: by their names, read-only.

No other file can be reached: names are fixed, and links are not followed, neither to the folder of
the report nor in it.
"""

from __future__ import annotations

import os
import pathlib
import stat
from collections.abc import Callable
from typing import TypeVar

FILES = {
    "report.html": "text/html; charset=utf-8",
    "privacy_statement.md": "text/plain; charset=utf-8",
    "privacy_statement.json": "application/json",
}
"""Names and types of the files."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; sandbox"
    )
}
"""Headers of the files: a page in itself, which runs no script and reads nothing of the server."""

_MAX_BYTES = 64 * 2**20
_Found = TypeVar("_Found")


def listed(folder: pathlib.Path) -> list[tuple[str, float]]:
    """Returns names of the files that there are, and times of their last change."""
    found = []
    for name in FILES:
        if (status := _visit(folder, name, os.fstat)) is not None:
            found.append((name, status.st_mtime))
    return found


def read(folder: pathlib.Path, name: str) -> bytes | None:
    """Reads a file; returns None if there is none that may be handed out."""

    def content(descriptor: int) -> bytes:
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(_MAX_BYTES)

    return _visit(folder, name, content) if name in FILES else None


def _visit(folder: pathlib.Path, name: str, visit: Callable[[int], _Found]) -> _Found | None:
    """Applies a function to the descriptor of a file; returns None for what is not handed out."""
    try:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
    except OSError:
        return None
    finally:
        os.close(inside)
    try:
        status = os.fstat(file)
        is_fit = stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_BYTES
        return visit(file) if is_fit else None
    except OSError:
        return None
    finally:
        os.close(file)
