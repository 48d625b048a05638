"""Takes large constants out of a computation, such as the initial weights of a model.

TensorFlow and TFF copy a constant with every parse, import, trace and optimisation of the graph
that holds it: a model's first weights took memory for eighteen copies of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from google.protobuf import message

from tff_dpftrl.execution import graph_function, tff_names

_INDEX = "_large_constant"
"""Attribute of a placeholder that stands for a constant: its position among the constants."""


def take_out(computation: Any) -> tuple[Any, list[tf.Tensor]]:
    """Replaces large constants in a copy of a computation's graphs by placeholders; returns both.

    Constants in the functions of a graph's library stay. Merging and pruning by TFF keep the
    attribute by which `placeholders` finds the placeholders.
    """
    concrete = tff_names.ConcreteComputation
    content = type(concrete.get_proto(computation))()
    content.CopyFrom(concrete.get_proto(computation))
    constants: list[tf.Tensor] = []
    for packed in _graphs(content):
        if packed.ByteSize() < graph_function.LARGE_BYTES:
            continue
        graph = tf.compat.v1.GraphDef()
        packed.Unpack(graph)
        packed.Clear()
        for node in graph.node:
            if (value := graph_function.take_constant(node)) is not None:
                node.attr[_INDEX].i = len(constants)
                constants.append(value)
        packed.Pack(graph)
    if not constants:
        return computation, []
    taken = concrete(
        computation_proto=content,
        context_stack=tff_names.get_context_stack(),
        annotated_type=computation.type_signature,
    )
    return taken, constants


def placeholders(graph: tf.compat.v1.GraphDef, constants: Sequence[tf.Tensor]) -> list[tuple]:
    """Finds the placeholders of `take_out` in a graph, by tensor name, with their constants."""
    return [
        (f"{node.name}:0", constants[node.attr[_INDEX].i])
        for node in graph.node
        if _INDEX in node.attr
    ]


def _graphs(content: message.Message) -> Iterator[Any]:
    """Yields the packed graphs of all TensorFlow computations within a message of TFF."""
    for field, value in content.ListFields():
        if field.type != field.TYPE_MESSAGE:
            continue
        for part in value if field.label == field.LABEL_REPEATED else [value]:
            if field.name == "graph_def":
                yield part
            else:
                yield from _graphs(part)
