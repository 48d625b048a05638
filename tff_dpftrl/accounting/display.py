"""Privacy costs and noise with few digits, never rounded in the flattering direction."""

from __future__ import annotations

import decimal
import math


def round_up(value: float | None, digits: int = 4) -> str:
    """Formats a non-negative number rounded up: 8.526079 as "8.527", None as "unbounded"."""
    if value is None or math.isinf(value):
        return "unbounded"
    return _rounded(value, digits, decimal.ROUND_CEILING)


def round_down(value: float, digits: int = 4) -> str:
    """Formats a non-negative number rounded down, such as 8.526979 as "8.526"; inf as "∞"."""
    return "∞" if math.isinf(value) else _rounded(value, digits, decimal.ROUND_FLOOR)


def delta(value: float, digits: int = 6) -> str:
    """Formats δ, rounded up: an ε that holds at a δ holds at every larger one."""
    return round_up(value, digits)


def epsilon_at(epsilon: float | None, delta_of_epsilon: float) -> str:
    """Formats ε with the δ that it holds at, both rounded up, such as "ε = 8.527 at δ = 1e-10"."""
    return f"ε = {round_up(epsilon)} at δ = {delta(delta_of_epsilon)}"


def _rounded(value: float, digits: int, rounding: str) -> str:
    context = decimal.Context(prec=digits, rounding=rounding)
    return f"{float(context.create_decimal(repr(float(value)))):.{digits}g}"


def percent_up(share: float) -> str:
    """Formats a share in percent, rounded up, such as "73 %".

    It has as many decimals, up to four, as keep it below "100 %".
    """
    percent = decimal.Decimal(repr(float(share))) * 100
    for digits in range(5):
        rounded = percent.quantize(decimal.Decimal(10) ** -digits, decimal.ROUND_CEILING)
        if rounded < 100:
            return f"{rounded} %"
    return "100 %"


def data_size(value: float) -> str:
    """Formats a number of bytes with three digits, such as "1.23 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"
