"""Labels in place of values: the client values that a tensor may depend on, and their form.

A value of a computation is a `tff.structure.Struct` of values, down to the labels of a
tensor or sequence; the placement of a federated value is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tff_dpftrl.execution import tff_names


@dataclasses.dataclass(frozen=True)
class Raw:
    """Label of a client's data at that client, or of anything made from it."""


@dataclasses.dataclass(frozen=True)
class Contribution:
    """Label of the result of a registered clipping at a client, from its `call`-th call."""

    call: int
    clip: bytes


@dataclasses.dataclass(frozen=True)
class Total:
    """Label of a sum of `Contribution`s at the server, without noise so far."""

    call: int
    clip: bytes
    not_private_because: str | None = None


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """Label of client values at the server, aggregated in another way.

    `aggregation` is an index in `Trace.aggregations`. Values that do not depend on the data of the
    clients show only the number of clients. With `is_randomised`, a computation that draws random
    numbers came in between.
    """

    aggregation: int
    depends_on_data: bool
    is_randomised: bool = False


@dataclasses.dataclass(frozen=True)
class ServerInput:
    """Label of a tensor that the server was given, such as a part of the state, by index."""

    number: int


Label = Raw | Contribution | Total | Aggregate | ServerInput
Labels = frozenset[Label]
Value = Any
"""Labels; a Struct of values; or a function from a value to a value."""

RAW = Raw()
NOTHING: Labels = frozenset()


def is_count(label: Label) -> bool:
    """Checks whether a label stands for the number of clients only."""
    return isinstance(label, Aggregate) and not label.depends_on_data


def at_arrival(labels: Labels, aggregation: int) -> Labels:
    """Returns the labels of an aggregate at the server, from those at the clients."""
    contributions = {label for label in labels if isinstance(label, Contribution)}
    carried = frozenset(label for label in labels if not isinstance(label, Raw | Contribution))
    if len({label.call for label in contributions}) == 1 and RAW not in labels:
        (one,) = contributions
        return carried | {Total(one.call, one.clip)}
    depends_on_data = bool(contributions) or RAW in labels
    return carried | {Aggregate(aggregation, depends_on_data)}


def fill(
    type_spec: tff_names.Type,
    labels: Labels,
    only_at: tff_names.PlacementLiteral | None = None,
) -> Value:
    """Makes a value of a type with the same labels everywhere, or only at one placement."""
    if isinstance(type_spec, tff_names.FederatedType):
        here = only_at is None or type_spec.placement is only_at
        return fill(type_spec.member, labels if here else NOTHING)
    if isinstance(type_spec, tff_names.StructType):
        return tff_names.Struct(
            (name, fill(element, labels, only_at))
            for name, element in tff_names.iter_elements(type_spec)
        )
    return labels if only_at is None else NOTHING


def leaves(value: Value) -> Iterator[Labels]:
    """Yields the labels of the tensors of a value, in the order of its type."""
    if isinstance(value, tff_names.Struct):
        for element in value:
            yield from leaves(element)
    else:
        yield value


def union(value: Value) -> Labels:
    """Returns all labels of a value; None has none."""
    return frozenset().union(*leaves(value)) if value is not None else NOTHING


def pack(type_spec: tff_names.Type, labels: Iterable[Labels]) -> Value:
    """Undoes `leaves` for a value of a type; labels that do not fit are put everywhere."""
    labels = list(labels)
    empty = fill(type_spec, NOTHING)
    if len(labels) != len(list(leaves(empty))):
        return fill(type_spec, frozenset().union(*labels))
    remaining = iter(labels)
    return map_labels(lambda _: next(remaining), empty)


def map_labels(function: Callable[[Labels], Labels], value: Value) -> Value:
    """Returns a value of the same structure, with its labels replaced one by one."""
    if isinstance(value, tff_names.Struct):
        return tff_names.Struct(
            (name, map_labels(function, element))
            for name, element in tff_names.iter_elements(value)
        )
    return function(value)


def join(first: Value, second: Value) -> Value:
    """Joins the labels of two values of the same type, tensor by tensor."""
    others = leaves(second)
    return map_labels(lambda labels: labels | next(others), first)
