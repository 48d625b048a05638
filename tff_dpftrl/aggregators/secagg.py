"""DP-FTRL on top of secure aggregation, as TFF aggregation factories.

Clients send clipped, rotated and rounded updates as integers; the server sees
nothing but their sum modulo M, decodes it, and adds the correlated noise
(Xu et al. 2023, Algorithm 2). Rounding may lengthen an update, so the noise is
scaled by the inflated clip norm.

Only execution contexts with an implementation of secure sums can run this. For
simulations TFF has one that computes the same sums in the clear:

    tff.backends.test.set_sync_test_cpp_execution_context()
"""

from __future__ import annotations

import collections
import inspect
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.aggregators import clip_ops, dp_ftrl, secagg_ops, seeds, updates
from tff_dpftrl.encoding import grid
from tff_dpftrl.mechanisms import strategy as strategy_lib

_COUNT_MODULUS = 2**31 - 1


class SecAggSumState(NamedTuple):
    """State of the sum between rounds. Public: every client is sent it.

    Attributes:
      round_index: int64 scalar, the next round.
      rotation_seed: int64 tensor of shape [2], from which every round's rotation
        is derived. It is unrelated to the seed of the noise.
    """

    round_index: Any
    rotation_seed: Any


class SecAggSumFactory(tff.aggregators.UnweightedAggregationFactory):
    """Sums float32 updates over clients by secure modular sums of integers.

    The result is the sum of the updates, each clipped to `clip_norm`, up to
    rounding: per coordinate, a stddev of at most `encoding.rounding_stddev_bound`.
    No client contributes more than `inflated_clip_norm` to its L2 norm. It is
    clipped anew, but a caller that clips by other rules may do so before.

    Any number of clients from 0 to `encoding.max_clients` is summed exactly as
    sent; with more the round fails, because the sum might have wrapped around.
    The measurement "summed_clients" is the number of clients in the sum.

    Attributes:
      encoding: The grid.
      clip_norm: L2 norm C that each update is clipped to before rounding.
    """

    def __init__(
        self, encoding: grid.GridEncoding, clip_norm: float, *, rotation_seed: int | None = None
    ):
        """Initialises the factory.

        Args:
          encoding: The grid, for updates of `encoding.dim` numbers in total.
          clip_norm: L2 clip norm C. With adaptive clipping, pass 1 and
            sum updates that are divided by the active clip norm.
          rotation_seed: An integer in [0, 2^128); taken from the operating system if None.
            It is public, so giving one does not harm privacy, only the independence of
            the updates of the rotation.

        Raises:
          ValueError: If an argument is out of range.
        """
        self.encoding = encoding
        self.clip_norm = clip_ops.check_clip_norm("clip_norm", clip_norm)
        self._rotation_seed = seeds.check_deterministic_seed(rotation_seed)

    @property
    def inflated_clip_norm(self) -> float:
        """C_inflated: the L2 sensitivity of the sum to one client."""
        return self.encoding.inflated_clip_norm(self.clip_norm)

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        """Creates the process for updates of one type.

        Args:
          value_type: A floating-point tensor or any nesting of such tensors.

        Returns:
          The process; its state is a `SecAggSumState`.

        Raises:
          ValueError: If the type is not of `encoding.dim` floats of static shape.
        """
        update = updates.UpdateType(value_type)
        sizes = [spec.shape.num_elements() for spec in update.specs]
        if sum(sizes) != self.encoding.dim:
            raise ValueError(
                f"encoding is for dim {self.encoding.dim}, but an update has {sum(sizes)} numbers: "
                f"build the encoding with dim={sum(sizes)}."
            )

        @tff.tensorflow.computation
        def initial_state():
            return SecAggSumState(tf.constant(0, tf.int64), seeds.root_seed(self._rotation_seed))

        state_type = initial_state.type_signature.result

        @tff.federated_computation
        def initialize():
            return tff.federated_eval(initial_state, tff.SERVER)

        @tff.tensorflow.computation(state_type)
        def start_round(state):
            round_seed = seeds.derive(state.rotation_seed, state.round_index)
            return round_seed, SecAggSumState(state.round_index + 1, state.rotation_seed)

        seed_type = start_round.type_signature.result[0]

        @tff.tensorflow.computation(value_type, seed_type)
        def encode(value, round_seed):
            flat = tf.concat([tf.reshape(t, [-1]) for t in update.flatten(value)], axis=0)
            vector = secagg_ops.encode(flat, round_seed, self.encoding, self.clip_norm)
            return collections.OrderedDict(vector=vector, count=tf.constant(1, tf.int32))

        @tff.tensorflow.computation(encode.type_signature.result, seed_type)
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
            flat = secagg_ops.decode(
                total["vector"], count, round_seed, self.encoding, self.clip_norm
            )
            tensors = [
                tf.reshape(part, spec.shape)
                for part, spec in zip(tf.split(flat, sizes), update.specs, strict=True)
            ]
            return update.pack_as_update(tensors), count

        @tff.federated_computation(
            initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            round_seed, new_state = tff.federated_map(start_round, state)
            encoded = tff.federated_map(encode, (value, tff.federated_broadcast(round_seed)))
            total = tff.backends.mapreduce.federated_secure_modular_sum(
                encoded,
                collections.OrderedDict(vector=self.encoding.modulus, count=_COUNT_MODULUS),
            )
            result, count = tff.federated_map(decode, (total, round_seed))
            return tff.templates.MeasuredProcessOutput(
                state=new_state,
                result=result,
                measurements=tff.federated_zip(collections.OrderedDict(summed_clients=count)),
            )

        return tff.templates.AggregationProcess(initialize, next_fn)


def check_max_clients(encoding: grid.GridEncoding, clients_per_round: float) -> None:
    """Raises ValueError if `encoding` has no room for the report goal.

    Args:
      encoding: The grid.
      clients_per_round: The report goal.
    """
    if encoding.max_clients < clients_per_round:
        raise ValueError(
            f"encoding.max_clients {encoding.max_clients} is below clients_per_round "
            f"{clients_per_round}: build the encoding for the largest number of clients that can "
            "report in one round."
        )


def check_execution_context() -> None:
    """Tries a secure sum in TFF's current execution context.

    Raises:
      RuntimeError: If the context, like TFF's default one, has no secure sums.
    """

    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def secure_sum(value):
        return tff.backends.mapreduce.federated_secure_modular_sum(value, 8)

    try:
        result = secure_sum([1, 2])
        if inspect.isawaitable(result):  # In an asynchronous context: not run yet.
            result.close()
    except Exception as error:
        raise RuntimeError(
            "TFF's current execution context cannot run secure sums. For a simulation, call "
            "tff.backends.test.set_sync_test_cpp_execution_context() first: it computes the same "
            "sums, without the cryptography."
        ) from error


def build_secagg_dp_ftrl_aggregator(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    clip_norm: float,
    clients_per_round: float,
    encoding: grid.GridEncoding,
    deterministic_seed: int | None = None,
    rotation_seed: int | None = None,
) -> dp_ftrl.DPFTRLFactory:
    """DP-FTRL whose server sees only secure sums of encoded updates.

    Like `dp_ftrl.build_dp_ftrl_aggregator`, with the standard deviation of the
    noise `noise_multiplier · encoding.inflated_clip_norm(clip_norm)`: the statement
    ρ = S² / (2 noise_multiplier²) holds as it stands, with nothing left to charge.

    Args:
      strategy: The strategy C that correlates the noise of different rounds.
      noise_multiplier: Standard deviation of z for an inflated clip norm of 1.
      clip_norm: L2 norm that one client's update is clipped to, before rounding.
      clients_per_round: The number the noised sum is divided by: the report goal.
      encoding: The grid, from `grid.for_bits` or `grid.for_inflation`.
      deterministic_seed: Only for tests; see `dp_ftrl.build_dp_ftrl_aggregator`.
      rotation_seed: Public seed of the rotations, see `SecAggSumFactory`. It must
        not be the seed of the noise.

    Returns:
      The factory.

    Raises:
      ValueError: If an argument is out of range, or `encoding.max_clients` is below
        `clients_per_round`.
      RuntimeError: If the current execution context has no secure sums.
    """
    check_max_clients(encoding, clients_per_round)
    check_execution_context()
    sum_factory = SecAggSumFactory(encoding, clip_norm, rotation_seed=rotation_seed)
    return dp_ftrl.build_dp_ftrl_aggregator(
        strategy,
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        clients_per_round=clients_per_round,
        deterministic_seed=deterministic_seed,
        sum_factory=sum_factory,
        encoded_norm=sum_factory.inflated_clip_norm,
    )
