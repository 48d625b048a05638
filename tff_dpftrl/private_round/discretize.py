"""Encoding of client updates for secure aggregation, and decoding of their sum.

Pure TensorFlow on flat vectors, following Xu et al. 2023, Algorithm 2. Clients
compute in float32, int32 and int64 only. What bounds the privacy loss is the
exact integer test on the rounded vector, not the float32 arithmetic before it.
"""

from __future__ import annotations

import tensorflow as tf

from tff_dpftrl.discretization import grid
from tff_dpftrl.private_round import seeds, walsh_hadamard

MAX_TRIES = 64
"""Number of roundings drawn before truncating; all fail with probability below α^64."""

ROTATION_STREAM = 0
"""Index of the sub-seed of a round's public seed that makes its rotation."""

_ROUNDING_STREAM = 1
_PART_LENGTH = 1 << 20
_SMALLEST_NORMAL = 2.0**-126
# float32 norms and rotations err by less: vectors clipped this short of the bound are as
# likely to be accepted as in theory.
_NORM_MARGIN = 1e-5


def scale_and_clip(x: tf.Tensor, clip_norm: float, scaled_clip_norm: float) -> tf.Tensor:
    """Scales a vector by `scaled_clip_norm / clip_norm` and clips its L2 norm.

    No square overflows or underflows, whatever the magnitude of the entries. An entry of the
    float32 vector that is not finite makes it zero.
    """
    largest = tf.maximum(tf.reduce_max(tf.abs(x)), _SMALLEST_NORMAL)
    unit = x / largest
    norm = tf.sqrt(tf.reduce_sum(tf.square(unit)))
    scale = tf.minimum(
        largest / clip_norm * scaled_clip_norm, scaled_clip_norm * (1 - _NORM_MARGIN) / norm
    )
    scale = tf.where(tf.math.is_finite(norm), scale, 0.0)
    return tf.math.multiply_no_nan(unit, scale)


def limit_coordinates(x: tf.Tensor, max_coordinate: int) -> tf.Tensor:
    """Scales a vector down until no coordinate exceeds `max_coordinate` in size."""
    bound = float(max_coordinate)
    x = x * tf.minimum(1.0, bound / tf.reduce_max(tf.abs(x)))
    # The product may exceed the bound by one unit in the last place.
    return tf.clip_by_value(x, -bound, bound)


def has_norm_at_most(x: tf.Tensor, max_squared_norm: int) -> tf.Tensor:
    """Checks exactly whether ‖x‖₂² ≤ `max_squared_norm` for int32; both are below 2^63."""
    return _squared_norm(x) <= tf.constant(max_squared_norm, tf.int64)


def _squared_norm(x: tf.Tensor) -> tf.Tensor:
    """Computes ‖x‖₂² in int64, of a large vector part by part: int64 takes twice its memory."""
    length = x.shape[0] or 0  # An unknown length is one part, too.
    if length <= _PART_LENGTH or length % _PART_LENGTH:
        return tf.reduce_sum(tf.square(tf.cast(x, tf.int64)))
    parts = tf.reshape(x, [-1, _PART_LENGTH])
    _, total = tf.while_loop(
        lambda index, _: index < length // _PART_LENGTH,
        lambda index, total: (index + 1, total + _squared_norm(parts[index])),
        (tf.constant(0), tf.constant(0, tf.int64)),
        parallel_iterations=1,
    )
    return total


def round_conditionally(x: tf.Tensor, seed: tf.Tensor, max_squared_norm: int) -> tf.Tensor:
    """Rounds stochastically to integers until the squared norm is within a bound.

    Each coordinate becomes one of its two neighbours, with mean x up to 2^-23 before
    conditioning (`grid.GridEncoding.rounding_bias_bound` covers the conditioning).
    After `MAX_TRIES` rejections the vector is rounded towards zero, which cannot
    lengthen it; if even that is too long, it becomes zero.

    Entries of `x`, float32, are at most 2^22 in size. The result is int32.
    """
    floor = tf.floor(x)
    fraction = x - floor  # Exact in float32.
    floor = tf.cast(floor, tf.int32)

    def attempt(index, _rounded, _accepted):
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seeds.derive(seed, index))
        uniform = tf.raw_ops.StatelessRandomUniformV2(
            shape=tf.shape(x), key=key, counter=counter, alg=seeds.PHILOX, dtype=tf.float32
        )
        rounded = floor + tf.cast(uniform < fraction, tf.int32)
        return index + 1, rounded, has_norm_at_most(rounded, max_squared_norm)

    _, rounded, accepted = tf.while_loop(
        lambda index, rounded, accepted: tf.logical_not(accepted),
        attempt,
        (tf.constant(0, tf.int64), floor, tf.constant(False)),
        maximum_iterations=MAX_TRIES,
    )

    def truncate():  # Not from x, which is large: it is no longer in memory.
        is_below = tf.logical_and(floor < 0, fraction > 0)
        truncated = floor + tf.cast(is_below, tf.int32)
        fits = has_norm_at_most(truncated, max_squared_norm)
        return tf.where(fits, truncated, tf.zeros_like(truncated))

    return tf.cond(accepted, lambda: rounded, truncate)


def encode(
    x: tf.Tensor, round_seed: tf.Tensor, encoding: grid.GridEncoding, clip_norm: float
) -> tf.Tensor:
    """Encodes one client's update as integers to be added modulo `encoding.sum_modulus`.

    It clips to `clip_norm` itself, so the bound on the norm of what is sent holds
    for every input. The rounding is a function of the update and the public seed:
    a round that is repeated sends the same integers, and reveals nothing new. Two
    clients with identical updates round identically.

    `x` is float32 of shape [encoding.dim]; NaN or Inf make it count as zero. `round_seed` is the
    public seed of the round, the same for all clients. The result is int32, of shape
    [encoding.padded_dim], with entries in [0, 2 encoding.max_coordinate].
    """
    x = scale_and_clip(x, clip_norm, encoding.scaled_clip_norm)
    rounding_seed = seeds.derive(seeds.derive(round_seed, _ROUNDING_STREAM), _fingerprint(x))
    with tf.control_dependencies([rounding_seed]):  # From then on this x is not needed any more.
        x = tf.pad(x, [[0, encoding.padded_dim - encoding.dim]])
    x = walsh_hadamard.rotate(x, seeds.derive(round_seed, ROTATION_STREAM))
    x = limit_coordinates(x, encoding.max_coordinate)
    rounded = round_conditionally(x, rounding_seed, encoding.max_squared_norm)
    return rounded + encoding.max_coordinate


def decode(
    total: tf.Tensor,
    num_clients: tf.Tensor,
    round_seed: tf.Tensor,
    encoding: grid.GridEncoding,
    clip_norm: float,
) -> tf.Tensor:
    """Decodes the sum of encoded updates.

    `total` is the int32 sum modulo `encoding.sum_modulus` of at most `encoding.max_clients` encoded
    updates, and of noise if `encoding.noise_ratio` is not 0. The result is the float64 sum of the
    clipped updates up to rounding. Decoding adds less than `grid.DECODING_ALLOWANCE` to what one
    client contributes; in float32 it would add up to 5e-4 for some thousands of them.
    """
    centred = total - num_clients * encoding.max_coordinate
    if encoding.noise_ratio:
        centred = to_centre(centred, encoding.sum_modulus)
    x = tf.cast(centred, tf.float64) * encoding.granularity(clip_norm)
    x = walsh_hadamard.unrotate(x, seeds.derive(round_seed, ROTATION_STREAM))
    return x[: encoding.dim]


def to_centre(x: tf.Tensor, modulus: int) -> tf.Tensor:
    """Returns the representatives of integers modulo `modulus` that are nearest to 0.

    Entries of `x`, int32, are above `-modulus` and below `modulus`.
    """
    x = tf.where(x > (modulus - 1) // 2, x - modulus, x)
    return tf.where(x < -(modulus // 2), x + modulus, x)


def _fingerprint(x: tf.Tensor) -> tf.Tensor:
    """Computes a hash of a float32 vector, an int64 scalar that is not negative."""
    data = tf.reshape(tf.bitcast(x, tf.uint8), [1, -1])
    fingerprint = tf.reshape(tf.bitcast(tf.fingerprint(data), tf.int64), [])
    return tf.bitwise.bitwise_and(fingerprint, tf.int64.max)
