"""The vocabulary's share of a run's budget: the noise of its count, and what it costs."""

from __future__ import annotations

import math

from tff_dpftrl.accounting import budget_shares, display, parts
from tff_dpftrl.data import set_union

_NAME = "vocabulary"  # Of the share.
_SAFETY = 1e-12  # Relative excess of noise for rounding.


def counting(target_epsilon: float, delta: float, shares: str | None = None) -> set_union.Counting:
    """Returns the noise of the vocabulary 'dp', from ε and δ of the whole run."""
    rho = _rho(target_epsilon, delta, shares)
    return set_union.Counting(
        (1.0 + _SAFETY) / math.sqrt(2.0 * rho), budget_shares.THRESHOLD_SHARE_OF_DELTA * delta
    )


def part(target_epsilon: float, delta: float, shares: str | None = None) -> parts.Part:
    """Returns the cost of the vocabulary 'dp'; the arguments are those of `counting`."""
    noise = counting(target_epsilon, delta, shares)
    return parts.Part(
        parts.VOCABULARY,
        f"words that were counted, at most {noise.max_words} of a user, whose weights have an L2 "
        "norm of 1: Gaussian noise of standard deviation "
        f"{display.round_down(noise.noise_multiplier)} on their sums, and a threshold of "
        f"{display.round_down(noise.threshold)} (set union, Gopi et al. 2020)",
        rho_zcdp=noise.rho_zcdp,
        delta=noise.delta,
    )


def _rho(target_epsilon: float, delta: float, shares: str | None) -> float:
    given = {} if shares is None else budget_shares.parse(shares)
    share = given.get(_NAME, budget_shares.DEFAULTS[_NAME])
    return budget_shares.split(target_epsilon, delta, {_NAME: share})[_NAME]
