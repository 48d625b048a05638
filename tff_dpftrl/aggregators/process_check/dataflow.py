"""Follows client values through a TFF computation to its outputs.

The computation is evaluated on labels in place of values: each tensor carries the set
of client values that it may depend on, and their form. Only a release that this package
has registered for exactly the clipping whose sums it gets removes labels. Parts that
are not understood keep every label.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tff_dpftrl.aggregators import release_registry
from tff_dpftrl.aggregators.process_check import graph_dependencies
from tff_dpftrl.aggregators.process_check import labels as labels_lib
from tff_dpftrl.execution import tff_names


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """Call of an intrinsic, such as "federated_sum", by which client values reach the server.

    With `has_data`, client data is in it other than as contributions of one clipping.
    """

    intrinsic: str
    value_type: tff_names.Type
    has_data: bool


@dataclasses.dataclass(frozen=True)
class PrivateRelease:
    """Call of a registered release with noise multiplier z.

    `value_type` is that of the sums that it makes private. `computations` has SHA-256 of the
    computation that clips at the clients, and of the one that adds the noise: those of equal
    clippings and mechanisms are equal.
    """

    noise_multiplier: float
    value_type: tff_names.Type
    computations: tuple[bytes, bytes]


@dataclasses.dataclass(frozen=True)
class Trace:
    """Result of `trace`: aggregations and private releases in the order of their calls.

    `outputs` has the labels of the tensors of the result at the server, by path: names, and indices
    where there is no name. `contributions` has the type of each clipping's contribution, by the
    number of its call. `released_twice` has the clippings whose sums went into more than one
    release, and `shares_state` those whose release was given the state of an earlier one, or what
    that one returned.
    """

    outputs: Mapping[tuple[str | int, ...], labels_lib.Labels]
    aggregations: Sequence[Aggregation]
    releases: Sequence[PrivateRelease]
    contributions: Mapping[int, tff_names.Type]
    released_twice: frozenset[int]
    shares_state: frozenset[int]


def trace(computation: tff_names.ConcreteComputation) -> Trace:
    """Evaluates a computation, whose arguments at the clients are their data, on labels."""
    evaluator = _Evaluator()
    function = evaluator.evaluate(computation.to_building_block(), {})
    function_type = computation.type_signature
    argument = None
    if function_type.parameter is not None:
        argument = labels_lib.fill(
            function_type.parameter, frozenset([labels_lib.RAW]), only_at=tff_names.CLIENTS
        )
        numbers = itertools.count()
        argument = labels_lib.map_labels(
            lambda labels: labels or frozenset([labels_lib.ServerInput(next(numbers))]), argument
        )
    result = function(argument)
    return Trace(
        {
            path: frozenset(x for x in labels if not isinstance(x, labels_lib.ServerInput))
            for path, labels in _at_server(function_type.result, result)
        },
        evaluator.aggregations,
        evaluator.releases,
        evaluator.contributions,
        frozenset(call for call, count in evaluator.num_releases.items() if count > 1),
        frozenset(evaluator.shares_state),
    )


_LEAFWISE_AGGREGATIONS = frozenset(
    [
        "federated_sum",
        "federated_mean",
        "federated_min",
        "federated_max",
        "federated_secure_sum",
        "federated_secure_sum_bitwidth",
        "federated_secure_modular_sum",
    ]
)


class _Evaluator:
    """Evaluates building blocks; the attributes are those of `Trace`."""

    def __init__(self):
        self.aggregations: list[Aggregation] = []
        self.releases: list[PrivateRelease] = []
        self.contributions: dict[int, tff_names.Type] = {}
        self.num_releases: collections.Counter[int] = collections.Counter()
        self.shares_state: set[int] = set()
        self._released_states: set[labels_lib.Label] = set()
        self._placement: tff_names.PlacementLiteral | None = None

    def evaluate(
        self,
        block: tff_names.ComputationBuildingBlock,
        bindings: Mapping[str | None, labels_lib.Value],
    ) -> labels_lib.Value:
        """Returns the labels of a building block whose free references are in `bindings`."""
        match block:
            case tff_names.Reference():
                return bindings[block.name]
            case tff_names.Selection():
                return self.evaluate(block.source, bindings)[block.as_index()]
            case tff_names.Block():
                bindings = dict(bindings)
                for name, value in block.locals:
                    bindings[name] = self.evaluate(value, bindings)
                return self.evaluate(block.result, bindings)
            case tff_names.Lambda():
                return lambda argument: self.evaluate(
                    block.result, {**bindings, block.parameter_name: argument}
                )
            case tff_names.Call():
                function = self.evaluate(block.function, bindings)
                argument = block.argument
                return function(None if argument is None else self.evaluate(argument, bindings))
            case tff_names.StructBlock():
                return tff_names.Struct(
                    (name, self.evaluate(element, bindings))
                    for name, element in tff_names.iter_elements(block)
                )
            case tff_names.CompiledComputation():
                return functools.partial(self._call_compiled, block)
            case tff_names.Intrinsic():
                return functools.partial(self._call_intrinsic, block)
        return labels_lib.fill(block.type_signature, labels_lib.NOTHING)  # Constants and the like.

    def _call_compiled(
        self, block: tff_names.CompiledComputation, argument: labels_lib.Value
    ) -> labels_lib.Value:
        digest = release_registry.digest(block)
        totals = release_registry.totals_of(digest)
        if self._placement is tff_names.SERVER and totals is not None:
            argument = self._released(digest, argument, totals)
        arguments = [] if argument is None else list(labels_lib.leaves(argument))
        result_type = _function_type(block).result
        results = list(labels_lib.leaves(labels_lib.fill(result_type, labels_lib.NOTHING)))
        dependencies = graph_dependencies.analyse(block, len(arguments), len(results))
        labels = []
        for sources, is_random in zip(dependencies.arguments, dependencies.random, strict=True):
            joined = frozenset().union(*(arguments[i] for i in sources))
            labels.append(self._randomised(joined) if is_random else joined)
        result = labels_lib.pack(result_type, iter(labels))
        if self._placement is tff_names.CLIENTS:
            return self._clipped(digest, block, argument, result)
        return result

    def _randomised(self, labels: labels_lib.Labels) -> labels_lib.Labels:
        if self._placement is not tff_names.SERVER:
            return labels
        return frozenset(
            dataclasses.replace(label, is_randomised=True)
            if isinstance(label, labels_lib.Aggregate)
            else label
            for label in labels
        )

    def _clipped(
        self,
        digest: bytes,
        block: tff_names.CompiledComputation,
        argument: labels_lib.Value,
        result: labels_lib.Value,
    ) -> labels_lib.Value:
        """Labels the result of a registered clipping; other results stay as they are."""
        contributions = release_registry.contributions_of(digest)
        if contributions is None:
            return result
        call = len(self.contributions)
        result_type = _function_type(block).result
        self.contributions[call] = tff_names.StructType(
            [result_type[i] for i in sorted(contributions)]
        )
        # Values from the server are in it still, perhaps of other clients.
        others = frozenset(
            label
            for label in labels_lib.union(argument)
            if not isinstance(label, labels_lib.Raw | labels_lib.Contribution)
        )
        labels = others | {labels_lib.Contribution(call, digest)}
        return tff_names.Struct(
            (name, labels_lib.fill(result_type[i], labels) if i in contributions else element)
            for i, (name, element) in enumerate(tff_names.iter_elements(result))
        )

    def _released(
        self, digest: bytes, argument: labels_lib.Value, totals: frozenset[int]
    ) -> labels_lib.Value:
        """Returns a registered release's argument without the labels that it makes private."""
        labels = frozenset().union(*(labels_lib.union(argument[i]) for i in totals))
        pairs = {
            label: release_registry.find(label.clip, digest)
            for label in labels
            if isinstance(label, labels_lib.Total)
        }
        covered = {label: pair for label, pair in pairs.items() if pair is not None}
        if len({label.call for label in pairs}) != 1 or len(covered) != len(pairs):
            return argument  # It was made for the sums of one clipping, not for others.
        (call,) = {label.call for label in covered}
        self.num_releases[call] += 1
        # The accounting has one release of each state in a round.
        state = {
            label
            for i, element in enumerate(argument)
            if i not in totals
            for label in labels_lib.union(element)
            if isinstance(label, labels_lib.ServerInput)
        }
        if state & self._released_states:
            self.shares_state.add(call)
        self._released_states |= state
        reasons = [pair.not_private_because for pair in covered.values()]
        replaced: dict[labels_lib.Label, labels_lib.Labels]
        if any(reasons):
            replaced = {
                label: frozenset([dataclasses.replace(label, not_private_because=reason)])
                for label, reason in zip(covered, reasons, strict=True)
            }
        else:
            replaced = dict.fromkeys(covered, labels_lib.NOTHING)
            label, pair = next(iter(covered.items()))
            self.releases.append(
                PrivateRelease(
                    pair.noise_multiplier, self.contributions[call], (label.clip, digest)
                )
            )

        def clean(labels: labels_lib.Labels) -> labels_lib.Labels:
            # The number of clients shows in a sum through their contributions only.
            kept = (label for label in labels if not labels_lib.is_count(label))
            return frozenset().union(*(replaced.get(label, frozenset([label])) for label in kept))

        return tff_names.Struct(
            (name, labels_lib.map_labels(clean, element) if i in totals else element)
            for i, (name, element) in enumerate(tff_names.iter_elements(argument))
        )

    def _call_intrinsic(
        self, block: tff_names.Intrinsic, argument: labels_lib.Value
    ) -> labels_lib.Value:
        result_type = _function_type(block).result
        parameter_type = _function_type(block).parameter
        match block.uri:
            case "federated_apply":
                return self._at(tff_names.SERVER, *argument)
            case "federated_map" | "federated_map_all_equal":
                return self._at(parameter_type[1].placement, *argument)
            case "federated_eval_at_clients":
                return self._at(tff_names.CLIENTS, argument, None)
            case "federated_eval_at_server":
                return self._at(tff_names.SERVER, argument, None)
            case (
                "federated_broadcast"
                | "federated_value_at_clients"
                | "federated_value_at_server"
                | "federated_zip_at_clients"
                | "federated_zip_at_server"
            ):
                return labels_lib.pack(result_type, labels_lib.leaves(argument))
            case "federated_aggregate":
                return self._aggregate(parameter_type, *argument)
            case uri if uri in _LEAFWISE_AGGREGATIONS:
                has_parameters = isinstance(parameter_type, tff_names.StructType)
                value, value_type = argument, parameter_type
                if has_parameters:
                    value, value_type = argument[0], parameter_type[0]
                return self._sent(uri, value_type.member, value)
        return self._unknown_intrinsic(block, argument)

    def _at(
        self,
        placement: tff_names.PlacementLiteral,
        function: Callable,
        argument: labels_lib.Value,
    ) -> labels_lib.Value:
        """Calls a function that runs at a placement."""
        before, self._placement = self._placement, placement
        try:
            return function(argument)
        finally:
            self._placement = before

    def _aggregate(
        self,
        parameter_type: tff_names.StructType,
        value: labels_lib.Value,
        zero: labels_lib.Value,
        accumulate: Callable,
        merge: Callable,
        report: Callable,
    ) -> labels_lib.Value:
        accumulated = zero
        while True:
            step = accumulate(tff_names.Struct.unnamed(accumulated, value))
            step = labels_lib.join(merge(tff_names.Struct.unnamed(step, step)), step)
            step = labels_lib.join(accumulated, step)
            if list(labels_lib.leaves(step)) == list(labels_lib.leaves(accumulated)):
                break
            accumulated = step
        sent = self._sent("federated_aggregate", parameter_type[0].member, accumulated)
        return self._at(tff_names.SERVER, report, sent)

    def _sent(
        self, intrinsic: str, value_type: tff_names.Type, value: labels_lib.Value
    ) -> labels_lib.Value:
        """Records an aggregation, and returns the labels of its result, tensor by tensor."""
        number = len(self.aggregations)
        arrived = labels_lib.map_labels(lambda labels: labels_lib.at_arrival(labels, number), value)
        has_data = labels_lib.Aggregate(number, depends_on_data=True) in labels_lib.union(arrived)
        self.aggregations.append(Aggregation(intrinsic, value_type, has_data))
        return arrived

    def _unknown_intrinsic(
        self, block: tff_names.Intrinsic, argument: labels_lib.Value
    ) -> labels_lib.Value:
        """Labels the result with all labels of the argument; values that leave clients are sent."""
        block_type = _function_type(block)
        parameter_type, result_type = block_type.parameter, block_type.result
        arguments = argument if isinstance(parameter_type, tff_names.StructType) else [argument]
        types = (
            list(parameter_type)
            if isinstance(parameter_type, tff_names.StructType)
            else [parameter_type]
        )
        labels = frozenset().union(*(labels_lib.union(a) for a in arguments if not callable(a)))
        for function, function_type in zip(arguments, types, strict=True):
            if callable(function):  # Values that it captures come out, too.
                inner = function_type.parameter
                labels |= labels_lib.union(
                    function(None if inner is None else labels_lib.fill(inner, labels))
                )
        from_clients = [
            t
            for t in types
            if isinstance(t, tff_names.FederatedType) and t.placement is tff_names.CLIENTS
        ]
        stays = (
            isinstance(result_type, tff_names.FederatedType)
            and result_type.placement is tff_names.CLIENTS
        )
        if from_clients and (not stays or block.uri.endswith("select")):
            arrived = self._sent(block.uri, from_clients[0].member, labels)
            if not stays:
                labels = arrived
        return labels_lib.fill(result_type, labels)


def _function_type(block: Any) -> Any:
    """Returns the type of a building block that is a function; TFF declares just a type."""
    return block.type_signature


def _at_server(
    type_spec: tff_names.Type, value: labels_lib.Value, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], labels_lib.Labels]]:
    """Yields paths and labels of the tensors of a result that are not at the clients."""
    if isinstance(type_spec, tff_names.FederatedType):
        if type_spec.placement is not tff_names.CLIENTS:
            yield from _at_server(type_spec.member, value, path)
    elif isinstance(type_spec, tff_names.StructType):
        for i, (name, element) in enumerate(tff_names.iter_elements(type_spec)):
            yield from _at_server(element, value[i], (*path, i if name is None else name))
    else:
        yield path, value
