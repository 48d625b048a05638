"""Shares of a privacy budget: how much noise each part gets besides the weights.

A share is a share of μ²: a part's squared μ is the share times that of the Gaussian mechanism which
spends the whole (ε, δ). Squared μ add up, ε do not: shares of ε would promise more than the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tff_dpftrl import validation
from tff_dpftrl.accounting import gaussian, noise_search, parts

DEFAULTS = {"vocabulary": 0.05, "metrics": 0.05}
"""Shares of parts that are not given one. With a share s, other noise grows by 1 / √(1 − s).

The vocabulary's is where coverage has gained most of what it can (docs/how_to/vocabulary.md).
"""
PARTS = {"vocabulary": parts.VOCABULARY, "metrics": parts.METRICS}
"""Names of parts, by the names of their shares."""
THRESHOLD_SHARE_OF_DELTA = 0.1
"""Share of δ for the threshold of a vocabulary: the probability that a word of one user is kept."""


def parse(text: str) -> dict[str, float]:
    """Reads shares such as "vocabulary=0.02,metrics=0.05"; a name alone has its default share."""
    shares: dict[str, float] = {}
    for pair in text.split(","):
        name, separator, value = pair.partition("=")
        name = name.strip()
        try:
            share = float(value) if separator else DEFAULTS.get(name, math.nan)
        except ValueError:
            share = math.nan
        if math.isnan(share) or name in shares:
            raise validation.UsageError(
                f"budget_shares={text!r} must be pairs of a part and its share, each part once, "
                "like vocabulary=0.02,metrics=0.05."
            )
        shares[name] = share
    check(shares)
    return shares


def check(shares: Mapping[str, float]) -> None:
    """Refuses unknown names, shares outside (0, 1), and shares that leave the weights nothing."""
    for name, share in shares.items():
        if name not in PARTS:
            raise validation.UsageError(
                f"budget_shares has {name!r}, which is no part: take {', '.join(PARTS)}."
            )
        if not 0.0 < share < 1.0:
            raise validation.UsageError(
                f"budget_shares gives {name} the share {share!r} of the budget: give a number "
                "above 0 and below 1, like 0.05; the weights get the rest."
            )
    total = math.fsum(shares.values())
    if total >= 1.0:
        raise validation.UsageError(
            f"budget_shares add up to {total:g}, which leaves nothing for the weights: lower them "
            "to less than 1 in all, like 0.1."
        )


def of_run(
    text: str | None, released: Sequence[str], target_epsilon: float | None
) -> dict[str, float]:
    """Returns the share of each part that a run releases besides its weights, by name in `PARTS`.

    Parts without a share in `text` get the default. Shares of parts that the run does not release
    are refused. `target_epsilon` is None if noise is given instead.
    """
    given = {} if text is None else parse(text)
    if text is not None and target_epsilon is None:
        raise validation.UsageError(
            f"budget_shares={text!r} are shares of target_epsilon: give it, or leave them out."
        )
    for name in given:
        if name not in released:
            raise validation.UsageError(
                f"budget_shares gives {name} a share, and this run releases no {PARTS[name]}: "
                "leave it out, or ask for them."
            )
    shares = {name: given.get(name, DEFAULTS[name]) for name in released}
    check(shares)
    return shares


def split(target_epsilon: float, delta: float, shares: Mapping[str, float]) -> dict[str, float]:
    """Splits a budget: returns ρ of zCDP of each part that has a share, rounded down.

    The weights get what is left, by `calibrate` or the sampling's own calibration.
    """
    check(shares)
    whole = gaussian.mu(validation.positive("target_epsilon", target_epsilon), delta)
    rho = whole * whole / 2.0
    return {name: math.nextafter(share * rho, 0.0) for name, share in shares.items()}


def planned(
    target_epsilon: float, delta: float, shares: Mapping[str, float]
) -> tuple[parts.Part, ...]:
    """Returns parts with shares of a budget, before it is known how they are released.

    The parts have no secret sampling; the vocabulary has its threshold's share of δ.
    """
    rho = split(target_epsilon, delta, shares)
    return tuple(
        parts.Part(
            PARTS[name],
            f"{share:.3g} of the budget",
            rho_zcdp=rho[name],
            delta=THRESHOLD_SHARE_OF_DELTA * delta if name == "vocabulary" else 0.0,
        )
        for name, share in shares.items()
    )


def growth(share: float) -> float:
    """Computes the factor by which the noise of the weights grows if another part has a share."""
    return (1.0 + 1e-12) / math.sqrt(1.0 - share)


def figures(rounds: parts.Weights, share: float) -> parts.Part:
    """Returns figures of each round that have a share of the rounds' budget.

    `rounds` are rounds whose updates alone spend all of the budget. The noise of the updates then
    has to grow by `growth`, and nothing costs more than before; by more if other parts have shares,
    too. Samplings that allow no figures are refused.
    """
    noise = noise_of_round(rounds, share)
    says = f"figures of each round, {share:.3g} of the budget"
    return parts.Part(parts.METRICS, says, noise_multiplier_of_round=noise)


def noise_of_round(rounds: parts.Weights, share: float) -> float:
    """Computes the noise of a figure of each round that has a share of the rounds' budget.

    The result is a standard deviation over the largest change of the figure by one unit. `rounds`
    are rounds whose updates alone spend all of the budget: updates then need more noise.
    """
    check({"metrics": share})
    return rounds.noise_of_figure() / math.sqrt(share)


def noise_of_round_for_epsilon(rounds: parts.Weights, target_epsilon: float, delta: float) -> float:
    """Computes the noise with which all rounds' figures, released alone, cost `target_epsilon`.

    The result is a standard deviation over the largest change of the figure by one unit.
    """
    alone = rounds.without_updates()
    return noise_search.smallest_noise(
        lambda noise: alone.composed(0.0, noise**-2, delta), target_epsilon=target_epsilon
    )
