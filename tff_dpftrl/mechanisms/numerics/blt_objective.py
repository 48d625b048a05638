"""Objective of the BLT optimiser: log loss and its gradient, for many BLTs at once.

The same closed forms as in `blt_losses`, batched over a leading axis and with
their derivatives written out, for the optimiser only. A BLT of d buffers is the
interlaced chain y_1 < y_2 < ... < y_2d < 0 of log(1 - θ_1), log(1 - θ̂_1),
log(1 - θ_2), ...: any increasing chain gives positive output scales and
decreasing coefficients, so the sensitivity theorem holds throughout.
"""

from __future__ import annotations

import numpy as np

from tff_dpftrl.mechanisms.numerics import geometric_sums, model_errors
from tff_dpftrl.participation import schema as schema_lib


def log_loss(
    chain: np.ndarray,
    schema: schema_lib.MinSep,
    minimize_rms: bool,
    errors: model_errors.ModelErrors | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the log of MaxLoss or RmsLoss, and its gradient by the chain.

    A row of `chain`, shape [s, 2 d], is the chain y of a BLT: negative, increasing. If `errors` is
    given, it decides the loss, not `minimize_rms`.
    """
    y_pole, y_zero = chain[:, 0::2], chain[:, 1::2]
    across = y_zero[:, np.newaxis, :] - y_pole[:, :, np.newaxis]  # [s, pole i, zero j]
    poles = y_pole[:, np.newaxis, :] - y_pole[:, :, np.newaxis]
    zeros = y_zero[:, np.newaxis, :] - y_zero[:, :, np.newaxis]
    # 1 / expm1(y_j - y_i) = (1 - x_i) / (x_i - x_j) is the derivative of -log of that
    # difference by y_i; the diagonals, which do not occur, come out as zero.
    across_ratio = 1.0 / np.expm1(across)
    pole_ratio, log_poles = _differences(poles)
    zero_ratio, log_zeros = _differences(zeros)
    log_across = np.log(np.abs(np.expm1(across))) + y_pole[:, :, np.newaxis]
    log_poles += y_pole[:, :, np.newaxis] * (1.0 - np.eye(poles.shape[1]))
    log_zeros += y_zero[:, :, np.newaxis] * (1.0 - np.eye(poles.shape[1]))
    scale = np.exp(np.sum(log_across - log_poles, axis=2))
    weight = np.exp(np.sum(np.swapaxes(log_across, 1, 2) - log_zeros, axis=2) - y_zero)
    constant = np.exp(np.sum(y_pole - y_zero, axis=1))

    s2, s2_by_scale, s2_by_pole = _sensitivity(np.exp(y_pole), scale, schema)
    if errors is None:
        e2, e2_by_constant, e2_by_weight, e2_by_zero = _error(
            np.exp(y_zero), constant, weight, schema.num_rounds, minimize_rms
        )
    else:
        zero = np.exp(y_zero)
        e2, e2_by_chain = _model_error(np.exp(y_pole), zero, weight * zero, schema, errors)
        e2_by_constant, e2_by_weight, e2_by_zero = np.zeros(len(chain)), 0.0 * zero, 0.0 * zero

    half_s, half_e = 0.5 / s2[:, np.newaxis], 0.5 / e2[:, np.newaxis]
    a, c, e = half_s * s2_by_scale, half_e * e2_by_weight, half_e * e2_by_constant[:, np.newaxis]
    by_pole = half_s * s2_by_pole + e
    by_pole += -a * np.sum(across_ratio, axis=2) - np.sum(across_ratio * c[:, np.newaxis], axis=2)
    by_pole += np.sum((a[:, :, np.newaxis] + a[:, np.newaxis]) * pole_ratio, axis=2)
    by_zero = half_e * e2_by_zero - e - c
    across_other = 1.0 + across_ratio  # (1 - θ̂_j) / (θ_i - θ̂_j)
    by_zero += np.sum(across_other * a[:, :, np.newaxis], axis=1) + c * np.sum(across_other, axis=1)
    by_zero += np.sum((c[:, :, np.newaxis] + c[:, np.newaxis]) * zero_ratio, axis=2)
    gradient = np.stack([by_pole, by_zero], axis=2).reshape(chain.shape)
    if errors is not None:
        gradient += half_e * e2_by_chain  # pyright: ignore[reportPossiblyUnboundVariable]
    return 0.5 * np.log(s2 * e2), gradient


def _differences(gaps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes 1 / expm1(gap) and log |expm1(gap)|, both zero on the diagonal."""
    diagonal = np.eye(gaps.shape[1], dtype=bool)
    difference = np.where(diagonal, 1.0, np.expm1(gaps))
    return np.where(diagonal, 0.0, 1.0 / difference), np.log(np.abs(difference))


def _sensitivity(pole, scale, schema: schema_lib.MinSep):
    """Computes S² like `blt_losses.sensitivity_squared`, and its gradient by log ω, log(1 - θ)."""
    n, b, k = schema.num_rounds, schema.min_sep, schema.effective_participations
    log_pole = np.log1p(-pole)
    log_pair = log_pole[:, :, np.newaxis] + log_pole[:, np.newaxis]
    step = b * log_pole
    segment, segment_slope = _sum_and_slope(log_pair, b - 1)
    tail, tail_slope = _sum_and_slope(log_pair, n - (k - 1) * b - 1)
    last, last_slope = _sum_and_slope(step, k)
    nodes, weights = geometric_sums.summation_nodes(k - 1)
    gain, gain_slope = _sum_and_slope(step[:, np.newaxis], nodes[:, np.newaxis] + 1)  # [s, m, d]
    gain_weighted = np.swapaxes(gain * weights[:, np.newaxis], 1, 2)
    gains = gain_weighted @ gain
    last_pair = last[:, :, np.newaxis] * last[:, np.newaxis]

    quadratic = gains * segment + last_pair * tail
    by_log_pole = (
        gains * segment_slope
        + last_pair * tail_slope
        + b * np.swapaxes(gain_weighted @ gain_slope, 1, 2) * segment
        + b * last_slope[:, :, np.newaxis] * last[:, np.newaxis] * tail
    )
    entry_scale = scale * np.exp((b - 1) * log_pole)
    entries = 1.0 + (gain @ entry_scale[:, :, np.newaxis])[..., 0]  # [s, m]
    weighted = (weights * entries)[:, np.newaxis]  # [s, 1, m]
    entry_gain = entry_scale * (weighted @ gain)[:, 0]
    entry_slope = entry_scale * (weighted @ gain_slope)[:, 0]

    scaled = scale * (quadratic @ scale[:, :, np.newaxis])[..., 0]
    s2 = 1.0 + np.sum(weights * np.square(entries), axis=1) + np.sum(scaled, axis=1)
    by_scale = 2.0 * (scaled + entry_gain)
    by_log = scale * (by_log_pole @ scale[:, :, np.newaxis])[..., 0]
    by_log += (b - 1) * entry_gain + b * entry_slope
    return s2, by_scale, -2.0 * by_log * pole / (1.0 - pole)


def _error(zero, constant, weight, num_rounds: int, minimize_rms: bool):
    """Computes E² like `blt_losses`, and its derivatives by log β, log γ and log(1 - θ̂)."""
    log_zero = np.log1p(-zero)
    log_pair = log_zero[:, :, np.newaxis] + log_zero[:, np.newaxis]
    if minimize_rms:
        constant_sum = 0.5 * (num_rounds + 1.0)
        single, single_slope, pair, pair_slope = (
            part / num_rounds
            for log_ratio in (log_zero, log_pair)
            for part in _ramp_and_slope(log_ratio, num_rounds)
        )
    else:
        constant_sum = float(num_rounds)
        single, single_slope = _sum_and_slope(log_zero, num_rounds)
        pair, pair_slope = _sum_and_slope(log_pair, num_rounds)
    mixed = constant[:, np.newaxis] * weight
    squares = weight * (pair @ weight[:, :, np.newaxis])[..., 0]
    constant_part = np.square(constant) * constant_sum
    mixed_part = np.sum(mixed * single, axis=1)
    e2 = constant_part + 2.0 * mixed_part + np.sum(squares, axis=1)
    by_log = mixed * single_slope + weight * (pair_slope @ weight[:, :, np.newaxis])[..., 0]
    return (
        e2,
        2.0 * (constant_part + mixed_part),
        2.0 * (mixed * single + squares),
        -2.0 * by_log * zero / (1.0 - zero),
    )


def _model_error(pole, zero, scale, schema: schema_lib.MinSep, errors: model_errors.ModelErrors):
    """Computes E² under a workload, and its gradient by the chain of log(1 - θ), log(1 - θ̂).

    C⁻¹(x) = Π (1 - θ_i x) / (1 - θ̂_i x) has the coefficients 1, -Σ_i scale_i θ̂_i^(t-1).
    """
    from scipy import signal  # It takes long to import.

    num_rounds = schema.num_rounds
    powers = np.exp(np.log1p(-zero)[..., np.newaxis] * np.arange(num_rounds - 1.0))
    inverse = np.ones((len(zero), num_rounds))
    inverse[:, 1:] = -np.einsum("sd,sdt->st", scale, powers)
    squared, by_inverse = errors.squared(inverse)
    by_chain = np.zeros((len(zero), zero.shape[1], 2))
    for s in range(len(zero)):
        for i in range(zero.shape[1]):
            for j, (u, sign) in enumerate(((pole[s, i], 1.0), (zero[s, i], -1.0))):
                # ∂C⁻¹/∂θ = -x C⁻¹ / (1 - θ x), ∂C⁻¹/∂θ̂ = x C⁻¹ / (1 - θ̂ x), ∂θ/∂y = -(1 - θ).
                change = signal.lfilter([1.0], [1.0, u - 1.0], inverse[s, :-1])
                by_chain[s, i, j] = sign * u * (by_inverse[s, 1:] @ change)
    return squared, by_chain.reshape(len(zero), -1)


def _sum_and_slope(log_ratio, length):
    total = geometric_sums.geometric_sum(log_ratio, length)
    return total, geometric_sums.geometric_sum_slope(log_ratio, length, total)


def _ramp_and_slope(log_ratio, length):
    ramp = geometric_sums.ramp_sum(log_ratio, length)
    return ramp, geometric_sums.ramp_sum_slope(log_ratio, length, ramp)
