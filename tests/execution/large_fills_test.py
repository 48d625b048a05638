"""Large tensors of one value: the same values, and no constants of their size."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.execution import graph_function, large_fills

_SPEC = [tf.TensorSpec([], tf.float32)]


def _function(x: tf.Tensor) -> list[tf.Tensor]:
    large = [100, 200]
    return [
        tf.zeros(large, tf.float64),
        tf.constant(-0.0, tf.float32, large) * tf.ones(large),
        tf.cond(x > 0, lambda: tf.fill(large, 3), lambda: tf.ones(large, tf.int32)),
        tf.constant(np.full(large, 7, np.int64)),
        tf.constant(np.arange(20_000, dtype=np.float32)),
        tf.zeros([5]),
    ]


@pytest.mark.parametrize("x", [1.0, -1.0])
def test_values_and_shapes_stay(x):
    graph = graph_function.GraphFunction.trace(_function, _SPEC)
    # Not eagerly: TensorFlow then takes a 0.0 that it met before for -0.0.
    reference, run = (
        tf.function(
            graph.importer(edit=edit), input_signature=_SPEC, autograph=False
        ).get_concrete_function()
        for edit in (None, large_fills.compute)
    )
    assert [tensor.shape for tensor in run.outputs] == [t.shape for t in reference.outputs]
    results = zip(run(tf.constant(x)), reference(tf.constant(x)), strict=True)
    for tensor, expected in results:
        assert tensor.numpy().tobytes() == expected.numpy().tobytes()
    assert np.signbit(run(tf.constant(x))[1]).all()


def test_only_large_tensors_of_one_value_are_computed():
    graph_def = tf.compat.v1.GraphDef.FromString(
        graph_function.GraphFunction.trace(_function, _SPEC).graph
    )
    large_fills.compute(graph_def)
    nodes = list(graph_function.nodes_of(graph_def))
    # Both branches of the condition, zeros, two factors, and the sevens.
    assert sum(node.op == "FakeParam" for node in nodes) == 6
    sizes = [len(node.attr["value"].tensor.tensor_content) for node in nodes if node.op == "Const"]
    assert max(sizes) == 80_000  # The values that differ stay a constant.
    assert sorted(sizes)[-2] < 100


@pytest.mark.parametrize(("edit", "is_folded"), [(None, True), (large_fills.compute, False)])
def test_folding_does_not_make_a_constant_again(edit, is_folded):
    graph = graph_function.GraphFunction.trace(lambda: [tf.zeros([1000, 1000])], [])
    imported = graph.importer(edit=edit)
    run = tf.function(imported, input_signature=[], autograph=False).get_concrete_function()
    assert ("Fill" not in {node.op for node in _optimized(run).node}) == is_folded


def _optimized(run: tf.types.experimental.ConcreteFunction) -> tf.compat.v1.GraphDef:
    """Returns the graph of a function as Grappler leaves it."""
    from tensorflow.python.grappler import tf_optimizer
    from tensorflow.python.training import saver

    graph_def = run.graph.as_graph_def()
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
        output = graph.get_tensor_by_name(run.outputs[0].name)
        graph.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP).append(output.op)
        meta = saver.export_meta_graph(graph_def=graph.as_graph_def(), graph=graph)
    return tf_optimizer.OptimizeGraph(tf.compat.v1.ConfigProto(), meta)
