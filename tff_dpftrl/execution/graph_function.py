"""A serialized TensorFlow graph as a function that can be called while another is traced.

It is plain data (a GraphDef, names and specs), so that it can be sent to another process,
and needs TensorFlow only.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from google.protobuf import message

_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"
"""`ResourceHandle::ANONYMOUS_NAME`: a resource of this name is a new one at every run."""

_VARIABLE = "VarHandleOp"
# A static table is the same for all clients: what initialises it again, with the same
# content, does nothing.
_RESOURCES = (_VARIABLE, "HashTableV2")
_COUNTER = itertools.count()


class UnsupportedGraphError(ValueError):
    """A graph holds something that cannot be run again and again in one process."""


@dataclasses.dataclass(frozen=True)
class GraphFunction:
    """A graph with names for what goes in and what comes out.

    Attributes:
      graph: A serialized GraphDef. Variables and tables in it belong to one call.
      inputs: Names of the input tensors.
      outputs: Names of the output tensors.
      input_specs: Shapes and dtypes of the inputs.
      initialize_op: Name of the operation that initialises variables, or "".
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
        """Traces a Python function.

        Args:
          function: From tensors to a sequence of tensors; it may capture nothing.
          specs: Shapes and dtypes of its arguments.

        Returns:
          Its graph.

        Raises:
          UnsupportedGraphError: If it captures tensors or variables from outside.
        """
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

    def importer(self) -> Callable[..., list[tf.Tensor]]:
        """Returns a function to be called on input tensors, inside a `tf.function`.

        Returns:
          From one tensor for each of `inputs` to one for each of `outputs`.

        Raises:
          UnsupportedGraphError: If the graph keeps state other than variables and
            static tables of its own.
        """
        graph_def = tf.compat.v1.GraphDef()
        try:
            graph_def.ParseFromString(self.graph)
        except message.DecodeError as error:
            raise UnsupportedGraphError(f"its graph cannot be read: {error}.") from error
        # Two threads, or two processes of one process tree, never share a name.
        _rename_functions(graph_def, f"_{os.getpid()}_{next(_COUNTER)}")
        variables = _prepare_resources(graph_def, self.initialize_op)
        # TensorFlow's eager context must know the functions, also after this graph is gone.
        library = tf.compat.v1.GraphDef(library=graph_def.library, versions=graph_def.versions)
        tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(library), [])

        def call(*leaves: tf.Tensor) -> list[tf.Tensor]:
            if not self.outputs:
                return []
            *outputs, handles = _import(
                graph_def, dict(zip(self.inputs, leaves, strict=True)), self.outputs, variables
            )
            # An anonymous variable lives until it is destroyed. The automatic control
            # dependencies of a `tf.function` put this after every other use.
            outputs = [tf.identity(output) for output in outputs]
            for handle in handles:
                tf.raw_ops.DestroyResourceOp(resource=handle)
            return outputs

        return call


def _import(graph_def, input_map, outputs, variables):
    names = [*outputs, *(f"{name}:0" for name in variables)]
    tensors = tf.graph_util.import_graph_def(
        graph_def, input_map=input_map, return_elements=names, name=""
    )
    return [*tensors[: len(outputs)], tensors[len(outputs) :]]


def _rename_functions(graph_def: tf.compat.v1.GraphDef, suffix: str) -> None:
    """Makes the names of a graph's functions unique.

    TensorFlow's eager context may know functions of these names, from when the graph was
    traced, and forgets them when that graph is collected.
    """
    names = {f.signature.name: f.signature.name + suffix for f in graph_def.library.function}
    for node in _nodes(graph_def):
        node.op = names.get(node.op, node.op)
        for attr in node.attr.values():
            for function in [attr.func] if attr.HasField("func") else attr.list.func:
                function.name = names.get(function.name, function.name)
    for function in graph_def.library.function:
        function.signature.name = names[function.signature.name]
    for gradient in graph_def.library.gradient:
        gradient.function_name = names.get(gradient.function_name, gradient.function_name)
        gradient.gradient_func = names.get(gradient.gradient_func, gradient.gradient_func)


def _nodes(graph_def: tf.compat.v1.GraphDef) -> Iterator:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def _prepare_resources(graph_def: tf.compat.v1.GraphDef, initialize_op: str) -> list[str]:
    """Gives every run variables of its own, initialised before anything else runs.

    Returns:
      Names of the variables.
    """
    if not initialize_op:
        return []
    initialize_op = initialize_op.partition(":")[0]
    nodes = {node.name: node for node in graph_def.node}
    before = _ancestors(nodes, initialize_op)
    _check_resources(graph_def, before)
    variables = []
    for node in graph_def.node:
        if node.op == _VARIABLE:
            node.attr["shared_name"].s = _ANONYMOUS.encode()
            variables.append(node.name)
        if node.name not in before and node.op not in ("Placeholder", "Const"):
            node.input.append(f"^{initialize_op}")
    return variables


def _check_resources(graph_def: tf.compat.v1.GraphDef, names: set[str]) -> None:
    """Refuses state that a run could not have for itself."""
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
    for name in sorted(names):
        operation = graph.get_operation_by_name(name)
        keeps_state = any(
            output.dtype == tf.resource or output.dtype != output.dtype.base_dtype
            for output in operation.outputs
        )
        if keeps_state and operation.type not in _RESOURCES:
            raise UnsupportedGraphError(
                f"its TensorFlow keeps state in a {operation.type} ({name!r}), which all clients "
                "would share; only variables and static tables can be made anew for each."
            )


def _ancestors(nodes: dict, name: str) -> set[str]:
    """A node and everything that runs before it."""
    found, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += [entry.lstrip("^").partition(":")[0] for entry in nodes[current].input]
    return found
