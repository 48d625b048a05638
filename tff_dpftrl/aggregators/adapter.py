"""From a private round in TensorFlow to a TFF aggregation process, for all rounds alike.

Everything private happens in `private_round`; here clients and server are put around it.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.aggregators import inner_sum, release_registry, updates
from tff_dpftrl.private_round import interface


def build_process(
    private_round: interface.PrivateRound,
    value_type: tff.Type,
    *,
    sums: Sequence[inner_sum.InnerSum],
    state_type: type,
    weight_type: tff.Type | None = None,
    report_non_finite_clients: bool = False,
) -> tff.templates.AggregationProcess:
    """Builds the process that runs a private round on updates of one type.

    Args:
      private_round: The round.
      value_type: A floating-point tensor or any nesting of such tensors.
      sums: The sums of the fields of its contributions, in their order. The measurements
        of the first are passed on.
      state_type: NamedTuple of the process's state: the fields of the round's state,
        then the state of each sum. One level, because TFF copies its state once more
        for every level.
      weight_type: Type of the clients' weights, for a round that weighs them.
      report_non_finite_clients: Whether to measure their exact number, which no noise
        covers.

    Returns:
      The process.

    Raises:
      ValueError: If the type has no tensors, other dtypes or unknown shapes, or does
        not fit the round or the sums.
    """
    update = updates.UpdateType(value_type)

    @tff.tensorflow.computation
    def initial_round_state():
        return tuple(private_round.initial_state(update.shapes))

    round_state_types = list(initial_round_state.type_signature.result)
    num_fields = len(round_state_types)
    seen_by_clients = state_type._fields.index(private_round.broadcast_field)
    client_types = [value_type, round_state_types[seen_by_clients]]
    if weight_type is not None:
        client_types.append(weight_type)

    @tff.tensorflow.computation(tff.StructType(client_types))
    def clip_client(client):
        value, broadcast, *weight = client
        (tensors, *scalars), is_finite = private_round.clip_client(
            update.flatten(value), broadcast, *weight
        )
        update_sum, *scalar_sums = sums
        sent = [update.pack([tf.cast(tensor, update_sum.dtype) for tensor in tensors])]
        for scalar, scalar_sum in zip(scalars, scalar_sums, strict=True):
            sent.append(tf.cast(scalar, scalar_sum.dtype))
        return tuple(sent), is_finite

    contribution_types = list(clip_client.type_signature.result[0])
    processes = [
        one_sum.create(summed_type)
        for one_sum, summed_type in zip(sums, contribution_types, strict=True)
    ]

    @tff.tensorflow.computation(tff.StructType(round_state_types + contribution_types))
    def release(state_and_totals):
        release_registry.note_seed(private_round.deterministic_seed)
        parts = list(state_and_totals)
        round_state = private_round.state_type(*parts[:num_fields])
        total, *scalars = parts[num_fields:]
        totals = private_round.contribution_type(update.flatten(total), *scalars)
        new_state, average, measurements = private_round.release(round_state, totals)
        return (
            *new_state,
            update.pack_as_update(average),
            collections.OrderedDict(measurements),
        )

    release_registry.register(
        clip=clip_client,
        contributions=[0],
        release=release,
        totals=range(num_fields, num_fields + len(contribution_types)),
        noise_multiplier=private_round.noise_multiplier,
        deterministic_seed=private_round.deterministic_seed,
    )

    @tff.federated_computation
    def initialize():
        own = tff.federated_eval(initial_round_state, tff.SERVER)
        return tff.federated_zip(state_type(*own, *[process.initialize() for process in processes]))

    def run_round(state, value, *weight):
        state = list(state)
        broadcast = tff.federated_broadcast(state[seen_by_clients])
        contributions, is_finite = tff.federated_map(clip_client, (value, broadcast, *weight))
        summed = [
            process.next(sum_state, contribution)
            for process, sum_state, contribution in zip(
                processes, state[num_fields:], contributions, strict=True
            )
        ]
        *round_state, average, measurements = tff.federated_map(
            release, (*state[:num_fields], *[output.result for output in summed])
        )
        if report_non_finite_clients:
            count = _count_non_finite(is_finite)
            measurements = _join(measurements, tff.federated_zip({"non_finite_clients": count}))
        return tff.templates.MeasuredProcessOutput(
            state=tff.federated_zip(state_type(*round_state, *[o.state for o in summed])),
            result=average,
            measurements=_join(measurements, summed[0].measurements),
        )

    state_at_server = initialize.type_signature.result
    value_at_clients = tff.FederatedType(value_type, tff.CLIENTS)
    if weight_type is None:

        @tff.federated_computation(state_at_server, value_at_clients)
        def next_fn(state, value):
            return run_round(state, value)

    else:

        @tff.federated_computation(
            state_at_server, value_at_clients, tff.FederatedType(weight_type, tff.CLIENTS)
        )
        def next_fn(state, value, weight):
            return run_round(state, value, weight)

    return tff.templates.AggregationProcess(initialize, next_fn)


def _count_non_finite(is_finite: tff.Value) -> tff.Value:
    """Number of clients whose `is_finite` is False, exact and so not private; int32."""

    @tff.tensorflow.computation(np.bool_)
    def as_count(finite):
        return tf.cast(tf.logical_not(finite), tf.int32)

    return tff.federated_sum(tff.federated_map(as_count, is_finite))


def _join(own: tff.Value, others: tff.Value) -> tff.Value:
    """One flat dictionary at the server; `others` under "sum" if they have no names."""
    others_type = others.type_signature.member
    if isinstance(others_type, tff.StructType) and len(others_type) == 0:
        return own
    has_names = isinstance(others_type, tff.StructType) and all(
        name is not None for name, _ in tff.structure.iter_elements(others_type)
    )

    @tff.tensorflow.computation(own.type_signature.member, others_type)
    def join(own, others):
        if isinstance(others, tff.structure.Struct):
            others = tff.structure.to_odict_or_tuple(others)
        return collections.OrderedDict(own, **(others if has_names else {"sum": others}))

    return tff.federated_map(join, (own, others))
