"""Masks, expanded from keys of 32 bytes, and sums that they are added to and removed from.

A mask is the key stream of AES-256 in counter mode, read as words. Every entry is exactly uniform
modulo its segment's modulus if the stream is uniform. A modulus that is a power of two divides the
number of words. For any other modulus, words at or above its largest multiple are replaced by spare
ones, which both sides repeat alike.

Masks are added chunk by chunk, so that a chunk of the sum stays in a processor's cache for several
masks. Nothing is reduced before the sum is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from tff_dpftrl.secure_sums import vectors

KEY_BYTES = 32

_CHUNK_BYTES = 1 << 18
_SPARE_BYTES = 1 << 12  # Drawn at a time.
_BATCH = 16  # Masks whose streams are open at a time.
_ALIGNMENT = 16
_ZEROS = memoryview(bytes(_CHUNK_BYTES))


def _stream(key: bytes, number: int) -> CipherContext:
    """Opens a key stream; streams of different numbers share none of their first 2⁶⁴ blocks."""
    start = number.to_bytes(8, "big") + bytes(8)
    return Cipher(algorithms.AES(key), modes.CTR(start)).encryptor()


class MaskedSum:
    """Sum of vectors and masks, reduced only when it is read."""

    def __init__(self, layout: vectors.Layout):
        """Starts with zeros."""
        self._layout = layout
        self._wrapping = _WrappingSum(layout)
        self._others = {
            i: _ReducedSum(segment, i + 1)
            for i, segment in enumerate(layout)
            if not segment.is_power_of_two
        }

    def add(self, vector: vectors.Vector) -> None:
        """Adds a vector (which `vectors.check` accepts)."""
        for i, (entries, segment) in enumerate(zip(vector, self._layout, strict=True)):
            entries = entries.astype(segment.dtype, copy=False)
            total = self._others[i].total if i in self._others else self._wrapping.segments[i]
            np.add(total, entries, out=total)

    def add_masks(self, keys: Sequence[bytes]) -> None:
        """Adds the masks of some keys, KEY_BYTES bytes each."""
        self._apply(keys, np.add)

    def subtract_masks(self, keys: Sequence[bytes]) -> None:
        """Subtracts the masks of some keys, KEY_BYTES bytes each."""
        self._apply(keys, np.subtract)

    def _apply(self, keys: Sequence[bytes], operation: np.ufunc) -> None:
        for i in range(0, len(keys), _BATCH):
            self._wrapping.apply(keys[i : i + _BATCH], operation)
            for other in self._others.values():
                other.apply(keys[i : i + _BATCH], operation)

    def value(self) -> vectors.Vector:
        """Returns the vector so far, each entry reduced modulo its segment's modulus."""
        result = []
        for i, segment in enumerate(self._layout):
            if i in self._others:
                reduced = np.mod(self._others[i].total, segment.modulus)
            else:
                words = self._wrapping.segments[i]
                reduced = words & words.dtype.type(segment.modulus - 1)
            result.append(reduced.astype(segment.dtype))
        return result

    def wipe(self) -> None:
        """Overwrites the sum, and the buffers of the last mask, with zeros."""
        self._wrapping.wipe()
        for other in self._others.values():
            other.wipe()


class _WrappingSum:
    """Segments whose moduli are powers of two: words wrap around, and need no reduction.

    They lie in one buffer, ordered by the size of their words, as long as the key stream that
    masks them all.
    """

    def __init__(self, layout: vectors.Layout):
        sizes = [(i, s.size, s.dtype) for i, s in enumerate(layout) if s.is_power_of_two]
        spans, runs, start = {}, [], 0
        for itemsize in (8, 4, 2, 1):
            run = start
            for i, size, dtype in sizes:
                if dtype.itemsize == itemsize:
                    spans[i] = (start, start + size * itemsize, dtype)
                    start += -(-size * itemsize // _ALIGNMENT) * _ALIGNMENT
            runs.append((run, start, np.dtype(f"<u{itemsize}")))
        self._total = np.zeros(start, np.uint8)
        self._words = np.zeros(min(start, _CHUNK_BYTES), np.uint8)
        self.segments = {i: self._total[a:b].view(dtype) for i, (a, b, dtype) in spans.items()}
        self._chunks = [
            (
                _ZEROS[: min(_CHUNK_BYTES, end - a)],
                self._words.data[: min(_CHUNK_BYTES, end - a)],
                self._words[: min(_CHUNK_BYTES, end - a)].view(dtype),
                self._total[a : min(a + _CHUNK_BYTES, end)].view(dtype),
            )
            for run, end, dtype in runs
            for a in range(run, end, _CHUNK_BYTES)
        ]

    def apply(self, keys: Sequence[bytes], operation: np.ufunc) -> None:
        if not self._chunks:
            return
        streams = [_stream(key, 0).update_into for key in keys]
        for zeros, buffer, words, total in self._chunks:
            for update_into in streams:
                update_into(zeros, buffer)
                operation(total, words, out=total)

    def wipe(self) -> None:
        self._total[:] = 0
        self._words[:] = 0


@dataclasses.dataclass(frozen=True)
class _Rule:
    """Rule that makes entries of words: a word below `limit` counts, modulo the modulus."""

    dtype: np.dtype
    limit: int

    @classmethod
    def of(cls, modulus: int) -> _Rule:
        # The smallest words of which at most one in sixteen is rejected, or the largest.
        itemsize = next((size for size in (1, 2, 4) if 16 * modulus <= 256**size), 4)
        return cls(np.dtype(f"<u{itemsize}"), 256**itemsize // modulus * modulus)


class _ReducedSum:
    """Segment with any modulus up to 2³²: words are rejected, sums reduced at the end.

    A sum of 2³⁰ masks and as many vectors stays below 2⁶³.
    """

    def __init__(self, segment: vectors.Segment, number: int):
        self._rule = _Rule.of(segment.modulus)
        self._number = number
        self.total = np.zeros(segment.size, np.int64)
        itemsize = self._rule.dtype.itemsize
        per_chunk = _CHUNK_BYTES // itemsize
        self._words = np.zeros(min(segment.size, per_chunk), self._rule.dtype)
        self._chunks = []
        for a in range(0, segment.size, per_chunk):
            total = self.total[a : a + per_chunk]
            words = self._words[: len(total)]
            buffer = words.view(np.uint8).data
            self._chunks.append((_ZEROS[: len(buffer)], buffer, words, total))

    def apply(self, keys: Sequence[bytes], operation: np.ufunc) -> None:
        limit = self._rule.limit
        streams = [
            (_stream(key, self._number).update_into, _Spare(key, self._number, self._rule))
            for key in keys
        ]
        for zeros, buffer, words, total in self._chunks:
            for update_into, spare in streams:
                update_into(zeros, buffer)
                if words.max() >= limit:
                    rejected = np.flatnonzero(words >= limit)
                    words[rejected] = spare.take(len(rejected))
                operation(total, words, out=total)

    def wipe(self) -> None:
        self.total[:] = 0
        self._words[:] = 0


class _Spare:
    """Accepted words of a separate stream, in their order."""

    def __init__(self, key: bytes, number: int, rule: _Rule):
        self._accepted = self._draw(key, number, rule)
        self._left = np.zeros(0, rule.dtype)

    @staticmethod
    def _draw(key: bytes, number: int, rule: _Rule) -> Iterator[np.ndarray]:
        stream = _stream(key, number | 1 << 63)
        while True:
            words = np.frombuffer(stream.update(_ZEROS[:_SPARE_BYTES]), rule.dtype)
            yield words[words < rule.limit]

    def take(self, count: int) -> np.ndarray:
        parts, missing = [self._left], count - len(self._left)
        while missing > 0:
            parts.append(next(self._accepted))
            missing -= len(parts[-1])
        words = np.concatenate(parts)
        self._left = words[count:]
        return words[:count]
