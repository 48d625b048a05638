"""Sets of devices as bitmaps: bit i % 8 of byte i / 8 is set if device i is in it."""

from __future__ import annotations

from collections.abc import Iterable

from tff_dpftrl import validation


def write(indices: Iterable[int], num_devices: int) -> bytes:
    """Writes the bitmap of some devices of a group, ceil(num_devices / 8) bytes."""
    return sum(1 << index for index in indices).to_bytes((num_devices + 7) // 8, "little")


def read(bitmap: bytes, num_devices: int) -> set[int]:
    """Reads the indices in an untrusted bitmap.

    It raises ValueError if it has more or fewer bytes, or names devices beyond the group.
    """
    value = int.from_bytes(bitmap, "little")
    if len(bitmap) != (num_devices + 7) // 8 or value >> num_devices:
        raise validation.UsageError(
            f"bitmap is not one of {num_devices} devices: it has {len(bitmap)} bytes, or names "
            "devices beyond the group."
        )
    return {index for index in range(num_devices) if value >> index & 1}
