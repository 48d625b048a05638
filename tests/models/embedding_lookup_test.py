"""Tests of tff_dpftrl.models.embedding_lookup."""

import numpy as np
import tensorflow as tf

from tff_dpftrl.models import embedding_lookup


def test_lookup_adds_up_the_gradients_of_a_row():
    table = tf.constant(np.arange(8.0).reshape(4, 2))
    ids = tf.constant([[3, 0], [3, 3]])
    with tf.GradientTape() as tape:
        tape.watch(table)
        rows = embedding_lookup.lookup(table, ids)
        total = tf.reduce_sum(
            rows * tf.constant([[[1.0, 2], [3, 4]], [[5, 6], [7, 8]]], tf.float64)
        )
    np.testing.assert_array_equal(rows, [[[6, 7], [0, 1]], [[6, 7], [6, 7]]])
    gradient = tape.gradient(total, table)
    assert isinstance(gradient, tf.Tensor)
    np.testing.assert_array_equal(gradient, [[3, 4], [0, 0], [0, 0], [13, 16]])
