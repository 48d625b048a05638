"""Arrays as arguments of TensorFlow functions, whose memory is free when nothing needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tff_dpftrl import array_tensors
from tff_dpftrl.execution import graph_function


def lent(arrays: list[np.ndarray]) -> list[tf.Tensor]:
    """Moves arrays into variables, for the functions that `taking` makes.

    It returns handles of the variables. The list is emptied, so that the memory of arrays is free
    as soon as the function has no use for it, and nobody else has.
    """
    handles = []
    arrays.reverse()
    while arrays:
        value = array_tensors.tensor(arrays.pop())
        with tf.device("/CPU:0"):
            handle = tf.raw_ops.VarHandleOp(
                dtype=value.dtype, shape=value.shape, shared_name=graph_function.ANONYMOUS
            )
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        handles.append(handle)
        del value
    return handles


def taking(
    function: Callable[..., Sequence[tf.Tensor]], begin: int, specs: Sequence[tf.TensorSpec]
) -> Callable[..., Sequence[tf.Tensor]]:
    """Makes a function of variables' handles of a function of tensors, to be traced.

    A caller has a tensor in memory until the function returns. A variable's value goes when the
    function needs it no more.

    Arguments from `begin` on become variables, of these shapes and dtypes. The function empties
    them.
    """

    def read(handle: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype)
        with tf.control_dependencies([value]):
            # TensorFlow would ignore the destruction of a variable without a name.
            nothing = tf.zeros([0], spec.dtype)
            emptied = tf.raw_ops.AssignVariableOp(resource=handle, value=nothing)
        with tf.control_dependencies([emptied]):
            return tf.ensure_shape(value, spec.shape)

    return lambda *given: function(*given[:begin], *map(read, given[begin:], specs))
