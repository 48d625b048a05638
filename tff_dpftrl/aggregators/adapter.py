"""Builds a TFF aggregation process around any private round.

Everything private happens in `private_round`; clients and server are added here.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.accounting import guarantee as guarantee_lib
from tff_dpftrl.aggregators import computations, inner_sum, release_registry, updates
from tff_dpftrl.execution import contexts, tff_names
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import interface


class DpFtrlFactory(tff.aggregators.UnweightedAggregationFactory):
    """Base of the TFF factories of DP-FTRL.

    `private_round` is the mechanism, with strategy, noise multiplier and clipping; it runs without
    TFF too. `inner_sum` is the sum of the clipped updates.
    """

    private_round: Any
    inner_sum: inner_sum.InnerSum
    _state_type: ClassVar[type]
    _further_sums: Sequence[inner_sum.InnerSum] = ()
    _report_non_finite_clients: bool

    def guarantee(self, schema: schema_lib.MinSep, delta: float) -> guarantee_lib.Guarantee:
        """Computes the guarantee of a run with this aggregator, for zeroing out one client.

        All that a client sends is zeroed out, its bits included. Released clip norms are covered.

        Args:
          schema: Participation schema of the clients; all its rounds are charged.
          delta: Parameter δ for which ε is stated.

        Returns:
          The guarantee. If the seed of the noise was given, the run has none, and a
          statement made of the guarantee says so.

        Raises:
          ValueError: If an argument is out of range, or the strategy is not defined
            for that many rounds.
        """
        return guarantee_lib.of_round(self.private_round, schema, delta)

    def create(self, value_type: tff_names.Type) -> tff.templates.AggregationProcess:
        """Creates the process for updates of one type, any nesting of floating-point tensors.

        A `ValueError` refuses a type without tensors, of other dtypes or unknown shapes, or that
        does not fit the clipping or a sum.
        """
        return build_process(
            self.private_round,
            value_type,
            sums=[self.inner_sum, *self._further_sums],
            state_type=self._state_type,
            report_non_finite_clients=self._report_non_finite_clients,
        )


def build_process(
    private_round: interface.PrivateRound,
    value_type: tff_names.Type,
    *,
    sums: Sequence[inner_sum.InnerSum],
    state_type: type,
    weight_type: tff_names.Type | None = None,
    report_non_finite_clients: bool = False,
) -> tff.templates.AggregationProcess:
    """Builds the process that runs a private round on updates of one type.

    `sums` are those of the fields of a contribution, in the order of the fields. The measurements
    of the first one become the process's. `state_type` has the fields of the round's state, then
    the state of each sum. It has one level, because TFF copies its state once more for every level.
    `weight_type` is for a round that weighs clients. No noise covers the exact number of clients
    that `report_non_finite_clients` measures.
    """
    contexts.clean_up_at_exit()
    update = updates.UpdateType(value_type)

    @computations.tensorflow
    def initial_round_state():
        return tuple(private_round.initial_state(update.shapes))

    round_state_types = list(initial_round_state.type_signature.result)
    num_fields = len(round_state_types)
    seen_by_clients = state_type._fields.index(private_round.broadcast_field)
    client_types = [value_type, round_state_types[seen_by_clients]]
    if weight_type is not None:
        client_types.append(weight_type)

    @computations.tensorflow(tff_names.StructType(client_types))
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

    @computations.tensorflow(tff_names.StructType(round_state_types + contribution_types))
    def release(state_and_totals):
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

    if interface.foreign_part(private_round) is None:  # Else nobody vouches for its noise.
        release_registry.register(
            clip=clip_client,
            contributions=[0],
            release=release,
            totals=range(num_fields, num_fields + len(contribution_types)),
            noise_multiplier=private_round.noise_multiplier,
            deterministic_seed=private_round.deterministic_seed,
        )

    @computations.federated
    def initialize():
        round_state = tff_names.federated_eval(initial_round_state, tff_names.SERVER)
        sum_states = [process.initialize() for process in processes]
        return tff_names.federated_zip(state_type(*round_state, *sum_states))

    def run_round(state, value, *weight):
        state = list(state)
        broadcast = tff_names.federated_broadcast(state[seen_by_clients])
        contributions, is_finite = tff_names.federated_map(clip_client, (value, broadcast, *weight))
        summed = [
            process.next(sum_state, contribution)
            for process, sum_state, contribution in zip(
                processes, state[num_fields:], contributions, strict=True
            )
        ]
        *round_state, average, measurements = tff_names.federated_map(
            release, (*state[:num_fields], *[output.result for output in summed])
        )
        if report_non_finite_clients:
            count = _count_non_finite(is_finite)
            measurements = _join(
                measurements, tff_names.federated_zip({"non_finite_clients": count})
            )
        return tff.templates.MeasuredProcessOutput(
            state=tff_names.federated_zip(state_type(*round_state, *[o.state for o in summed])),
            result=average,
            measurements=_join(measurements, summed[0].measurements),
        )

    state_at_server = initialize.type_signature.result
    value_at_clients = tff_names.FederatedType(value_type, tff_names.CLIENTS)
    if weight_type is None:

        @computations.federated(state_at_server, value_at_clients)
        def next_unweighted(state, value):
            return run_round(state, value)

        return tff.templates.AggregationProcess(initialize, next_unweighted)

    @computations.federated(
        state_at_server, value_at_clients, tff_names.FederatedType(weight_type, tff_names.CLIENTS)
    )
    def next_weighted(state, value, weight):
        return run_round(state, value, weight)

    return tff.templates.AggregationProcess(initialize, next_weighted)


def _count_non_finite(is_finite: tff_names.Value) -> tff_names.Value:
    """Counts the clients whose `is_finite` is False: an exact int32, which is not private."""

    @computations.tensorflow(np.bool_)
    def as_count(finite):
        return tf.cast(tf.logical_not(finite), tf.int32)

    return tff_names.federated_sum(tff_names.federated_map(as_count, is_finite))


def _join(measured: Any, others: Any) -> tff_names.Value:
    """Joins measurements at the server in one dictionary; `others` is "sum" if without names."""
    others_type = others.type_signature.member
    if isinstance(others_type, tff_names.StructType) and len(others_type) == 0:
        return measured
    has_names = isinstance(others_type, tff_names.StructType) and all(
        name is not None for name, _ in tff_names.iter_elements(others_type)
    )

    @computations.tensorflow(measured.type_signature.member, others_type)
    def join(measured, others):
        if isinstance(others, tff_names.Struct):
            others = tff_names.to_odict_or_tuple(others)
        joined = collections.OrderedDict(measured)
        joined.update(others if has_names else {"sum": others})
        return joined

    return tff_names.federated_map(join, (measured, others))
