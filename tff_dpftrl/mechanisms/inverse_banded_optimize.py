"""Tunes γ of γ-BIFR (Kalinin et al. 2025), its only parameter besides its bands."""

from __future__ import annotations

import numpy as np
from scipy import optimize

from tff_dpftrl.mechanisms import defaults, inverse_banded
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.participation import schema as schema_lib

_GRID = 24


def optimize_bifr(
    schema: schema_lib.MinSep,
    bands: int = defaults.INVERSE_BANDS,
    *,
    minimize_rms: bool = True,
    workload: workload_lib.Workload | None = None,
) -> inverse_banded.InverseBanded:
    """Tunes γ of γ-BIFR for one schema.

    A grid search over (0, 1) is followed by a bounded search around the best grid point.
    The loss is that of the stated sensitivity, which may be an upper bound.

    Args:
      schema: Participation schema to optimise for.
      bands: Number of diagonals of C⁻¹.
      minimize_rms: Whether to minimise RmsLoss; if False, MaxLoss.
      workload: Workload of the schema's rounds, whose models' error is minimised; None for the
        prefix sums.

    Returns:
      The strategy with the least loss.

    Raises:
      ValueError: If `bands` is less than 1.
    """

    def loss(gamma: float) -> float:
        candidate = inverse_banded.InverseBanded.bifr(bands, gamma)
        if minimize_rms:
            return candidate.rms_loss(schema, workload)
        return candidate.max_loss(schema, workload)

    grid = np.arange(1, _GRID) / _GRID
    best = grid[np.argmin([loss(gamma) for gamma in grid])]
    optimum = optimize.minimize_scalar(
        loss,
        bounds=(best - 1 / _GRID + 1e-9, best + 1 / _GRID - 1e-9),
        method="bounded",
        options={"xatol": 1e-9},
    )
    return inverse_banded.InverseBanded.bifr(bands, float(optimum.x))
