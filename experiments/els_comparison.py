"""Older bounds of example-level sampling, for comparison with the tight one.

`mixture_of_gaussians.epsilon` of `els` is tight (Charles et al. 2024, Theorem 3). Both bounds
here are looser; they are for the comparison in their Figure 1, not for privacy statements.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting import rdp
from scipy import special

from tff_dpftrl import validation
from tff_dpftrl.accounting import mixture_of_gaussians

# Rényi orders; those for which the integrals take too long are left out.
_ORDERS = (
    *np.round(np.arange(1.05, 3.0, 0.05), 2),
    *np.round(np.arange(3.0, 12.0, 0.25), 2),
    *range(12, 64, 2),
    *range(64, 513, 32),
)
_MOST_POINTS = 200_000
# Smallest δ₁ that is tried; where the search for it ends: ratio of two ε₁, difference of log δ₁.
_SMALLEST_DELTA, _TOLERANCE, _SMALLEST_STEP = 1e-50, 1.001, 1e-4


def black_box_epsilon(
    *,
    noise_multiplier: float,
    sampling_probability: float,
    group_size: int,
    num_steps: int,
    delta: float,
) -> float:
    """Computes a user's epsilon by group privacy from that of one example.

    What is (ε₁, δ₁)-private for one example is (G ε₁, δ₁ (e^{G ε₁} − 1) / (e^{ε₁} − 1))-private
    for G examples (Vadhan 2017, Lemma 2.2). The best of all (ε₁, δ₁) of the run is taken, which
    are tight for one example. The result is looser than the tight bound.

    Args:
      noise_multiplier: σ, standard deviation of the noise per unit of an example's clip norm.
      sampling_probability: p, probability of an example to be in a step's batch.
      group_size: G, largest number of examples of one user.
      num_steps: T, number of steps.
      delta: δ of the user's guarantee, at least 1e-50.

    Returns:
      ε, within 0.2% of the best for a δ₁ of at least 1e-50; inf if there is none, whatever
      smaller ones would give.

    Raises:
      ValueError: If an argument is out of range.
    """
    delta = validation.number("delta", delta, at_least=_SMALLEST_DELTA, below=1)
    group_size = validation.integer("group_size", group_size, minimum=1)
    pair = mixture_of_gaussians.uls(noise_multiplier, sampling_probability)

    def of_one(log_delta: float) -> float:
        # Going the other way, by `mixture_of_gaussians.delta`, takes seconds each time.
        return mixture_of_gaussians.epsilon(pair, num_steps=num_steps, delta=math.exp(log_delta))

    tight = mixture_of_gaussians.epsilon(pair, num_steps=num_steps, delta=delta)
    if group_size == 1 or tight == 0.0 or math.isinf(tight):
        return tight
    # The factor is G at least, so that nothing larger than this will do; and what does, does so
    # with every smaller one, since the logarithm of δ₁ is concave in ε₁.
    too_large, log_small = math.log(delta / group_size), math.log(_SMALLEST_DELTA)
    too_small, enough = of_one(too_large), of_one(log_small)
    if math.isinf(enough) or log_small + _log_factor(enough, group_size) > math.log(delta):
        return math.inf
    while enough > _TOLERANCE * too_small and too_large - log_small > _SMALLEST_STEP:
        middle = (too_large + log_small) / 2.0
        example = of_one(middle)
        if middle + _log_factor(example, group_size) <= math.log(delta):
            log_small, enough = middle, example
        else:
            too_large, too_small = middle, example
    return group_size * enough


def _log_factor(epsilon: float, group_size: int) -> float:
    """log((e^{G ε} − 1) / (e^ε − 1)) without overflow, for ε above 0."""

    def log_expm1(value: float) -> float:
        return value + math.log(-math.expm1(-value))

    return log_expm1(group_size * epsilon) - log_expm1(epsilon)


def renyi_epsilon(
    *,
    noise_multiplier: float,
    sampling_probability: float,
    group_size: int,
    num_steps: int,
    delta: float,
) -> float:
    """Computes a user's epsilon by Rényi divergences of the same mixtures of Gaussians.

    The divergences are integrated numerically, to about 1e-10 of them, not bounded. For
    comparison: looser than the tight bound.

    Args:
      noise_multiplier: σ, standard deviation of the noise per unit of an example's clip norm.
      sampling_probability: p, probability of an example to be in a step's batch.
      group_size: G, largest number of examples of one user.
      num_steps: T, number of steps.
      delta: δ of the user's guarantee.

    Returns:
      ε, the larger one of both directions, by the best of many orders; inf if the noise is
      so small that none could be computed.

    Raises:
      ValueError: If an argument is out of range.
    """
    validation.delta(delta)
    num_steps = validation.integer("num_steps", num_steps, minimum=1)
    pair = mixture_of_gaussians.els(noise_multiplier, sampling_probability, group_size)
    epsilon = 0.0
    for remove in (True, False):
        orders, divergences = [], []
        for order in _ORDERS:
            divergence = _divergence(pair, float(order), remove)
            if divergence is not None:
                orders.append(float(order))
                divergences.append(num_steps * divergence)
        if not orders:
            return math.inf
        epsilon = max(epsilon, float(rdp.compute_epsilon(orders, divergences, delta)[0]))
    return epsilon


def _divergence(
    pair: mixture_of_gaussians.MixtureOfGaussians, order: float, remove: bool
) -> float | None:
    """Rényi divergence of mixture from Gaussian, or of Gaussian from mixture; None if too long."""
    shifts = np.asarray(pair.sensitivities) / pair.stddev
    weights = np.asarray(pair.probabilities)
    shifts, log_weights = shifts[weights > 0.0], np.log(weights[weights > 0.0])
    # Where the integrand lies, and what resolves both a normal density and the loss's bends:
    # the trapezoidal rule is then exact to rounding.
    power = order if remove else 1.0 - order
    low = -12.0 + min(power, 0.0) * shifts[-1]
    high = 12.0 + max(power, 0.0) * shifts[-1]
    count = math.ceil((high - low) / min(0.1, 0.4 / shifts[-1]))
    if count * len(shifts) > 10 * _MOST_POINTS or count > _MOST_POINTS:
        return None
    x, step = np.linspace(low, high, count + 1, retstep=True)
    joint = log_weights[:, None] + np.outer(shifts, x) - shifts[:, None] ** 2 / 2.0
    exponents = power * np.asarray(special.logsumexp(joint, axis=0)) - x**2 / 2.0
    integral = np.asarray(special.logsumexp(exponents))
    log_integral = integral + math.log(step / math.sqrt(2.0 * math.pi))
    return max(0.0, float(log_integral)) / (order - 1.0)
