"""Vectors are added modulo their segments' moduli, and survive being packed."""

from __future__ import annotations

import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.secure_sums import conversations
from tff_dpftrl.secure_sums import vectors

_SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
_MODULI = st.one_of(
    st.integers(2, 2**32), st.integers(2, 300), st.integers(0, 63).map(lambda log: 2 ** (log + 1))
)
_LAYOUTS = st.lists(
    st.builds(vectors.Segment, st.integers(1, 20), _MODULI), min_size=1, max_size=4
).map(tuple)


def _assert_equal(vector, other):
    for entries, others in zip(vector, other, strict=True):
        np.testing.assert_array_equal(entries, others)


@_SETTINGS
@hypothesis.given(_LAYOUTS, st.integers(0, 2**32))
def test_sums_and_packing(layout, seed):
    rng = np.random.default_rng(seed)
    a, b = (conversations.random_vector(layout, rng) for _ in range(2))
    total = [entries.copy() for entries in a]
    vectors.add(total, b, layout)
    _assert_equal(total, conversations.plain_sum(layout, [a, b]))
    vectors.check(total, layout)
    packed = [vectors.pack(a, layout, in_bits=in_bits) for in_bits in (False, True)]
    lengths = [vectors.packed_bytes(layout, in_bits=in_bits) for in_bits in (False, True)]
    assert [*map(len, packed)] == lengths
    assert lengths[1] <= lengths[0]
    for content in packed:
        _assert_equal(vectors.unpack(content, layout), a)
    if lengths[0] == lengths[1]:  # Whoever reads it does not know which it is.
        assert packed[0] == packed[1]
    zero = vectors.zeros(layout)
    vectors.check(zero, layout)
    vectors.add(zero, a, layout)
    _assert_equal(zero, a)
    wanted = " or ".join(map(str, dict.fromkeys(lengths)))
    for other in (packed[0] + b"\0", packed[1][:-1], b""):
        with pytest.raises(ValueError, match=f"must have {wanted} bytes, got {len(other)}"):
            vectors.unpack(other, layout)


def _by_python(entries, bits):
    """Entries as one large integer, the first ones in its lowest bits."""
    number = sum(int(entry) << i * bits for i, entry in enumerate(entries))
    return number.to_bytes(-(-len(entries) * bits // 8), "little")


@pytest.mark.parametrize("bits", [1, 3, 7, 11, 13, 17, 20, 25, 26, 31, 33, 45, 57])
@pytest.mark.parametrize("size", [8, 63, 64, 65, 1001])
def test_bits_follow_one_another(bits, size):
    layout = (vectors.Segment(size, 2**bits),)
    entries = np.random.default_rng(bits).integers(0, 2**bits, size).astype(layout[0].dtype)
    entries[:2] = 0, 2**bits - 1
    packed = vectors.pack([entries], layout, in_bits=True)
    assert packed == _by_python(entries, bits)
    _assert_equal(vectors.unpack(packed, layout), [entries])


def test_bits_of_no_entry_are_refused():
    layout = (vectors.Segment(16, 1000),)
    wrong = _by_python([*range(15), 1000], 10)
    with pytest.raises(ValueError, match="below 1000 in segment 0, got 1000"):
        vectors.unpack(wrong, layout)


def test_entries_take_the_fewest_whole_bytes_little_endian():
    layout = (vectors.Segment(2, 2**20), vectors.Segment(1, 257), vectors.Segment(1, 2**64))
    vector = [
        np.array([0x0A0B0C, 1], np.uint32),
        np.array([256], np.uint16),
        np.array([2**64 - 2], np.uint64),
    ]
    expected = bytes([0x0C, 0x0B, 0x0A, 1, 0, 0, 0, 1, 0xFE, *[0xFF] * 7])
    assert vectors.pack(vector, layout) == expected


@pytest.mark.parametrize("modulus", [3, 200, 2**20, 2**24, 2**31 + 11, 2**40])
def test_packed_entries_that_are_no_entries(modulus):
    layout = (vectors.Segment(2, modulus),)
    width = layout[0].bytes_per_entry
    largest = (modulus - 1).to_bytes(width, "little")
    assert [int(entry) for entry in vectors.unpack(2 * largest, layout)[0]] == [modulus - 1] * 2
    if modulus < 256**width:
        with pytest.raises(ValueError, match=f"below {modulus} in segment 0, got {modulus}"):
            vectors.unpack(largest + modulus.to_bytes(width, "little"), layout)


@pytest.mark.parametrize(
    "vector, match",
    [
        ([], "vector must have 1 segments, got 0"),
        ([np.array([1, 2])], "vector[0] must be an array of unsigned integers, got int64"),
        ([[1, 2]], "got list"),
        ([np.zeros(3, np.uint8)], "vector[0] must have shape (2,), got (3,)"),
        ([np.array([1, 10], np.uint64)], "vector[0] must have entries below 10, got 10"),
    ],
)
def test_no_vectors(vector, match):
    with pytest.raises(ValueError, match=re.escape(match)):
        vectors.check(vector, (vectors.Segment(2, 10),))


@pytest.mark.parametrize(
    "size, modulus, match",
    [
        (0, 2, "size must be at least 1"),
        (1, 1, "modulus must be at least 2"),
        (1, 2**32 + 1, "or a power of two"),
        (1, 2**65, "or a power of two"),
    ],
)
def test_no_segments(size, modulus, match):
    with pytest.raises(ValueError, match=match):
        vectors.Segment(size, modulus)
