"""Noise multipliers of the updates and of the clip norm that is learned with them.

Each round releases two Gaussian sums: the clipped updates, with noise multiplier z_Δ,
and the number of clients whose norm is at most the estimate, with noise of standard
deviation σ_b. A client counts as its bit shifted by −1/2, hence ±1/2, and as 0 once it
is zeroed out: one client moves the count by 1/2, and both sums together are one
Gaussian sum with noise multiplier z, where `z⁻² = z_Δ⁻² + (2 σ_b)⁻²` (Andrew et al.
2021, Theorem 1; Xu et al. 2023, Theorem 1). If one strategy drives both streams the
guarantee of the run is that of z, whatever the strategy.
"""

from __future__ import annotations

import math

from tff_dpftrl import validation

COUNT_SENSITIVITY = 0.5
"""Sensitivity of the count to one client, which counts as ±1/2, or as 0 if zeroed out."""


def update_noise_multiplier(noise_multiplier: float, clipped_count_stddev: float) -> float:
    """Computes z_Δ = (z⁻² − (2 σ_b)⁻²)^(−1/2), the noise of the updates if z is promised.

    σ_b is the standard deviation of the noise on the number of unclipped clients of a round, before
    any division by the clients of a round. z_Δ is at least z, and 0 if z is 0. A σ_b of at most
    z / 2 is refused: the counts alone spend more than z allows.
    """
    z = validation.noise_multiplier(noise_multiplier)
    stddev = validation.number("clipped_count_stddev", clipped_count_stddev, at_least=0)
    if z == 0.0:
        return 0.0
    if not stddev > COUNT_SENSITIVITY * z:
        raise validation.UsageError(
            f"clipped_count_stddev must be above noise_multiplier / 2 = {z / 2}, got {stddev!r}: "
            "the counts alone would spend the whole privacy budget. Raise it (its default is "
            "clients_per_round / 20), use more clients in a round, or lower noise_multiplier."
        )
    ratio = COUNT_SENSITIVITY * z / stddev
    # 1 − ratio², without cancellation where the counts take nearly everything.
    return z / math.sqrt((1.0 - ratio) * (1.0 + ratio))
