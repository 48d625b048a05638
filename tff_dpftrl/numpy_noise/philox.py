"""Seeds, random words and Gaussians, as `private_round` makes them in TensorFlow.

A seed is four words of 32 bits. The words of every draw equal TensorFlow's bit for bit
(stateless Philox-4x32-10, Salmon et al. 2011). The Gaussians made of them differ in the
last bits of the logarithm, sine and cosine, which each library approximates in its own way.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

Seed: TypeAlias = tuple[int, int, int, int]
"""Four words of 32 bits, the lowest first."""

_MASK = (1 << 32) - 1
_CHUNK = 1 << 13  # Blocks, or pairs of Gaussians, at a time: what fits into a core's cache.


def seed_from_int(value: int) -> Seed:
    """Splits an integer in [0, 2^128) into the words of a seed."""
    return (value & _MASK, value >> 32 & _MASK, value >> 64 & _MASK, value >> 96)


def derive(seed: Seed, index: int) -> Seed:
    """Derives the sub-seed number `index` of a seed, as `private_round.seeds.derive` does."""
    key, upper = _key_and_counter(seed)
    return _block((index & _MASK, index >> 32, *upper), key)


def words(seed: Seed, size: int) -> np.ndarray:
    """Draws independent uniform uint32 words; nothing else may be drawn with the seed."""
    key, upper = _key_and_counter(seed)
    blocks = np.empty([-(-size // 4), 4], np.uint32)
    for start in range(0, len(blocks), _CHUNK):
        index = np.arange(start, min(start + _CHUNK, len(blocks)), dtype=np.uint64)
        counter = (index & _MASK, index >> 32, *upper)
        blocks[start : start + _CHUNK] = np.stack(_block(counter, key), axis=-1)
    return blocks.reshape(-1)[:size]


def normal(seed: Seed, size: int) -> np.ndarray:
    """Draws independent standard Gaussians, float32, as `private_round.gaussians.normal` does.

    Nothing else may be derived from or drawn with the seed.
    """
    pairs = (size + 1) // 2
    random = words(seed, 3 * pairs).reshape([3, pairs])
    drawn = np.empty([2, pairs], np.float32)
    for start in range(0, pairs, _CHUNK):
        part = slice(start, start + _CHUNK)
        drawn[:, part] = gaussians_from_words(random[:, part])
    return drawn.reshape(-1)[:size]


def gaussians_from_words(random: np.ndarray) -> np.ndarray:
    """Applies Box and Muller's transform as `private_round.gaussians` does, and says why.

    `random` has independent uint32 bits, shape [3, n]: the sign and the upper bits of u, its lower
    bits, and the angle. The Gaussians are float32, shape [2, n].
    """
    upper, lower, angle = random
    u = (upper & 0x7FFFFFFF).astype(np.float32) * np.float32(2.0**-32)
    u += (lower.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-64)
    radius = np.where(upper >> 31, np.log(u), np.log1p(-u))
    radius = np.sqrt(np.float32(-2) * radius)
    turn = (angle.astype(np.float32) + np.float32(0.5)) * np.float32(2 * math.pi * 2.0**-32)
    return np.stack([radius * np.cos(turn), radius * np.sin(turn)])


def _key_and_counter(seed: Seed) -> tuple[tuple[int, int], tuple[int, int]]:
    """Scrambles a seed into the key and the upper half of the counter, as TensorFlow does."""
    key0, key1, upper0, upper1 = _block(seed, (0x3EC8F720, 0x02461E29))
    return (key0, key1), (upper0, upper1)


def _block(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Computes blocks of Philox-4x32-10 from words below 2^32, the counter's lowest first.

    The counter's words are integers or uint64 arrays.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & _MASK, p0 >> 32 ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3
