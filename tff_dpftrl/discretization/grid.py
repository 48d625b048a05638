"""Integer grid of secure aggregation: sizes, moduli and inflated sensitivity.

Secure aggregation adds integers modulo M, so a client scales its clipped update
to a grid, rotates it at random and rounds it (Xu et al. 2023, "Federated
Learning of Gboard Language Models with Differential Privacy", section 2.4 and
Algorithm 2; the rounding is that of Kairouz, Liu & Steinke 2021, section 4.1).
Rounding can lengthen a vector, and the noise has to cover the longer one.

Everything is stated relative to the clip norm: an encoding is fixed by K, the
clip norm counted in grid steps (s·C in the paper). When adaptive clipping moves
C, the grid step C/K moves along, and neither the modulus nor the ratio of the
inflated clip norm to the clip norm changes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tff_dpftrl import validation

MAX_COORDINATE = 2**22
"""Largest rounded coordinate, so that float32 still resolves half grid steps."""

MAX_MODULUS = 2**31 - 1
"""Largest modulus of an int32 secure sum."""

DECODING_ALLOWANCE = 2e-6
"""Relative growth of one client's contribution by rounding in decoding; noise covers it.

The sum of the integers is exact; only its decoding in float64 (u = 2⁻⁵³) rounds. A factor
of up to 32 rows of the transform is a matrix of norm √32 (unscaled) whose absolute values
have norm 32, so a product with it errs by at most γ₃₂ √32 of the vector's norm, and
with the scale, six factors, for up to 2³⁰ coordinates, by 1.3e-13. The sum of n clients
is at most n times as long as one client's largest contribution, so the two decoded sums of
neighbours err by at most 2.6e-13 n relative to that contribution: less than this allowance
for n ≤ 7·10⁶.
"""

WRAPAROUND_PROBABILITY = 1e-12
"""Largest probability that the noise in the sum of one round wraps around, at any coordinate."""

DEFAULT_REJECTION_BOUND = math.exp(-0.5)
"""Bound α used in the production training of Xu et al. 2023."""


def padded_dim(dim: int) -> int:
    """Computes the smallest power of two that is at least `dim`."""
    return 1 << (dim - 1).bit_length()


def coordinate_factor(dim: int, linf_stddevs: float | None = None) -> float:
    """Computes the ratio, at most 1, of the largest coordinate to the norm of a rotated vector.

    `dim` is a power of two. `linf_stddevs` bounds a coordinate in standard deviations (1/√dim of
    the norm); None for the 2 ln(dim) of Xu et al. 2023, Algorithm 2.
    """
    if linf_stddevs is None:
        # The paper's formula is 0 for a scalar and below 1 for two coordinates.
        linf_stddevs = 2 * math.log(dim) if dim > 2 else math.inf
    return min(1.0, linf_stddevs / math.sqrt(dim))


def inflated_norm_squared(
    norm: float, dim: int, rejection_bound: float = DEFAULT_REJECTION_BOUND
) -> float:
    """Bounds the squared norm of an accepted, rounded vector, in grid steps².

    The bound is min(K² + d/4 + √(2 ln(1/α)) (K + √d/2), (K + √d)²) for a vector of norm at most K
    grid steps before rounding. A stochastic rounding exceeds the first term with probability at
    most α (Kairouz, Liu & Steinke 2021, section 4.1; Xu et al. 2023, section 2.4), and is then
    drawn anew; no rounding exceeds norm + √dim.
    """
    slack = math.sqrt(2 * math.log(1 / rejection_bound))
    root = math.sqrt(dim)
    return min(norm**2 + dim / 4 + slack * (norm + root / 2), (norm + root) ** 2)


def inflated_clip_norm(
    clip_norm: float,
    granularity: float,
    dim: int,
    rejection_bound: float = DEFAULT_REJECTION_BOUND,
) -> float:
    """Computes C_inflated, the L2 sensitivity to one client after rounding, from clip norm C.

    Xu et al. 2023, section 2.4. `granularity` is the width 1/s of a grid step, in the unit of C;
    `dim` is the padded dimension.
    """
    squared = inflated_norm_squared(clip_norm / granularity, dim, rejection_bound)
    return granularity * math.sqrt(squared)


@dataclasses.dataclass(frozen=True)
class GridEncoding:
    """Encoding on one grid, with the sizes and bounds that follow from it.

    `dim`, the number of model parameters, is padded to a power of two for the Walsh–Hadamard
    transform; all the padded coordinates are sent. `max_clients` must cover over-selection, not
    only the report goal: their sum must not wrap around. `scaled_clip_norm` is the clip norm in
    grid steps, K = s·C, and `rejection_bound` the largest probability α of drawing a rounding anew.

    `linf_stddevs` bounds a rotated coordinate, in standard deviations; None for the 2
    ln(padded_dim) of the paper. Clipping a coordinate distorts the client's vector but never
    lengthens it, so this costs no privacy.

    `noise_ratio` is the standard deviation of the noise in the sum itself, on one coordinate, over
    the inflated clip norm: the largest of all rounds, of all noise parties together. It is 0 where
    the noise is added to the decoded sum. A wrap-around costs no privacy.
    """

    dim: int
    max_clients: int
    scaled_clip_norm: float
    rejection_bound: float = DEFAULT_REJECTION_BOUND
    linf_stddevs: float | None = None
    noise_ratio: float = 0.0

    def __post_init__(self):
        validation.number("noise_ratio", self.noise_ratio, at_least=0)
        object.__setattr__(self, "dim", validation.integer("dim", self.dim, minimum=1))
        object.__setattr__(
            self, "max_clients", validation.integer("max_clients", self.max_clients, minimum=1)
        )
        for name in ("scaled_clip_norm", "linf_stddevs"):
            value = getattr(self, name)
            if value is not None:
                validation.positive(name, value)
        validation.number(
            "rejection_bound", self.rejection_bound, above=0, below=1, remedy="exp(-0.5) is usual."
        )
        if self.max_coordinate > MAX_COORDINATE:
            raise validation.UsageError(
                f"scaled_clip_norm {self.scaled_clip_norm!r} makes coordinates of up to "
                f"{self.max_coordinate} grid steps, which float32 cannot round faithfully. Lower "
                f"it until they are at most {MAX_COORDINATE}."
            )
        if self._inflated_norm_squared >= 2**62:
            raise validation.UsageError(
                f"scaled_clip_norm {self.scaled_clip_norm!r} makes squared norms that overflow an "
                "int64 sum. Lower it below 2**31."
            )
        if self.modulus > MAX_MODULUS:
            raise validation.UsageError(
                f"scaled_clip_norm {self.scaled_clip_norm!r} with max_clients {self.max_clients} "
                f"needs the modulus {self.modulus}, above the largest of an int32 sum, "
                f"{MAX_MODULUS}. Lower either."
            )

    @property
    def padded_dim(self) -> int:
        """Number d of integers that a client sends."""
        return padded_dim(self.dim)

    @property
    def max_coordinate(self) -> int:
        """C_∞: no rounded coordinate is larger in absolute value."""
        factor = coordinate_factor(self.padded_dim, self.linf_stddevs)
        return math.ceil(self.scaled_clip_norm * factor)

    @property
    def modulus(self) -> int:
        """M = 2 (C_∞ max_clients + noise_room) + 1: without noise it never wraps around."""
        return 2 * (self.max_coordinate * self.max_clients + self.noise_room) + 1

    @property
    def noise_room(self) -> int:
        """Largest noise on a coordinate of the sum that has room, in grid steps.

        A Gaussian on any of d coordinates exceeds it with at most `WRAPAROUND_PROBABILITY`, by
        2 d exp(-x²/2). The added step is for its rounding.
        """
        if self.noise_ratio == 0:
            return 0
        stddevs = math.sqrt(2 * math.log(2 * self.padded_dim / WRAPAROUND_PROBABILITY))
        return math.ceil(stddevs * self.noise_stddev) + 1

    @property
    def noise_stddev(self) -> float:
        """`noise_ratio` in grid steps: times K and the inflation."""
        return self.noise_ratio * self.scaled_clip_norm * self.inflation

    @property
    def bits_per_parameter(self) -> int:
        """Bits of one integer modulo M."""
        return (self.modulus - 1).bit_length()

    @property
    def power_of_two_modulus(self) -> int:
        """The smallest power of two that is at least `modulus`."""
        return 1 << self.bits_per_parameter

    @property
    def sum_modulus(self) -> int:
        """Modulus of the sum of updates: a power of two if that fits into an int32 sum.

        It takes as many bits as `modulus`, and half the time or less where masks are added
        (`secure_sums`). Sums that stay below `modulus` are the same.
        """
        rounded = self.power_of_two_modulus
        return rounded if rounded <= MAX_MODULUS else self.modulus

    @property
    def upload_bytes(self) -> int:
        """Bytes of one client's encoded update, before the protocol's own overhead."""
        return -(-self.padded_dim * self.bits_per_parameter // 8)

    @property
    def max_squared_norm(self) -> int:
        """Largest squared L2 norm, in grid steps², of an integer vector that is sent."""
        return math.floor(self._inflated_norm_squared)

    @property
    def inflation(self) -> float:
        """Factor C_inflated / C > 1, with `DECODING_ALLOWANCE`, which the noise must cover."""
        ratio = math.sqrt(self._inflated_norm_squared) / self.scaled_clip_norm
        return max(1.0, ratio) * (1 + DECODING_ALLOWANCE)

    @property
    def rounding_bias_bound(self) -> float:
        """Bound on ‖E[rounded | accepted] − x‖₂ for one client, in grid steps.

        The derivation is not from a paper. Let A be the event of acceptance, P(A) ≥ 1 − α, and u a
        unit vector. The bias along u is Cov(u·x̃, 1_A) / P(A), at most
        sd(u·x̃) √(P(A)(1 − P(A))) / P(A). Coordinates are rounded independently,
        each with variance at most 1/4, so sd(u·x̃) ≤ 1/2 whatever the dimension,
        and the bias is at most √(α / (1 − α)) / 2.
        """
        return math.sqrt(self.rejection_bound / (1 - self.rejection_bound)) / 2

    def granularity(self, clip_norm: float) -> float:
        """Computes the width of a grid step (1/s) in the unit of `clip_norm`."""
        return clip_norm / self.scaled_clip_norm

    def inflated_clip_norm(self, clip_norm: float) -> float:
        """Computes C_inflated, the L2 sensitivity to one client, in the unit of `clip_norm`."""
        return clip_norm * self.inflation

    def rounding_stddev_bound(self, clip_norm: float, num_clients: int) -> float:
        """Bounds the stddev that rounding adds to a coordinate of the sum.

        It is √num_clients / 2 grid steps, in the unit of `clip_norm`: clients are rounded
        independently, and each rounding has variance at most 1/4.
        """
        return math.sqrt(num_clients) / 2 * self.granularity(clip_norm)

    def to_dict(self) -> dict[str, Any]:
        """Returns parameters and costs as JSON-compatible values, for results and statements."""
        return {
            "dim": self.dim,
            "padded_dim": self.padded_dim,
            "max_clients": self.max_clients,
            "scaled_clip_norm": self.scaled_clip_norm,
            "rejection_bound": self.rejection_bound,
            "linf_stddevs": self.linf_stddevs,
            "max_coordinate": self.max_coordinate,
            "modulus": self.modulus,
            "bits_per_parameter": self.bits_per_parameter,
            "upload_bytes": self.upload_bytes,
            "inflation": self.inflation,
            **({"noise_ratio": self.noise_ratio} if self.noise_ratio else {}),
        }

    @property
    def _inflated_norm_squared(self) -> float:
        return inflated_norm_squared(self.scaled_clip_norm, self.padded_dim, self.rejection_bound)


def for_bits(
    dim: int,
    max_clients: int,
    bits_per_parameter: int,
    *,
    rejection_bound: float = DEFAULT_REJECTION_BOUND,
    linf_stddevs: float | None = None,
    noise_ratio: float = 0.0,
) -> GridEncoding:
    """Builds the finest grid whose integers modulo M fit in `bits_per_parameter` bits.

    `noise_ratio` is the standard deviation of the noise in the sum itself, on one coordinate, over
    the inflated clip norm (`GridEncoding.noise_ratio`). The grid uses fewer bits where float32 has
    no use for a finer one.
    """
    dim = validation.integer("dim", dim, minimum=1)
    max_clients = validation.integer("max_clients", max_clients, minimum=1)
    bits_per_parameter = validation.integer("bits_per_parameter", bits_per_parameter, minimum=1)
    largest = (min(2**bits_per_parameter, MAX_MODULUS) - 1) // (2 * max_clients)
    if largest < 1:
        raise validation.UsageError(
            f"bits_per_parameter {bits_per_parameter} cannot hold a sum over max_clients "
            f"{max_clients}: use at least {(2 * max_clients).bit_length()} bits."
        )
    largest = min(largest, MAX_COORDINATE)
    factor = coordinate_factor(padded_dim(dim), linf_stddevs)
    norm = largest / factor
    while math.ceil(norm * factor) > largest:
        norm = math.nextafter(norm, 0.0)
    if noise_ratio:
        return _with_noise(
            GridEncoding(dim, max_clients, norm, rejection_bound, linf_stddevs),
            noise_ratio,
            bits_per_parameter,
        )
    return GridEncoding(dim, max_clients, norm, rejection_bound, linf_stddevs)


def _with_noise(finest: GridEncoding, noise_ratio: float, bits: int) -> GridEncoding:
    """Returns the finest grid that has room for noise, too, in a modulus of so many bits."""

    def fitting(norm: float) -> GridEncoding | None:
        try:
            made = dataclasses.replace(finest, scaled_clip_norm=norm, noise_ratio=noise_ratio)
        except validation.UsageError:  # The modulus is too large for an int32 sum.
            return None
        return made if made.bits_per_parameter <= bits else None

    # Of the integers of a vector, hardly any is not 0 if the norm is one grid step.
    best, too_fine = fitting(1.0), finest.scaled_clip_norm
    if best is None:
        raise validation.UsageError(
            f"bits_per_parameter {bits} has no room for noise of {noise_ratio:.4g} clip norms on "
            f"each of {finest.padded_dim} coordinates, beside {finest.max_clients} clients: raise "
            "it, or lower the noise."
        )
    if (whole := fitting(too_fine)) is not None:
        return whole
    for _ in range(50):
        middle = (best.scaled_clip_norm + too_fine) / 2
        if (made := fitting(middle)) is None:
            too_fine = middle
        else:
            best = made
    return best


def for_inflation(
    dim: int,
    max_clients: int,
    inflation: float,
    *,
    rejection_bound: float = DEFAULT_REJECTION_BOUND,
    linf_stddevs: float | None = None,
) -> GridEncoding:
    """Builds the coarsest grid, with the fewest bits, whose C_inflated / C is at most `inflation`.

    An inflation of 1.01 costs 1 % more noise. `rejection_bound` is the largest probability α of
    drawing a rounding anew.
    """
    ratio = inflation / (1 + DECODING_ALLOWANCE)
    if not 1 < ratio < math.inf:
        raise validation.UsageError(
            f"inflation must be above {1 + DECODING_ALLOWANCE} and finite, got {inflation!r}; "
            "try 1.01."
        )
    size = padded_dim(validation.integer("dim", dim, minimum=1))

    def encoding(norm: float) -> GridEncoding:
        return GridEncoding(dim, max_clients, norm, rejection_bound, linf_stddevs)

    encoding(1.0)  # Checks the other arguments.
    # Ratio² − 1 = slack/K + (d/4 + slack √d/2)/K² is a quadratic in 1/K.
    slack = math.sqrt(2 * math.log(1 / rejection_bound))
    constant = size / 4 + slack * math.sqrt(size) / 2
    excess = (ratio - 1) * (ratio + 1)
    norm = (slack + math.sqrt(slack**2 + 4 * excess * constant)) / (2 * excess)
    # The other bound, (K + √d)/K, may allow a coarser grid.
    norm = min(norm, math.sqrt(size) / (ratio - 1))
    step = 1e-15
    while encoding(norm).inflation > inflation:  # Only rounding errors exceed it.
        norm *= 1 + step
        step *= 2
    return encoding(norm)
