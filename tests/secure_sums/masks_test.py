"""Masks are what the key stream says, the same on both sides, and exactly uniform."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import scipy.stats
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import strategies as st

from tests.secure_sums import conversations
from tff_dpftrl.secure_sums import masks, vectors

_SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=40)
_MODULI = st.one_of(
    st.integers(2, 300), st.integers(2, 2**32), st.integers(0, 63).map(lambda log: 2 ** (log + 1))
)
_LAYOUTS = st.lists(
    st.builds(vectors.Segment, st.integers(1, 50), _MODULI), min_size=1, max_size=5
).map(tuple)
_KEY = bytes(range(32))
_KEYS = st.lists(st.binary(min_size=32, max_size=32), max_size=40)


def _mask(layout, key=_KEY):
    total = masks.MaskedSum(layout)
    total.add_masks([key])
    return total.value()


def _stream(number, num_bytes, key=_KEY):
    nonce = number.to_bytes(8, "big") + bytes(8)
    return Cipher(algorithms.AES(key), modes.CTR(nonce)).encryptor().update(bytes(num_bytes))


@_SETTINGS
@hypothesis.given(
    _LAYOUTS, st.integers(0, 2**32), st.lists(st.binary(min_size=32, max_size=32), max_size=40)
)
def test_masks_of_both_signs_cancel_for_any_layout(layout, seed, keys):
    vector = conversations.random_vector(layout, np.random.default_rng(seed))
    total = masks.MaskedSum(layout)
    total.add_masks(keys)
    total.add(vector)
    for key in reversed(keys):
        total.subtract_masks([key])
    for entries, expected, segment in zip(total.value(), vector, layout, strict=True):
        assert entries.dtype == segment.dtype
        np.testing.assert_array_equal(entries, expected)


def test_powers_of_two_take_the_low_bits_of_words_of_one_stream():
    # Large words first; the segments of each size begin at multiples of 16 bytes.
    layout = tuple(
        vectors.Segment(size, modulus)
        for size, modulus in [(5, 2**8), (3, 2**20), (2, 2**50), (1, 2**32), (9, 2)]
    )
    stream = _stream(0, 16 + 16 + 16 + 16 + 16)
    expected = [
        np.frombuffer(stream, np.uint8, 5, 48),
        np.frombuffer(stream, "<u4", 3, 16) % 2**20,
        np.frombuffer(stream, "<u8", 2, 0) % np.uint64(2**50),
        np.frombuffer(stream, "<u4", 1, 32),
        np.frombuffer(stream, np.uint8, 9, 64) % 2,
    ]
    for entries, wanted in zip(_mask(layout), expected, strict=True):
        np.testing.assert_array_equal(entries, wanted)


@pytest.mark.parametrize("modulus", [3, 16 + 1, 4096 + 3, 2**31 + 1, 3 * 2**30])
@pytest.mark.parametrize("size", [1, 1000, 70_000])
def test_other_moduli_replace_rejected_words_by_spare_ones(modulus, size):
    # What the module says, word for word, in Python.
    itemsize = next((s for s in (1, 2, 4) if 16 * modulus <= 256**s), 4)
    limit = 256**itemsize // modulus * modulus
    words = np.frombuffer(_stream(2, size * itemsize), f"<u{itemsize}").tolist()
    spare = np.frombuffer(_stream(2 | 1 << 63, (size + 50) * itemsize), f"<u{itemsize}").tolist()
    later = (word for word in spare if word < limit)
    expected = [(word if word < limit else next(later)) % modulus for word in words[:size]]
    layout = (vectors.Segment(3, 2**32), vectors.Segment(size, modulus))
    np.testing.assert_array_equal(_mask(layout)[1], expected)


@pytest.mark.parametrize("modulus", [15, 2**12 - 1, 2**24 - 1, 2**32 - 1, 2**20])
def test_batches_of_masks_are_the_sums_of_single_ones(modulus):
    size, num_masks = 50, 3 * masks._BATCH - 1
    layout = (vectors.Segment(size, modulus),)
    keys = [bytes([i]) * 32 for i in range(num_masks)]
    expected = sum(_mask(layout, key)[0].astype(object) for key in keys)
    for sign, method in ((1, "add_masks"), (-1, "subtract_masks")):
        total = masks.MaskedSum(layout)
        getattr(total, method)(keys)
        np.testing.assert_array_equal(total.value()[0], sign * expected % modulus)


def test_words_that_count_are_as_many_for_each_entry():
    # Exactly uniform, however the words are drawn: below the limit each entry occurs as often.
    for modulus in range(3, 300):
        if modulus & (modulus - 1):
            rule = masks._Rule.of(modulus)
            accepted = np.arange(rule.limit) % modulus
            assert rule.limit <= 256**rule.dtype.itemsize
            assert len(set(np.bincount(accepted, minlength=modulus).tolist())) == 1


@pytest.mark.parametrize("modulus", [2, 3, 7, 64, 100])
def test_entries_are_uniform(modulus):
    # 10⁵ entries for one fixed key; the p-value is what it is, and would be 0 for a bias of 5 %.
    (entries,) = _mask((vectors.Segment(100_000, modulus),))
    counts = np.bincount(entries, minlength=modulus)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_long_segments_are_masked_beyond_a_chunk():
    size = 3 * masks._CHUNK_BYTES // 4 + 5
    (entries,) = _mask((vectors.Segment(size, 2**32),))
    np.testing.assert_array_equal(entries, np.frombuffer(_stream(0, 4 * size), "<u4"))


def test_wiping_overwrites_sum_and_last_mask():
    layout = (vectors.Segment(10, 2**32), vectors.Segment(10, 1000))
    total = masks.MaskedSum(layout)
    total.add_masks([_KEY])
    total.wipe()
    assert not any(entries.any() for entries in total.value())
    assert not total._wrapping._words.any()
    assert not total._others[1]._words.any()
