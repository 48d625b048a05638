"""Sets of devices survive being bitmaps, and others' bytes are refused."""

from __future__ import annotations

import pytest

from tff_dpftrl.secure_sums import bitmaps


def test_bitmaps():
    for indices, num_devices, content in (
        ((), 3, b"\0"),
        ((0, 2), 3, b"\5"),
        ((8,), 9, b"\0\1"),
        (range(16), 16, b"\xff\xff"),
    ):
        assert bitmaps.write(indices, num_devices) == content
        assert bitmaps.read(content, num_devices) == set(indices)
    for content in (b"", b"\x08", b"\0\0"):
        with pytest.raises(ValueError, match="not one of 3 devices"):
            bitmaps.read(content, 3)
