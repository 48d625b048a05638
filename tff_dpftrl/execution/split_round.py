"""A round of a process, split into what its server does and shares of its clients."""

from __future__ import annotations

import collections
import functools
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff


class CannotSplitError(TypeError):
    """The computation is not one round of a process that TFF can take apart."""


class SplitRound:
    """The computations of one round that is run in several places.

    For a state and shares `d1, ..., dn` of the clients' data,
    `finish(n)(state, [share(prepare(state), d1), ..., share(prepare(state), dn)])` is
    `next(state, d1 + ... + dn)`, but for the order in which floating-point numbers are
    added. Only `prepare` and `finish` see the state.

    Attributes:
      prepare: From the state to what clients receive, such as the model.
      share: From that and the data of some clients, at least one, to the sum of their
        updates, before `report`. It is compiled for TFF's worker.
    """

    def __init__(self, next_fn: tff.framework.ConcreteComputation, *, secure_sums: bool = False):
        """Takes a round apart, which takes about a second for a language model.

        Args:
          next_fn: A computation whose type `is_round`.
          secure_sums: Whether to replace secure sums by plain ones.

        Raises:
          CannotSplitError: If TFF cannot, or there are secure sums that are not to be replaced.
        """
        self._result_type = next_fn.type_signature.result
        self._state_type, data_type = next_fn.type_signature.parameter
        if secure_sums:
            next_fn = tff.backends.test.replace_secure_intrinsics_with_bodies(next_fn)
        form = self._form = _map_reduce_form(next_fn)
        sums_type = form.merge.type_signature.result

        @tff.federated_computation(self._state_type)
        def prepare(state):
            return tff.federated_map(form.prepare, state)

        @tff.tensorflow.computation(sums_type)
        def unreported(sums):
            return sums

        @tff.federated_computation(prepare.type_signature.result, data_type)
        def share(for_clients, data):
            broadcast = tff.federated_broadcast(for_clients)
            update = tff.federated_map(form.work, tff.federated_zip((data, broadcast)))[0]
            return tff.federated_aggregate(
                update, form.zero(), form.accumulate, form.merge, unreported
            )

        self.prepare = prepare
        self.share = tff.backends.native.desugar_and_transform_to_native(share)
        self.finish = functools.lru_cache(self._finish)

    def _finish(self, num_shares: int) -> tff.framework.ConcreteComputation:
        """The computation of the server once all shares are there.

        Args:
          num_shares: How many there are, at least one.

        Returns:
          A computation from the state and the list of shares to the result of the round.
        """
        form = self._form
        share_type = self.share.type_signature.result
        shares_type = tff.StructType([(None, share_type)] * num_shares)

        @tff.federated_computation(self._state_type, shares_type)
        def finish(state, shares):
            sums = shares[0]
            for i in range(1, num_shares):
                sums = tff.federated_map(form.merge, tff.federated_zip((sums, shares[i])))
            total = tff.federated_map(form.report, sums)
            # There are three kinds of secure sums, and none here.
            nothing = tff.federated_value((), tff.SERVER)
            update_arg = tff.federated_zip((state, (total, nothing, nothing, nothing)))
            result = tff.federated_map(form.update, update_arg)
            return _named(result, self._result_type)

        # Taking it apart has forgotten the Python classes of the result.
        return tff.framework.ConcreteComputation.with_type(
            finish, tff.FunctionType(finish.type_signature.parameter, self._result_type)
        )


def _named(result: Any, result_type: tff.StructType) -> Any:
    """The two parts of a value at the server, under the names of a type."""
    names = [name for name, _ in tff.structure.iter_elements(result_type)]
    parts = (result[0], result[1])
    return parts if None in names else collections.OrderedDict(zip(names, parts, strict=True))


def _map_reduce_form(next_fn: Any) -> tff.backends.mapreduce.MapReduceForm:
    config = tf.compat.v1.ConfigProto()  # The graphs as they are: the runtime optimises them.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    try:
        form = tff.backends.mapreduce.get_map_reduce_form_for_computation(next_fn, config)
    except Exception as error:  # TFF raises errors of many classes.
        raise CannotSplitError(f"TFF cannot take this round apart: {error}.") from error
    if form.securely_aggregates_tensors:
        raise CannotSplitError("This round has secure sums, which need secure_sums=True.")
    return form


def is_round(type_signature: tff.Type) -> bool:
    """Whether the type is that of `next` of an iterative process with data at clients."""
    if not isinstance(type_signature, tff.FunctionType):
        return False
    parameter, result = type_signature.parameter, type_signature.result
    return (
        isinstance(parameter, tff.StructType)
        and isinstance(result, tff.StructType)
        and len(parameter) == len(result) == 2
        and _is_at(parameter[0], tff.SERVER)
        and _is_at(parameter[1], tff.CLIENTS)
        and not parameter[1].all_equal
        and _is_at(result[0], tff.SERVER)
        and _is_at(result[1], tff.SERVER)
    )


def _is_at(type_spec: tff.Type, placement: Any) -> bool:
    return isinstance(type_spec, tff.FederatedType) and type_spec.placement is placement
