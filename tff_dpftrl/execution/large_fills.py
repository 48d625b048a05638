"""Large tensors of one value, such as the zeros that a sum begins with, computed when needed.

TensorFlow makes constants of them, and keeps five copies of the model. Needs TensorFlow only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

OPS = frozenset({"FakeParam"})
"""Operations that `compute` adds, beside those of every graph; no bit of their values is used."""

_MIN_BYTES = 65_536


def compute(graph_def: tf.compat.v1.GraphDef) -> None:
    """Makes a graph compute large tensors of one value whenever it runs, and hold none of them.

    Their size is computed from an operation that TensorFlow never folds to a constant.
    """
    _compute(graph_def.node, is_function=False)
    for function in graph_def.library.function:
        _compute(function.node_def, is_function=True)


def _compute(nodes: Any, *, is_function: bool) -> None:
    constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
    for node in list(nodes):
        if (fill := _fill_of(node, constants)) is not None:
            _replace(nodes, node, *fill, is_function=is_function)


def _replace(
    nodes: Any, node: Any, dims: list[int], value: np.ndarray, *, is_function: bool
) -> None:
    """Makes a node the result of a `Fill` whose size is computed."""
    controls = [name for name in node.input if name.startswith("^")]

    def add(name: str, op: str, inputs: Sequence[str] = (), **attributes: Any) -> None:
        new = nodes.add(name=f"{node.name}/computed_{name}", op=op, device=node.device)
        new.input.extend([*inputs, *controls])
        for key, attribute in attributes.items():
            _set_attribute(new.attr[key], attribute)

    def output(name: str, argument: str) -> str:
        path = f"{node.name}/computed_{name}"
        return f"{path}:{argument}:0" if is_function else path

    add("value", "Const", dtype=value.dtype, value=value)
    add("dims", "Const", dtype=np.int32, value=np.array(dims, np.int32))
    add("none", "Const", dtype=np.int32, value=np.array(0, np.int32))
    # Never folded to a constant. Its value is undefined: none of its bits is used.
    add("any", "FakeParam", dtype=np.int32, shape=tf.TensorShape([]))
    add("zero", "BitwiseAnd", [output("any", "output"), output("none", "output")], T=np.int32)
    add("shape", "AddV2", [output("dims", "output"), output("zero", "z")], T=np.int32)
    filled = [output("shape", "z"), output("value", "output")]
    add("fill", "Fill", filled, T=value.dtype, index_type=np.int32)
    node.op = "EnsureShape"
    node.ClearField("input")
    node.input.append(output("fill", "output"))
    node.attr.clear()
    _set_attribute(node.attr["T"], value.dtype)
    _set_attribute(node.attr["shape"], tf.TensorShape(dims))


def _fill_of(node: Any, constants: dict[str, Any]) -> tuple[list[int], np.ndarray] | None:
    """Returns shape and value of the large tensor of one value that a node makes, if it does."""
    if node.op == "Const":
        value = node.attr["value"].tensor
        dims = [dim.size for dim in value.tensor_shape.dim]
    elif node.op == "Fill":
        made_of = [constants.get(name.partition(":")[0]) for name in node.input[:2]]
        if None in made_of:
            return None
        dims, value = tf.make_ndarray(made_of[0]).tolist(), made_of[1]
    else:
        return None
    dtype = tf.as_dtype(value.dtype)
    if not (dtype.is_floating or dtype.is_integer) or math.prod(dims) * dtype.size < _MIN_BYTES:
        return None
    return None if (scalar := _scalar(value, dtype)) is None else (dims, scalar)


def _scalar(value: Any, dtype: tf.DType) -> np.ndarray | None:
    """Returns the only value of a tensor, without making the tensor; None if it has others."""
    if value.tensor_content:
        size = dtype.size
        content = np.frombuffer(value.tensor_content, np.uint8).reshape(-1, size)
        if not (content == content[0]).all():
            return None
        return np.frombuffer(value.tensor_content[:size], dtype.as_numpy_dtype)[0, ...]
    scalar = type(value)()
    scalar.CopyFrom(value)
    del scalar.tensor_shape.dim[:]
    fields = [field for _, field in scalar.ListFields() if hasattr(field, "__len__")]
    if any(len(field) > 1 for field in fields):
        return None
    return tf.make_ndarray(scalar)


def _set_attribute(attribute: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        attribute.tensor.CopyFrom(tf.make_tensor_proto(value))
    elif isinstance(value, tf.TensorShape):
        attribute.shape.CopyFrom(value.as_proto())
    else:
        attribute.type = tf.as_dtype(value).as_datatype_enum
