"""Reductions of datasets as loops: the same values, whatever is reduced."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.execution import client_part, graph_function, reductions

_SPECS = [tf.TensorSpec([], tf.variant), tf.TensorSpec([], tf.float32)]
_ELEMENT = (tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.string))
_VARIABLE = {"dtype": tf.float32, "shape": [], "shared_name": "v"}


def _dataset(variant):
    return tf.data.experimental.from_variant(variant, _ELEMENT)


def _several(variant, shift):
    """State of several tensors, one of which grows, and an argument from outside."""

    def add(state, element):
        (texts, total), (row, text) = state, element
        return tf.concat([texts, [text]], 0), total + tf.reduce_sum(row) - shift

    empty = tf.zeros([0], tf.string)
    return [*_dataset(variant).reduce((empty, shift), add)]


def _in_a_function(variant, shift):
    """A reduction in a function that is called, beside another one that it depends on."""
    one = tf.function(lambda v, s: _several(v, s)[1], autograph=False)
    return [one(variant, one(variant, shift))]


def _with_a_variable(variant, shift):
    """What is reduced is no state but a resource."""
    handle = tf.raw_ops.VarHandleOp(**_VARIABLE)
    with tf.control_dependencies([tf.raw_ops.AssignVariableOp(resource=handle, value=shift)]):
        first = tf.identity(shift)

    def add(count, element):
        row, _ = element
        old = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
        new = 2.0 * old + tf.reduce_sum(row)  # The order counts.
        with tf.control_dependencies([tf.raw_ops.AssignVariableOp(resource=handle, value=new)]):
            return count + 1.0

    count = _dataset(variant).reduce(first, add)
    with tf.control_dependencies([count]):
        return [count, tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)]


def _variant(num_rows):
    rows = tf.data.Dataset.range(num_rows).map(
        lambda i: (tf.ones([i + 1]) / (tf.cast(i, tf.float32) + 3.0), tf.strings.as_string(i))
    )
    return tf.data.experimental.to_variant(rows)


@pytest.mark.parametrize("num_rows", [0, 1, 7])
@pytest.mark.parametrize("function", [_several, _in_a_function, _with_a_variable])
def test_values_stay(function, num_rows):
    graph = graph_function.GraphFunction.trace(function, _SPECS)
    reference, run = (
        tf.function(
            graph.importer(edit=edit), input_signature=_SPECS, autograph=False
        ).get_concrete_function()
        for edit in (None, reductions.unroll)
    )
    for shift in (0.5, 1.5):  # Nothing is left over from a call.
        given = _variant(num_rows), tf.constant(shift)
        for found, expected in zip(run(*given), reference(*given), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("function", [_several, _in_a_function])
def test_no_reduction_is_left_in_a_client(function):
    graph_def = tf.compat.v1.GraphDef.FromString(
        graph_function.GraphFunction.trace(function, _SPECS).graph
    )
    client_part._edit_work(graph_def)
    ops = [node.op for node in graph_function.nodes_of(graph_def)]
    assert "ReduceDataset" not in ops and "MakeIterator" in ops
