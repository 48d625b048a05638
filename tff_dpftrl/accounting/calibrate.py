"""Calibrates the noise to a privacy target; the result is rechecked and never above it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tff_dpftrl import validation
from tff_dpftrl.accounting import defaults, display, gaussian, guarantee, noise_search, parts
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib


def largest_mu(
    *,
    target_epsilon: float | None = None,
    target_rho: float | None = None,
    delta: float | None = None,
) -> float:
    """Computes the largest sensitivity over standard deviation that meets exactly one target."""
    if target_rho is not None and target_epsilon is None:
        validation.positive("target_rho", target_rho)
        return gaussian.mu_from_rho(target_rho)
    if target_epsilon is None or target_rho is not None:
        raise validation.UsageError(
            f"Give exactly one of target_epsilon={target_epsilon!r} and target_rho={target_rho!r}."
        )
    validation.positive("target_epsilon", target_epsilon)
    if delta is None:
        raise validation.UsageError("delta is needed with target_epsilon, got None; try 1e-10.")
    return gaussian.mu(target_epsilon, delta)


def calibrate_noise_multiplier(
    strategy: strategy_lib.Strategy,
    schema: schema_lib.MinSep,
    *,
    target_epsilon: float | None = None,
    target_rho: float | None = None,
    delta: float | None = None,
    clip_norm_inflation: float = 1.0,
    others: tuple[parts.Part, ...] = (),
) -> float:
    """Computes the smallest noise multiplier with which a DP-FTRL run meets a target.

    Give exactly one of the two targets.

    Args:
      strategy: Strategy matrix C that generates the noise.
      schema: Participation schema of the whole run.
      target_epsilon: Largest allowed epsilon at `delta`; None if rho is the target.
      target_rho: Largest allowed rho of zCDP; None if epsilon is the target.
      delta: Delta of the target; needed with `target_epsilon`.
      clip_norm_inflation: Factor ≥ 1 by which the norm bound of what clients send exceeds
        the clip norm that z is relative to.
      others: All else that the run releases about the same clients; the target is for the whole.

    Returns:
      z. The guarantee of a run with it was recomputed and is not above the target.

    Raises:
      ValueError: If not exactly one target is given, or an argument is out of range, or `others`
        leave nothing of the target.
    """
    strategy_lib.check_strategy(strategy)
    mu = largest_mu(target_epsilon=target_epsilon, target_rho=target_rho, delta=delta)
    if others:
        mu = _mu_left(others, schema, target_epsilon, target_rho, delta)
    sensitivity = strategy.sensitivity(schema)
    noise_multiplier = sensitivity.value * clip_norm_inflation / mu
    if math.isinf(noise_multiplier):
        raise validation.UsageError(
            f"The target (target_epsilon={target_epsilon!r}, target_rho={target_rho!r}) needs more "
            "noise than a float can hold: raise it."
        )
    step = 1e-12
    while True:
        reached = guarantee.Guarantee(
            mechanism=strategy.name,
            noise_multiplier=noise_multiplier,
            schema=schema,
            sensitivity=sensitivity,
            delta=defaults.DELTA if delta is None else delta,  # Rho does not depend on it.
            clip_norm_inflation=clip_norm_inflation,
            others=others,
        )
        if target_rho is not None and reached.rho_zcdp <= target_rho:
            return noise_multiplier
        if target_epsilon is not None and reached.epsilon <= target_epsilon:
            return noise_multiplier
        noise_multiplier *= 1.0 + step
        step *= 2.0


def _mu_left(
    others: tuple[parts.Part, ...],
    schema: schema_lib.MinSep,
    target_epsilon: float | None,
    target_rho: float | None,
    delta: float | None,
) -> float:
    """Computes the largest μ of the weights with which they and others meet a target."""
    if target_epsilon is None or delta is None:
        whole = largest_mu(target_rho=target_rho)
    else:
        nothing = parts.GaussianRounds(0.0, schema.effective_participations)
        check_left(nothing, others, target_epsilon=target_epsilon, delta=delta)
        left = target_epsilon - parts.added_epsilon(others)
        whole = gaussian.mu(left, parts.remaining_delta(others, delta))
    rounds = parts.GaussianRounds(0.0, schema.effective_participations)
    spent = rounds.mu_with(parts.gaussian_mu(others), parts.precision_of_rounds(others))
    if spent >= whole:
        raise validation.UsageError(
            f"target_rho={target_rho!r} is spent by other parts than the weights: raise it, or "
            "give them smaller budget_shares."
        )
    return math.sqrt((whole - spent) * (whole + spent))


def check_left(
    weights: parts.Weights, others: Sequence[parts.Part], *, target_epsilon: float, delta: float
) -> None:
    """Refuses parts that leave nothing of the target, which is for the whole, to the weights."""
    spent = parts.epsilon_without_weights(weights, others, delta)
    if spent >= target_epsilon:
        names = " and ".join(dict.fromkeys(part.name for part in others))
        raise validation.UsageError(
            f"target_epsilon={target_epsilon:g} leaves nothing for the weights: {names} cost "
            f"{display.round_up(spent)} by themselves; raise it, or give them smaller "
            "budget_shares."
        )


def noise_beside(
    rounds: Callable[[float], parts.Weights],
    others: Sequence[parts.Part],
    *,
    target_epsilon: float,
    delta: float,
    initial: float = 1.0,
    relative_tolerance: float = 1e-4,
) -> float:
    """Finds the noise of the rounds with which they and `others` together meet a target.

    The noise was evaluated: ε of the whole is not above the target.
    """
    if others:
        check_left(rounds(initial), others, target_epsilon=target_epsilon, delta=delta)
    return noise_search.smallest_noise(
        lambda noise: parts.compose(rounds(noise), others, delta),
        target_epsilon=target_epsilon,
        initial=initial,
        relative_tolerance=relative_tolerance,
    )
