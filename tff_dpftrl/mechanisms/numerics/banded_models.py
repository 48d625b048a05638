"""Noise variances of models under a workload for a banded C, and their gradients.

Like `banded_blocks`, it cuts the rounds into blocks of `bands` rounds: the noise of block i is
ẑ_i = C_i⁻¹ (z_i − U_i ẑ_{i−1}). Models and the last outputs s of the workload's recurrences follow
from it block by block,

  models y_i = O_i s_i + L_i ẑ_i,   s_{i+1} = F_i s_i + K_i ẑ_i,

so that time is O(n · bands²) for any workload.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import scipy.linalg

from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.mechanisms.numerics import banded_blocks


@dataclasses.dataclass(frozen=True)
class _Block:
    """Block of C with the second moments of its noise; letters as in the module's docstring."""

    start: int
    diagonal: np.ndarray  # C_i, lower triangular.
    left: np.ndarray  # U_i.
    transition: np.ndarray  # T_i = −C_i⁻¹ U_i: what ẑ_{i−1} contributes to ẑ_i.
    covariance: np.ndarray  # E[ẑ_i ẑ_iᵀ].
    cross: np.ndarray  # E[ẑ_i ẑ_{i−1}ᵀ].
    with_state: np.ndarray  # E[ẑ_i s_iᵀ].
    previous_with_state: np.ndarray  # E[ẑ_{i−1} s_iᵀ].


class BandedModels:
    """Models of a workload under strategies with `bands` bands."""

    def __init__(self, workload: workload_lib.Workload, bands: int):
        self._num_rounds, self._bands = workload.num_rounds, bands
        self._responses = [
            workload.responses(start, min(start + bands, self._num_rounds))
            for start in range(0, self._num_rounds, bands)
        ]

    def _forward(self, rows: np.ndarray) -> tuple[list[_Block], np.ndarray]:
        """Computes the blocks, and the variances of the models."""
        bands, kept = self._bands, len(self._responses[0][2])
        previous = np.zeros((bands, bands))
        previous_with_state, state = np.zeros((bands, kept)), np.zeros((kept, kept))
        blocks, variances = [], []
        for start, (by_state, by_noise, forward, inflow) in zip(
            range(0, self._num_rounds, bands), self._responses, strict=True
        ):
            stop = min(start + bands, self._num_rounds)
            left, diagonal = banded_blocks.dense_blocks(rows, start, stop)
            solved = scipy.linalg.solve_triangular(
                diagonal, np.hstack([-left, np.eye(len(diagonal))]), lower=True, check_finite=False
            )
            transition, inverse = solved[:, :bands], solved[:, bands:]
            cross = transition @ previous
            covariance = cross @ transition.T + inverse @ inverse.T
            with_state = transition @ previous_with_state
            noise = (transition, covariance, cross, with_state, previous_with_state)
            blocks.append(_Block(start, diagonal, left, *noise))
            # E[y yᵀ] on the diagonal only; the mixed term occurs twice.
            mixed = by_noise @ (covariance @ by_noise.T + 2.0 * with_state @ by_state.T)
            variances.append(np.diagonal(mixed + by_state @ state @ by_state.T))
            both = inflow @ with_state @ forward.T
            state = forward @ state @ forward.T + both + both.T + inflow @ covariance @ inflow.T
            previous = covariance
            previous_with_state = with_state @ forward.T + covariance @ inflow.T
        return blocks, np.concatenate(variances)

    def variances(self, rows: np.ndarray) -> np.ndarray:
        """Computes the variances of the models' noise; `rows` are those of C by lag."""
        return self._forward(rows)[1]

    def weighted_error_gradient(
        self, rows: np.ndarray, weigh_rounds: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes the models' variances v, and the gradient of Σ_t w_t v_t at fixed w by `rows`.

        `rows` are those of C by lag, shape [num_rounds, bands]; `weigh_rounds` maps v to w. The
        gradient is 0 for j > t.
        """
        bands, kept = self._bands, len(self._responses[0][2])
        blocks, variances = self._forward(rows)
        weights = weigh_rounds(variances)
        gradient = np.zeros_like(rows)
        # With λ = C⁻ᵀ Aᵀ W A ẑ: E[−U_{i+1}ᵀ λ_{i+1} | ẑ_i, s_{i+1}], by its two parts.
        next_noise, next_state = np.zeros((bands, bands)), np.zeros((bands, kept))
        # Derivative of half the error of later rounds by s_{i+1}, given ẑ_i and s_{i+1}.
        slope_noise, slope_state = np.zeros((kept, bands)), np.zeros((kept, kept))
        for block, (by_state, by_noise, forward, inflow) in zip(
            reversed(blocks), reversed(self._responses), strict=True
        ):
            size = len(block.diagonal)
            weighted = weights[block.start : block.start + size, np.newaxis] * by_noise
            # The next block's share depends on s_{i+1} = F s_i + K ẑ_i.
            by_next = inflow.T @ slope_state + next_state[:size]
            matrix = weighted.T @ by_noise + by_next @ inflow
            matrix += inflow.T @ slope_noise[:, :size] + next_noise[:size, :size]
            both = scipy.linalg.solve_triangular(
                block.diagonal,
                np.hstack([matrix, weighted.T @ by_state + by_next @ forward]),
                lower=True,
                trans=1,  # Transposed.
                check_finite=False,
            )
            noise_part, state_part = both[:, :size], both[:, size:]
            within = noise_part @ block.covariance + state_part @ block.with_state.T
            before = noise_part @ block.cross + state_part @ block.previous_with_state.T
            gradient[block.start : block.start + size] = banded_blocks.band(
                np.hstack([before, within]), bands
            )[:, ::-1]
            next_noise = -block.left.T @ noise_part @ block.transition
            next_state = -block.left.T @ state_part
            slope_noise = (
                by_state.T @ weighted + forward.T @ (slope_state @ inflow + slope_noise[:, :size])
            ) @ block.transition
            slope_state = (
                weights[block.start : block.start + size, np.newaxis] * by_state
            ).T @ by_state + forward.T @ slope_state @ forward
        gradient[:bands] = np.tril(gradient[:bands])
        return variances, -2.0 * gradient
