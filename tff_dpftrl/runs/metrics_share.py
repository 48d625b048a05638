"""Options that pay for training metrics: an ε of their own, or a share of the budget."""

from __future__ import annotations

from tff_dpftrl import validation

_NAME = "metrics"  # Of the share.


def of(shares: str | None) -> float | None:
    """Returns the share of the budget for training metrics; None if it is not given."""
    if shares is None:
        return None
    from tff_dpftrl.accounting import budget_shares  # It brings dp_accounting with it.

    return budget_shares.parse(shares).get(_NAME)


def check(shares: str | None, epsilon: float | None, whole: float | None) -> None:
    """Refuses an ε beside a share, a share without a whole, or an ε that leaves nothing of it."""
    share = of(shares)
    if share is not None and epsilon is not None:
        raise validation.UsageError(
            f"metrics_epsilon={epsilon:g} and budget_shares metrics={share:g} say two things of "
            "the noise of the metrics: leave one of them out."
        )
    if share is not None and whole is None:
        raise validation.UsageError(
            f"budget_shares metrics={share:g} is a share of target_epsilon: give that, or "
            "metrics_epsilon instead."
        )
    if epsilon is not None and whole is not None and epsilon >= whole:
        raise validation.UsageError(
            f"metrics_epsilon={epsilon:g} leaves nothing of target_epsilon={whole:g} for the "
            "model: lower it, to a quarter of that, say."
        )
