"""Gaussians of a cryptographic stream, each one the correctly rounded value of an ideal Gaussian.

**The stream.** A draw has a key of its own: HMAC-SHA256, keyed by the root seed (256 bits), of the
path of indices that leads to the draw (stream, block, tensor, draw). Its bits are the keystream of
AES-256 in counter mode under that key. So a draw is a pure function of seed and path, and who sees
any number of draws, but no seed, cannot tell others from random (NIST SP 800-38A; RFC 2104).

**The Gaussians.** A pair is Box and Muller's transform of two real numbers, U and V, uniform
between 0 and 1: sqrt(-2 log U) times cosine and sine of 2π V. The stream has 192 bits of each. What
`normal` returns is that real number, rounded to the nearest multiple of `STEP`. It is computed in
float64 with a bound on the error; where that leaves two multiples (about one draw in 20,000), in
decimal arithmetic. So a draw is what rounding makes of an ideal Gaussian, up to 2⁻¹²⁰, and not a
number that a library's logarithm makes. All machines have the same, and every multiple of `STEP` up
to 16 standard deviations can be drawn: there are no gaps (Mironov 2012, "On significance of the
least significant bits for differential privacy"; Jin et al. 2022, "Are we there yet? Timing and
floating-point attacks on differential privacy systems"). A sum of integers in units of σ · `STEP`
and of such noise is the ideal Gaussian mechanism on these integers, rounded: the same ε, without an
allowance.

A change of what is drawn needs a new `private_round.NOISE_VERSION`.
"""

from __future__ import annotations

import concurrent.futures
import decimal
import functools
import hashlib
import hmac
import os
from collections.abc import Callable, Sequence

import numpy as np

from tff_dpftrl import packages, validation

SEED_BYTES = 32
"""Length of a root seed."""

STEP_BITS = 32

STEP = 2.0**-STEP_BITS
"""Grid of the draws: standard Gaussians are rounded to multiples of it."""

_LABEL = b"tff_dpftrl secure noise 1"
_RADII, _ANGLES, _FURTHER = range(3)  # Parts of a draw's keystream, 2^64 blocks apart.
_CHUNK = 1 << 14  # Pairs at a time: what fits into a core's cache, and enough for a thread.
_PI = decimal.Decimal(
    "3.1415926535897932384626433832795028841971693993751058209749445923078164062862089986280348"
)
# Outside these, the bound on the error of float64 would be large.
_SMALLEST_U = 2.0**-18
_SMALLEST_RADIUS = 2.0**-8
_ERROR = 2.0**-48
_LARGEST_SCALE = 2.0**16


def seed_from_int(value: int) -> bytes:
    """Returns the root seed that is a given integer in [0, 2^256), lowest byte first; for tests."""
    return value.to_bytes(SEED_BYTES, "little")


def key(seed: bytes, path: Sequence[int]) -> bytes:
    """Derives the key of a draw, 32 bytes, from a root seed of 32 bytes.

    Indices of `path` are in [-2^63, 2^63). Each path has a key of its own.
    """
    if len(seed) != SEED_BYTES:
        raise validation.UsageError(f"seed must have {SEED_BYTES} bytes, got {len(seed)}.")
    text = b"".join(index.to_bytes(8, "little", signed=True) for index in path)
    return hmac.new(seed, _LABEL + text, hashlib.sha256).digest()


def words(draw_key: bytes, part: int, first: int, size: int) -> np.ndarray:
    """Reads uint64 words of a draw's keystream, from index `first`, an even number, of a part.

    `part`, in [0, 2^64), is the upper half of the counter.
    """
    counter = (part << 64 | first // 2).to_bytes(16, "big")
    stream = _encryptor(draw_key, counter).update(bytes(8 * size))
    return np.frombuffer(stream, "<u8")


def normal(seed: bytes, path: Sequence[int], size: int, scale: float = 1.0) -> np.ndarray:
    """Draws independent Gaussians, float64, rounded to exact multiples of `STEP`.

    `path` leads to the draw from the root seed of 32 bytes. `scale` is the standard deviation of
    the Gaussians before they are rounded, from -2^16 to 2^16: a negative one mirrors them.
    """
    validation.number("scale", scale, at_least=-_LARGEST_SCALE, at_most=_LARGEST_SCALE)
    draw_key = key(seed, path)
    pairs = (size + 1) // 2
    drawn = np.empty([2, pairs])

    def fill(start: int) -> None:
        end = min(start + _CHUNK, pairs)
        _fill(draw_key, start, scale, drawn[:, start:end])

    in_threads(fill, range(0, pairs, _CHUNK))
    return drawn.reshape(-1)[:size]


def _fill(draw_key: bytes, start: int, scale: float, drawn: np.ndarray) -> None:
    """Computes pairs of Gaussians, and again with more digits where float64 does not suffice.

    Cosine and sine are (1 - t²) / (1 + t²) and 2t / (1 + t²), of the tangent t of half the angle,
    which is by far the fastest of the three in NumPy.

    Errors: U and V are within 2⁻⁵³ of their leading words' values, relatively; the words cut off
    add 2⁻⁶⁵. NumPy's logarithm and tangent are assumed to err by at most 2⁻⁵⁰ of the result, 4
    units in the last place. For U ≥ 2⁻¹⁸, E = R²/2 = -log U then errs by at most 2⁻⁵⁰ (0.5 + E),
    and by 2⁻⁴⁷ more for U < 2⁻¹⁵, where R > 4.5. Hence R errs by 2⁻⁵⁰ (0.5/R + 0.7 R), and by 2⁻⁴⁹
    more where R > 4.5. An error of 2⁻⁵⁰ t is at most 2⁻⁵¹ in half the angle, which errs by as much
    before; the quotients add 2⁻⁵¹. So cosine and sine err by 0.7 · 2⁻⁴⁸. Together with the last
    product, that is less than `_ERROR` times R + 1/(2R).
    """
    size = drawn.shape[1]
    radii = words(draw_key, _RADII, start, size)
    angles = words(draw_key, _ANGLES, start, size)
    u = radii.astype(np.float64)
    u += 0.5
    u *= 2.0**-64
    tangent = angles.view("<i8").astype(np.float64)  # From -1/2 to 1/2 turns.
    tangent += 0.5
    tangent *= 2.0**-64 * np.pi
    np.tan(tangent, out=tangent)
    radius = np.log(u)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    is_extreme = (u < _SMALLEST_U) | (radius < _SMALLEST_RADIUS)
    np.maximum(radius, _SMALLEST_RADIUS, out=radius)
    # How close to the middle of two multiples a value is trusted: 1/2 less the error.
    error = _ERROR / STEP * abs(scale)
    trusted = np.divide(-0.5 * error, radius)
    trusted -= error * radius
    trusted += 0.5
    trusted[is_extreme] = -1.0
    radius *= scale / STEP
    square = np.multiply(tangent, tangent, out=u)
    radius /= square + 1.0
    np.subtract(1.0, square, out=square)
    tangent *= 2.0
    for index, exact in enumerate((square, tangent)):
        exact *= radius
        rounded = np.rint(exact)
        exact -= rounded
        is_open = np.abs(exact, out=exact) > trusted
        np.multiply(rounded, STEP, out=drawn[index])
        for place in np.flatnonzero(is_open).tolist():
            leading = int(radii[place]), int(angles[place])
            multiple = None if is_extreme[place] else _decided(*leading, index, scale)
            if multiple is None:
                multiple = _decided_by_all_bits(draw_key, start + place, *leading, index, scale)
            drawn[index, place] = multiple * STEP


def _decided(u: int, v: int, index: int, scale: float) -> int | None:
    """Rounds a Gaussian from the leading words of U and V; None if these do not suffice."""
    with decimal.localcontext(decimal.Context(prec=36)):
        exact = _box_muller(u, v, 64, index) * decimal.Decimal(scale) * 2**STEP_BITS
        rounded = round(exact)
        # What is cut off, and 36 digits, move it by less than 2⁻¹⁷, for U ≥ 2⁻¹⁸ and R ≥ 2⁻⁸.
        return rounded if abs(float(exact - rounded)) < 0.5 - 1e-5 * max(1, abs(scale)) else None


def _decided_by_all_bits(
    draw_key: bytes, pair: int, u: int, v: int, index: int, scale: float
) -> int:
    """Rounds a Gaussian from all bits of U and V; `index` is 0 for the cosine, 1 for the sine."""
    a, b, c, d = words(draw_key, _FURTHER, 4 * pair, 4).tolist()
    u, v = u << 128 | a << 64 | b, v << 128 | c << 64 | d
    with decimal.localcontext(decimal.Context(prec=75)):
        return round(_box_muller(u, v, 192, index) * decimal.Decimal(scale) * 2**STEP_BITS)


def _box_muller(u: int, v: int, bits: int, index: int) -> decimal.Decimal:
    """Computes the Gaussian of two uniform numbers (u + 1/2) 2^-bits and (v + 1/2) 2^-bits.

    u makes the radius and v the angle, in turns; `index` is 0 for its cosine, 1 for its sine. The
    result has all but two digits of the context's precision, which is at most 80.
    """
    turn = v * 8 + 4 - index * 2 ** (bits + 1)  # In 2^-(bits + 3); sin x = cos(x - π/2).
    if turn > 2 ** (bits + 2):
        turn -= 2 ** (bits + 3)
    angle = 2 * _PI * turn / 2 ** (bits + 3)
    square, least = angle * angle, decimal.Decimal(10) ** -decimal.getcontext().prec
    term, cosine, degree = decimal.Decimal(1), decimal.Decimal(1), 0
    while abs(term) > least:
        degree += 2
        term *= -square / (degree * (degree - 1))
        cosine += term
    return (-2 * (decimal.Decimal(2 * u + 1) / 2 ** (bits + 1)).ln()).sqrt() * cosine


def in_threads(work: Callable[[int], None], starts: Sequence[int]) -> None:
    """Calls a function for each chunk, in the threads of this process that draw noise."""
    if len(starts) < 2:
        for start in starts:
            work(start)
        return
    for done in [_threads(os.getpid()).submit(work, start) for start in starts]:
        done.result()


@functools.lru_cache(maxsize=1)
def _threads(process: int) -> concurrent.futures.ThreadPoolExecutor:
    del process  # A forked process has no threads: it makes its own.
    return concurrent.futures.ThreadPoolExecutor(
        len(os.sched_getaffinity(0)), thread_name_prefix="secure_noise"
    )


def _encryptor(draw_key: bytes, counter: bytes):
    packages.require("Secure noise", "cryptography")
    from cryptography.hazmat.primitives import ciphers
    from cryptography.hazmat.primitives.ciphers import algorithms, modes

    return ciphers.Cipher(algorithms.AES(draw_key), modes.CTR(counter)).encryptor()
