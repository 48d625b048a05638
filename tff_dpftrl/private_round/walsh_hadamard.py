"""Random rotation by signs and a Walsh–Hadamard transform. Pure TensorFlow, float32 or float64."""

from __future__ import annotations

import functools
import math

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation

_PHILOX = 1  # tf.random.Algorithm.PHILOX, as the raw ops want it.
_MAX_LOG2_RADIX = 5
_WORD_BITS = 32


@functools.cache
def _hadamard_matrix(log2_dim: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    for _ in range(log2_dim):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def walsh_hadamard(x: tf.Tensor) -> tf.Tensor:
    """Multiplies a vector by H/√d, which is symmetric and its own inverse.

    H, in Sylvester's order, is a Kronecker product of small Hadamard matrices.
    Each product with one of them, written as Xᵀ H_a, also moves its index to the
    end. After one turn through all factors the order is the first again, without a
    separate transposition. Factors of up to 32 rows are the fastest on CPUs: smaller
    ones read memory more often, larger ones multiply more. The op stays on the CPU,
    because a GPU would first round float32 entries to the 11 bits of TensorFloat-32.
    """
    dim = _static_power_of_two(x)
    log2_dim = dim.bit_length() - 1
    num_factors = -(-log2_dim // _MAX_LOG2_RADIX)
    scale = 1 / math.sqrt(dim)
    for i in range(num_factors):
        log2_radix = log2_dim // num_factors + (i < log2_dim % num_factors)
        factor = _hadamard_matrix(log2_radix)
        if i == num_factors - 1:
            factor = factor * scale
        with tf.device("CPU:0"):
            x = tf.reshape(x, [1 << log2_radix, -1])
            x = tf.matmul(x, tf.constant(factor, x.dtype), transpose_a=True)
    return tf.reshape(x, [dim])


def flip_signs(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Multiplies the entries of a vector by independent random signs.

    The same seed gives the same signs in float32 and float64. The sign of zero may change too.
    """
    dim = _static_length(x)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    words = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[-(-dim // _WORD_BITS), 1], key=key, counter=counter, alg=_PHILOX, dtype=tf.int32
    )
    # Bit i of a word becomes the sign bit of its i-th float.
    shifted = tf.bitwise.left_shift(words, tf.range(_WORD_BITS, dtype=tf.int32))
    sign_bits = tf.bitwise.bitwise_and(shifted, tf.int32.min)
    sign_bits = tf.reshape(sign_bits, [-1])[:dim]
    as_int = tf.int32
    if x.dtype == tf.float64:
        as_int = tf.int64
        sign_bits = tf.bitwise.bitwise_and(tf.cast(sign_bits, tf.int64), tf.int64.min)
    flipped = tf.bitwise.bitwise_xor(tf.bitcast(x, as_int), sign_bits)
    return tf.bitcast(flipped, x.dtype)


def rotate(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Rotates a vector at random: (H/√d) D x, with D a diagonal of random signs.

    Every coordinate of the result is sub-Gaussian with standard deviation ‖x‖₂/√d
    (Kairouz, Liu & Steinke 2021, lemmas 28 and 29).
    """
    return walsh_hadamard(flip_signs(x, seed))


def unrotate(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Undoes `rotate` with the same seed."""
    return flip_signs(walsh_hadamard(x), seed)


def _static_length(x: tf.Tensor) -> int:
    dim = x.shape[0] if x.shape.rank == 1 else None
    if dim is None:
        raise validation.UsageError(f"x must be a vector of static length, got shape {x.shape}.")
    return dim


def _static_power_of_two(x: tf.Tensor) -> int:
    dim = _static_length(x)
    if dim < 1 or dim & (dim - 1):
        raise validation.UsageError(
            f"x must have a power of two of entries, got {dim}: pad it with zeros."
        )
    return dim
