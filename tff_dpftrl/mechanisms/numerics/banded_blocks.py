"""Noise variances of a banded strategy and their gradients, in O(n · bands²).

The rounds are cut into blocks of `bands` rounds, so that C is block bidiagonal: a lower
triangle C_i on the diagonal and an upper triangle U_i left of it. The noise ẑ = C⁻¹ z of
block i is ẑ_i = C_i⁻¹ (z_i − U_i ẑ_{i−1}). Later rounds depend on earlier ones only through
ẑ_{i−1} and the sum p_i of the noise before block i. The forward pass computes their covariances
block by block. The backward pass computes the gradient: with λ = C⁻ᵀ Aᵀ W A ẑ for round weights W,

  ∂/∂C Σ_t w_t ‖(A C⁻¹)[t, :]‖² = −2 E[λ ẑᵀ],

and E[λ_i | ẑ_i, p_i] is linear in ẑ_i and p_i. Everything is a product of matrices of size
bands × bands; nothing of size n × n is formed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import scipy.linalg


@dataclasses.dataclass(frozen=True)
class _Block:
    """Block i of C, and the second moments of its noise."""

    start: int
    diagonal: np.ndarray  # C_i, lower triangular.
    transition: np.ndarray  # T_i = −C_i⁻¹ U_i: what ẑ_{i−1} contributes to ẑ_i.
    covariance: np.ndarray  # E[ẑ_i ẑ_iᵀ].
    cross: np.ndarray  # E[ẑ_i ẑ_{i−1}ᵀ].
    with_sum: np.ndarray  # E[ẑ_i p_i].
    previous_with_sum: np.ndarray  # E[ẑ_{i−1} p_i].
    left: np.ndarray  # U_i.

    @property
    def stop(self) -> int:
        return self.start + len(self.diagonal)


def band(wide: np.ndarray, bands: int) -> np.ndarray:
    """Returns a view of a [m, bands + m] array U | C by lags, shape [m, bands].

    Entry [i, bands − 1 − j] is C[i, i − j], which lies in U for i < j. In memory, the step to
    the next row and column is constant.
    """
    step, item = wide.strides
    return np.lib.stride_tricks.as_strided(wide[:, 1:], (len(wide), bands), (step + item, item))


def dense_blocks(rows: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Builds (U, C) of the rows start ... stop − 1, shapes [m, bands] and [m, m]."""
    bands = rows.shape[1]
    wide = np.zeros((stop - start, bands + stop - start))
    band(wide, bands)[:] = rows[start:stop, ::-1]
    return wide[:, :bands], wide[:, bands:]


def _forward(rows: np.ndarray) -> tuple[list[_Block], np.ndarray, np.ndarray]:
    """Computes the blocks, and the variances of ẑ_t and of its prefix sums."""
    num_rounds, bands = rows.shape
    previous = np.zeros((bands, bands))
    previous_with_sum, sum_variance = np.zeros(bands), 0.0
    blocks, round_variance, prefix_variance = [], [], []
    for start in range(0, num_rounds, bands):
        left, diagonal = dense_blocks(rows, start, min(start + bands, num_rounds))
        solved = scipy.linalg.solve_triangular(
            diagonal, np.hstack([-left, np.eye(len(diagonal))]), lower=True, check_finite=False
        )
        transition, inverse = solved[:, :bands], solved[:, bands:]
        cross = transition @ previous
        covariance = cross @ transition.T + inverse @ inverse.T
        with_sum = transition @ previous_with_sum
        blocks.append(
            _Block(
                start, diagonal, transition, covariance, cross, with_sum, previous_with_sum, left
            )
        )
        round_variance.append(np.diagonal(covariance))
        within = np.diagonal(np.cumsum(np.cumsum(covariance, axis=0), axis=1))
        prefix_variance.append(sum_variance + 2.0 * np.cumsum(with_sum) + within)
        sum_variance = prefix_variance[-1][-1]
        previous, previous_with_sum = covariance, with_sum + covariance.sum(axis=1)
    return blocks, np.concatenate(round_variance), np.concatenate(prefix_variance)


def noise_variances(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes the squared row norms of C⁻¹ and of A C⁻¹: variances of the noise and prefix sums.

    `rows[t, j]` is C[t, t − j], and 0 for j > t, shape [num_rounds, bands].
    """
    _, round_variance, prefix_variance = _forward(rows)
    return round_variance, prefix_variance


def _suffix_sums(values: np.ndarray) -> np.ndarray:
    return np.cumsum(values[::-1], axis=0)[::-1]


def weighted_error_gradient(
    rows: np.ndarray, weigh_rounds: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Computes prefix variances v, and the gradient of Σ_t w_t v_t by `rows` at fixed w.

    `rows[t, j]` is C[t, t − j], and 0 for j > t, shape [num_rounds, bands]. `weigh_rounds` maps v
    to w, both of shape [num_rounds]: the derivatives, for a function of the variances. The gradient
    is 0 for j > t.
    """
    num_rounds, bands = rows.shape
    blocks, _, prefix_variance = _forward(rows)
    weights = weigh_rounds(prefix_variance)
    gradient = np.zeros_like(rows)
    # Part of the next block in E[(Aᵀ W A ẑ)_i − U_{i+1}ᵀ λ_{i+1} | ẑ_i, p_{i+1}].
    next_matrix = np.zeros((bands, bands))
    next_vector = np.zeros(bands)
    sum_slope = np.zeros(bands)  # E[Σ_{later s} w_s P_s | ẑ_i, p] = sum_slopeᵀ ẑ_i + later p.
    later = 0.0
    for block in reversed(blocks):
        size = block.stop - block.start
        remaining = _suffix_sums(weights[block.start : block.stop]) + later
        # (Aᵀ W A)[s, t], later rounds included, is the weight of the rounds from max(s, t) on.
        index = np.arange(size)
        matrix = remaining[np.maximum.outer(index, index)]
        matrix += sum_slope[:size] + next_matrix[:size, :size] + next_vector[:size, np.newaxis]
        both = scipy.linalg.solve_triangular(
            block.diagonal,
            np.column_stack([matrix, remaining + next_vector[:size]]),
            lower=True,
            trans=1,  # Transposed.
            check_finite=False,
        )
        slope, sum_part = both[:, :-1], both[:, -1]
        within = slope @ block.covariance + np.outer(sum_part, block.with_sum)
        before = slope @ block.cross + np.outer(sum_part, block.previous_with_sum)
        gradient[block.start : block.stop] = band(np.hstack([before, within]), bands)[:, ::-1]
        next_matrix = -block.left.T @ slope @ block.transition
        next_vector = -block.left.T @ sum_part
        sum_slope = block.transition.T @ (remaining + sum_slope[:size])
        later = remaining[0]
    gradient[:bands] = np.tril(gradient[:bands])
    return prefix_variance, -2.0 * gradient
