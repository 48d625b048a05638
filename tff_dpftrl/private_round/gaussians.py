"""Standard Gaussians from a seed: the draws that all noise is made of.

A change of their values needs a new `private_round.NOISE_VERSION`.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tff_dpftrl.private_round import secure_calls, seeds


def normal(seed: tf.Tensor, size: int, scale: tf.Tensor | float = 1.0) -> tf.Tensor:
    """Draws independent standard Gaussians, without the gaps of `tf.random.stateless_normal`.

    TensorFlow makes a pair of draws from a uniform number of 23 bits, not below 1e-7.
    No pair is ever farther out than 5.68, and its distances from the origin are a grid:
    a sum off that grid reveals that there was a client. Here the distance has 64 bits.

    They are float32, of shape [size]; of a secure seed, float64, and times `scale` before they are
    rounded to their grid. It is 1 for Philox.
    """
    if seeds.is_secure(seed):
        return secure_calls.normal(tf.convert_to_tensor(seed), size, scale)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    words = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[3, (size + 1) // 2], key=key, counter=counter, alg=seeds.PHILOX, dtype=tf.uint32
    )
    return tf.reshape(gaussians_from_words(words), [-1])[:size]


def gaussians_from_words(words: tf.Tensor) -> tf.Tensor:
    """Applies Box and Muller's transform, exact to float32 rounding near 0 and in the tail.

    Half the squared distance of a pair is exponential: -log(u) or, with equal
    probability, -log(1 - u), for u uniform in (0, 1/2). So small and large distances
    both come from small u, of which a float32 keeps all leading bits.

    `words` are independent random bits, uint32, of shape [3, n]: the sign and the upper bits of u,
    its lower bits, and the angle. The result is float32, of shape [2, n].
    """
    upper, lower, angle = tf.unstack(words)
    is_far = upper >= tf.constant(1 << 31, tf.uint32)
    upper = tf.bitwise.bitwise_and(upper, tf.constant((1 << 31) - 1, tf.uint32))
    u = tf.cast(upper, tf.float32) * 2.0**-32 + (tf.cast(lower, tf.float32) + 0.5) * 2.0**-64
    radius = tf.sqrt(2.0 * tf.where(is_far, -tf.math.log(u), -tf.math.log1p(-u)))
    angle = (tf.cast(angle, tf.float32) + 0.5) * (2.0 * math.pi * 2.0**-32)
    return tf.stack([radius * tf.cos(angle), radius * tf.sin(angle)])
