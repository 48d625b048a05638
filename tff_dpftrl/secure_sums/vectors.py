"""Vectors of integers with a modulus for each segment, and their encoding as bytes.

A vector is a list of unsigned NumPy arrays, one for each `Segment` of its layout, with entries
in [0, modulus). Small vectors (a count, a histogram) are segments beside the large ones, so that
one protocol sums them all under the same masks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tff_dpftrl import validation

Vector = list[np.ndarray]

_MOST_BITS = 57  # Bits that fit in one word of 64 bits, wherever in a byte they begin.


@dataclasses.dataclass(frozen=True)
class Segment:
    """Part of a vector with a separate modulus.

    Attributes:
      size: Number of entries, at least 1.
      modulus: Modulus of the sum of its entries: from 2 to 2³², or a power of two up to 2⁶⁴.
    """

    size: int
    modulus: int

    def __post_init__(self):
        object.__setattr__(self, "size", validation.integer("size", self.size, minimum=1))
        modulus = validation.integer("modulus", self.modulus, minimum=2)
        object.__setattr__(self, "modulus", modulus)
        if modulus > (2**64 if self.is_power_of_two else 2**32):
            raise validation.UsageError(
                "modulus must be at most 2**32, or a power of two up to 2**64, got "
                f"{modulus}. Take the next power of two."
            )

    @property
    def is_power_of_two(self) -> bool:
        """Whether the modulus is a power of two, so that machine words wrap around with it."""
        return self.modulus & (self.modulus - 1) == 0

    @property
    def dtype(self) -> np.dtype:
        """Smallest unsigned, little-endian dtype that holds an entry."""
        sizes = (1, 2, 4, 8)
        return np.dtype(f"<u{next(size for size in sizes if self.bits_per_entry <= 8 * size)}")

    @property
    def bits_per_entry(self) -> int:
        """Number of bits that hold an entry."""
        return (self.modulus - 1).bit_length()

    @property
    def bytes_per_entry(self) -> int:
        """Number of whole bytes that hold an entry."""
        return (self.bits_per_entry + 7) // 8

    @property
    def has_shorter_bits(self) -> bool:
        """Whether the entries take fewer bytes one bit after the other than in whole bytes.

        Where they do not, packing does not pack bits: so two packed vectors of one layout and one
        length have the same format.
        """
        is_shorter = _bytes_of_bits(self) < self.size * self.bytes_per_entry
        return is_shorter and self.bits_per_entry <= _MOST_BITS


Layout = tuple[Segment, ...]


def packed_bytes(layout: Layout, *, in_bits: bool = False) -> int:
    """Computes the number of bytes of a packed vector; `in_bits` is that of `pack`."""
    return sum(
        _bytes_of_bits(segment)
        if in_bits and segment.has_shorter_bits
        else segment.size * segment.bytes_per_entry
        for segment in layout
    )


def _bytes_of_bits(segment: Segment) -> int:
    return (segment.size * segment.bits_per_entry + 7) // 8


def zeros(layout: Layout) -> Vector:
    """Makes a vector of zeros."""
    return [np.zeros(segment.size, segment.dtype) for segment in layout]


def check(vector: Sequence[np.ndarray], layout: Layout) -> None:
    """Raises ValueError unless segments, shapes, types and entries of a vector fit a layout."""
    if len(vector) != len(layout):
        raise validation.UsageError(f"vector must have {len(layout)} segments, got {len(vector)}.")
    for i, (entries, segment) in enumerate(zip(vector, layout, strict=True)):
        if not isinstance(entries, np.ndarray) or entries.dtype.kind != "u":
            raise validation.UsageError(
                f"vector[{i}] must be an array of unsigned integers, got "
                f"{getattr(entries, 'dtype', type(entries).__name__)}. Convert it by astype, "
                "after reducing it modulo its segment's modulus."
            )
        if entries.shape != (segment.size,):
            raise validation.UsageError(
                f"vector[{i}] must have shape ({segment.size},), got {entries.shape}."
            )
        if int(entries.max()) >= segment.modulus:
            raise validation.UsageError(
                f"vector[{i}] must have entries below {segment.modulus}, got "
                f"{int(entries.max())}. Reduce them modulo the segment's modulus."
            )


def add(vector: Vector, other: Vector, layout: Layout) -> None:
    """Adds `other` to `vector` in place, modulo each segment's modulus."""
    for entries, others, segment in zip(vector, other, layout, strict=True):
        if segment.is_power_of_two:
            np.add(entries, others.astype(entries.dtype, copy=False), out=entries)
            np.bitwise_and(entries, entries.dtype.type(segment.modulus - 1), out=entries)
        else:
            total = entries.astype(np.uint64) + others.astype(np.uint64)
            entries[:] = total % np.uint64(segment.modulus)


def pack(vector: Vector, layout: Layout, *, in_bits: bool = False) -> bytes:
    """Packs a vector as bytes; its entries must be below their modulus (`check`).

    With `in_bits`, entries of a segment follow each other bit by bit, the least significant bit
    first, where that takes fewer bytes; otherwise each takes the fewest whole bytes, little-endian.
    """
    parts = []
    for entries, segment in zip(vector, layout, strict=True):
        entries = np.ascontiguousarray(entries, segment.dtype)
        width = segment.bytes_per_entry
        if in_bits and segment.has_shorter_bits:
            parts.append(_to_bits(entries, segment))
            continue
        if width != segment.dtype.itemsize:
            entries = _columns(entries.view(np.uint8).reshape(segment.size, -1), width, width)
        parts.append(entries.tobytes())
    return b"".join(parts)


def _columns(array: np.ndarray, count: int, out_of: int) -> np.ndarray:
    """Copies the first columns of an array of bytes, and pads with zeros.

    Column by column NumPy is ten times faster.
    """
    result = np.zeros((len(array), out_of), np.uint8)
    for column in range(count):
        result[:, column] = array[:, column]
    return result


def _to_bits(entries: np.ndarray, segment: Segment) -> bytes:
    """Packs entries bit by bit."""
    # A group's bits are a whole number of words of 64 bits. So words of different groups, into
    # which their i-th entries are written, do not overlap.
    group = 64
    buffer, words = _words_of_bits(segment, group)
    for i, (word, shift) in enumerate(words):
        part = entries[i::group].astype(word.dtype)
        part <<= shift
        word[: len(part)] |= part
    return buffer[: _bytes_of_bits(segment)].tobytes()


def _from_bits(content: memoryview, segment: Segment) -> np.ndarray:
    """Unpacks what `_to_bits` packed. Bits after the last entry are not looked at."""
    group = 8 // math.gcd(segment.bits_per_entry, 8)  # The fewest with a whole number of bytes.
    buffer, words = _words_of_bits(segment, group)
    buffer[: len(content)] = np.frombuffer(content, np.uint8)
    entries = np.empty(segment.size, segment.dtype)
    for i, (word, shift) in enumerate(words):
        column = entries[i::group]
        part = word[: len(column)] >> shift
        part &= part.dtype.type(2**segment.bits_per_entry - 1)
        column[:] = part
    return entries


def _words_of_bits(
    segment: Segment, group: int
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.integer]]]:
    """Makes a buffer of zeros for the bits of entries, and views of it as words.

    `group` is the number of entries whose bits are a whole number of bytes. Returns the buffer; and
    for each entry in a group the words that have the entries of this place of all groups, and the
    number of bits before the entry in a word.
    """
    bits, num_groups = segment.bits_per_entry, -(-segment.size // group)
    dtype = np.dtype("<u4" if bits + 7 <= 32 else "<u8")
    group_bytes = group * bits // 8
    buffer = np.zeros(num_groups * group_bytes + dtype.itemsize, np.uint8)
    words = [
        (
            np.ndarray((num_groups,), dtype, buffer, i * bits // 8, (group_bytes,)),
            dtype.type(i * bits % 8),
        )
        for i in range(group)
    ]
    return buffer, words


def unpack(content: bytes, layout: Layout) -> Vector:
    """Unpacks an untrusted vector that `pack` made bytes of; its length tells the format.

    The arrays may be read-only views of `content`. It raises ValueError if there are more or fewer
    bytes, or an entry is not below its modulus.
    """
    lengths = [packed_bytes(layout, in_bits=in_bits) for in_bits in (False, True)]
    if len(content) not in lengths:
        raise validation.UsageError(
            f"content must have {' or '.join(map(str, dict.fromkeys(lengths)))} bytes, got "
            f"{len(content)}."
        )
    in_bits = len(content) != lengths[0]
    vector, offset = [], 0
    for i, segment in enumerate(layout):
        width, itemsize = segment.bytes_per_entry, segment.dtype.itemsize
        num_bytes = segment.size * width
        if in_bits and segment.has_shorter_bits:
            num_bytes = _bytes_of_bits(segment)
            entries = _from_bits(memoryview(content)[offset : offset + num_bytes], segment)
        elif width == itemsize:
            entries = np.frombuffer(content, segment.dtype, segment.size, offset)
        else:
            narrow = np.frombuffer(content, np.uint8, num_bytes, offset)
            padded = _columns(narrow.reshape(segment.size, width), width, itemsize)
            entries = padded.view(segment.dtype).reshape(segment.size)
        if segment.modulus < 256**itemsize and int(entries.max()) >= segment.modulus:
            raise validation.UsageError(
                f"content must have entries below {segment.modulus} in segment {i}, got "
                f"{int(entries.max())}."
            )
        vector.append(entries)
        offset += num_bytes
    return vector
