"""The lookup in an embedding table, with a written-out gradient.

TensorFlow's gradient of a table that is both looked up and multiplied with copies the table.
The lookup can be vectorised by `tf.vectorized_map`. It has first derivatives only.
"""

from __future__ import annotations

import tensorflow as tf


def lookup(table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows of a table, shape [..., E], with a dense gradient.

    `table` is floating, shape [V, E], with V known when the graph is made. `ids` are integers of
    any shape.
    """

    @tf.custom_gradient
    def run(table):
        def gradient(rows):
            return tf.math.unsorted_segment_sum(rows, ids, table.shape[0])

        return tf.gather(table, ids), gradient

    return run(table)
