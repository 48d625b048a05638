"""Seeds: fresh from the system, all 128 bits used, and pinned to their definition."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.private_round import seeds


def _philox(counter, key):
    """Philox-4x32-10 (Salmon et al. 2011) on four counter and two key words of 32 bits."""
    c, k = [int(x) for x in counter], [int(x) for x in key]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


def _words(seed):
    return np.asarray(seed, np.int64).view(np.uint32)


def _reference_derive(seed, index):
    # TensorFlow scrambles a seed into key and upper counter words by one block.
    mix = _philox(_words(seed), (0x3EC8F720, 0x02461E29))
    low = [index & 0xFFFFFFFF, index >> 32]
    out = _philox([*low, mix[2], mix[3]], mix[:2])
    return np.asarray(out, np.uint32).view(np.int64)


def _derive(seed, index):
    return seeds.derive(tf.constant(seed, tf.int64), tf.constant(index, tf.int64)).numpy()


@pytest.mark.parametrize("seed", [(0, 0), (5, -7), (2**63 - 1, -(2**63))])
@pytest.mark.parametrize("index", [0, 1, 2**40 + 3])
def test_derive_is_philox_written_out(seed, index):
    # Pinned because a resumed run must repeat its noise.
    np.testing.assert_array_equal(_derive(seed, index), _reference_derive(seed, index))


def test_every_bit_of_the_seed_matters():
    base = np.asarray([0x0123456789ABCDEF, 0x1EDCBA9876543210], np.int64)
    derived = {tuple(_derive(base, 0))}
    for bit in range(128):
        flipped = base.view(np.uint64).copy()
        flipped[bit // 64] ^= np.uint64(1) << np.uint64(bit % 64)
        derived.add(tuple(_derive(flipped.view(np.int64), 0)))
    assert len(derived) == 129


def test_indices_and_paths_do_not_collide():
    root = (3, 4)
    children = [tuple(_derive(root, i)) for i in range(50)]
    grandchildren = [tuple(_derive(child, i)) for child in children[:10] for i in range(10)]
    assert len(set(children + grandchildren)) == 150


def test_root_seeds_from_the_system_are_fresh_and_balanced():
    draw = tf.function(seeds.root_seed_from_os)
    n = 100
    drawn = np.stack([draw().numpy() for _ in range(n)])
    assert len({tuple(seed) for seed in drawn}) == n
    bits = np.unpackbits(drawn.view(np.uint8), axis=1)
    assert bits.shape == (n, 128)
    # Six standard errors; a bit that is always the same would be 10 away.
    assert np.max(np.abs(bits.mean(axis=0) - 0.5)) < 6 * 0.5 / np.sqrt(n)


def test_given_seed_keeps_its_128_bits():
    seed = 2**127 + 2**64 + 5
    np.testing.assert_array_equal(
        seeds.root_seed(seed).numpy().view(np.uint64), np.asarray([5, 2**63 + 1], np.uint64)
    )


@pytest.mark.parametrize("seed", [-1, 2**128, 1.5, "7"])
def test_bad_seed_is_refused(seed):
    with pytest.raises(ValueError, match="deterministic_seed must be None or an integer"):
        seeds.root_seed(seed)
