"""Makers of the findings of a recount's checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tff_dpftrl.auditing import audit_report

_SHOWN = 4


def judged(
    test: str, wrong: Sequence[str], fine: str, *, nothing: str | bool = False
) -> audit_report.Finding:
    """Makes the finding of a check: violated if anything is wrong.

    `wrong` has a clause for each fault. `nothing` is the reason why nothing was compared, for which
    the check counts as not done; false if something was.
    """
    if not wrong and nothing:
        return skipped(test, str(nothing))
    if not wrong:
        return audit_report.Finding(test, "consistent", f"{fine}.")
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return audit_report.Finding(test, "violated", f"{'; '.join(wrong[:_SHOWN])}{more}.")


def skipped(test: str, why: str) -> audit_report.Finding:
    """Makes the finding of a check that could not be done."""
    return audit_report.Finding(test, "not tested", f"{why}.")


def differs(recorded: Any, expected: float, tolerance: float = 1e-9) -> bool:
    """Returns whether a record is no number, or differs from the expected one.

    `tolerance` is the largest relative difference that is ignored.
    """
    if not isinstance(recorded, int | float) or isinstance(recorded, bool):
        return True
    return not abs(recorded - expected) <= tolerance * abs(expected)
