"""Tensors of arrays, without the copies that TensorFlow makes of an array.

`tf.convert_to_tensor` of a large array makes two copies, and keeps both. Here a tensor takes the
memory of the array itself, if that is aligned as TensorFlow's kernels want it, or of one copy.
"""

from __future__ import annotations

import ctypes

import numpy as np
import tensorflow as tf

from tff_dpftrl import array_files

_MIN_BYTES = 65_536


def tensor(array: np.ndarray) -> tf.Tensor:
    """Makes a tensor of an array, on the CPU.

    The array must not be changed while the tensor, or one that TensorFlow made of it without a
    copy, is in use.
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


def _writable(array: np.ndarray) -> np.ndarray:
    """Returns a view that NumPy lends to others. TensorFlow does not write to memory it is lent."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    memory.owner = array  # pyright: ignore[reportAttributeAccessIssue]
    return np.frombuffer(memoryview(memory), array.dtype).reshape(array.shape)
