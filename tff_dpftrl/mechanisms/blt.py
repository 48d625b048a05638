"""BLT: buffered linear Toeplitz strategies (McMahan, Xu & Zhang 2024, section 2.4).

C is lower-triangular Toeplitz with c_0 = 1 and c_t = Σ_i ω_i θ_i^{t-1}, so that
C⁻¹ z streams with d model-sized buffers. C⁻¹ is a BLT again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from scipy import optimize
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import noise_recipe as recipe_lib
from tff_dpftrl.mechanisms import strategy
from tff_dpftrl.mechanisms.numerics import blt_losses, toeplitz
from tff_dpftrl.participation import schema as schema_lib


@dataclasses.dataclass(frozen=True)
class Blt(strategy.Strategy):
    """BLT strategy with positive output scales; any number of rounds.

    Attributes:
      buf_decay: Buffer decays θ, distinct, each in (0, 1); kept in decreasing
        order. A decay within about 1 / num_rounds of 1 ties C to its number of
        rounds.
      output_scale: Output scales ω, one for each buffer, positive.
    """

    buf_decay: tuple[float, ...]
    output_scale: tuple[float, ...]

    mechanism: ClassVar[str] = "blt"

    def __post_init__(self):
        decay = validation.numbers("buf_decay", self.buf_decay)
        scale = validation.numbers("output_scale", self.output_scale)
        if len(decay) != len(scale) or not decay:
            raise validation.UsageError(
                f"buf_decay has {len(decay)} entries and output_scale {len(scale)}; give both one "
                "entry a buffer, at least one. Identity() is the strategy without buffers."
            )
        if not all(0 < x < 1 for x in decay):
            raise validation.UsageError(
                f"buf_decay must lie strictly between 0 and 1, got {decay}."
            )
        if not all(0 < x < math.inf for x in scale):
            raise validation.UsageError(
                f"output_scale must be positive and finite, got {scale}. Drop a buffer of scale 0."
            )
        if len({1 - x for x in decay}) < len(decay):
            raise validation.UsageError(
                f"buf_decay must be distinct, by more than 1e-16, got {decay}; merge equal buffers "
                "by adding their scales."
            )
        order = sorted(range(len(decay)), key=lambda i: -decay[i])
        object.__setattr__(self, "buf_decay", tuple(decay[i] for i in order))
        object.__setattr__(self, "output_scale", tuple(scale[i] for i in order))

    @property
    def num_buffers(self) -> int:
        """Number of buffers d."""
        return len(self.buf_decay)

    @functools.cached_property
    def _poles(self) -> np.ndarray:
        """1 - θ, increasing; exact for θ ≥ 1/2."""
        return 1.0 - np.asarray(self.buf_decay)

    @functools.cached_property
    def _zeros(self) -> np.ndarray:
        """1 - θ̂, increasing, interlaced with the poles."""
        return _zero_complements(self._poles, np.asarray(self.output_scale))

    def inverse(self) -> tuple[np.ndarray, np.ndarray]:
        """Computes buffer decays θ̂ and output scales ω̂ of C⁻¹, itself a BLT (Alg. 5).

        Returns:
          Two float64 vectors of length d. The scales are negative. The last
          decay is negative where Σ_i ω_i / θ_i > 1.
        """
        return 1.0 - self._zeros, -blt_losses.pole_residues(self._zeros, self._poles)

    def coefficients(self, num_rounds: int) -> np.ndarray:
        """Computes c_0 ... c_{n-1}, float64, shape [num_rounds] (paper, equation 2)."""
        decay, scale = np.asarray(self.buf_decay), np.asarray(self.output_scale)
        return toeplitz.exponential_sums(decay, scale, num_rounds - 1, first=1.0)

    def inverse_coefficients(self, num_rounds: int) -> np.ndarray:
        """Computes the first column of C⁻¹, float64, shape [num_rounds]."""
        return toeplitz.exponential_sums(*self.inverse(), num_rounds - 1, first=1.0)

    def multiply(self, x: np.ndarray) -> np.ndarray:
        """Computes C x, streaming with d buffers (Alg. 2); x has shape [n, ...], float64."""
        decay, scale, buffers = self._streaming_start(x)
        out = np.empty(x.shape)
        for t, x_t in enumerate(x):
            out[t] = x_t + np.tensordot(scale, buffers, axes=1)
            buffers = decay * buffers + x_t
        return out

    def multiply_inverse(self, z: np.ndarray) -> np.ndarray:
        """Computes C⁻¹ z, streaming with d buffers (Alg. 3); z has shape [n, ...]."""
        decay, scale, buffers = self._streaming_start(z)
        out = np.empty(z.shape)
        for t, z_t in enumerate(z):
            out[t] = z_t - np.tensordot(scale, buffers, axes=1)
            buffers = decay * buffers + out[t]
        return out

    def _streaming_start(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape = (self.num_buffers,) + x.shape[1:]
        decay = np.asarray(self.buf_decay).reshape((-1,) + (1,) * (x.ndim - 1))
        return decay, np.asarray(self.output_scale), np.zeros(shape)

    @override
    def strategy_matrix(self, num_rounds: int) -> np.ndarray:
        return toeplitz.matrix(self.coefficients(num_rounds), num_rounds)

    @override
    def noise_matrix(self, num_rounds: int) -> np.ndarray:
        return toeplitz.matrix(self.inverse_coefficients(num_rounds), num_rounds)

    @override
    def sensitivity(self, schema: schema_lib.MinSep) -> strategy.Sensitivity:
        """Computes the sensitivity in closed form, O(d² log k) for any number of rounds.

        c_1 ≥ c_2 ≥ ... > 0 always, so the non-increasing theorem (Thm. 3.1)
        applies if c_0 = 1 ≥ Σ_i ω_i = c_1. If not, c_0 is replaced by c_1, which
        only enlarges entries of C. The result is then an upper bound, but still exact for
        one participation.
        """
        c_1 = math.fsum(self.output_scale)
        scale = np.asarray(self.output_scale)
        if c_1 <= 1 or schema.num_rounds == 1:
            squared = blt_losses.sensitivity_squared(self._poles, scale, schema)
            return strategy.Sensitivity(squared, True, "non-increasing Toeplitz theorem")
        if schema.effective_participations == 1:
            squared = blt_losses.sensitivity_squared(self._poles, scale, schema)
            return strategy.Sensitivity(squared, True, "columns do not overlap")
        # C / c_1 with leading coefficient 1 is a BLT whose theorem holds.
        squared = c_1**2 * blt_losses.sensitivity_squared(self._poles, scale / c_1, schema)
        return strategy.Sensitivity(
            squared, False, "upper bound: non-increasing envelope of the coefficients"
        )

    @override
    def prefix_noise_variance(self, num_rounds: int) -> np.ndarray:
        constant, weight = blt_losses.prefix_noise_terms(self._poles, self._zeros)
        column = constant + toeplitz.exponential_sums(1.0 - self._zeros, weight, num_rounds)
        return np.cumsum(np.square(column))

    @override
    def round_noise_variance(self, num_rounds: int) -> np.ndarray:
        return toeplitz.round_noise_variance(self.inverse_coefficients(num_rounds))

    @override
    def toeplitz_inverse(self, num_rounds: int) -> np.ndarray:
        return self.inverse_coefficients(num_rounds)

    @override
    def prefix_noise(self, num_rounds: int) -> strategy.Extent:
        """Computes the squared errors in closed form: O(d²) for any number of rounds."""
        return strategy.Extent(
            blt_losses.max_error_squared(self._poles, self._zeros, num_rounds),
            blt_losses.rms_error_squared(self._poles, self._zeros, num_rounds),
        )

    @override
    def round_noise(self, num_rounds: int) -> strategy.Extent:
        """Computes the variances in closed form: O(d²) for any number of rounds."""
        return strategy.Extent(*blt_losses.round_noise(self._poles, self._zeros, num_rounds))

    @override
    def noise_recipe(self) -> recipe_lib.BufferedNoise:
        return recipe_lib.BufferedNoise(self.buf_decay, self.output_scale)

    @override
    def memory_copies(self, num_rounds: int) -> int:
        return self.num_buffers

    @override
    def to_dict(self) -> dict[str, Any]:
        return {
            "mechanism": self.mechanism,
            "buf_decay": list(self.buf_decay),
            "output_scale": list(self.output_scale),
        }

    @classmethod
    def from_dict(cls, parameters: Mapping[str, Any]) -> Blt:
        """Reads what `to_dict` returned.

        Raises:
          ValueError: If a parameter is missing or out of range.
        """
        try:
            return cls(parameters["buf_decay"], parameters["output_scale"])
        except KeyError as error:
            raise validation.UsageError(f"A BLT needs the parameter {error}.") from None


def _zero_complements(poles: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Computes the complements û of the zeros of C(x) = 1 + Σ_i ω_i x / (1 - θ_i x), increasing.

    With y = 1/x = 1 - w they solve Σ_j ω_j / (w - u_j) = 1, a secular equation with one root in
    every (u_i, u_{i+1}) and one in (u_d, u_d + Σω]. Each root is computed as an offset from the
    nearer pole, so that it keeps its relative precision however close the two are. The poles
    u = 1 - θ increase, and ω is positive.
    """
    zeros = np.empty(len(poles))
    for i, pole in enumerate(poles):
        if i + 1 < len(poles):
            half = 0.5 * (poles[i + 1] - pole)
            anchor = i if np.sum(scale / (pole + half - poles)) < 1 else i + 1
        else:
            half, anchor = float(np.sum(scale)), i
        distance = poles[anchor] - poles
        distance[anchor] = 1.0

        def balance(offset, anchor=anchor, distance=distance):
            """Returns the secular equation times its offset: smooth, without the nearby pole."""
            shifted = offset + distance
            shifted[anchor] = 1.0
            others = scale / shifted
            others[anchor] = 0.0
            return scale[anchor] + offset * (np.sum(others) - 1.0)

        far = half if anchor == i else -half
        zeros[i] = poles[anchor] + _root(balance, far)
    return zeros


def _root(function, far: float) -> float:
    """Finds the root between 0, where the function is positive, and `far`."""
    if function(far) >= 0:
        return far
    return optimize.brentq(  # pyright: ignore[reportReturnType]
        function, 0.0, far, xtol=1e-300, rtol=4 * np.finfo(float).eps
    )
