"""Sums of clipped updates in float64, and how far one client can move them.

**What one client moves.** Let x_1, ..., x_n be the float64 updates that the clip
lets pass, and x'_1, ..., x'_n the same with one of them zeroed. Added up in float64,
in any order, the two sums differ by at most the clip norm C in L2 norm, for up to
`MAX_CLIENTS` clients and 10⁹ coordinates.

Proof. Write u = 2⁻⁵³ and m = `clipping.CLIP_MARGIN`.

1. *The clip.* A computed squared norm of d numbers is a sum of d non-negative terms,
   so its relative error is at most (d + 1) u / (1 - (d + 1) u), in any order of
   summation; the norm's is about half of that, at most 6e-8 for d ≤ 10⁹. The scale
   and the product with it add three roundings. Hence ‖x_i‖ ≤ B with
   B = C (1 - m) (1 + 1e-7).
2. *The sum.* Each coordinate of each x_i takes part in at most n - 1 additions, and
   an addition never underflows inexactly. So the computed sum is Σ x_i (1 + θ_i),
   coordinate by coordinate, with |θ| ≤ γ = (n - 1) u / (1 - (n - 1) u) (Higham 2002,
   section 4.2), and is within γ Σ ‖x_i‖ ≤ γ n B of the exact one.
3. *Both together.* The computed sums of neighbours differ by at most
   B + 2 γ n B ≤ C (1 - m) (1 + 1e-7) (1 + 2 n² u / (1 - n u)), and that is at most C
   while 2 n² u / (1 - n u), the relative error, is at most 9.8e-6. It is 2.3e-8 for
   10⁴ clients and 8.9e-6 for 2·10⁵. ∎

In float32, u is 2⁻²⁴: one rounding of the sum of n aligned clients is up to 2⁻²⁴ n of a
clip norm, more than the margin from some hundred clients on.

**The noise.** `noised_mean` adds it in float64. An IEEE sum is a function of the exact
sum of its two terms, so that rounding, the division and the cast to the dtype of
the updates are post-processing. That leaves what a privacy statement names anyway:
the noise of Philox is made of pseudo-random float32 numbers, and is no ideal Gaussian.

**Secure noise.** `noised_mean_on_grid` rounds the sum to integers X, in units of
2⁻³² standard deviations, and adds integers N, ideal Gaussians rounded to the same grid
(`numpy_noise.secure_draws`). X + N is what rounding makes of X plus an ideal Gaussian,
since X is an integer. So it is as private as the ideal Gaussian mechanism, the float64
that rounds X + N and all that follows is post-processing, and its low bits tell nothing
that is not paid for. Rounding moves each coordinate of X by half a unit at most, hence
the difference of two neighbours' by √d units; `grid_inflation` enlarges the noise for it,
by z √d 2⁻³²: a millionth for 4 million coordinates. Noise that is correlated is rounded
to the grid after it was correlated, in float64: `noise_stream` says where that is exact.

**Quotients.** The clipped denominator of `estimators` divides the sum by Σ w_k, which
has a relative error of at most γ too, and the quotient is no longer than C: the
computed quotients of neighbours err by at most C (4 γ + 2 u) together, relative to the
charged sensitivity 2 C / W by W (2 γ + u), where the smallest divisor W is a number of
clients. For W ≤ n that is below the same relative error; for W > n the divisor is exact
and the quotient no longer than n C / W, so that γ n is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.numpy_noise import secure_draws

DTYPE = tf.float64
"""Dtype in which clipped updates are summed and noised, here and in `aggregators.inner_sum`."""

MAX_CLIENTS = 200_000
"""Largest number of clients in a sum for which the margin of the clip covers rounding."""


def check_clients_per_round(clients_per_round: float) -> float:
    """Returns a report goal after checking that the proof above covers it."""
    return validation.number(
        "clients_per_round",
        clients_per_round,
        above=0,
        at_most=MAX_CLIENTS,
        remedy="That sums move by no more than the clip norm is proven up to there.",
    )


def grid_inflation(noise_multiplier: float, num_coordinates: int) -> float:
    """Computes the factor of secure noise that pays for rounding the sum to its grid.

    It is 1 / (1 - z √d 2⁻³²): with σ that much larger than z times the sensitivity, it is z times
    the sensitivity and √d grid steps. From z √d = 2³² on, no noise is enough.
    """
    share = noise_multiplier * math.sqrt(num_coordinates) * secure_draws.STEP
    if not share < 1:
        raise validation.UsageError(
            f"noise_multiplier {noise_multiplier} is too large for secure noise on "
            f"{num_coordinates} coordinates: take philox."
        )
    return 1 / (1 - share)


def in_float64(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Casts updates, or sums of them, to `DTYPE`; a cast of complex numbers would drop a part."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for tensor in tensors:
        validation.float_dtype("The update", tensor.dtype)
    return [tf.cast(tensor, DTYPE) for tensor in tensors]


def noised_mean_on_grid(
    total: Sequence[tf.Tensor],
    noise: Sequence[tf.Tensor],
    stddev: tf.Tensor,
    divisor: tf.Tensor | float,
    noise_multiplier: float,
) -> list[tf.Tensor]:
    """Computes (total + stddev · noise) / divisor of secure noise, on its grid.

    The noise is of float64 multiples of `secure_draws.STEP`.
    """
    size = sum(tensor.shape.num_elements() for tensor in total)
    stddev = tf.cast(stddev, DTYPE) * grid_inflation(noise_multiplier, size)
    step = stddev * secure_draws.STEP
    return [
        (tf.round(x / step) + z * (1 / secure_draws.STEP)) * (step / divisor)
        for x, z in zip(in_float64(total), noise, strict=True)
    ]


def noised_mean(
    total: Sequence[tf.Tensor],
    noise: Sequence[tf.Tensor],
    stddev: tf.Tensor,
    divisor: tf.Tensor | float,
) -> list[tf.Tensor]:
    """Computes (total + stddev · noise) / divisor, tensor by tensor, in float64."""
    stddev = tf.cast(stddev, DTYPE)
    return [
        (x + stddev * tf.cast(z, DTYPE)) / divisor
        for x, z in zip(in_float64(total), noise, strict=True)
    ]
