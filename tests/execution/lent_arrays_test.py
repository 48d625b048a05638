"""Functions of variables that arrays are moved into."""

import gc
import weakref

import numpy as np
import tensorflow as tf

from tff_dpftrl import array_files
from tff_dpftrl.execution import lent_arrays

_SIZE = 40_000
_SPECS = [tf.TensorSpec([_SIZE], tf.float32), tf.TensorSpec([], tf.int64)]


def _arrays():
    large = array_files.aligned([_SIZE], np.dtype(np.float32))
    large[:] = np.arange(_SIZE)
    return [large, np.array(3, np.int64)]


def test_a_function_takes_what_it_is_lent_once():
    def scaled(factor, values, more):
        return [factor * values + tf.cast(more, tf.float32), more]

    taking = lent_arrays.taking(scaled, 1, _SPECS)
    handles = [tf.TensorSpec([], tf.resource)] * 2
    traced = tf.function(taking, input_signature=[tf.TensorSpec([], tf.float32), *handles])
    arrays = _arrays()
    for factor in (1.0, 2.0):
        given = list(arrays)
        values, more = traced(tf.constant(factor), *lent_arrays.lent(given))
        assert given == []
        np.testing.assert_array_equal(values, factor * arrays[0] + 3)
        assert int(more) == 3
    np.testing.assert_array_equal(arrays[0], np.arange(_SIZE))


def test_the_memory_is_free_after_the_last_use():
    traced = tf.function(
        lent_arrays.taking(lambda values, more: [tf.reduce_sum(values)], 0, _SPECS),
        input_signature=[tf.TensorSpec([], tf.resource)] * 2,
    )
    arrays = _arrays()
    memory = weakref.ref(arrays[0].base)
    handles = lent_arrays.lent(arrays)
    assert memory() is not None
    traced(*handles)
    gc.collect()
    assert memory() is None  # Although the handles live.
    assert len(handles) == 2
