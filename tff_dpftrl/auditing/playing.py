"""Rounds of an aggregator with clients that an audit makes up.

A client is a flat vector: the numbers of all tensors of an update, one after the other. A release
is a flat vector too. Rounds are compiled: an empty round of small vectors takes 1 to 2 ms then, a
client 0.1 ms. TFF runs a process that cannot be compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import execution
from tff_dpftrl.execution import entropy as entropy_lib
from tff_dpftrl.execution import federated_round
from tff_dpftrl.learning import rounds
from tff_dpftrl.private_round import aggregation as aggregation_lib

_CLIENTS_A_CALL = 64
_MOST_NUMBERS = 1000  # Largest number of recorded entries of one measurement.
_SIGNIFICANT_BITS = {tf.float16: 11, tf.bfloat16: 8}

Resume = Callable[[Any], Any]
"""Function that saves a state and loads it again, as a program does that resumes after a crash."""


@dataclasses.dataclass(frozen=True, eq=False)
class Played:
    """Outcome of a round.

    `released` is the flat result, as the process returned it, float64, shape [dim]. Measured
    numbers have their last names; entries of vectors are "name[index]".
    """

    state: Any
    released: np.ndarray
    measurements: dict[str, float]


class Playable(NamedTuple):
    """Aggregation of updates of one type, with the specs of an update's tensors.

    `pack` makes an update of a list of these tensors. `weight_dtype` is that of a client's weight,
    which comes after its update; None without weights. `compiled` takes a client's function of a
    flat vector, the vector's spec, a runner and repeated bits. It returns an object with
    `initialize` and `next`, and whether it is compiled.
    """

    specs: Sequence[tf.TensorSpec]
    pack: Callable[[Sequence[tf.Tensor]], Any]
    weight_dtype: tf.DType | None
    compiled: Callable[..., tuple[Any, bool]]


def of_aggregation(
    aggregation: aggregation_lib.Aggregation, shapes: Sequence[Sequence[int]]
) -> Playable:
    """Returns an aggregation of float32 updates of these shapes."""
    specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
    weight_dtype = tf.float32 if aggregation.is_weighted else None

    def work(value: Any, broadcast: Any) -> Any:
        update, weight = value if weight_dtype else (value, None)
        plain, secure = aggregation.contribute(update, broadcast, weight)
        return plain, rounds.secure_parts(aggregation, secure)

    def update(state: Any, plain: Any, secure: Mapping[str, Any]) -> Any:
        state, average, measured = aggregation.release(state, plain, secure, shapes)
        return state, ([tf.cast(one, tf.float32) for one in average], measured)

    def compiled(
        value: Any,
        spec: tf.TensorSpec,
        clients: execution.ClientRunner,
        entropy: entropy_lib.Repeated,
    ) -> Any:
        round_ = federated_round.compose(
            initialize=lambda: aggregation.initial_state(shapes),
            client=(specs, tf.TensorSpec([], weight_dtype)) if weight_dtype else specs,
            prepare=aggregation.broadcast,
            work=work,
            update=update,
        )
        process = execution.CompiledProcess(
            round_, dataset_fn=value, tensor_spec=spec, clients=clients, entropy=entropy
        )
        return process, True

    return Playable(specs, list, weight_dtype, compiled)


class Player:
    """Player of rounds: an aggregation whose clients and results are flat vectors of `dim` numbers.

    `significant_bits` are those of each tensor's floats, 24 at most: noise is drawn in float32.
    `largest_value` is the largest number that all floats of an update can hold; float32's at most,
    which clients are made of. With `is_weighted`, the last number of a client's vector is its
    weight. With `is_compiled`, rounds run in this process, without TFF's executor.

    Compiled rounds read `entropy` in place of the operating system's bits. Two rounds from one
    state have the same noise until it is renewed, as for each round of a game.
    """

    def __init__(
        self,
        played: Playable,
        client_weight: float = 1.0,
        entropy: entropy_lib.Repeated | None = None,
    ):
        """Compiles the rounds, which takes a second."""
        self._played = played
        self.entropy = entropy_lib.Repeated() if entropy is None else entropy
        self.sizes = [int(np.prod(spec.shape)) for spec in played.specs]
        self.significant_bits = [_SIGNIFICANT_BITS.get(spec.dtype, 24) for spec in played.specs]
        self.largest_value = min(
            float(dtype.max) for dtype in [tf.float32, *(spec.dtype for spec in played.specs)]
        )
        self.dim = sum(self.sizes)
        self.is_weighted = played.weight_dtype is not None
        self._client_weight = client_weight
        spec = tf.TensorSpec([self.dim + self.is_weighted], tf.float32)
        self._process, self.is_compiled = played.compiled(
            self._value, spec, _InTurn(), self.entropy
        )

    def initialize(self) -> Any:
        """Returns an initial state, with a new seed of the noise each time, and renews the bits."""
        self.entropy.renew()
        return self._process.initialize()

    def next(self, state: Any, clients: Iterable[np.ndarray | tf.Tensor]) -> Played:
        """Runs a round; a client's vector is its update, then its weight if there is one."""
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
        value = self._played.pack(
            [
                tf.cast(tf.reshape(part, spec.shape), spec.dtype)
                for part, spec in zip(parts, self._played.specs, strict=False)
            ]
        )
        if not self.is_weighted:
            return value
        return value, tf.cast(parts[-1][0], self._played.weight_dtype)


def as_arrays(state: Any) -> Any:
    """Returns a state as NumPy arrays, as checkpoints keep it."""
    return tf.nest.map_structure(np.array, state)


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
