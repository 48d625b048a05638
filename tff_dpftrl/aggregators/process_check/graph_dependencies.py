"""Dependencies of the results of a TensorFlow computation on its arguments.

A dependence may be reported that is none, but none is missed. A node of a graph counts
as one step, whatever happens inside a function that it calls, and a graph with variables
or other hidden channels counts as one node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tff_dpftrl.execution import tff_names

_HARMLESS_STATEFUL = frozenset(
    ["Assert", "If", "Placeholder", "PrintV2", "StatefulPartitionedCall", "While"]
)


@dataclasses.dataclass(frozen=True)
class Dependencies:
    """Dependencies of a computation's results, tensor by tensor.

    Attributes:
      arguments: Indices of the argument's tensors on which each tensor of the result may
        depend.
      random: Whether random numbers may be in each tensor of the result.
    """

    arguments: tuple[frozenset[int], ...]
    random: tuple[bool, ...]


def analyse(
    computation: tff_names.CompiledComputation, num_arguments: int, num_results: int
) -> Dependencies:
    """Reads the graph of a compiled computation.

    Args:
      computation: Compiled computation; other kinds than TensorFlow's count as one node.
      num_arguments: Number of tensors (or sequences) in its argument.
      num_results: Number of tensors (or sequences) in its result.

    Returns:
      The dependencies.
    """
    everything = Dependencies(
        (frozenset(range(num_arguments)),) * num_results, (False,) * num_results
    )
    if computation.proto.WhichOneof("computation") != "tensorflow":
        return everything
    proto = computation.proto.tensorflow
    arguments = list(_tensor_names(proto.parameter))
    results = list(_tensor_names(proto.result))
    if len(arguments) != num_arguments or len(results) != num_results:
        return everything
    graph_def = tf.compat.v1.GraphDef()
    proto.graph_def.Unpack(graph_def)
    functions = {function.signature.name: function for function in graph_def.library.function}
    random_functions = {
        name for name, function in functions.items() if any(map(_is_random, function.node_def))
    }
    bodies = [graph_def.node, *(function.node_def for function in functions.values())]
    if not all(_is_harmless(node) for body in bodies for node in body):
        is_random = any(_is_random(node) for body in bodies for node in body)
        return Dependencies(everything.arguments, (is_random,) * num_results)
    nodes = {node.name: node for node in graph_def.node}
    numbers: dict[str, set[int]] = {}
    for number, name in enumerate(arguments):
        numbers.setdefault(_node_name(name), set()).add(number)
    ancestors = [_ancestors(_node_name(name), nodes) for name in results]
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


def _tensor_names(binding: Any) -> Iterator[str]:
    """Yields the names of the tensors of a binding, in the order of the type."""
    match binding.WhichOneof("binding"):
        case "tensor":
            yield binding.tensor.tensor_name
        case "sequence":
            yield binding.sequence.variant_tensor_name
        case "struct":
            for element in binding.struct.element:
                yield from _tensor_names(element)


def _node_name(tensor_name: str) -> str:
    return tensor_name.removeprefix("^").split(":")[0]


def _ancestors(name: str, nodes: dict[str, Any]) -> set[str]:
    """Returns a node and all nodes that it depends on, control dependencies included."""
    visited, pending = set(), [name]
    while pending:
        current = pending.pop()
        if current not in visited:
            visited.add(current)
            pending.extend(_node_name(source) for source in nodes[current].input)
    return visited


def _is_random(node: Any) -> bool:
    return "Random" in node.op or "TruncatedNormal" in node.op or node.op == "Multinomial"


def _calls(node: Any) -> bool:
    """Checks whether a node runs functions of the graph's library."""
    return any(
        attribute.HasField("func") or attribute.list.func for attribute in node.attr.values()
    )


def _is_harmless(node: Any) -> bool:
    """Checks whether all effects of a node show in its inputs and outputs."""
    definition = op_def_registry.get(node.op)
    if definition is None:  # An op of a library that is not loaded, or a function called by name.
        return False
    if any(argument.is_ref for argument in (*definition.input_arg, *definition.output_arg)):
        return False
    return not definition.is_stateful or node.op in _HARMLESS_STATEFUL or _is_random(node)
