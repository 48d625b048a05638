"""Words and seeds equal TensorFlow's bit for bit; Gaussians up to float32 rounding."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.numpy_noise import philox
from tff_dpftrl.private_round import gaussians, seeds

_SEEDS = (0, 5, 2**64 - 1, 2**127 + 2**64 + 12345678901234567890 % 2**60)


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("index", [0, 1, 2**32 + 7, 2**40 + 3])
def test_derived_seeds_are_tensorflow_s(seed, index):
    derived = philox.derive(philox.seed_from_int(seed), index)
    expected = seeds.derive(seeds.root_seed(seed), index).numpy().view(np.uint32)
    np.testing.assert_array_equal(np.array(derived, np.uint32), expected)
    assert all(type(word) is int for word in derived)


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("size", [0, 1, 7, 4 * philox._CHUNK + 9])
def test_words_are_tensorflow_s_bit_for_bit(seed, size):
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seeds.root_seed(seed))
    expected = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[size], key=key, counter=counter, alg=seeds.PHILOX, dtype=tf.uint32
    )
    np.testing.assert_array_equal(philox.words(philox.seed_from_int(seed), size), expected)


@pytest.mark.parametrize("size", [0, 1, 30, 200_001])
def test_gaussians_are_tensorflow_s_up_to_rounding(size):
    drawn = philox.normal(philox.seed_from_int(7), size)
    expected = gaussians.normal(seeds.root_seed(7), size).numpy()
    assert drawn.dtype == np.float32 and drawn.shape == (size,)
    # log, sqrt, sin, cos and two products round in either library, each within 2^-22 of its
    # result; no pair is farther out than 9.5. Of the words, one bit more or less is far more.
    np.testing.assert_allclose(drawn, expected, rtol=0, atol=6 * 2 * 2.0**-22 * 9.5)
    close = np.abs(drawn - expected) <= 12 * 2.0**-22 * np.maximum(np.abs(expected), 0.1)
    assert size == 0 or np.mean(close) > 0.999


def test_gaussians_at_the_edges_of_the_words():
    edges = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1]
    random = np.array(np.meshgrid(edges, edges, edges), np.uint32).reshape([3, -1])
    values = philox.gaussians_from_words(random)
    expected = gaussians.gaussians_from_words(tf.constant(random)).numpy()
    assert np.all(np.isfinite(values)) and np.all(values != 0.0) and np.max(values) > 9.4
    lengths = [np.linalg.norm(pairs.astype(np.float64), axis=0) for pairs in (values, expected)]
    np.testing.assert_allclose(*lengths, rtol=1e-6)
