"""Rounds of an aggregator with clients that an audit makes up.

A client is a flat vector: the numbers of all tensors of an update, one after the other. A release
is a flat vector too. Rounds run through `execution.compile_process`: an empty round of small
vectors takes 1 to 2 ms then, a client 0.1 ms. TFF runs a process that cannot be compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import override

from tff_dpftrl import execution, validation
from tff_dpftrl.aggregators import updates
from tff_dpftrl.execution import leaves, tff_names

_CLIENTS_A_CALL = 64
_MOST_NUMBERS = 1000  # Largest number of recorded entries of one measurement.
_SIGNIFICANT_BITS = {tf.float16: 11, tf.bfloat16: 8}

Resume = Callable[[Any], Any]
"""Function that saves a state and loads it again, as a program does that resumes after a crash."""


@dataclasses.dataclass(frozen=True, eq=False)
class Played:
    """The outcome of a round.

    Attributes:
      state: State of the process after the round.
      released: Flat result, as the process returned it, float64, shape [dim].
      measurements: Measured numbers by their last names; "name[index]" for entries of vectors.
    """

    state: Any
    released: np.ndarray
    measurements: dict[str, float]


class Player:
    """A player of rounds: an aggregation process whose clients and results are flat vectors.

    Attributes:
      sizes: Numbers of coordinates of the update's tensors.
      significant_bits: Significant bits of the floats of each tensor, 24 at most: noise is
        drawn in float32.
      dim: Number of coordinates of all tensors together.
      largest_value: Largest number that all floats of an update can hold; float32's at most,
        which clients are made of.
      is_weighted: Whether each client has a weight, the last number of its vector.
      is_compiled: Whether rounds run in this process, without TFF's executor.
    """

    def __init__(self, process: tff.templates.AggregationProcess, client_weight: float = 1.0):
        """Compiles the process, which takes a second.

        Args:
          process: Aggregation process whose updates are floats of static shapes.
          client_weight: Default weight of a client.

        Raises:
          ValueError: If its values are of another type, or its weights are not numbers.
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
        if self.is_weighted and not isinstance(self._weight_type, tff_names.TensorType):
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
        """Returns an initial state, with a new seed of the noise each time."""
        return self._process.initialize()

    def next(self, state: Any, clients: Iterable[np.ndarray | tf.Tensor]) -> Played:
        """Runs a round.

        Args:
          state: State from `initialize` or an earlier round, or its NumPy arrays.
          clients: Vector of each client: its update, then its weight if there is one.

        Returns:
          The outcome.
        """
        clients = list(clients)
        if not self.is_compiled:
            clients = [tf.nest.map_structure(np.array, self._value(client)) for client in clients]
        state, (result, measured) = self._process.next(state, clients)
        parts = [np.ravel(leaf).astype(np.float64) for leaf in tf.nest.flatten(result)]
        return Played(state, np.concatenate(parts), _numbers(measured))

    def client(self, update: np.ndarray, weight: float | None = None) -> np.ndarray:
        """Returns the vector of a client; its weight is `client_weight` if None is given."""
        vector = np.asarray(update, np.float32)
        weight = self._client_weight if weight is None else weight
        return np.append(vector, np.float32(weight)) if self.is_weighted else vector

    def zeroed(self) -> np.ndarray:
        """Returns the vector of a client that is zeroed out, with its weight."""
        return self.client(np.zeros(self.dim), 0.0)

    def _value(self, vector: Any) -> Any:
        """Returns a client's value from its vector."""
        sizes = [*self.sizes, 1] if self.is_weighted else self.sizes
        parts = tf.split(tf.convert_to_tensor(vector, tf.float32), sizes)
        shaped = [
            tf.reshape(part, shape) for part, shape in zip(parts, self._update.shapes, strict=False)
        ]
        value = self._update.pack_as_update(shaped)
        if not self.is_weighted:
            return value
        return value, tf.cast(parts[-1][0], self._weight_type.dtype)


def as_arrays(state: Any) -> Any:
    """Returns a state as NumPy arrays, as checkpoints keep it."""
    return tf.nest.map_structure(np.array, state)


def _of_one_argument(
    process: tff.templates.AggregationProcess,
    value_type: tff_names.Type,
    weight_type: tff_names.Type | None,
) -> tff.templates.IterativeProcess:
    """Returns the process with one argument a client and two results, which can be compiled."""
    state_type = process.next.type_signature.parameter[0]
    if weight_type is None:

        @tff_names.federated_computation(
            state_type, tff_names.FederatedType(value_type, tff_names.CLIENTS)
        )
        def next_fn(state, value):
            output = process.next(state, value)
            return output.state, tff_names.federated_zip((output.result, output.measurements))

    else:
        pair_type = tff_names.FederatedType(
            tff_names.StructType([value_type, weight_type]), tff_names.CLIENTS
        )

        @tff_names.federated_computation(state_type, pair_type)
        def next_fn(state, pair):
            output = process.next(state, pair[0], pair[1])
            return output.state, tff_names.federated_zip((output.result, output.measurements))

    return tff.templates.IterativeProcess(process.initialize, next_fn)


def _numbers(measured: Any) -> dict[str, float]:
    """Returns the numbers among measurements, by name."""
    if not isinstance(measured, dict):
        return {}
    numbers = {}
    for name, value in measured.items():
        if isinstance(value, dict):
            numbers |= _numbers(value)
            continue
        try:
            values = np.asarray(value, float)
        except (TypeError, ValueError):
            continue
        if values.ndim == 0:
            numbers[name] = float(values)
        else:
            numbers |= {
                f"{name}[{i}]": float(x) for i, x in enumerate(values.ravel()[:_MOST_NUMBERS])
            }
    return numbers


class _InTurn(execution.ClientRunner):
    """Runs clients one after the other: they take less time than handing them to threads."""

    @override
    def sum(self, functions, clients, broadcast):
        total = None
        for first in range(0, len(clients), _CLIENTS_A_CALL):
            some: Sequence = clients[first : first + _CLIENTS_A_CALL]
            total = functions.add(total, [values() for values in some], broadcast)
        return functions.zero() if total is None else total

    @override
    def close(self):
        pass
