"""What the aggregation factories of this package share."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff


def check_positive(name: str, value: float) -> float:
    """Returns `value` if it is a positive, finite number.

    Args:
      name: The argument's name, for the message.
      value: The number.

    Returns:
      The same value.

    Raises:
      ValueError: If it is not.
    """
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a positive number, got {value!r}.")
    return value


def check_noise_multiplier(value: float) -> float:
    """Returns `value` if it is a finite number, not negative.

    Args:
      value: The noise multiplier; 0 means no noise and no privacy.

    Returns:
      The same value.

    Raises:
      ValueError: If it is not.
    """
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(
            "noise_multiplier must be a finite number, at least 0 (no noise, no privacy), "
            f"got {value!r}."
        )
    return float(value)


def create_sum(
    sum_factory: tff.aggregators.UnweightedAggregationFactory | None, summed_type: tff.Type
) -> tff.templates.AggregationProcess:
    """Creates the inner sum and checks that it returns what it is given.

    Args:
      sum_factory: The factory of the sum; `tff.aggregators.SumFactory` if None.
      summed_type: The type of one client's clipped update.

    Returns:
      The process.

    Raises:
      ValueError: If the type of the sum differs from `summed_type`.
    """
    if sum_factory is None:
        sum_factory = tff.aggregators.SumFactory()
    process = sum_factory.create(summed_type)
    result_type = process.next.type_signature.result.result.member
    if not summed_type.is_equivalent_to(result_type):
        raise ValueError(
            f"sum_factory must return a sum of the type it is given, {summed_type}, but returns "
            f"{result_type}."
        )
    return process


def noised_mean(
    total: Sequence[tf.Tensor],
    noise: Sequence[tf.Tensor],
    stddev: tf.Tensor,
    clients_per_round: float,
) -> list[tf.Tensor]:
    """(total + stddev · noise) / clients_per_round, tensor by tensor, in float32.

    Args:
      total: The sum of the clipped updates.
      noise: Unit noise of the same shapes.
      stddev: float32 scalar, before the division.
      clients_per_round: The fixed denominator.

    Returns:
      Tensors of the same shapes.
    """
    return [(x + stddev * z) / clients_per_round for x, z in zip(total, noise, strict=True)]


def count_non_finite(is_finite: tff.Value) -> tff.Value:
    """Number of clients whose `is_finite` is False, exact and so not private.

    Args:
      is_finite: A boolean at the clients.

    Returns:
      int32 scalar at the server.
    """

    @tff.tensorflow.computation(np.bool_)
    def as_count(finite):
        return tf.cast(tf.logical_not(finite), tf.int32)

    return tff.federated_sum(tff.federated_map(as_count, is_finite))


def merge_measurements(own: collections.OrderedDict[str, Any], inner: tff.Value) -> tff.Value:
    """Joins a factory's measurements with those of its inner sum, in one flat dictionary.

    Args:
      own: Values at the server, by name.
      inner: The inner process's measurements; kept under "sum" if they have no names.

    Returns:
      A dictionary at the server.
    """
    inner_type = inner.type_signature.member
    own = tff.federated_zip(own)
    if isinstance(inner_type, tff.StructType) and len(inner_type) == 0:
        return own
    has_names = isinstance(inner_type, tff.StructType) and all(
        name is not None for name, _ in tff.structure.iter_elements(inner_type)
    )

    @tff.tensorflow.computation(own.type_signature.member, inner_type)
    def merge(own, inner):
        if isinstance(inner, tff.structure.Struct):
            inner = tff.structure.to_odict_or_tuple(inner)
        return collections.OrderedDict(own, **(inner if has_names else {"sum": inner}))

    return tff.federated_map(merge, (own, inner))
