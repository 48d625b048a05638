"""Sums over clients by secure modular sums of integers, as TFF aggregation factories.

The aggregators of `secagg` have them as inner sums, and they can be used by
themselves. Compiled processes run them, and execution contexts of TFF with an implementation
of secure sums. Others fail in a round, with the line of `execution.check_secure_sums`.
"""

from __future__ import annotations

import collections

import numpy as np
import tensorflow_federated as tff

from tff_dpftrl import validation
from tff_dpftrl.aggregators import computations, updates
from tff_dpftrl.discretization import grid
from tff_dpftrl.execution import secure_sum_check, tff_names
from tff_dpftrl.private_round import secure_sums


class SecAggSumFactory(tff.aggregators.UnweightedAggregationFactory):
    """TFF factory of sums over clients by secure modular sums of integers.

    The result is the sum of the updates, each clipped to `clip_norm`, up to rounding: per
    coordinate, a stddev of at most `encoding.rounding_stddev_bound`. No client contributes more
    than `contribution_norm` to its L2 norm. Updates are clipped here even if the caller has clipped
    them by other rules before.

    Clients compute in float32. The sum is exact, and decoded in float64 before it is cast to the
    dtypes of the updates. In float32 that cast would add rounding that the noise does not cover, so
    a private caller gives updates in float64.

    Any number of clients from 0 to `encoding.max_clients` is summed exactly as sent; with more the
    round fails, because the sum might have wrapped around. The measurement "summed_clients" is the
    number of clients in the sum.
    """

    sum_dtype = np.float64

    def __init__(
        self, encoding: grid.GridEncoding, clip_norm: float, *, rotation_seed: int | None = None
    ):
        """Initialises the factory.

        The encoded updates have `encoding.dim` numbers in total. With adaptive clipping `clip_norm`
        is 1, for updates that are divided by the active clip norm. `rotation_seed` is public; a
        given one does not harm privacy, only the independence of the updates and the rotation.
        """
        self._sum = secure_sums.VectorSum(encoding, clip_norm, rotation_seed)
        self.encoding, self.clip_norm = encoding, self._sum.clip_norm

    @property
    def contribution_norm(self) -> float:
        """Inflated clip norm, the L2 sensitivity of the sum to one client, whatever it sends."""
        return self._sum.contribution_norm

    def create(self, value_type: tff_names.Type) -> tff.templates.AggregationProcess:
        """Creates the process for updates of one type.

        Its state is a `secure_sums.SecAggSumState`.
        """
        secure_sum_check.explain_missing_secure_sums()
        update = updates.UpdateType(value_type)
        initial_state = computations.tensorflow(self._sum.initial_state)
        state_type = initial_state.type_signature.result

        @computations.federated
        def initialize():
            return tff_names.federated_eval(initial_state, tff_names.SERVER)

        start_round = computations.tensorflow(self._sum.start_round, state_type)
        seed_type = start_round.type_signature.result[0]

        @computations.tensorflow(value_type, seed_type)
        def encode(value, round_seed):
            return self._sum.encode(update.flatten(value), round_seed)

        @computations.tensorflow(encode.type_signature.result, seed_type)
        def decode(total, round_seed):
            tensors, count = self._sum.decode(total, round_seed, update.shapes)
            return update.pack_as_update(tensors), count

        @computations.federated(
            initialize.type_signature.result, tff_names.FederatedType(value_type, tff_names.CLIENTS)
        )
        def next_fn(state, value):
            round_seed, new_state = tff_names.federated_map(start_round, state)
            encoded = tff_names.federated_map(
                encode, (value, tff_names.federated_broadcast(round_seed))
            )
            total = tff_names.federated_secure_modular_sum(encoded, self._sum.moduli)
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
    contribution_norm = secure_sums.HalfBitSum.contribution_norm

    def __init__(self, *, has_noise: bool = False):
        """Initialises the factory; noise within the sum may carry it below zero."""
        self._sum = secure_sums.HalfBitSum(has_noise)

    def create(self, value_type: tff_names.Type) -> tff.templates.AggregationProcess:
        """Creates the process for float32 scalars, without state or measurements."""
        if value_type != tff_names.TensorType(np.float32):
            raise validation.UsageError(f"value_type must be a float32 scalar, got {value_type}.")

        @computations.federated
        def initialize():
            return tff_names.federated_value((), tff_names.SERVER)

        encode = computations.tensorflow(self._sum.encode, np.float32)
        decode = computations.tensorflow(self._sum.decode, encode.type_signature.result)

        @computations.federated(
            initialize.type_signature.result, tff_names.FederatedType(value_type, tff_names.CLIENTS)
        )
        def next_fn(state, value):
            total = tff_names.federated_secure_modular_sum(
                tff_names.federated_map(encode, value), self._sum.moduli
            )
            return tff.templates.MeasuredProcessOutput(
                state=state,
                result=tff_names.federated_map(decode, total),
                measurements=tff_names.federated_value((), tff_names.SERVER),
            )

        return tff.templates.AggregationProcess(initialize, next_fn)
