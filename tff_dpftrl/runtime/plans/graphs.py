"""Graphs of plans: traced from functions into messages, and made functions again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import tensorflow as tf
from google.protobuf import message

from tff_dpftrl.execution import client_part, graph_function, lent_arrays, secure_noise
from tff_dpftrl.execution import entropy as entropy_lib
from tff_dpftrl.runtime.plans import plan_pb2


def traced(
    function: Callable[..., Sequence[tf.Tensor]],
    specs: Sequence[tf.TensorSpec],
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> plan_pb2.Graph:
    """Traces a function of tensors into a message, with labels of its arguments and results.

    The graph names functions by their order, and neither devices nor lines of source.
    """
    named = [tf.TensorSpec(s.shape, s.dtype, f"input_{i}") for i, s in enumerate(specs)]
    results: list[tf.TensorSpec] = []

    def with_specs(*arguments: tf.Tensor) -> list[tf.Tensor]:
        made = [tf.identity(tensor) for tensor in function(*arguments)]
        results[:] = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in made]
        return made

    graph = graph_function.GraphFunction.trace(with_specs, named)
    graph_def = tf.compat.v1.GraphDef.FromString(graph.graph)
    graph_function.make_canonical(graph_def)
    return plan_pb2.Graph(
        graph_def=graph_def.SerializeToString(deterministic=True),
        inputs=_tensors(graph.inputs, inputs, specs),
        outputs=_tensors(graph.outputs, outputs, results),
    )


def _tensors(
    names: Sequence[str], labels: Sequence[str], specs: Sequence[tf.TensorSpec]
) -> list[plan_pb2.Tensor]:
    for label, spec in zip(labels, specs, strict=True):
        if spec.shape.rank is None:
            raise graph_function.UnsupportedGraphError(
                f"{label} has an unknown number of dimensions: use tf.ensure_shape."
            )
    return list(map(tensor_of, specs, labels, names))


def tensor_of(spec: tf.TensorSpec, label: str, name: str = "") -> plan_pb2.Tensor:
    """Returns a tensor of a plan."""
    shape = [-1 if size is None else size for size in spec.shape]
    return plan_pb2.Tensor(name=name, label=label, dtype=spec.dtype.name, shape=shape)


def spec_of(tensor: plan_pb2.Tensor) -> tf.TensorSpec:
    """Returns shape and dtype of a tensor in a plan."""
    shape = [None if size < 0 else size for size in tensor.shape]
    return tf.TensorSpec(shape, tf.dtypes.as_dtype(tensor.dtype))


def function_of(
    graph: plan_pb2.Graph,
    *,
    variables_from: int | None = None,
    draws_noise: bool = False,
    entropy: entropy_lib.Repeated | None = None,
) -> Callable[..., Sequence[tf.Tensor]]:
    """Makes a function of a trusted graph: from tensors to a list of tensors, on the CPU.

    Arguments from the index `variables_from` on are variables, as `lent_arrays.lent` makes them.
    With `draws_noise` this process draws the secure noise of the graph. The graph reads `entropy`
    in place of the operating system's bits, in tests and audits only.
    """

    def edit(graph_def: tf.compat.v1.GraphDef) -> None:
        if entropy is not None:
            entropy.read_instead(graph_def)
        if draws_noise:
            secure_noise.answer(graph_def)

    specs = [spec_of(tensor) for tensor in graph.inputs]
    call = graph_function.GraphFunction(
        graph.graph_def,
        tuple(tensor.name for tensor in graph.inputs),
        tuple(tensor.name for tensor in graph.outputs),
        tuple(specs),
    ).importer(edit=edit)
    if variables_from is not None:
        call = lent_arrays.taking(call, variables_from, specs[variables_from:])
        specs[variables_from:] = [tf.TensorSpec([], tf.resource)] * (len(specs) - variables_from)
    return client_part.traced(call, specs, device=client_part.CPU)


def results_of(graph: plan_pb2.Graph) -> Sequence[tf.Tensor]:
    """Computes the results of a graph without inputs, once, with few copies of its constants."""
    content, constants = graph.graph_def, {}
    # An unreadable graph is imported as it is: the import's error says what is wrong.
    with contextlib.suppress(message.DecodeError):
        if len(content) >= graph_function.LARGE_BYTES:
            graph_def = tf.compat.v1.GraphDef.FromString(content)
            for node in graph_def.node:
                if (value := graph_function.take_constant(node)) is not None:
                    constants[f"{node.name}:0"] = value
            content = graph_def.SerializeToString() if constants else content
            del graph_def
    specs = tuple(tf.TensorSpec(value.shape, value.dtype) for value in constants.values())
    outputs = tuple(tensor.name for tensor in graph.outputs)
    call = graph_function.GraphFunction(content, tuple(constants), outputs, specs).importer()
    return client_part.traced(call, specs, device=client_part.CPU)(*constants.values())


def adds_in_pairs(graph: plan_pb2.Graph) -> bool:
    """Returns whether a graph certainly adds its first inputs to as many others, and no more.

    Most tasks have such sums. NumPy adds the same numbers without TensorFlow's eager tensors.
    """
    nodes = {node.name: node for node in tf.compat.v1.GraphDef.FromString(graph.graph_def).node}

    def source(name: str) -> tf.compat.v1.NodeDef:
        node = nodes[name.partition(":")[0]]
        while node.op == "Identity" and len(node.input) == 1:
            node = nodes[node.input[0].partition(":")[0]]
        return node

    count = len(graph.outputs)
    if len(graph.inputs) != 2 * count:
        return False
    for one, other, output in zip(
        graph.inputs[:count], graph.inputs[count:], graph.outputs, strict=True
    ):
        kinds = {(tensor.dtype, tuple(tensor.shape)) for tensor in (one, other, output)}
        node = source(output.name)
        if len(kinds) > 1 or -1 in output.shape or node.op != "AddV2" or len(node.input) != 2:
            return False
        added = {source(name).name for name in node.input}
        if added != {one.name.partition(":")[0], other.name.partition(":")[0]}:
            return False
    return True
