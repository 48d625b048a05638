"""Noise of a kernel whose draws are unit vectors."""

import numpy as np
import tensorflow as tf

from tff_dpftrl.private_round import noise_stream


def run_on_basis(recipe, num_rounds):
    """Returns the noise if draw i is the i-th unit vector, shape [num_rounds, num_rounds]."""
    kernel = noise_stream.build_kernel(recipe)

    @tf.function
    def step(buffer, t):
        return kernel.step(buffer, t, lambda i: tf.one_hot(i, num_rounds))

    # Anything in the buffer of a block's first round must be ignored.
    buffer = tf.fill([kernel.num_buffers, num_rounds], 1e6) if kernel.num_buffers else None
    rows = []
    for t in range(num_rounds):
        noise, buffer = step(buffer, tf.constant(t, tf.int64))
        rows.append(noise.numpy())
    return np.stack(rows)
