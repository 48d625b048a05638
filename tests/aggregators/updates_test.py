"""Tests of updates as flat lists of tensors."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.aggregators import updates

_TYPE = tff.to_type(collections.OrderedDict(b=np.float32, a=((np.float16, (2, 3)), np.float64)))


def test_an_update_is_flattened_and_packed_again():
    update_type = updates.UpdateType(_TYPE)
    assert update_type.shapes == [(2, 3), (), ()]
    value = collections.OrderedDict(b=1.5, a=(np.ones([2, 3], np.float16), 2.5))

    @tff.tensorflow.computation(_TYPE)
    def there_and_back(update):
        tensors = update_type.flatten(update)
        assert [tensor.shape for tensor in tensors] == update_type.shapes
        return update_type.pack_as_update([tf.cast(2 * x, tf.float64) for x in tensors])

    assert there_and_back.type_signature.result.is_equivalent_to(_TYPE)
    doubled = there_and_back(value)
    assert list(doubled) == ["b", "a"] and doubled["b"] == 3.0 and doubled["a"][1] == 5.0
    np.testing.assert_array_equal(doubled["a"][0], 2 * np.ones([2, 3]))


def test_packing_keeps_dtypes_unless_told():
    update_type = updates.UpdateType(_TYPE)
    tensors = [tf.zeros(shape, tf.float64) for shape in update_type.shapes]
    packed = tf.nest.flatten(update_type.pack(tensors))
    assert {tensor.dtype for tensor in packed} == {tf.float64}
    cast = tf.nest.flatten(update_type.pack_as_update(tensors))
    assert [tensor.dtype for tensor in cast] == [spec.dtype for spec in update_type.specs]


@pytest.mark.parametrize(
    "value_type, message",
    [
        (tff.StructType([]), "at least one tensor"),
        (tff.SequenceType(np.float32), "nesting of tensors"),
        (tff.to_type((np.float32, np.int32)), "only floats.*got int32"),
        (tff.TensorType(np.float32, [None]), "static shapes"),
    ],
)
def test_other_types_are_refused(value_type, message):
    with pytest.raises(ValueError, match=message):
        updates.UpdateType(value_type)
