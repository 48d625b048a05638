"""Vectors of integers with a modulus for each segment, and their encoding as bytes.

A vector is a list of unsigned NumPy arrays, one for each `Segment` of its layout, with entries
in [0, modulus). Small vectors (a count, a histogram) are segments beside the large ones, so that
one protocol sums them all under the same masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tff_dpftrl import validation

Vector = list[np.ndarray]


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
        bits = (self.modulus - 1).bit_length()
        return np.dtype(f"<u{next(size for size in (1, 2, 4, 8) if bits <= 8 * size)}")

    @property
    def bytes_per_entry(self) -> int:
        """Number of bytes of an entry in `pack`."""
        return ((self.modulus - 1).bit_length() + 7) // 8


Layout = tuple[Segment, ...]


def packed_bytes(layout: Layout) -> int:
    """Computes the number of bytes of a packed vector."""
    return sum(segment.size * segment.bytes_per_entry for segment in layout)


def zeros(layout: Layout) -> Vector:
    """Makes a vector of zeros."""
    return [np.zeros(segment.size, segment.dtype) for segment in layout]


def check(vector: Sequence[np.ndarray], layout: Layout) -> None:
    """Checks that a vector has a layout.

    Args:
      vector: Vector to check.
      layout: Layout that it should have.

    Raises:
      ValueError: If the number of segments, the shape or type of one, or an entry is wrong.
    """
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
    """Adds `other` to `vector` in place, modulo each segment's modulus.

    Args:
      vector: Vector that is changed in place, such as the sum of one group.
      other: Vector that is added, such as the sum of another group.
      layout: Layout of both vectors.
    """
    for entries, others, segment in zip(vector, other, layout, strict=True):
        if segment.is_power_of_two:
            np.add(entries, others.astype(entries.dtype, copy=False), out=entries)
            np.bitwise_and(entries, entries.dtype.type(segment.modulus - 1), out=entries)
        else:
            total = entries.astype(np.uint64) + others.astype(np.uint64)
            entries[:] = total % np.uint64(segment.modulus)


def pack(vector: Vector, layout: Layout) -> bytes:
    """Packs a vector as bytes: each entry little-endian in the fewest whole bytes.

    Args:
      vector: Vector whose entries are below their modulus, which `check` checks.
      layout: Layout of the vector.

    Returns:
      `packed_bytes(layout)` bytes.
    """
    parts = []
    for entries, segment in zip(vector, layout, strict=True):
        entries = np.ascontiguousarray(entries, segment.dtype)
        width = segment.bytes_per_entry
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


def unpack(content: bytes, layout: Layout) -> Vector:
    """Unpacks a vector that `pack` made bytes of.

    Args:
      content: Packed vector. Untrusted.
      layout: Layout that the vector should have.

    Returns:
      A vector; its arrays may be read-only views of `content`.

    Raises:
      ValueError: If there are more or fewer bytes, or an entry is not below its modulus.
    """
    if len(content) != packed_bytes(layout):
        raise validation.UsageError(
            f"content must have {packed_bytes(layout)} bytes, got {len(content)}."
        )
    vector, offset = [], 0
    for i, segment in enumerate(layout):
        width, itemsize = segment.bytes_per_entry, segment.dtype.itemsize
        if width == itemsize:
            entries = np.frombuffer(content, segment.dtype, segment.size, offset)
        else:
            narrow = np.frombuffer(content, np.uint8, segment.size * width, offset)
            padded = _columns(narrow.reshape(segment.size, width), width, itemsize)
            entries = padded.view(segment.dtype).reshape(segment.size)
        if segment.modulus < 256**itemsize and int(entries.max()) >= segment.modulus:
            raise validation.UsageError(
                f"content must have entries below {segment.modulus} in segment {i}, got "
                f"{int(entries.max())}."
            )
        vector.append(entries)
        offset += segment.size * width
    return vector
