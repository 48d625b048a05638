"""Rounds of an aggregator with clients that an audit makes up.

A client is a flat vector, the numbers of all tensors of an update one after the other; what
is released comes back as one too. Rounds run through `execution.compile_process`, or by TFF
where a process cannot be compiled: an empty round of small vectors takes 1 to 2 ms then,
a client 0.1 ms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import execution, validation
from tff_dpftrl.aggregators import updates
from tff_dpftrl.execution import leaves

_CLIENTS_A_CALL = 64
_MOST_NUMBERS = 1000  # Of one measurement.
_SIGNIFICANT_BITS = {tf.float16: 11, tf.bfloat16: 8}

Resume = Callable[[Any], Any]
"""Saves a state and loads it again, as a program would that goes on after a crash."""


@dataclasses.dataclass(frozen=True, eq=False)
class Played:
    """What a round gave.

    Attributes:
      state: The process's state after it.
      released: float64, [dim]: the result, flat, as the process returned it.
      measurements: Numbers that it measured, by their last names; of vectors "name[index]".
    """

    state: Any
    released: np.ndarray
    measurements: dict[str, float]


class Player:
    """An aggregation process whose clients and results are flat vectors.

    Attributes:
      sizes: Numbers of coordinates of the update's tensors.
      significant_bits: Of the floats of each of them, 24 at most: noise is drawn in float32.
      dim: Their sum.
      largest_value: Largest number that all of its floats can be; float32's at most, which
        clients are made of.
      is_weighted: Whether each client has a weight too: the last number of its vector.
      is_compiled: Whether rounds run in this process, without TFF's executor.
    """

    def __init__(self, process: tff.templates.AggregationProcess, client_weight: float = 1.0):
        """Compiles the process, which takes a second.

        Args:
          process: The process. Its updates are floats of static shapes.
          client_weight: Weight of clients of which nothing else is said.

        Raises:
          ValueError: If its values are of another type, or its weights no numbers.
        """
        parameters = list(process.next.type_signature.parameter)
        value_type = leaves.member(parameters[1])
        self._update = updates.UpdateType(value_type)
        self.sizes = [int(np.prod(shape)) for shape in self._update.shapes]
        self.significant_bits = [
            _SIGNIFICANT_BITS.get(spec.dtype, 24) for spec in self._update.specs
        ]
        self.largest_value = min(
            float(dtype.max) for dtype in [tf.float32, *(spec.dtype for spec in self._update.specs)]
        )
        self.dim = sum(self.sizes)
        self.is_weighted = len(parameters) > 2
        self._client_weight = client_weight
        self._weight_type = leaves.member(parameters[2]) if self.is_weighted else None
        if self.is_weighted and not isinstance(self._weight_type, tff.TensorType):
            raise validation.UsageError(
                f"aggregator must take a number as a client's weight, got {self._weight_type}."
            )
        process = _of_one_argument(process, value_type, self._weight_type)
        length = self.dim + self.is_weighted
        try:
            self._process = execution.compile_process(
                process,
                dataset_fn=self._value,
                tensor_spec=tf.TensorSpec([length], tf.float32),
                clients=_InTurn(),
            )
            self.is_compiled = True
        except execution.NotCompilableError:
            self._process = process
            self.is_compiled = False

    def initialize(self) -> Any:
        """A first state, with noise of its own."""
        return self._process.initialize()

    def next(self, state: Any, clients: Iterable[np.ndarray | tf.Tensor]) -> Played:
        """Runs a round.

        Args:
          state: What `initialize` or an earlier round returned, or NumPy arrays.
          clients: A vector for each client: its update, then its weight if there is one.

        Returns:
          What it gave.
        """
        clients = list(clients)
        if not self.is_compiled:
            clients = [tf.nest.map_structure(np.array, self._value(client)) for client in clients]
        state, (result, measured) = self._process.next(state, clients)
        parts = [np.ravel(leaf).astype(np.float64) for leaf in tf.nest.flatten(result)]
        return Played(state, np.concatenate(parts), _numbers(measured))

    def client(self, update: np.ndarray, weight: float | None = None) -> np.ndarray:
        """The vector of a client with this update; of `client_weight` if None is given."""
        vector = np.asarray(update, np.float32)
        weight = self._client_weight if weight is None else weight
        return np.append(vector, np.float32(weight)) if self.is_weighted else vector

    def zeroed(self) -> np.ndarray:
        """The vector of a client that is zeroed out, its weight too."""
        return self.client(np.zeros(self.dim), 0.0)

    def _value(self, vector: Any) -> Any:
        """A client's value from its vector."""
        sizes = [*self.sizes, 1] if self.is_weighted else self.sizes
        parts = tf.split(tf.convert_to_tensor(vector, tf.float32), sizes)
        shaped = [
            tf.reshape(part, shape) for part, shape in zip(parts, self._update.shapes, strict=False)
        ]
        value = self._update.pack_as_update(shaped)
        if not self.is_weighted:
            return value
        return value, tf.cast(parts[-1][0], self._weight_type.dtype)


def saved(state: Any) -> Any:
    """A state as NumPy arrays, as checkpoints keep it."""
    return tf.nest.map_structure(np.array, state)


def _of_one_argument(
    process: tff.templates.AggregationProcess,
    value_type: tff.Type,
    weight_type: tff.Type | None,
) -> tff.templates.IterativeProcess:
    """The process with one argument a client and two results, as can be compiled."""
    state_type = process.next.type_signature.parameter[0]
    if weight_type is None:

        @tff.federated_computation(state_type, tff.FederatedType(value_type, tff.CLIENTS))
        def next_fn(state, value):
            output = process.next(state, value)
            return output.state, tff.federated_zip((output.result, output.measurements))

    else:
        pair_type = tff.FederatedType(tff.StructType([value_type, weight_type]), tff.CLIENTS)

        @tff.federated_computation(state_type, pair_type)
        def next_fn(state, pair):
            output = process.next(state, pair[0], pair[1])
            return output.state, tff.federated_zip((output.result, output.measurements))

    return tff.templates.IterativeProcess(process.initialize, next_fn)


def _numbers(measured: Any) -> dict[str, float]:
    """Numbers among measurements, by name."""
    if not isinstance(measured, dict):
        return {}
    found = {}
    for name, value in measured.items():
        if isinstance(value, dict):
            found |= _numbers(value)
            continue
        try:
            values = np.asarray(value, float)
        except (TypeError, ValueError):
            continue
        if values.ndim == 0:
            found[name] = float(values)
        else:
            found |= {
                f"{name}[{i}]": float(x) for i, x in enumerate(values.ravel()[:_MOST_NUMBERS])
            }
    return found


class _InTurn(execution.ClientRunner):
    """Runs clients one after the other: theirs take less time than handing them to threads."""

    def sum(self, functions, clients, broadcast):
        """As the base class says."""
        total = functions.zero()
        for first in range(0, len(clients), _CLIENTS_A_CALL):
            some: Sequence = clients[first : first + _CLIENTS_A_CALL]
            total = functions.add(total, [values() for values in some], broadcast)
        return total

    def close(self):
        """As the base class says."""
