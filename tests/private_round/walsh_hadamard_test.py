"""Tests of the random rotation, against SciPy's dense Hadamard matrices."""

import math

import numpy as np
import pytest
import scipy.linalg
import tensorflow as tf

from tff_dpftrl.private_round import walsh_hadamard

_SEED = tf.constant([3, 14], tf.int64)


@pytest.mark.parametrize("log2_dim", range(12))
def test_equals_the_dense_transform(log2_dim):
    dim = 2**log2_dim
    x = np.random.default_rng(log2_dim).normal(size=dim).astype(np.float32)
    expected = scipy.linalg.hadamard(dim) @ x.astype(np.float64) / math.sqrt(dim)
    actual = walsh_hadamard.walsh_hadamard(tf.constant(x)).numpy()
    np.testing.assert_allclose(actual, expected, atol=2e-6 * np.linalg.norm(x))


@pytest.mark.parametrize("log2_dim", [13, 16, 20])
def test_involution_and_norm(log2_dim):
    x = np.random.default_rng(0).normal(size=2**log2_dim).astype(np.float32)
    once = walsh_hadamard.walsh_hadamard(tf.constant(x))
    assert np.linalg.norm(once) == pytest.approx(np.linalg.norm(x), rel=2e-6)
    np.testing.assert_allclose(walsh_hadamard.walsh_hadamard(once), x, atol=1e-5)


def test_products_are_on_the_cpu_where_no_bits_are_dropped():
    graph = tf.function(walsh_hadamard.walsh_hadamard, input_signature=[tf.TensorSpec([2**12])])
    operations = graph.get_concrete_function().graph.get_operations()
    assert {op.device for op in operations if op.type == "MatMul"} == {"/device:CPU:0"}


@pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="needs a GPU")
def test_a_gpu_changes_no_bit():
    x = np.random.default_rng(0).normal(size=2**16).astype(np.float32)
    with tf.device("GPU:0"):
        rotated = tf.function(walsh_hadamard.rotate)(tf.constant(x), _SEED)
    with tf.device("CPU:0"):
        expected = tf.function(walsh_hadamard.rotate)(tf.constant(x), _SEED)
    np.testing.assert_array_equal(rotated, expected)


@pytest.mark.parametrize("position", [0, 1, 77777, 2**17 - 1])
def test_unit_vectors_become_rows(position):
    dim = 2**17
    row = walsh_hadamard.walsh_hadamard(tf.one_hot(position, dim)).numpy() * math.sqrt(dim)
    parity = [bin(position & column).count("1") % 2 for column in range(dim)]
    np.testing.assert_allclose(row, 1 - 2 * np.array(parity), rtol=1e-6)


@pytest.mark.parametrize("dim", [1, 2, 31, 32, 33, 100_000])
def test_signs_are_signs_and_depend_on_the_seed_alone(dim):
    x = np.random.default_rng(dim).normal(size=dim).astype(np.float32)
    flipped = walsh_hadamard.flip_signs(tf.constant(x), _SEED)
    np.testing.assert_array_equal(np.abs(flipped), np.abs(x))
    np.testing.assert_array_equal(walsh_hadamard.flip_signs(flipped, _SEED), x)
    ones = walsh_hadamard.flip_signs(tf.ones([dim]), _SEED)
    np.testing.assert_array_equal(flipped, x * ones)


def test_signs_are_balanced_and_uncorrelated():
    dim = 2**20
    signs = walsh_hadamard.flip_signs(tf.ones([dim]), _SEED).numpy().astype(np.float64)
    others = walsh_hadamard.flip_signs(tf.ones([dim]), _SEED + 1).numpy()
    standard_error = 1 / math.sqrt(dim)
    margin = 6 * standard_error  # 0.6 %: a bit of weight 0.51 would show up as 2 %.
    assert abs(np.mean(signs)) < margin
    assert abs(np.mean(signs * others)) < margin
    for lag in (1, 2, 31, 32, 33):
        assert abs(np.mean(signs * np.roll(signs, lag))) < margin
    for bit in range(32):
        assert abs(np.mean(signs[bit::32])) < margin * math.sqrt(32)


def test_rotation_spreads_a_spike_and_comes_back():
    dim = 2**14
    x = np.zeros(dim, np.float32)
    x[5] = 3.0
    x[6:9] = 1.0
    rotated = walsh_hadamard.rotate(tf.constant(x), _SEED)
    # Sub-Gaussian: 2 dim exp(−6.5² / 2) < 3e-5.
    assert np.max(np.abs(rotated)) < 6.5 * np.linalg.norm(x) / math.sqrt(dim)
    np.testing.assert_allclose(walsh_hadamard.unrotate(rotated, _SEED), x, atol=1e-5)
    assert np.max(np.abs(walsh_hadamard.unrotate(rotated, _SEED + 1) - x)) > 1


@pytest.mark.parametrize("shape", [[3], [0], [2, 2], []])
def test_bad_shapes(shape):
    with pytest.raises(ValueError, match="x must"):
        walsh_hadamard.walsh_hadamard(tf.zeros(shape))


def test_unknown_length():
    with pytest.raises(ValueError, match="static length"):
        tf.function(walsh_hadamard.walsh_hadamard).get_concrete_function(
            tf.TensorSpec([None], tf.float32)
        )
