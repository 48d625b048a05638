"""Finds the smallest noise that meets a target epsilon, where no closed form is known."""

from __future__ import annotations

import math
from collections.abc import Callable

from tff_dpftrl import validation

# Largest magnitude of the logarithm of a noise that is tried.
_LARGEST_LOG_NOISE = math.log(1e9)


def smallest_noise(
    epsilon: Callable[[float], float],
    *,
    target_epsilon: float,
    initial: float = 1.0,
    relative_tolerance: float = 1e-4,
) -> float:
    """Finds the noise that meets a target epsilon, in few evaluations.

    It is for mechanisms without a closed form: sampling, mixtures of Gaussians. `epsilon` maps the
    noise to ε, or to an upper bound of it, and must fall as the noise grows. The result was
    evaluated, and its epsilon is not above the target. It exceeds the smallest noise by at most
    `relative_tolerance`. dp_accounting.calibrate_dp_mechanism bounds the absolute error instead. No
    noise above 1e9 is tried.
    """
    validation.positive("target_epsilon", target_epsilon)
    validation.positive("initial", initial)
    position = math.log(initial)
    tolerance = math.log1p(relative_tolerance)
    # Log noise, and log epsilon over the target there; the smallest noise lies between.
    too_little: tuple[float, float] | None = None
    enough: tuple[float, float] | None = None
    step, widths = 0.0, [math.inf, math.inf]
    while True:
        value = epsilon(math.exp(position))
        excess = math.log(value / target_epsilon) if value > 0.0 else -math.inf
        if excess > 0.0:
            too_little = (position, excess)
        else:
            enough = (position, excess)
        if enough is None or too_little is None:
            if position > _LARGEST_LOG_NOISE:
                raise validation.UsageError(
                    f"target_epsilon={target_epsilon!r} is out of reach of any noise up to 1e9: "
                    "raise it."
                )
            if position < -_LARGEST_LOG_NOISE:
                return math.exp(position)
            # Epsilon falls about as fast as noise grows, or faster.
            step = max(min(abs(excess), math.log(2.0)) + tolerance / 2.0, 2.0 * step)
            position += math.copysign(step, excess)
            continue
        width = enough[0] - too_little[0]
        if width <= tolerance:
            return math.exp(enough[0])
        is_slow = width > widths[-2] / 2.0
        widths.append(width)
        if is_slow or math.isinf(enough[1]) or math.isinf(too_little[1]):
            position = (too_little[0] + enough[0]) / 2.0
        else:
            position = _between(too_little, enough, tolerance)


def _between(
    too_little: tuple[float, float], enough: tuple[float, float], tolerance: float
) -> float:
    """Returns the next log noise to evaluate: the zero of the line between both points, or more.

    A small step to the safe side turns a good guess into an answer. As small a step back from
    an answer shows that no smaller noise is enough.
    """
    (low, above), (high, below) = too_little, enough
    nudge = 0.45 * tolerance
    crossing = low + (high - low) * above / (above - below)
    wanted = crossing + nudge if high - crossing > 2.0 * nudge else high - 2.0 * nudge
    margin = min(nudge, 0.1 * (high - low))
    return min(max(wanted, low + margin), high - margin)
