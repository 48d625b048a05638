"""Parser of untrusted JSON, which refuses deep nesting with a ValueError.

Python's parser raises a RecursionError for deep nesting, and values that it just accepts are
too deep to be printed.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from tff_dpftrl import validation

_MOST_LEVELS = 100


def parse(text: str | bytes) -> Any:
    """Parses JSON.

    Args:
      text: JSON text, with a byte-order mark or without; bytes are UTF-8, UTF-16 or UTF-32.

    Returns:
      The value. As in `json.loads`, the last value of a repeated name counts, and NaN is
      accepted.

    Raises:
      ValueError: If the text is not JSON, or nested more than 100 levels deep.
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


def read_object(path: pathlib.Path, *, remedy: str = "Restore it.") -> dict[str, Any]:
    """Reads the JSON object that a program wrote to a file.

    Args:
      path: The file, in UTF-8.
      remedy: Sentence that ends the error's message.

    Returns:
      The values by name.

    Raises:
      UsageError: If the file cannot be read, or holds no JSON object.
    """
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise validation.UsageError(f"{path} cannot be read: {error}. {remedy}") from error
    if not isinstance(content, dict):
        raise validation.UsageError(f"{path} is no JSON object. {remedy}")
    return content


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
