"""Metrics of a round: what a client sends of its own, how it is summed, and what that tells.

    parts = build(model.finalize_metrics, unfinalized_spec, is_secure=True)
    for part in parts:
        sent = [part.encode(unfinalized) for unfinalized in of_clients]
        total = tf.nest.map_structure(lambda *one: tf.add_n(one), *sent)
        metrics |= part.decode(total)

The metrics of a round are those of all parts. TensorFlow without TFF: the functions work eagerly
and in graphs.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.models import metric_grid

FRACTION_BITS = 20
"""Number of fraction bits: a secure sum has floating-point numbers as multiples of 2⁻²⁰."""
LARGEST_ENTRY = 2**40 - 1
"""Largest integer that one client sends, so that a sum of up to 2²² clients is an int64."""
BOUNDED_SUMS = "bounded_sums"
"""Name of the vector of `bounded` among the metrics: float64, in the order of the bounds."""

Finalize: TypeAlias = Callable[[Any], Mapping[str, Any]]
"""Function from unfinalized metrics to the final ones, by their names."""
Grids: TypeAlias = Mapping[str, metric_grid.MetricGrid]
"""Grids by the names of final metrics. `metric_grid.SECONDS` has no values here: whoever runs the
client's graph fills its histogram in, as devices do."""

_NORM = 1.0 - 1e-9  # What float64 rounds is far less.


class MetricSum(NamedTuple):
    """One sum over clients, and the metrics that are made of it.

    `encode` makes the structure that a client sends of its unfinalized metrics, and `decode` an
    `OrderedDict` of metrics of the sum. `largest` is the largest entry that a client adds to a
    secure sum; None for a sum in the clear.
    """

    encode: Callable[[Any], Any]
    decode: Finalize
    largest: int | None


Build: TypeAlias = Callable[[Finalize, Any], list[MetricSum]]
"""Function from the finalizer of metrics, and the specs of a client's unfinalized ones, to the
sums of a round, as `build` with its options. The first is the sum of the metrics themselves: with
a finalizer that changes nothing, it gives the sums."""


def build(
    finalize: Finalize,
    unfinalized_spec: Any,
    *,
    is_secure: bool = False,
    grids: Grids | None = None,
    bounds: Mapping[str, float] | None = None,
) -> list[MetricSum]:
    """Builds the sums of a round, that of the metrics themselves first.

    Metrics and histograms are summed by secure sums if `is_secure`, those of `bounds` never.
    """
    sums = [secure(finalize, unfinalized_spec) if is_secure else in_the_clear(finalize)]
    if grids:
        sums.append(histograms(finalize, grids, is_secure=is_secure))
    if bounds is not None:
        sums.append(bounded(bounds))
    return sums


def in_the_clear(finalize: Finalize) -> MetricSum:
    """Sums metrics as they are, and finalizes the sums."""
    return MetricSum(_unchanged, finalize, None)


def secure(finalize: Finalize, unfinalized_spec: Any) -> MetricSum:
    """Sums metrics by secure sums, so that the server sees no single client's.

    A client's floating-point number is rounded to a multiple of 2⁻²⁰, up to 2²⁰; an integer is
    sent unchanged, up to 2⁴⁰ - 1. Larger values count as the limit, negative ones as 0. A client
    with a metric that is not finite, because its training diverged, counts as zero in all.

    What is finalized has the dtypes of `unfinalized_spec`.
    """
    dtypes = [spec.dtype for spec in tf.nest.flatten(unfinalized_spec)]

    def encode(metrics):
        numbers = tf.nest.flatten(metrics)
        is_finite = tf.reduce_all([tf.reduce_all(_is_finite(number)) for number in numbers])
        encoded = [tf.where(is_finite, _encoded(n), tf.zeros_like(n, tf.int64)) for n in numbers]
        return tf.nest.pack_sequence_as(unfinalized_spec, encoded)

    def decode(sums):
        numbers = map(_decoded, tf.nest.flatten(sums), dtypes)
        return finalize(tf.nest.pack_sequence_as(unfinalized_spec, list(numbers)))

    return MetricSum(encode, decode, LARGEST_ENTRY)


def bounded(bounds: Mapping[str, float]) -> MetricSum:
    """Sums vectors of metrics in which no client counts for more than a norm of 1, to be noised.

    A client scales its metrics by public bounds and clips the vector as a whole, so that ratios
    such as its mean loss stay as they are. A client with a metric that is not finite counts as
    zero.

    Bounds have the names of unfinalized metrics, and must not depend on protected data.
    """

    def encode(unfinalized):
        found = _leaves(unfinalized)
        unknown = sorted(set(bounds) - set(found))
        if unknown or not all(math.isfinite(b) and b > 0.0 for b in bounds.values()):
            raise validation.UsageError(
                f"bounds must be positive, of sums among {sorted(found)}, got {dict(bounds)}."
            )
        scaled = tf.stack([tf.cast(found[name], tf.float64) / b for name, b in bounds.items()])
        scaled = tf.where(tf.reduce_all(tf.math.is_finite(scaled)), scaled, tf.zeros_like(scaled))
        norm = tf.norm(scaled)
        factor = tf.where(norm > _NORM, _NORM / norm, tf.ones_like(norm))
        return tf.where(tf.math.is_finite(norm), scaled * factor, tf.zeros_like(scaled))

    return MetricSum(encode, lambda sums: collections.OrderedDict([(BOUNDED_SUMS, sums)]), None)


def histograms(finalize: Finalize, grids: Grids, is_secure: bool) -> MetricSum:
    """Counts clients by their own final metrics, such as their mean loss, for order statistics.

    A client sends a one-hot vector for each grid. A client whose metrics are all zero has no
    examples, or its training diverged: it has no value.

    Metrics are int32 of shape [size]. That of "loss" has the name "loss_histogram".
    """

    def encode(unfinalized):
        numbers = tf.nest.flatten(unfinalized)
        has_values = tf.reduce_any([tf.math.count_nonzero(number) > 0 for number in numbers])
        final = finalize(unfinalized)
        unknown = sorted(set(grids) - set(final) - {metric_grid.SECONDS})
        if unknown:
            raise validation.UsageError(
                f"grids names {unknown}, and the model has the metrics {sorted(final)}."
            )
        return collections.OrderedDict(
            (name + metric_grid.SUFFIX, _one_hot(grid, final.get(name), has_values))
            for name, grid in grids.items()
        )

    return MetricSum(encode, _unchanged, 1 if is_secure else None)


def _unchanged(value: Any) -> Any:
    return value


def _is_finite(number: tf.Tensor) -> tf.Tensor:
    return tf.math.is_finite(number) if number.dtype.is_floating else tf.constant(True)


def _encoded(number: tf.Tensor) -> tf.Tensor:
    if number.dtype.is_floating:
        number = tf.round(tf.cast(number, tf.float64) * 2.0**FRACTION_BITS)
        number = tf.clip_by_value(number, 0.0, float(LARGEST_ENTRY))
    return tf.clip_by_value(tf.cast(number, tf.int64), 0, LARGEST_ENTRY)


def _decoded(total: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.is_floating:
        return tf.cast(tf.cast(total, tf.float64) / 2.0**FRACTION_BITS, dtype)
    return tf.cast(total, dtype)


def _leaves(values: Any) -> dict[str, Any]:
    """Returns the tensors of nested dictionaries by their own names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _leaves(value) if isinstance(value, Mapping) else {name: value}
    return found


def _one_hot(
    grid: metric_grid.MetricGrid, value: tf.Tensor | None, has_values: tf.Tensor
) -> tf.Tensor:
    """Returns the vector of a client's value; a float32 is compared exactly, as float64."""
    if value is None:
        return tf.one_hot(0, grid.size, dtype=tf.int32)
    if value.shape.rank != 0:
        raise validation.UsageError(
            f"A metric with a grid must be a scalar, got shape {value.shape}."
        )
    value = tf.cast(value, tf.float64)
    inner = tf.constant(grid.edges[1:-1], tf.float64)
    place = 1 + tf.reduce_sum(tf.cast(value >= inner, tf.int32))
    is_known = tf.logical_and(has_values, tf.math.is_finite(value))
    return tf.one_hot(tf.where(is_known, place, 0), grid.size, dtype=tf.int32)
