"""Labels in place of values: what of the clients' values a tensor may depend on, in what form.

A value of a computation is a `tff.structure.Struct` of values, down to the labels of a
tensor or sequence; the placement of a federated value is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow_federated as tff


@dataclasses.dataclass(frozen=True)
class Raw:
    """At a client: its data, or anything made from it."""


@dataclasses.dataclass(frozen=True)
class Contribution:
    """At a client: what a registered clipping returned in its `call`-th call."""

    call: int
    clip: bytes


@dataclasses.dataclass(frozen=True)
class Total:
    """At the server: a sum of `Contribution`s, without noise so far."""

    call: int
    clip: bytes
    not_private_because: str | None = None


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """At the server: client values, aggregated by other ways.

    Attributes:
      aggregation: Number of the aggregation, in `Trace.aggregations`.
      depends_on_data: False for an aggregate of values that do not depend on the data of
        the clients, which shows nothing but how many of them there are.
      is_randomised: Whether a computation that draws random numbers came in between.
    """

    aggregation: int
    depends_on_data: bool
    is_randomised: bool = False


@dataclasses.dataclass(frozen=True)
class ServerInput:
    """What the server was given, such as a part of the state: no client value.

    Attributes:
      number: Of the tensor, in the argument of the computation.
    """

    number: int


Label = Raw | Contribution | Total | Aggregate | ServerInput
Labels = frozenset[Label]
Value = Any
"""Labels; a Struct of values; or a function from a value to a value."""

RAW = Raw()
NOTHING: Labels = frozenset()


def is_count(label: Label) -> bool:
    """Whether a label says no more than how many clients there are."""
    return isinstance(label, Aggregate) and not label.depends_on_data


def at_arrival(labels: Labels, aggregation: int) -> Labels:
    """What labels at the clients become where their aggregate arrives."""
    contributions = {label for label in labels if isinstance(label, Contribution)}
    carried = frozenset(label for label in labels if not isinstance(label, Raw | Contribution))
    if len({label.call for label in contributions}) == 1 and RAW not in labels:
        (one,) = contributions
        return carried | {Total(one.call, one.clip)}
    depends_on_data = bool(contributions) or RAW in labels
    return carried | {Aggregate(aggregation, depends_on_data)}


def fill(
    type_spec: tff.Type,
    labels: Labels,
    only_at: tff.framework.PlacementLiteral | None = None,
) -> Value:
    """A value of a type with the same labels everywhere, or only at one placement."""
    if isinstance(type_spec, tff.FederatedType):
        here = only_at is None or type_spec.placement is only_at
        return fill(type_spec.member, labels if here else NOTHING)
    if isinstance(type_spec, tff.StructType):
        return tff.structure.Struct(
            (name, fill(element, labels, only_at))
            for name, element in tff.structure.iter_elements(type_spec)
        )
    return labels if only_at is None else NOTHING


def leaves(value: Value) -> Iterator[Labels]:
    """The labels of the tensors of a value, in the order of its type."""
    if isinstance(value, tff.structure.Struct):
        for element in value:
            yield from leaves(element)
    else:
        yield value


def union(value: Value) -> Labels:
    """All labels of a value; of no value there are none."""
    return frozenset().union(*leaves(value)) if value is not None else NOTHING


def pack(type_spec: tff.Type, labels: Iterable[Labels]) -> Value:
    """The opposite of `leaves`, for a value of a type; all labels everywhere if they do not fit."""
    labels = list(labels)
    empty = fill(type_spec, NOTHING)
    if len(labels) != len(list(leaves(empty))):
        return fill(type_spec, frozenset().union(*labels))
    remaining = iter(labels)
    return map_labels(lambda _: next(remaining), empty)


def map_labels(function: Callable[[Labels], Labels], value: Value) -> Value:
    """A value of the same structure, its labels replaced one by one."""
    if isinstance(value, tff.structure.Struct):
        return tff.structure.Struct(
            (name, map_labels(function, element))
            for name, element in tff.structure.iter_elements(value)
        )
    return function(value)


def join(first: Value, second: Value) -> Value:
    """The labels of two values of the same type."""
    others = leaves(second)
    return map_labels(lambda labels: labels | next(others), first)
