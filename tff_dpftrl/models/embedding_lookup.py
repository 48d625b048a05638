"""The lookup in an embedding table, with a written-out gradient.

TensorFlow's gradient of a table that is both looked up and multiplied with copies the table.
The lookup can be vectorised by `tf.vectorized_map`. It has first derivatives only.
"""

from __future__ import annotations

import tensorflow as tf


def lookup(table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows of a table; the gradient is dense.

    Args:
      table: Table, floating, shape [V, E], with V known when the graph is made.
      ids: Indices of the rows to return, integer, any shape.

    Returns:
      The rows, of `table`'s dtype, shape [..., E].
    """

    @tf.custom_gradient
    def run(table):
        def gradient(rows):
            return tf.math.unsorted_segment_sum(rows, ids, table.shape[0])

        return tf.gather(table, ids), gradient

    return run(table)
