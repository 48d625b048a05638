"""Privacy costs with few digits, never rounded in the flattering direction."""

from __future__ import annotations

import decimal
import math


def round_up(value: float | None, digits: int = 4) -> str:
    """Formats a non-negative number with few digits, rounded up.

    Args:
      value: Privacy cost, at least 0; None or inf if there is no bound.
      digits: Number of significant digits to keep.

    Returns:
      Text such as "8.527" for 8.526079; "unbounded" if there is no bound.
    """
    if value is None or math.isinf(value):
        return "unbounded"
    with decimal.localcontext() as context:
        context.prec = digits
        context.rounding = decimal.ROUND_CEILING
        rounded = +decimal.Decimal(repr(float(value)))
    return f"{float(rounded):.{digits}g}"
