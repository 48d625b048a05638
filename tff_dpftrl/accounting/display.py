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


def percent_up(share: float) -> str:
    """Formats a share in percent, rounded up.

    Args:
      share: Number between 0 and 1.

    Returns:
      Text such as "73 %"; with as many decimals, up to four, as keep it below "100 %".
    """
    percent = decimal.Decimal(repr(float(share))) * 100
    for digits in range(5):
        rounded = percent.quantize(decimal.Decimal(10) ** -digits, decimal.ROUND_CEILING)
        if rounded < 100:
            return f"{rounded} %"
    return "100 %"
