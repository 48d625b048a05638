"""Tensors of arrays, without the copies that TensorFlow makes of an array.

`tf.convert_to_tensor` of a large array takes memory for two further ones, and keeps both. Here a
tensor takes the memory of the array itself, if that is aligned as TensorFlow's kernels want it, or
of one aligned copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tff_dpftrl import array_files
from tff_dpftrl.execution import graph_function

_MIN_BYTES = 65_536


def tensor(array: np.ndarray) -> tf.Tensor:
    """Makes a tensor of an array, on the CPU.

    Args:
      array: Array. It must not be changed while the tensor, or one that TensorFlow made of it
        without a copy, is in use.

    Returns:
      The tensor.
    """
    with tf.device("/CPU:0"):
        if array.nbytes < _MIN_BYTES or array.dtype.kind not in "iuf":
            return tf.convert_to_tensor(array)
        is_usable = array.flags.c_contiguous and array.dtype.isnative
        if not is_usable or array.ctypes.data % array_files.ALIGNMENT:
            copied = array_files.aligned(array.shape, array.dtype.newbyteorder("="))
            copied[...] = array
            array = copied
        if not array.flags.writeable:
            array = _writable(array)
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def lent(arrays: list[np.ndarray]) -> list[tf.Tensor]:
    """Moves arrays into variables, for the functions that `taking` makes.

    Args:
      arrays: Arrays. The list is emptied, so that their memory is free as soon as the function has
        no use for it, and nobody else has.

    Returns:
      Handles of the variables.
    """
    handles = []
    arrays.reverse()
    while arrays:
        value = tensor(arrays.pop())
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

    Args:
      function: Function from tensors to tensors.
      begin: Index of the first argument that becomes a variable; so do all after it.
      specs: Shapes and dtypes of these arguments.

    Returns:
      The function, from other arguments and the handles that `lent` returned; it empties the
      variables.
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


def _writable(array: np.ndarray) -> np.ndarray:
    """Returns a view that NumPy lends to others. TensorFlow does not write to memory it is lent."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    memory.owner = array  # pyright: ignore[reportAttributeAccessIssue]
    return np.frombuffer(memory, array.dtype).reshape(array.shape)
