"""Graphs of plans name nothing of where they were traced, and compute what was traced."""

import pytest
import tensorflow as tf

from tff_dpftrl.execution import graph_function
from tff_dpftrl.runtime.plans import graphs

_SPEC = tf.TensorSpec([None, 2], tf.float32)


def _function(x):
    @tf.function(autograph=False)
    def never_called(y):
        return y

    with tf.device("/CPU:0"):
        never_called.get_concrete_function(_SPEC)
        total = tf.while_loop(
            lambda i, _: i < 3, lambda i, t: (i + 1, tf.map_fn(tf.square, t)), [0, x]
        )[1]
    return [tf.reduce_sum(total), total]


def _traced(function=_function):
    return graphs.traced(function, [_SPEC], inputs=["x"], outputs=["sum", "powers"])


def test_functions_are_named_by_their_order_and_devices_not_at_all():
    graph = _traced()
    graph_def = tf.compat.v1.GraphDef.FromString(graph.graph_def)
    names = [function.signature.name for function in graph_def.library.function]
    assert names and names == [f"function_{i}" for i in range(len(names))]
    assert not any(node.device for node in graph_function.nodes_of(graph_def))


def test_a_message_says_what_goes_in_and_out():
    graph = _traced()
    assert [(t.label, t.dtype, list(t.shape)) for t in [*graph.inputs, *graph.outputs]] == [
        ("x", "float32", [-1, 2]),
        ("sum", "float32", []),
        ("powers", "float32", [-1, 2]),
    ]


def test_a_function_comes_back():
    total, powers = graphs.function_of(_traced())(tf.constant([[1.0, 2.0]]))
    assert total.numpy() == 257.0
    assert powers.numpy().tolist() == [[1.0, 256.0]]


def test_captured_tensors_are_refused():
    outside = tf.constant([1.0, 2.0])
    with pytest.raises(graph_function.UnsupportedGraphError, match="captures"):
        _traced(lambda x: [x + outside, x])


def test_results_need_a_number_of_dimensions():
    spec = tf.TensorSpec(None, tf.float32)
    with pytest.raises(graph_function.UnsupportedGraphError, match="number of dimensions"):
        graphs.traced(lambda x: [x], [spec], inputs=["x"], outputs=["x"])


_PAIR = [tf.TensorSpec([2], tf.float64), tf.TensorSpec([], tf.int64)]


def _of_pairs(function, specs=(*_PAIR, *_PAIR)):
    labels = [f"{i}" for i in range(len(specs))]
    return graphs.traced(function, specs, inputs=labels, outputs=labels[: len(specs) // 2])


def test_a_graph_that_adds_in_pairs_is_known():
    assert graphs.adds_in_pairs(_of_pairs(lambda a, b, c, d: [a + c, tf.identity(d) + b]))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c, d: [a - c, b + d],
        lambda a, b, c, d: [a + c + c, b + d],
        lambda a, b, c, d: [a + a, b + d],
        lambda a, b, c, d: [a + c, b],
        lambda a, b, c, d: [a + c, b + 2 * d],
        lambda a, b, c, d: [tf.maximum(a + c, 0), b + d],
        lambda a, b, c, d: [a + tf.cast(tf.cast(c, tf.float32), tf.float64), b + d],
    ],
)
def test_a_graph_that_does_anything_else_is_not(function):
    assert not graphs.adds_in_pairs(_of_pairs(function))


def test_a_graph_whose_shapes_differ_adds_not_in_pairs():
    wide, unknown = tf.TensorSpec([3, 2], tf.float64), tf.TensorSpec([None], tf.float64)
    for specs in ((wide, _PAIR[0]), (unknown, unknown)):
        assert not graphs.adds_in_pairs(_of_pairs(lambda a, b: [a + b], specs))
