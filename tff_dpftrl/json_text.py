"""Parser of untrusted JSON, which refuses deep nesting with a ValueError.

Python's parser raises a RecursionError for deep nesting, and values that it just accepts are
too deep to be printed.
"""

from __future__ import annotations

import json
from typing import Any

_MOST_LEVELS = 100


def parse(text: str | bytes) -> Any:
    """Parses JSON.

    Args:
      text: JSON text; bytes are UTF-8, UTF-16 or UTF-32.

    Returns:
      The value. As in `json.loads`, the last value of a repeated name counts, and NaN is
      accepted.

    Raises:
      ValueError: If the text is not JSON, or nested more than 100 levels deep.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    if isinstance(text, str):
        brackets = text.count("[") + text.count("{")
    else:
        brackets = text.count(b"[") + text.count(b"{")
    if brackets > _MOST_LEVELS and not _is_shallow(value):
        raise _too_deep()
    return value


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
