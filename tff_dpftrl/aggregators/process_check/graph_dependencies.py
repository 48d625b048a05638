"""Dependencies of the results of a TensorFlow computation on its arguments.

A dependence may be reported that is none, but none is missed. A node of a graph counts
as one step, whatever happens inside a function that it calls, and a graph with variables
or other hidden channels counts as one node.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tff_dpftrl.execution import entropy, graph_function, process_form, tff_names

_HARMLESS_STATEFUL = frozenset(
    ["Assert", "If", "Placeholder", "PrintV2", "StatefulPartitionedCall", "While", *entropy.OPS]
)


@dataclasses.dataclass(frozen=True)
class Dependencies:
    """Indices of arguments on which each result tensor may depend, and whether it may be random."""

    arguments: tuple[frozenset[int], ...]
    random: tuple[bool, ...]


def analyse(
    computation: tff_names.CompiledComputation, num_arguments: int, num_results: int
) -> Dependencies:
    """Reads the graph of a compiled computation.

    Kinds of computations other than TensorFlow's count as one node. The numbers are those of the
    tensors or sequences.
    """
    everything = Dependencies(
        (frozenset(range(num_arguments)),) * num_results, (False,) * num_results
    )
    if computation.proto.WhichOneof("computation") != "tensorflow":
        return everything
    proto = computation.proto.tensorflow
    arguments = process_form.tensor_names(proto.parameter) if num_arguments else []
    results = process_form.tensor_names(proto.result)
    if len(arguments) != num_arguments or len(results) != num_results:
        return everything
    graph_def = tf.compat.v1.GraphDef()
    proto.graph_def.Unpack(graph_def)
    functions = {function.signature.name: function for function in graph_def.library.function}
    random_functions = {
        name for name, function in functions.items() if any(map(_is_random, function.node_def))
    }
    bodies = [graph_def.node, *(function.node_def for function in functions.values())]
    is_known = entropy.is_of_the_system(graph_def) and all(
        _is_harmless(node) for body in bodies for node in body
    )
    if not is_known:
        is_random = any(_is_random(node) for body in bodies for node in body)
        return Dependencies(everything.arguments, (is_random,) * num_results)
    nodes = {node.name: node for node in graph_def.node}
    numbers: dict[str, set[int]] = {}
    for number, name in enumerate(arguments):
        numbers.setdefault(graph_function.operation(name), set()).add(number)
    ancestors = [graph_function.ancestors(nodes, name) for name in results]
    return Dependencies(
        tuple(frozenset().union(*(numbers.get(n, ()) for n in names)) for names in ancestors),
        tuple(
            any(
                _is_random(nodes[name]) or (bool(random_functions) and _calls(nodes[name]))
                for name in names
            )
            for names in ancestors
        ),
    )


def _is_random(node: Any) -> bool:
    """Checks whether a node draws, or reads the bits of the operating system."""
    names = ("Random", "TruncatedNormal", "Multinomial", "TextLineDataset")
    return any(name in node.op for name in names)


def _calls(node: Any) -> bool:
    """Checks whether a node runs functions of the graph's library."""
    return any(graph_function.called_by(node))


def _is_harmless(node: Any) -> bool:
    """Checks whether all effects of a node show in its inputs and outputs."""
    definition = op_def_registry.get(node.op)
    if definition is None:  # An op of a library that is not loaded, or a function called by name.
        return False
    if any(argument.is_ref for argument in (*definition.input_arg, *definition.output_arg)):
        return False
    return not definition.is_stateful or node.op in _HARMLESS_STATEFUL or _is_random(node)
