"""Serialized TensorFlow graph as a function that can be called while another is traced.

It is plain data (a GraphDef, names and specs), so that it can be sent to another process,
and needs TensorFlow only.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import message

from tff_dpftrl import array_tensors, validation

ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"
"""`ResourceHandle::ANONYMOUS_NAME`: a resource of this name is a new one at every run, and
is freed with the last use of its handle, also when the run fails."""

LARGE_BYTES = 65_536
"""Size of a constant from which on it is large: TensorFlow copies a graph many times."""

_NOT_NEEDED = ("_gradient_op_type", "forward_function_name", "backward_function_name")
"""Attributes for differentiating a graph once more, which name functions by counters."""
_UNUSED_ARGUMENT = "___redundant_placeholder"
"""Part of the names of those arguments of a loop's condition that it does not use."""
_VARIABLE = "VarHandleOp"
_STATIC_TABLE = "HashTableV2"
_COUNTER = itertools.count()


class UnsupportedGraphError(validation.UsageError):
    """The graph holds something that cannot run repeatedly in one process."""


@dataclasses.dataclass(frozen=True)
class GraphFunction:
    """Serialized GraphDef with the names of its inputs and outputs, and the specs of the former.

    Variables and tables in it belong to one call. `initialize_op` sets up the variables, or is "".
    """

    graph: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    input_specs: tuple[tf.TensorSpec, ...]
    initialize_op: str = ""

    @classmethod
    def trace(
        cls, function: Callable[..., Sequence[tf.Tensor]], specs: Sequence[tf.TensorSpec]
    ) -> GraphFunction:
        """Traces a Python function, which must not capture tensors or variables from outside."""
        concrete = tf.function(
            function, input_signature=list(specs), autograph=False
        ).get_concrete_function()
        if concrete.captured_inputs:
            raise UnsupportedGraphError(
                "it captures tensors or variables from outside: make them in the function."
            )
        return cls(
            concrete.graph.as_graph_def().SerializeToString(),
            tuple(tensor.name for tensor in concrete.inputs),
            tuple(tensor.name for tensor in concrete.outputs),
            tuple(specs),
        )

    def importer(
        self, *, edit: Callable[[tf.compat.v1.GraphDef], None] | None = None
    ) -> Callable[..., list[tf.Tensor]]:
        """Makes a function that imports the graph, to be called inside a `tf.function`.

        `edit` changes a copy of the graph in place before that. A graph that keeps state in
        anything but variables and static tables is refused (`UnsupportedGraphError`).
        """
        graph_def = tf.compat.v1.GraphDef()
        try:
            graph_def.ParseFromString(self.graph)
        except message.DecodeError as error:
            raise UnsupportedGraphError(f"its graph cannot be read: {error}.") from error
        _separate_resources(graph_def)
        if edit is not None:
            edit(graph_def)
        # TensorFlow's eager context may hold functions of these names from the trace of the
        # graph, and drops them when that graph is collected. And two threads, or two processes
        # of one process tree, must not share a name.
        suffix = f"_{os.getpid()}_{next(_COUNTER)}"
        names = [function.signature.name for function in graph_def.library.function]
        rename_functions(graph_def, {name: name + suffix for name in names})
        _initialize_first(graph_def, operation(self.initialize_op))
        # Registers the functions in TensorFlow's eager context, also after this graph is gone.
        library = tf.compat.v1.GraphDef(library=graph_def.library, versions=graph_def.versions)
        tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(library), [])

        def call(*leaves: tf.Tensor) -> list[tf.Tensor]:
            if not self.outputs:
                return []
            outputs = tf.graph_util.import_graph_def(
                graph_def,
                input_map=dict(zip(self.inputs, leaves, strict=True)),
                return_elements=self.outputs,
                name="",
            )
            return [tf.identity(output) for output in outputs]

        return call


def prune(graph_def: tf.compat.v1.GraphDef, wanted: Sequence[str]) -> None:
    """Drops operations that nothing wanted depends on, as a session does not run them.

    A `tf.function` would run those with state. A Keras model, for instance, looks up its
    embeddings once while it is built, for an input that is never fed.
    """
    nodes = {node.name: node for node in graph_def.node}
    kept = set().union(*(ancestors(nodes, name) for name in wanted))
    nodes_kept = [node for node in graph_def.node if node.name in kept]
    for node in nodes_kept:
        beside = node.attr["_class"].list.s if "_class" in node.attr else ()
        if any(_colocated(name) not in kept for name in beside):
            del node.attr["_class"]  # A colocation constraint: everything runs on one device.
    del graph_def.node[:]
    graph_def.node.extend(nodes_kept)


def rename_functions(graph_def: tf.compat.v1.GraphDef, names: Mapping[str, str]) -> None:
    """Renames all functions of a graph's library, in place and wherever they are called."""
    for node in nodes_of(graph_def):
        node.op = names.get(node.op, node.op)
        for function in called_by(node):
            function.name = names.get(function.name, function.name)
    for function in graph_def.library.function:
        function.signature.name = names[function.signature.name]
    for gradient in graph_def.library.gradient:
        gradient.function_name = names.get(gradient.function_name, gradient.function_name)
        gradient.gradient_func = names.get(gradient.gradient_func, gradient.gradient_func)


def make_canonical(graph_def: tf.compat.v1.GraphDef) -> None:
    """Drops what differs between two traces of the same Python code.

    It names functions by the order of their first calls, drops those that nobody calls, and
    removes devices and lines of source.
    """
    functions = {f.signature.name: f for f in graph_def.library.function}
    new_names: dict[str, str] = {}
    waiting = list(graph_def.node)
    for node in waiting:  # It grows.
        for name in [node.op, *(function.name for function in called_by(node))]:
            if name in functions and name not in new_names:
                new_names[name] = f"function_{len(new_names)}"
                waiting.extend(functions[name].node_def)
    del graph_def.library.function[:], graph_def.library.gradient[:]
    del graph_def.library.registered_gradients[:]
    graph_def.library.function.extend(functions[name] for name in new_names)
    rename_functions(graph_def, new_names)
    for node in nodes_of(graph_def):
        node.device = ""
        node.ClearField("experimental_debug_info")
        for name in _NOT_NEEDED:
            node.attr.pop(name, None)
    for function in graph_def.library.function:
        for place, argument in enumerate(function.signature.input_arg):
            if _UNUSED_ARGUMENT in argument.name:  # It has the former name of its function.
                argument.name = f"unused_{place}"
        for name in _NOT_NEEDED:
            function.attr.pop(name, None)


def take_constant(node: Any) -> tf.Tensor | None:
    """Replaces a large constant, such as a model's initial weights, by a placeholder.

    It returns the constant, on the CPU; None if the node is none of at least `LARGE_BYTES`.
    """
    if node.op != "Const" or node.attr["value"].ByteSize() < LARGE_BYTES:
        return None
    value = node.attr["value"].tensor
    if value.tensor_content:  # Taken without a copy.
        array = np.frombuffer(value.tensor_content, tf.as_dtype(value.dtype).as_numpy_dtype)
        array = array.reshape([dim.size for dim in value.tensor_shape.dim])
    else:
        array = tf.make_ndarray(value)
    node.op = "Placeholder"
    del node.attr["value"], value
    node.attr["shape"].shape.CopyFrom(tf.TensorShape(array.shape).as_proto())
    with tf.init_scope():
        return array_tensors.tensor(array)


def nodes_of(graph_def: tf.compat.v1.GraphDef) -> Iterator:
    """Yields all nodes of a graph and of the functions in its library."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def called_by(node: tf.compat.v1.NodeDef) -> Iterator:
    """Yields the names of functions in a node's attributes, as messages that can be changed."""
    for key in sorted(node.attr):
        attr = node.attr[key]
        yield from [attr.func] if attr.HasField("func") else attr.list.func


def _separate_resources(graph_def: tf.compat.v1.GraphDef) -> None:
    """Keeps runs from sharing state through resources of the same name.

    In TFF's executor, each run has a separate session. Here variables become new ones in
    every run. A static table becomes one that only this graph has: initialising it again,
    with the same content, does nothing.
    """
    named = [node for f in graph_def.library.function for node in f.node_def]
    for node in graph_def.node:
        if node.op == _VARIABLE:
            node.attr["shared_name"].s = ANONYMOUS.encode()
        elif node.op == _STATIC_TABLE:
            node.attr["shared_name"].s = b""
            node.attr["use_node_name_sharing"].b = False
        else:
            named.append(node)
    for node in named:
        if "shared_name" in node.attr:
            raise UnsupportedGraphError(
                f"its TensorFlow keeps state in a {node.op} ({node.name!r}), which all clients "
                "and rounds would share; only variables and static tables can be kept apart."
            )


def _initialize_first(graph_def: tf.compat.v1.GraphDef, initialize_op: str) -> None:
    """Makes all operations wait for the initialisation of variables and tables."""
    if not initialize_op:
        return
    before = ancestors({node.name: node for node in graph_def.node}, initialize_op)
    for node in graph_def.node:
        if node.name not in before and node.op not in ("Placeholder", "Const"):
            node.input.append(f"^{initialize_op}")


def ancestors(nodes: dict, name: str) -> set[str]:
    """Returns a node and all nodes that run before it."""
    visited, waiting = set(), [operation(name)]
    while waiting:
        current = waiting.pop()
        if current not in visited:
            visited.add(current)
            waiting += [operation(entry) for entry in nodes[current].input]
    return visited


def _colocated(name: bytes) -> str:
    """Returns the operation of an entry of the attribute "_class"."""
    return name.decode().removeprefix("loc:@")


def operation(name: str) -> str:
    """Returns the operation of a tensor, or of a control input."""
    return name.lstrip("^").partition(":")[0]
