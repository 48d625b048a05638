"""Tensors take the memory of arrays, and leave their values alone."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl import array_files, array_tensors

_SIZE = 40_000  # Large enough for memory that is taken.


def _aligned():
    array = array_files.aligned([_SIZE], np.dtype(np.float32))
    array[:] = np.arange(_SIZE)
    return array


def _address(tensor):
    return np.asarray(tensor).ctypes.data


@pytest.mark.parametrize("writeable", [True, False])
def test_a_tensor_takes_the_memory_of_an_aligned_array(writeable):
    array = _aligned()
    array.flags.writeable = writeable
    made = array_tensors.tensor(array)
    assert _address(made) == array.ctypes.data
    assert array.flags.writeable == writeable


def test_what_a_variable_does_leaves_the_array_alone():
    array = _aligned()
    variable = tf.Variable(array_tensors.tensor(array))
    variable.assign_add(tf.ones([_SIZE]))
    tf.keras.optimizers.Adam(1.0).apply_gradients([(tf.ones([_SIZE]), variable)])
    np.testing.assert_array_equal(array, np.arange(_SIZE))
    assert variable.numpy()[0] != 1.0


def test_the_memory_lives_as_long_as_the_tensor():
    made = array_tensors.tensor(_aligned())
    others = [_aligned() * 0 for _ in range(8)]  # They would take it if it were free.
    np.testing.assert_array_equal(made, np.arange(_SIZE))
    del others


@pytest.mark.parametrize(
    "array",
    [
        np.arange(2 * _SIZE, dtype=np.float64)[1:],  # Aligned for NumPy, not for TensorFlow.
        np.arange(2 * _SIZE, dtype=np.int64)[::2],
        np.arange(_SIZE, dtype=">f4"),
        np.asfortranarray(np.arange(_SIZE, dtype=np.float32).reshape(200, 200)),
        np.arange(_SIZE) % 2 == 0,
        np.float32(3.0),
        np.zeros([0, 5]),
    ],
    ids=["unaligned", "strided", "big endian", "Fortran", "bool", "scalar", "empty"],
)
def test_other_arrays_are_copied(array):
    made = array_tensors.tensor(np.asarray(array))
    np.testing.assert_array_equal(made, array)
    assert made.dtype == tf.as_dtype(np.asarray(array).dtype.newbyteorder("="))
