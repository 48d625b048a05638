"""Worker that computes chunks of clients for another process, and the encoding of its messages.

Messages are plain data: NumPy arrays, and datasets as the graphs that make them. It
needs TensorFlow only, so that a worker starts without TFF.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.execution import client_part

_FAIL_IF_STATEFUL = 2  # TensorFlow's ExternalStatePolicy.


@dataclasses.dataclass(frozen=True)
class SerializedDataset:
    """Dataset as the graph that makes it, with its options; it starts from the beginning."""

    graph: bytes


@dataclasses.dataclass(frozen=True)
class Failure:
    """Error of TensorFlow in a client's computation."""

    code: int
    message: str

    def error(self) -> tf.errors.OpError:
        """Makes an error of the class that the computation has raised."""
        return tf.compat.v1.errors.exception_type_from_error_code(self.code)(
            None, None, self.message
        )


def encode(tensors: Sequence[tf.Tensor], name: str) -> list[Any]:
    """Encodes the leaves of a value as plain data; refuses a dataset bound to this process."""
    return [_encode_leaf(tensor, name) for tensor in tensors]


def _encode_leaf(tensor: tf.Tensor, name: str) -> Any:
    if tensor.dtype != tf.variant:
        return tensor.numpy()
    try:
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tensor, external_state_policy=_FAIL_IF_STATEFUL
        )
    except tf.errors.FailedPreconditionError as error:
        raise validation.UsageError(
            f"The data of {name} cannot be sent to another process: {error.message} Make its "
            "dataset of tensors and of TensorFlow operations without state (no list of elements, "
            "Python generator or function; stateless random numbers), or give compile_process a "
            "dataset_fn."
        ) from error
    return SerializedDataset(graph.numpy())


def decode(leaves: Sequence[Any]) -> list[tf.Tensor]:
    """Decodes the leaves that `encode` returned to tensors."""
    return [
        tf.raw_ops.DatasetFromGraph(graph_def=leaf.graph)
        if isinstance(leaf, SerializedDataset)
        else tf.convert_to_tensor(leaf)
        for leaf in leaves
    ]


class ClientWorker:
    """Worker that adds up the clients of a chunk, in the order of `client_part`."""

    def __init__(self):
        """Starts without any client part."""
        self._functions: dict[Hashable, client_part.ClientFunctions] = {}

    def sum(
        self,
        key: Hashable,
        get_part: Callable[[], client_part.ClientPart],
        broadcast: Sequence[Any],
        clients: Sequence[Sequence[Any]],
    ) -> list[Any] | Failure:
        """Runs the clients of a chunk and adds up their results.

        `get_part` fetches the client part, and is called the first time that the key is used. All
        values are encoded.
        """
        if key not in self._functions:
            self._functions[key] = client_part.ClientFunctions(get_part())
        functions = self._functions[key]
        try:
            decoded = [decode(values) for values in clients]
            return encode(functions.add(None, decoded, decode(broadcast)), "the sum")
        except tf.errors.OpError as error:
            return Failure(error.error_code, error.message)
