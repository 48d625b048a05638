"""Secure draws are the standard's keystream, and ideal Gaussians rounded to the last bit."""

import hashlib

import mpmath
import numpy as np
import pytest
from scipy import stats

from tff_dpftrl import validation
from tff_dpftrl.numpy_noise import secure_draws

_SEED = bytes(range(32))


def test_keystream_is_that_of_nist():
    # NIST SP 800-38A, F.5.5 (CTR-AES256.Encrypt): key, initial counter and output blocks.
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    expected = bytes.fromhex(
        "0bdf7df1591716335e9a8b15c860c502"
        "5a6e699d536119065433863c8f657b94"
        "1bc12c9c01610d5d0d8bd6a3378eca62"
        "2956e1c8693536b1bee99c73a31576b6"
    )
    part, block = 0xF0F1F2F3F4F5F6F7, 0xF8F9FAFBFCFDFEFF
    assert secure_draws.words(key, part, 2 * block, 8).tobytes() == expected
    assert secure_draws.words(key, part, 2 * (block + 2), 3).tobytes() == expected[32:56]


def test_keys_are_hmacs_of_the_path():
    message = b"tff_dpftrl secure noise 1" + bytes([7]) + bytes(7) + bytes([0, 1]) + bytes(6)
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in _SEED.ljust(64, b"\0")) + message).digest()
    outer = hashlib.sha256(bytes(b ^ 0x5C for b in _SEED.ljust(64, b"\0")) + inner).digest()
    assert secure_draws.key(_SEED, [7, 256]) == outer
    with pytest.raises(validation.UsageError, match="32 bytes, got 16"):
        secure_draws.key(bytes(16), [0])


def _exact(key: bytes, size: int, scale: float = 1.0) -> list[int]:
    """Computes the draws in multiples of the step, with 80 digits, by other functions."""
    pairs = (size + 1) // 2
    radii, angles = (secure_draws.words(key, part, 0, pairs).tolist() for part in (0, 1))
    further = secure_draws.words(key, 2, 0, 4 * pairs).tolist()
    drawn = [[], []]
    with mpmath.workdps(80):
        for pair in range(pairs):
            a, b, c, d = further[4 * pair : 4 * pair + 4]
            u = (mpmath.mpf(radii[pair] << 128 | a << 64 | b) + 0.5) / 2**192
            v = (mpmath.mpf(angles[pair] << 128 | c << 64 | d) + 0.5) / 2**192
            for values, function in zip(drawn, (mpmath.cos, mpmath.sin), strict=True):
                exact = mpmath.sqrt(-2 * mpmath.log(u)) * function(2 * mpmath.pi * v)
                values.append(int(mpmath.nint(exact * scale * 2**secure_draws.STEP_BITS)))
    return [*drawn[0], *drawn[1]][:size]


@pytest.mark.parametrize(
    ("size", "scale"), [(0, 1.0), (1, 1.0), (2, 1.0), (601, 1.0), (200, -0.7), (200, 65000.3)]
)
def test_draws_are_rounded_as_a_library_of_high_precision_does(size, scale):
    drawn = secure_draws.normal(_SEED, [3, 1], size, scale)
    assert drawn.dtype == np.float64 and drawn.shape == (size,)
    multiples = drawn * 2.0**secure_draws.STEP_BITS
    assert multiples.tolist() == _exact(secure_draws.key(_SEED, [3, 1]), size, scale)


def test_a_library_that_errs_in_the_last_bits_makes_the_same_draws(monkeypatch):
    size = 60_000
    expected = secure_draws.normal(_SEED, [0], size)
    tan, log = np.tan, np.log

    def other_tan(x, out=None):
        return np.multiply(tan(x), 1 + 2.0**-51, out=out)

    monkeypatch.setattr(np, "tan", other_tan)
    monkeypatch.setattr(np, "log", lambda x: log(x) * (1 - 2.0**-51))
    np.testing.assert_array_equal(secure_draws.normal(_SEED, [0], size), expected)
    # Without the second look, such errors show: 4e-16 of a draw is 2e-6 steps, so that some of so
    # many draws are rounded otherwise once the error is a thousand times larger.
    monkeypatch.setattr(np, "log", lambda x: log(x) * (1 - 2.0**-41))
    assert np.any(secure_draws.normal(_SEED, [0], size) != expected)


@pytest.mark.parametrize("index", [0, 1])
def test_extreme_words_are_decided_exactly(monkeypatch, index):
    edges = [0, 1, 2**45, 2**46 + 1, 2**63, 2**64 - 2**46, 2**64 - 2**12, 2**64 - 1]
    u, v = np.meshgrid(np.array(edges, np.uint64), np.array(edges, np.uint64))
    parts = {0: u.reshape(-1), 1: v.reshape(-1)}

    def words(_key, part, first, size):
        if part in parts:
            return parts[part][first : first + size]
        return np.full(size, 2**63 + 5, np.uint64)

    monkeypatch.setattr(secure_draws, "words", words)
    drawn = np.empty([2, u.size])
    secure_draws._fill(b"", 0, 1.0, drawn)
    expected = np.array(_exact(b"", 2 * u.size)).reshape([2, -1])
    np.testing.assert_array_equal(drawn[index] * 2.0**secure_draws.STEP_BITS, expected[index])
    assert np.max(np.abs(drawn)) > 9.4  # Of 64 bits, all zero: sqrt(2 · 65 · log 2).


def test_draws_of_large_tensors_do_not_depend_on_threads():
    size = 4 * secure_draws._CHUNK + 7
    drawn = secure_draws.normal(_SEED, [5], size)
    np.testing.assert_array_equal(drawn, secure_draws.normal(_SEED, [5], size))
    pairs, chunk = (size + 1) // 2, secure_draws._CHUNK
    alone = np.empty([2, pairs - 2 * chunk])
    secure_draws._fill(secure_draws.key(_SEED, [5]), 2 * chunk, 1.0, alone)
    np.testing.assert_array_equal(drawn[2 * chunk : pairs], alone[0])


def test_draws_are_gaussian_and_independent():
    size = 200_000
    drawn = secure_draws.normal(_SEED, [0], size)
    other = secure_draws.normal(_SEED, [1], size)
    # Kolmogorov and Smirnov's test: P(D > 3 / √n) = 2 exp(-18) = 3e-8.
    assert stats.kstest(drawn, "norm").statistic < 3 / np.sqrt(size)
    assert stats.kstest(drawn * 1.05, "norm").statistic > 3 / np.sqrt(size)
    halves = drawn[: size // 2], drawn[size // 2 :]
    for one, two in [(drawn, other), halves, (drawn[1:], drawn[:-1])]:
        # The mean of n products has standard deviation 1/√n.
        assert abs(np.mean(one * two)) < 6 / np.sqrt(len(one))
    # All multiples of the step occur alike: the lowest 8 bits are uniform, 255 degrees of freedom.
    low = np.bincount((drawn * 2.0**32).astype(np.int64) & 255, minlength=256)
    chi_squared = np.sum((low - size / 256) ** 2) / (size / 256)
    assert abs(chi_squared - 255) < 6 * np.sqrt(2 * 255)


def test_other_seeds_and_paths_make_other_draws():
    drawn = {
        secure_draws.normal(seed, path, 3).tobytes()
        for seed in (_SEED, secure_draws.seed_from_int(1), secure_draws.seed_from_int(2))
        for path in ([0], [1], [0, 0], [256])
    }
    assert len(drawn) == 12
