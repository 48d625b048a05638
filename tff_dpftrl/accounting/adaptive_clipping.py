"""The price of learning the clip norm while training.

Each round releases two Gaussian sums: the clipped updates, with noise multiplier
z_delta, and the clients' bits 1[norm <= estimate] shifted to ±1/2, with noise of
standard deviation sigma_b. One client moves the bit sum by 1/2, so both together
are one Gaussian sum with noise multiplier z, where
`z⁻² = z_delta⁻² + (2 sigma_b)⁻²` (Andrew et al. 2021, Theorem 1; Xu et al. 2023,
Theorem 1). If one strategy drives both streams the guarantee of the run is that
of z, whatever the strategy.
"""

from __future__ import annotations

import math


def update_noise_multiplier(noise_multiplier: float, bit_sum_stddev: float) -> float:
    """z_delta, the noise multiplier left for the updates when z is promised.

    Args:
      noise_multiplier: The total z that the guarantee is stated for, above 0.
      bit_sum_stddev: sigma_b, standard deviation of the noise in the sum of bits,
        before the division by the number of clients.

    Returns:
      `(z⁻² − (2 sigma_b)⁻²)^(−1/2)`, larger than z.

    Raises:
      ValueError: If `bit_sum_stddev` is at most z / 2: the bits alone cost more.
    """
    if not noise_multiplier > 0.0:
        raise ValueError(f"noise_multiplier must be above 0, got {noise_multiplier!r}.")
    left = noise_multiplier**-2 - (2.0 * bit_sum_stddev) ** -2 if bit_sum_stddev > 0.0 else -1.0
    if not left > 0.0:
        raise ValueError(
            f"bit_sum_stddev={bit_sum_stddev!r} is too small for noise_multiplier="
            f"{noise_multiplier!r}: it must exceed {noise_multiplier / 2.0!r}."
        )
    return left**-0.5


def total_noise_multiplier(update_noise_multiplier: float, bit_sum_stddev: float) -> float:
    """z, the total noise multiplier of a run with these two streams.

    Args:
      update_noise_multiplier: z_delta, of the clipped updates; at least 0.
      bit_sum_stddev: sigma_b, of the sum of bits; at least 0.

    Returns:
      `(z_delta⁻² + (2 sigma_b)⁻²)^(−1/2)`; 0 if one of the streams has no noise.
    """
    if update_noise_multiplier < 0.0 or bit_sum_stddev < 0.0:
        raise ValueError(
            "update_noise_multiplier and bit_sum_stddev must be at least 0, got "
            f"{update_noise_multiplier!r} and {bit_sum_stddev!r}."
        )
    if update_noise_multiplier == 0.0 or bit_sum_stddev == 0.0:
        return 0.0
    return 1.0 / math.hypot(1.0 / update_noise_multiplier, 0.5 / bit_sum_stddev)
