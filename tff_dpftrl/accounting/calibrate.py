"""The noise that meets a privacy target, rechecked and never above it."""

from __future__ import annotations

import math
from collections.abc import Callable

from tff_dpftrl import validation
from tff_dpftrl.accounting import defaults, gaussian, guarantee
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import schema as schema_lib


def largest_mu(
    *,
    target_epsilon: float | None = None,
    target_rho: float | None = None,
    delta: float | None = None,
) -> float:
    """Largest sensitivity over standard deviation that meets the target.

    Args:
      target_epsilon: Epsilon not to exceed at `delta`; or
      target_rho: rho-zCDP not to exceed. Exactly one of the two.
      delta: Needed with `target_epsilon`.

    Returns:
      mu of the Gaussian mechanism.

    Raises:
      ValueError: If not exactly one target is given, or one is out of range.
    """
    if (target_epsilon is None) == (target_rho is None):
        raise ValueError(
            f"Give exactly one of target_epsilon={target_epsilon!r} and target_rho={target_rho!r}."
        )
    if target_rho is not None:
        validation.positive("target_rho", target_rho)
        return gaussian.mu_from_rho(target_rho)
    validation.positive("target_epsilon", target_epsilon)
    if delta is None:
        raise ValueError("delta is needed with target_epsilon, got None; try 1e-10.")
    return gaussian.mu(target_epsilon, delta)


def calibrate_noise_multiplier(
    strategy: strategy_lib.Strategy,
    schema: schema_lib.MinSep,
    *,
    target_epsilon: float | None = None,
    target_rho: float | None = None,
    delta: float | None = None,
    clip_norm_inflation: float = 1.0,
) -> float:
    """Smallest noise multiplier of a DP-FTRL run that meets the target.

    Args:
      strategy: The strategy matrix C that generates the noise.
      schema: The participation schema of the whole run.
      target_epsilon: Epsilon not to exceed at `delta`; or
      target_rho: rho-zCDP not to exceed. Exactly one of the two.
      delta: Needed with `target_epsilon`.
      clip_norm_inflation: See `guarantee.Guarantee`.

    Returns:
      z. The guarantee of a run with it was recomputed and is not above the target.

    Raises:
      ValueError: If not exactly one target is given, or an argument is out of range.
    """
    strategy_lib.check_strategy(strategy)
    mu = largest_mu(target_epsilon=target_epsilon, target_rho=target_rho, delta=delta)
    # Any delta serves for a target on rho, which does not depend on it.
    sensitivity = strategy.sensitivity(schema)
    noise_multiplier = sensitivity.value * clip_norm_inflation / mu
    if math.isinf(noise_multiplier):
        raise ValueError(
            f"The target (target_epsilon={target_epsilon!r}, target_rho={target_rho!r}) needs more "
            "noise than a float can hold: raise it."
        )
    step = 1e-12
    while True:
        found = guarantee.Guarantee(
            mechanism=strategy.name,
            noise_multiplier=noise_multiplier,
            schema=schema,
            sensitivity=sensitivity,
            delta=defaults.DELTA if delta is None else delta,
            clip_norm_inflation=clip_norm_inflation,
        )
        if target_rho is not None and found.rho_zcdp <= target_rho:
            return noise_multiplier
        if target_epsilon is not None and found.epsilon <= target_epsilon:
            return noise_multiplier
        noise_multiplier *= 1.0 + step
        step *= 2.0


def smallest_noise(
    epsilon: Callable[[float], float],
    *,
    target_epsilon: float,
    initial: float = 1.0,
    relative_tolerance: float = 1e-4,
) -> float:
    """Bisects the noise of a mechanism whose epsilon falls as noise grows.

    For mechanisms without a closed form: sampling, mixtures of Gaussians. It needs
    a function and no more; dp_accounting.calibrate_dp_mechanism, as good for its own
    accountants, bounds the absolute error of the noise, not the relative one.

    Args:
      epsilon: Epsilon, or an upper bound of it, as a function of the noise.
      target_epsilon: Epsilon not to exceed, above 0.
      initial: Where to begin the search, above 0.
      relative_tolerance: How far above the smallest noise the result may lie.

    Returns:
      A noise that was evaluated and whose epsilon is not above the target.

    Raises:
      ValueError: If an argument is out of range, or no noise up to 1e9 suffices.
    """
    validation.positive("target_epsilon", target_epsilon)
    validation.positive("initial", initial)
    enough = initial
    while epsilon(enough) > target_epsilon:
        enough *= 2.0
        if enough > 1e9:
            raise ValueError(f"target_epsilon={target_epsilon!r} is out of reach of any noise.")
    too_little = enough / 2.0
    while epsilon(too_little) <= target_epsilon:
        enough, too_little = too_little, too_little / 2.0
        if too_little < 1e-9:
            return enough
    while enough > too_little * (1.0 + relative_tolerance):
        middle = math.sqrt(enough * too_little)
        if epsilon(middle) <= target_epsilon:
            enough = middle
        else:
            too_little = middle
    return enough
