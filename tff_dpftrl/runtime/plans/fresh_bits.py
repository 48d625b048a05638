"""Finds out whether a plan's graph reads bits of the operating system, without TensorFlow.

A server reads tasks before TensorFlow is imported. What is needed of `tf.GraphDef` is declared here
again, with the numbers of TensorFlow's fields, which never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

_READS = "TextLineDataset"  # Of `private_round.seeds`.
_SOURCE = b"/dev/urandom"
_PACKAGE = "tff_dpftrl.fresh_bits"
_FIELDS = {
    "Tensor": [("string_val", 8, "bytes*")],
    "Value": [("tensor", 8, "Tensor")],
    "Attribute": [("key", 1, "string"), ("value", 2, "Value")],
    "Node": [
        ("name", 1, "string"),
        ("op", 2, "string"),
        ("input", 3, "string*"),
        ("attr", 5, "Attribute*"),
    ],
    "Function": [("node_def", 3, "Node*")],
    "Library": [("function", 1, "Function*")],
    "Graph": [("node", 1, "Node*"), ("library", 2, "Library")],
}
"""Fields of each message: name, number and type, with a star where it is repeated."""


def _graph_class() -> type[message.Message]:
    file = descriptor_pb2.FileDescriptorProto(
        name="tff_dpftrl/fresh_bits.proto", package=_PACKAGE, syntax="proto3"
    )
    field_type = descriptor_pb2.FieldDescriptorProto
    scalars = {"string": field_type.TYPE_STRING, "bytes": field_type.TYPE_BYTES}
    for name, fields in _FIELDS.items():
        described = file.message_type.add(name=name)
        for field, number, kind in fields:
            added = described.field.add(name=field, number=number)
            added.label = (
                field_type.LABEL_REPEATED if kind.endswith("*") else field_type.LABEL_OPTIONAL
            )
            kind = kind.rstrip("*")
            added.type = scalars.get(kind, field_type.TYPE_MESSAGE)
            if kind not in scalars:
                added.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Graph"))


_Graph: Any = _graph_class()


def are_read(graph_def: bytes) -> bool:
    """Returns whether a graph reads bits of the operating system, and no other file.

    Args:
      graph_def: A serialized `tf.GraphDef`. One that cannot be parsed reads none.
    """
    try:
        graph = _Graph.FromString(graph_def)
    except message.DecodeError:
        return False
    files = [file for nodes in _bodies(graph) for file in _files(nodes)]
    return bool(files) and all(file == _SOURCE for file in files)


def _bodies(graph: Any) -> Iterator[Any]:
    yield graph.node
    for function in graph.library.function:
        yield function.node_def


def _files(nodes: Any) -> Iterator[bytes | None]:
    """Yields the name of each file that the nodes of a graph read; None if it is no constant."""
    values = {node.name: node for node in nodes if node.op == "Const"}
    for node in nodes:
        if node.op == _READS:
            named = values.get(node.input[0].partition(":")[0]) if node.input else None
            strings = [
                string
                for attribute in (named.attr if named is not None else ())
                if attribute.key == "value"
                for string in attribute.value.tensor.string_val
            ]
            yield strings[0] if len(strings) == 1 else None
