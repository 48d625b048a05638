"""Discrete Gaussians of a cryptographic stream: exact samples, and what they cost.

P(k) is proportional to exp(-k² / (2σ²)) on the integers (Canonne, Kamath & Steinke 2020, "The
discrete Gaussian for differential privacy"). The sampler is their algorithm 3: a discrete Laplace
proposal, accepted with a probability exp(-γ). Both are decisions about a uniform real number U of
192 bits: which integer is below -t log U, and whether U < exp(-γ). They are made in float64, with a
bound on its error, and in decimal arithmetic where the bound leaves them open. So the samples are
exact up to 2⁻¹⁰⁰, and the same on every machine.

Where it fits: added to integers, once for each release. That is independent noise, and the nodes of
a tree (`mechanisms` without `variance_reduction`). Correlated noise C⁻¹z of integers z is not of
integers unless C⁻¹ is, which no other strategy here has: its noise is that of `secure_draws`.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Sequence

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.numpy_noise import secure_draws

_CHUNK = 1 << 14
_LARGEST_STDDEV = 2.0**40
_FURTHER_BLOCKS = 1 << 63  # Within a chunk's part of the keystream, for bits that are rarely used.
_ERROR = 2.0**-48
_DIGITS = 75
_LABEL = -1  # Last index of a path, so that no Gaussians have the same bits.


def zcdp(sensitivity: float, stddev: float) -> float:
    """Computes ρ = sensitivity² / (2 σ²) of the mechanism on integer vectors (their theorem 4).

    The exact conversion of ideal Gaussians to (ε, δ) is not proven for it; ρ-zCDP is.
    """
    sensitivity = validation.number("sensitivity", sensitivity, at_least=0)
    return sensitivity**2 / (2 * validation.positive("stddev", stddev) ** 2)


def sample(seed: bytes, path: Sequence[int], size: int, stddev: float) -> np.ndarray:
    """Draws `size` independent discrete Gaussians, int64, with parameter σ in (0, 2^40].

    `path` leads to the draw, as for `secure_draws.normal`, whose draw may have the same path. The
    standard deviation is a little less than σ, by a part of 10⁸ for σ = 1.
    """
    stddev = validation.number("stddev", stddev, above=0, at_most=_LARGEST_STDDEV)
    draw_key = secure_draws.key(seed, [*path, _LABEL])
    drawn = np.empty(size, np.int64)

    def fill(start: int) -> None:
        chunk = drawn[start : start + _CHUNK]
        uniforms = _Uniforms(draw_key, start // _CHUNK)
        waiting = np.arange(len(chunk))
        while len(waiting):
            proposed, is_accepted = _propose(uniforms, len(waiting), stddev)
            chunk[waiting[is_accepted]] = proposed[is_accepted]
            waiting = waiting[~is_accepted]

    secure_draws.in_threads(fill, range(0, size, _CHUNK))
    return drawn


class _Uniforms:
    """Uniform real numbers in (0, 1) of one part of a keystream: 64 bits of each, 128 on demand."""

    def __init__(self, draw_key: bytes, part: int):
        self._key, self._part, self._used = draw_key, part, 0

    def take(self, size: int) -> tuple[np.ndarray, int]:
        """Returns the leading 64 bits of the next numbers, and the index of the first."""
        first = self._used
        self._used += size + size % 2
        return secure_draws.words(self._key, self._part, first, size), first

    def exact(self, index: int, leading: int) -> decimal.Decimal:
        """Returns all bits of a number whose leading bits were taken."""
        first = 2 * (_FURTHER_BLOCKS + index)
        high, low = secure_draws.words(self._key, self._part, first, 2).tolist()
        return decimal.Decimal(2 * (leading << 128 | high << 64 | low) + 1) / 2**193


def _propose(uniforms: _Uniforms, size: int, stddev: float) -> tuple[np.ndarray, np.ndarray]:
    """Draws `size` discrete Laplace proposals, int64, and whether each is accepted."""
    scale = math.floor(stddev) + 1
    with decimal.localcontext(decimal.Context(prec=_DIGITS)):
        # floor(-t log U) is geometric, with success probability 1 - exp(-1/t).
        leading, first = uniforms.take(size)
        u = (leading.astype(np.float64) + 0.5) * 2.0**-64
        length = -scale * np.log(u)
        magnitude = np.floor(length)
        # The logarithm errs by 2⁻⁵⁰ of itself, and by what U errs: 2⁻⁵³ and what is cut off.
        error = _ERROR * (length + scale) + scale * 2.0**-64 / u
        is_open = (length - magnitude <= error) | (magnitude + 1 - length <= error)
        for place in np.flatnonzero(is_open).tolist():
            exact = uniforms.exact(first + place, int(leading[place]))
            magnitude[place] = float(math.floor(-scale * exact.ln()))
        signs, _ = uniforms.take(size)
        is_negative = signs >> np.uint64(63) == 1
        # The bias towards σ²/t, and its acceptance.
        distance = (magnitude - stddev * stddev / scale) / stddev
        probability = np.exp(-distance * distance / 2)
        leading, first = uniforms.take(size)
        u = (leading.astype(np.float64) + 0.5) * 2.0**-64
        is_accepted = u < probability
        is_open = np.abs(u - probability) <= 2.0**-40
        variance = decimal.Decimal(stddev) ** 2
        for place in np.flatnonzero(is_open).tolist():
            off = decimal.Decimal(float(magnitude[place])) - variance / scale
            exact = uniforms.exact(first + place, int(leading[place]))
            is_accepted[place] = exact < (-off * off / (2 * variance)).exp()
    is_accepted &= ~(is_negative & (magnitude == 0))  # Else 0 would be proposed twice as often.
    proposed = magnitude.astype(np.int64)
    return np.where(is_negative, -proposed, proposed), is_accepted
