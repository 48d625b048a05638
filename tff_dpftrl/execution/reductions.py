"""Loops in the place of `tf.data.Dataset.reduce`, whose function TensorFlow prepares at every call.

That takes most of the time of a client with few examples. TFF's learning processes reduce the
client's dataset in this way by default. Needs TensorFlow only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tff_dpftrl.execution import graph_function

_CALL = "StatefulPartitionedCall"


def unroll(graph_def: tf.compat.v1.GraphDef) -> None:
    """Replaces each `ReduceDataset` of a graph by a call of a loop over an iterator.

    The loop calls the reduced function for one element after the other, as before.
    """
    library = graph_def.library
    signatures = {function.signature.name: function.signature for function in library.function}
    for nodes in [graph_def.node, *(function.node_def for function in list(library.function))]:
        for node in nodes:
            if node.op == "ReduceDataset":
                signature = signatures[node.attr["f"].func.name]
                name = f"{signature.name}_over_{len(library.function)}"
                library.function.extend(_loop(name, node, signature))
                _call(node, name)
    for function in library.function:
        called = {node.name for node in function.node_def if node.op == _CALL}
        for node in function.node_def:
            node.input[:] = [_of_call(name, called) for name in node.input]
        for key, name in function.ret.items():
            function.ret[key] = _of_call(name, called)


def _call(node: Any, name: str) -> None:
    """Makes a `ReduceDataset` the call of a function."""
    types = [tf.variant.as_datatype_enum, *node.attr["Tstate"].list.type]
    types += node.attr["Targuments"].list.type
    results = list(node.attr["output_types"].list.type)
    node.op = _CALL
    node.attr.clear()
    node.attr["f"].func.name = name
    node.attr["Tin"].list.type.extend(types)
    node.attr["Tout"].list.type.extend(results)


def _of_call(name: str, called: set[str]) -> str:
    """Returns the name of an input in a function, whose operation may be a call now."""
    operation, _, output = name.partition(":")
    is_changed = operation in called and output.startswith("components:")
    return f"{operation}:output:{output.partition(':')[2]}" if is_changed else name


def _loop(name: str, node: Any, signature: Any) -> Sequence[Any]:
    """Traces the loop of a reduction, and returns it with the functions that it is made of."""
    dtypes = [tf.as_dtype(argument.type) for argument in signature.input_arg]
    num_state = len(node.attr["Tstate"].list.type)
    num_captured = len(node.attr["Targuments"].list.type)
    element = dtypes[num_state : len(dtypes) - num_captured]
    captured = dtypes[len(dtypes) - num_captured :]
    of_elements = {"output_types": element, "output_shapes": [tf.TensorShape(None)] * len(element)}

    # Stands for the reduced function, which only the graph has.
    @tf.function(input_signature=[tf.TensorSpec(None, dtype) for dtype in dtypes], autograph=False)
    def reduced(*arguments: tf.Tensor) -> list[tf.Tensor]:
        del arguments
        unknown = tf.TensorShape(None)
        return [tf.raw_ops.FakeParam(dtype=dtype, shape=unknown) for dtype in dtypes[:num_state]]

    stand_in = reduced.get_concrete_function()

    def loop(dataset: tf.Tensor, *arguments: tf.Tensor) -> list[tf.Tensor]:
        state, shared = arguments[:num_state], arguments[num_state:]
        with tf.device("/CPU:0"):
            iterator = tf.raw_ops.AnonymousIteratorV3(**of_elements)
            made = tf.raw_ops.MakeIterator(dataset=dataset, iterator=iterator)

        def next_element() -> tuple[tf.Tensor, tf.Tensor]:
            with tf.device("/CPU:0"):
                found = tf.raw_ops.IteratorGetNextAsOptional(iterator=iterator, **of_elements)
                return tf.raw_ops.OptionalHasValue(optional=found), found

        def step(has_value: tf.Tensor, found: tf.Tensor, *state: tf.Tensor) -> list[tf.Tensor]:
            del has_value
            values = tf.raw_ops.OptionalGetValue(optional=found, **of_elements)
            state = stand_in(*state, *values, *shared)
            state = [state] if isinstance(state, tf.Tensor) else state
            with tf.control_dependencies(state):
                return [*next_element(), *state]

        with tf.control_dependencies([made]):
            first = next_element()
        unknown = [tf.TensorShape(None)] * num_state
        _, _, *state = tf.while_loop(
            lambda has_value, *others: has_value,
            step,
            [*first, *state],
            shape_invariants=[tf.TensorShape([]), tf.TensorShape([]), *unknown],
            parallel_iterations=1,
        )
        return state

    specs = [tf.TensorSpec([], tf.variant)]
    specs += [tf.TensorSpec(None, dtype) for dtype in [*dtypes[:num_state], *captured]]
    traced = tf.function(loop, input_signature=specs, autograph=False).get_concrete_function()
    made = tf.compat.v1.GraphDef(library=traced.graph.as_graph_def().library)
    made.library.function.append(traced.function_def)
    names = [function.signature.name for function in made.library.function]
    names = {old: f"{name}_{number}" for number, old in enumerate(names)}
    names[traced.function_def.signature.name] = name
    names[stand_in.function_def.signature.name] = signature.name
    graph_function.rename_functions(made, names)
    for call in graph_function.nodes_of(made):
        if any(function.name == signature.name for function in graph_function.called_by(call)):
            call.op = _CALL  # The reduced function may have state.
    return [one for one in made.library.function if one.signature.name != signature.name]
