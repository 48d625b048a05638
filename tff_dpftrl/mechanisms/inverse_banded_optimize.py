"""Tunes γ of γ-BIFR (Kalinin et al. 2025), the one parameter that it has beside its bands."""

from __future__ import annotations

import numpy as np
from scipy import optimize

from tff_dpftrl.mechanisms import defaults, inverse_banded
from tff_dpftrl.participation import schema as schema_lib

_GRID = 24


def optimize_bifr(
    schema: schema_lib.MinSep, bands: int = defaults.INVERSE_BANDS, *, minimize_rms: bool = True
) -> inverse_banded.InverseBanded:
    """Tunes γ of γ-BIFR for one schema.

    A grid over (0, 1), then a bounded search around the best grid point; the loss
    is evaluated with the sensitivity as it is stated, bounds included.

    Args:
      schema: Rounds, separation and participations to optimise for.
      bands: Number of diagonals of C⁻¹.
      minimize_rms: Minimise RmsLoss; if False, MaxLoss.

    Returns:
      The best strategy found.

    Raises:
      ValueError: If `bands` is less than 1.
    """

    def loss(gamma: float) -> float:
        candidate = inverse_banded.InverseBanded.bifr(bands, gamma)
        return candidate.rms_loss(schema) if minimize_rms else candidate.max_loss(schema)

    grid = np.arange(1, _GRID) / _GRID
    best = grid[np.argmin([loss(gamma) for gamma in grid])]
    found = optimize.minimize_scalar(
        loss,
        bounds=(best - 1 / _GRID + 1e-9, best + 1 / _GRID - 1e-9),
        method="bounded",
        options={"xatol": 1e-9},
    )
    return inverse_banded.InverseBanded.bifr(bands, float(found.x))
