"""JSON that somebody else may have written: read, or refused with a ValueError.

Python's own parser gives up on deep nesting with a RecursionError, and what it just accepts
is too deep for whoever prints it.
"""

from __future__ import annotations

import json
from typing import Any

_MOST_LEVELS = 100


def parse(text: str | bytes) -> Any:
    """Reads JSON.

    Args:
      text: The text; UTF-8, -16 or -32 if bytes.

    Returns:
      The value. Names that come twice count with their last value, and NaN is taken, as by
      `json.loads`.

    Raises:
      ValueError: If it is no JSON, or nested more than 100 levels deep.
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
