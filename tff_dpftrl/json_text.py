"""Parser of untrusted JSON, which refuses deep nesting with a ValueError.

Python's parser raises a RecursionError for deep nesting, and values that it just accepts are
too deep to be printed.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from tff_dpftrl import validation

_MOST_LEVELS = 100


def parse(text: str | bytes) -> Any:
    """Parses JSON; refuses more than 100 nested levels. Bytes are UTF-8, UTF-16 or UTF-32.

    A byte-order mark may come first. As in `json.loads`, the last value of a repeated name counts,
    and NaN is accepted.
    """
    try:
        value = json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
    except RecursionError:
        raise _too_deep() from None
    if isinstance(text, str):
        brackets = text.count("[") + text.count("{")
    else:
        brackets = text.count(b"[") + text.count(b"{")
    if brackets > _MOST_LEVELS and not _is_shallow(value):
        raise _too_deep()
    return value


def read_object(
    path: pathlib.Path,
    *,
    folder: pathlib.Path | None = None,
    max_bytes: int = validation.MAX_FILE_BYTES,
    remedy: str = "Restore it.",
) -> dict[str, Any]:
    """Reads the JSON object that a program wrote to a file of at most `max_bytes` bytes.

    Links may not lead out of `folder`, by default the file's. `remedy` ends the error's message.
    The values can take 30 times as much memory as the file.
    """
    folder = path.parent if folder is None else folder
    validation.file_in(folder, str(path.relative_to(folder)), max_bytes=max_bytes, remedy=remedy)
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise validation.UsageError(f"{path} cannot be read: {error}. {remedy}") from error
    if not isinstance(content, dict):
        raise validation.UsageError(f"{path} is no JSON object. {remedy}")
    return content


def read_outside(
    path: pathlib.Path,
    *,
    folder: pathlib.Path | None = None,
    max_bytes: int = 1 << 25,
    remedy: str = "Restore it.",
) -> dict[str, Any]:
    """Reads the JSON object that another program, or another person, wrote to a file.

    Links may not lead out of `folder`, by default the file's. All numbers are within the range of a
    float, and all texts can be encoded.
    """
    content = read_object(path, folder=folder, max_bytes=max_bytes, remedy=remedy)
    _check_plain(content, f"{path}: ", remedy)
    return content


def _check_plain(value: Any, where: str, remedy: str) -> None:
    """Refuses numbers that no float holds, and texts with a half of a surrogate pair."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_plain(name, f"{where}a name ", remedy)
            _check_plain(inner, f"{where}{name if name.isprintable() else repr(name)} ", remedy)
    elif isinstance(value, list):
        for inner in value:
            _check_plain(inner, where, remedy)
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise validation.UsageError(
                f"{where}must be a text that can be encoded, got {value[:100]!r}. {remedy}"
            ) from None
    elif isinstance(value, int | float) and not abs(value) <= sys.float_info.max:  # Or it is NaN.
        validation.number(where.rstrip(), value, remedy=remedy)


def _too_deep() -> ValueError:
    return ValueError(f"the JSON is nested more than {_MOST_LEVELS} levels deep")


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return True
    return not any(isinstance(inner, dict | list) for inner in level)
