"""Sensitivity and errors of a BLT in closed form: no loop over rounds.

McMahan, Xu & Zhang 2024 evaluate the same quantities (Thm. 3.1, Prop. 3.3) in
O(n) from coefficients. Here geometric series are summed, so one evaluation costs
O(d² log k) for d buffers and k participations whatever the number of rounds.

A BLT has poles θ (buffer decays of C) and zeros θ̂ (buffer decays of C⁻¹). This
module takes their *complements* u = 1 - θ and û = 1 - θ̂, which keep their digits
as θ → 1. Every sum below has non-negative terms, so nothing cancels.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from tff_dpftrl.mechanisms.numerics import geometric_sums
from tff_dpftrl.participation import schema as schema_lib


def sensitivity_squared(
    pole_complements: np.ndarray, output_scale: np.ndarray, schema: schema_lib.MinSep
) -> float:
    """Computes ‖Σ_j C[:, j · min_sep]‖²: S² if coefficients do not increase.

    Between two participations, round m · min_sep + r, the sum of the client's columns is Σ_i ω_i
    g_i θ_i^{r-1} with g_i = Σ_{l≤m} θ_i^{l·min_sep}; its squares are geometric series again. The
    pole complements are u = 1 - θ, each in (0, 1), and ω is non-negative.
    """
    n, b, k = schema.num_rounds, schema.min_sep, schema.effective_participations
    log_pole = np.log1p(-pole_complements)
    log_pair = np.add.outer(log_pole, log_pole)
    scale_pair = np.outer(output_scale, output_scale)
    step = b * log_pole
    last = geometric_sums.geometric_sum(step, k)
    tail = geometric_sums.geometric_sum(log_pair, n - (k - 1) * b - 1)
    total = float(np.sum(scale_pair * np.outer(last, last) * tail))

    nodes, weights = geometric_sums.summation_nodes(k)
    before = geometric_sums.geometric_sum(step, nodes[:, np.newaxis])
    first_entry = 1.0 + before @ (output_scale * np.exp((b - 1) * log_pole))
    total += float(weights @ np.square(first_entry))

    nodes, weights = geometric_sums.summation_nodes(k - 1)
    gain = geometric_sums.geometric_sum(step, nodes[:, np.newaxis] + 1)
    segment = geometric_sums.geometric_sum(log_pair, b - 1)
    return total + float(np.sum(scale_pair * ((gain.T * weights) @ gain) * segment))


def prefix_noise_terms(
    pole_complements: np.ndarray, zero_complements: np.ndarray
) -> tuple[float, np.ndarray]:
    """Writes the first column of B = A C⁻¹ as b_t = constant + Σ_i weight[i] θ̂_i^t.

    The complements u = 1 - θ and û = 1 - θ̂ are interlaced: u_1 < û_1 < u_2 < ... The constant is
    Π u_i / û_i. All terms are positive.
    """
    constant = float(np.prod(pole_complements / zero_complements))
    inverse_scale = pole_residues(zero_complements, pole_complements)
    return constant, inverse_scale / zero_complements


def pole_residues(poles: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Computes |Π_j (pole_i - zero_j) / Π_{j≠i} (pole_i - pole_j)|, shape [d].

    With the poles and zeros of C these are its output scales ω. With poles and zeros
    exchanged they are -ω̂, those of C⁻¹ with the sign changed
    (Dvijotham et al. 2024, Lemma 5.2; McMahan, Xu & Zhang 2024, Alg. 5).
    """
    among = np.abs(np.subtract.outer(poles, poles))
    np.fill_diagonal(among, 1.0)
    across = np.abs(np.subtract.outer(poles, zeros))
    # Ratios first, so that neither product can under- or overflow.
    order = np.sort(across, axis=1) / np.sort(among, axis=1)
    return np.prod(order, axis=1)


def max_error_squared(
    pole_complements: np.ndarray, zero_complements: np.ndarray, num_rounds: int
) -> float:
    """Computes MaxError² = Σ_{t<n} b_t², the squared norm of the last row of B.

    The complements u = 1 - θ and û = 1 - θ̂ are interlaced. The last û exceeds 1 if its θ̂ is
    negative.
    """
    return _weighted_sum(
        pole_complements,
        zero_complements,
        float(num_rounds),
        functools.partial(geometric_sums.geometric_sum, length=num_rounds),
    )


def rms_error_squared(
    pole_complements: np.ndarray, zero_complements: np.ndarray, num_rounds: int
) -> float:
    """Computes RmsError² = (1/n) Σ_{t<n} (n - t) b_t²; see `max_error_squared`."""
    total = _weighted_sum(
        pole_complements,
        zero_complements,
        0.5 * num_rounds * (num_rounds + 1.0),
        functools.partial(geometric_sums.ramp_sum, length=num_rounds),
    )
    return total / num_rounds


def round_noise(
    pole_complements: np.ndarray, zero_complements: np.ndarray, num_rounds: int
) -> tuple[float, float]:
    """Computes the variance of the noise of the last round, the largest, and the mean of all.

    The first column of C⁻¹ is 1 and then Σ_i ω̂_i θ̂_i^t, all of one sign. Clip norm and noise
    multiplier are 1.
    """
    scale, later = pole_residues(zero_complements, pole_complements), num_rounds - 1
    last, total = (
        _squares(0.0, scale, zero_complements, 0.0, functools.partial(sum_of, length=later))
        for sum_of in (geometric_sums.geometric_sum, geometric_sums.ramp_sum)
    )
    return 1.0 + last, 1.0 + total / num_rounds


def _weighted_sum(pole_complements, zero_complements, constant_sum, power_sum) -> float:
    """Computes Σ_t w_t b_t²; `power_sum` gives Σ_t w_t x^t and `constant_sum` is Σ_t w_t."""
    constant, weight = prefix_noise_terms(pole_complements, zero_complements)
    return _squares(constant, weight, zero_complements, constant_sum, power_sum)


def _squares(constant, weight, zero_complements, constant_sum, power_sum) -> float:
    """Computes Σ_t w_t (constant + Σ_i weight[i] θ̂_i^t)²."""
    zero = 1.0 - zero_complements
    negative = zero < 0
    with np.errstate(divide="ignore"):
        log_zero = np.where(zero_complements < 1, np.log1p(-np.minimum(zero_complements, 1.0)), 0)
        log_zero = np.where(negative, np.log(np.abs(zero)), log_zero)
    single = power_sum(log_zero, negative=negative if negative.any() else None)
    log_pair = np.add.outer(log_zero, log_zero)
    negative_pair = np.not_equal.outer(negative, negative)
    pair = power_sum(log_pair, negative=negative_pair if negative.any() else None)
    return math.fsum(
        [
            constant**2 * constant_sum,
            2.0 * constant * float(weight @ single),
            float(weight @ pair @ weight),
        ]
    )
