"""How the checks of a recount say what they found."""

from __future__ import annotations

from collections.abc import Sequence

from tff_dpftrl.auditing import audit_report

_SHOWN = 4


def judged(test: str, wrong: Sequence[str], fine: str) -> audit_report.Finding:
    """A check that was made: violated if anything is wrong.

    Args:
      test: Its name.
      wrong: What is wrong, a clause each; empty if nothing is.
      fine: What is said if nothing is.
    """
    if not wrong:
        return audit_report.Finding(test, "consistent", f"{fine}.")
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return audit_report.Finding(test, "violated", f"{'; '.join(wrong[:_SHOWN])}{more}.")


def skipped(test: str, why: str) -> audit_report.Finding:
    """A check that could not be made."""
    return audit_report.Finding(test, "not tested", f"{why}.")


def differs(found: float | None, expected: float, tolerance: float = 1e-9) -> bool:
    """Whether a number is missing, or is not what it should be, up to a relative tolerance."""
    if not isinstance(found, int | float) or isinstance(found, bool):
        return True
    return not abs(found - expected) <= tolerance * abs(expected)
