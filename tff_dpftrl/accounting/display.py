"""Numbers as people should see them: never rounded in the flattering direction."""

from __future__ import annotations

import decimal
import math


def round_up(value: float | None, digits: int = 4) -> str:
    """A non-negative number with few digits, rounded up.

    Args:
      value: A cost in privacy, at least 0; None or inf if there is no bound.
      digits: Significant digits to keep.

    Returns:
      Like "8.527" for 8.526079; "unbounded" if there is no bound.
    """
    if value is None or math.isinf(value):
        return "unbounded"
    with decimal.localcontext() as context:
        context.prec = digits
        context.rounding = decimal.ROUND_CEILING
        rounded = +decimal.Decimal(repr(float(value)))
    return f"{float(rounded):.{digits}g}"
