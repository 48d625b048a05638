"""Sums over clients by secure modular sums of integers, as TFF aggregation factories.

The aggregators of `secagg` have them as inner sums, and they can be used by
themselves. Compiled processes run them, and execution contexts of TFF with an implementation
of secure sums. Others fail in a round, with the line of `execution.check_secure_sums`.
"""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.aggregators import computations, updates
from tff_dpftrl.discretization import grid
from tff_dpftrl.execution import secure_sum_check, tff_names
from tff_dpftrl.private_round import discretize, seeds

COUNT_MODULUS = 2**31 - 1
"""Modulus of sums of counts."""


class SecAggSumState(NamedTuple):
    """State of the sum between rounds. Public: every client receives it.

    Attributes:
      round_index: int64 scalar, the index of the next round.
      rotation_seed: Seed of every round's rotation, int64 tensor of shape [2], unrelated
        to the seed of the noise.
    """

    round_index: Any
    rotation_seed: Any


class SecAggSumFactory(tff.aggregators.UnweightedAggregationFactory):
    """TFF factory of sums over clients by secure modular sums of integers.

    The result is the sum of the updates, each clipped to `clip_norm`, up to
    rounding: per coordinate, a stddev of at most `encoding.rounding_stddev_bound`.
    No client contributes more than `contribution_norm` to its L2 norm. Updates are
    clipped here even if the caller has clipped them by other rules before.

    Clients compute in float32. The sum is exact, and decoded in float64 before it is
    cast to the dtypes of the updates. In float32 that cast would add rounding that
    the noise does not cover, so a private caller gives updates in float64.

    Any number of clients from 0 to `encoding.max_clients` is summed exactly as
    sent; with more the round fails, because the sum might have wrapped around.
    The measurement "summed_clients" is the number of clients in the sum.

    Attributes:
      encoding: Grid of the encoded updates.
      clip_norm: L2 norm C that each update is clipped to before rounding.
    """

    sum_dtype = np.float64

    def __init__(
        self, encoding: grid.GridEncoding, clip_norm: float, *, rotation_seed: int | None = None
    ):
        """Initialises the factory.

        Args:
          encoding: Grid of the encoded updates, which have `encoding.dim` numbers in total.
          clip_norm: L2 clip norm C. With adaptive clipping it is 1, for updates that are
            divided by the active clip norm.
          rotation_seed: Public seed of the rotations, an integer in [0, 2^128); from the
            operating system if None. A given seed does not harm privacy, only the
            independence of the updates and the rotation.

        Raises:
          ValueError: If an argument is out of range.
        """
        self.encoding = encoding
        self.clip_norm = validation.clip_norm("clip_norm", clip_norm)
        self._rotation_seed = validation.seed("rotation_seed", rotation_seed)

    @property
    def contribution_norm(self) -> float:
        """Inflated clip norm, the L2 sensitivity of the sum to one client, whatever it sends."""
        return self.encoding.inflated_clip_norm(self.clip_norm)

    def create(self, value_type: tff_names.Type) -> tff.templates.AggregationProcess:
        """Creates the process for updates of one type.

        Args:
          value_type: Type of an update, a floating-point tensor or any nesting of such
            tensors.

        Returns:
          The process; its state is a `SecAggSumState`.

        Raises:
          ValueError: If the type is not of `encoding.dim` floats of static shape.
        """
        secure_sum_check.explain_missing_secure_sums()
        update = updates.UpdateType(value_type)
        sizes = [math.prod(shape) for shape in update.shapes]
        if sum(sizes) != self.encoding.dim:
            raise validation.UsageError(
                f"encoding is for dim {self.encoding.dim}, but an update has {sum(sizes)} numbers: "
                f"build the encoding with dim={sum(sizes)}."
            )

        @computations.tensorflow
        def initial_state():
            return SecAggSumState(tf.constant(0, tf.int64), seeds.root_seed(self._rotation_seed))

        state_type = initial_state.type_signature.result

        @computations.federated
        def initialize():
            return tff_names.federated_eval(initial_state, tff_names.SERVER)

        @computations.tensorflow(state_type)
        def start_round(state):
            round_seed = seeds.derive(state.rotation_seed, state.round_index)
            return round_seed, SecAggSumState(state.round_index + 1, state.rotation_seed)

        seed_type = start_round.type_signature.result[0]

        @computations.tensorflow(value_type, seed_type)
        def encode(value, round_seed):
            parts = [tf.reshape(tf.cast(t, tf.float32), [-1]) for t in update.flatten(value)]
            flat = tf.concat(parts, axis=0)
            vector = discretize.encode(flat, round_seed, self.encoding, self.clip_norm)
            return collections.OrderedDict(vector=vector, count=tf.constant(1, tf.int32))

        @computations.tensorflow(encode.type_signature.result, seed_type)
        def decode(total, round_seed):
            too_many = tf.debugging.assert_less_equal(
                total["count"],
                self.encoding.max_clients,
                message=(
                    "More clients were summed than the encoding's max_clients, so the sum may have "
                    "wrapped around. Discard the round and build the encoding for more clients."
                ),
            )
            with tf.control_dependencies([too_many]):
                count = tf.identity(total["count"])
            flat = discretize.decode(
                total["vector"], count, round_seed, self.encoding, self.clip_norm
            )
            tensors = [
                tf.reshape(part, spec.shape)
                for part, spec in zip(tf.split(flat, sizes), update.specs, strict=True)
            ]
            return update.pack_as_update(tensors), count

        @computations.federated(
            initialize.type_signature.result, tff_names.FederatedType(value_type, tff_names.CLIENTS)
        )
        def next_fn(state, value):
            round_seed, new_state = tff_names.federated_map(start_round, state)
            encoded = tff_names.federated_map(
                encode, (value, tff_names.federated_broadcast(round_seed))
            )
            total = tff_names.federated_secure_modular_sum(
                encoded,
                collections.OrderedDict(vector=self.encoding.sum_modulus, count=COUNT_MODULUS),
            )
            result, count = tff_names.federated_map(decode, (total, round_seed))
            return tff.templates.MeasuredProcessOutput(
                state=new_state,
                result=result,
                measurements=tff_names.federated_zip(collections.OrderedDict(summed_clients=count)),
            )

        return tff.templates.AggregationProcess(initialize, next_fn)


class SecAggHalfBitFactory(tff.aggregators.UnweightedAggregationFactory):
    """TFF factory of exact sums of float32 scalars in {-1/2, 0, 1/2} over clients.

    These are the shifted bits of adaptive clipping, 0 for a client that has none.
    Other values are rounded to the nearest of the three, NaN to 0.
    """

    sum_dtype = np.float32
    contribution_norm = 0.5

    def __init__(self, *, has_noise: bool = False):
        """Initialises the factory.

        Args:
          has_noise: Whether noise is added within the sum, which may carry it below zero.
        """
        self._has_noise = has_noise

    def create(self, value_type: tff_names.Type) -> tff.templates.AggregationProcess:
        """Creates the process, without state or measurements.

        Args:
          value_type: Type of a bit, a float32 scalar.

        Returns:
          The process.

        Raises:
          ValueError: If the type is another one.
        """
        if value_type != tff_names.TensorType(np.float32):
            raise validation.UsageError(f"value_type must be a float32 scalar, got {value_type}.")

        @computations.federated
        def initialize():
            return tff_names.federated_value((), tff_names.SERVER)

        @computations.tensorflow(np.float32)
        def encode(half_bit):
            # Divided by a half, shifted by 1: 0, 1 or 2, so that no sum is negative.
            half_bit = tf.where(tf.math.is_nan(half_bit), 0.0, half_bit)
            doubled = tf.clip_by_value(tf.round(2.0 * half_bit), -1.0, 1.0)
            return collections.OrderedDict(
                doubled=tf.cast(doubled, tf.int32) + 1, count=tf.constant(1, tf.int32)
            )

        @computations.tensorflow(encode.type_signature.result)
        def decode(total):
            doubled = total["doubled"] - total["count"]
            if self._has_noise:
                doubled = discretize.to_centre(doubled, COUNT_MODULUS)
            return tf.cast(doubled, tf.float32) / 2.0

        @computations.federated(
            initialize.type_signature.result, tff_names.FederatedType(value_type, tff_names.CLIENTS)
        )
        def next_fn(state, value):
            total = tff_names.federated_secure_modular_sum(
                tff_names.federated_map(encode, value), COUNT_MODULUS
            )
            return tff.templates.MeasuredProcessOutput(
                state=state,
                result=tff_names.federated_map(decode, total),
                measurements=tff_names.federated_value((), tff_names.SERVER),
            )

        return tff.templates.AggregationProcess(initialize, next_fn)
