"""Sums of metrics in which no client counts for more than an L2 norm of 1, to be noised.

Each client scales its sums of metrics by public bounds and clips the vector as a whole, so that
ratios such as its mean loss stay as they are. The server sums the vectors beside the metrics.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.execution import tff_names

NAME = "bounded_sums"
"""Name of the vector among the metrics of training: float64, in the order of the bounds."""

_NORM = 1.0 - 1e-9  # What float64 rounds is far less.


def with_bounded_sums(
    metrics_aggregator: Callable[..., tff_names.Computation], bounds: Mapping[str, float]
) -> Callable[..., tff_names.Computation]:
    """Adds bounded sums to the metrics of training.

    Args:
      metrics_aggregator: Function that builds the aggregation of the metrics, such as
        `tff.learning.metrics.sum_then_finalize`.
      bounds: What the sums of a client are divided by, by their names among the unfinalized
        metrics. They must not depend on protected data.

    Returns:
      A function like `metrics_aggregator`, whose metrics have one more entry, `NAME`.
    """

    def build(metric_finalizers: Any, local_unfinalized_metrics_type: Any = None):
        inner = metrics_aggregator(metric_finalizers, local_unfinalized_metrics_type)

        @tff_names.federated_computation
        def aggregate(metrics):
            return _joined(inner(metrics), _summed(metrics, bounds))

        return aggregate

    return build


def clipped(values: list[tf.Tensor], bounds: list[float]) -> tf.Tensor:
    """Scales and clips one client's sums.

    Args:
      values: Scalars.
      bounds: What each is divided by.

    Returns:
      float64 tensor of shape [n], of an L2 norm of at most 1; zero if a value is not finite.
    """
    scaled = tf.stack([tf.cast(x, tf.float64) / b for x, b in zip(values, bounds, strict=True)])
    scaled = tf.where(tf.reduce_all(tf.math.is_finite(scaled)), scaled, tf.zeros_like(scaled))
    norm = tf.norm(scaled)
    factor = tf.where(norm > _NORM, _NORM / norm, tf.ones_like(norm))
    return tf.where(tf.math.is_finite(norm), scaled * factor, tf.zeros_like(scaled))


def _summed(metrics: Any, bounds: Mapping[str, float]) -> Any:
    """Sums the clients' vectors, a federated value at the server."""

    @tff_names.tensorflow_computation(metrics.type_signature.member)
    def bound(unfinalized):
        found = _leaves(unfinalized)
        unknown = sorted(set(bounds) - set(found))
        if unknown or not all(math.isfinite(b) and b > 0.0 for b in bounds.values()):
            raise validation.UsageError(
                f"bounds must be positive, of sums among {sorted(found)}, got {dict(bounds)}."
            )
        return clipped([found[name] for name in bounds], list(bounds.values()))

    return tff_names.federated_sum(tff_names.federated_map(bound, metrics))


def _leaves(values: Any) -> dict[str, Any]:
    """Returns the tensors of nested dictionaries by their own names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _leaves(value) if isinstance(value, Mapping) else {name: value}
    return found


def _joined(metrics: Any, sums: Any) -> Any:
    pair = tff_names.federated_zip((metrics, sums))

    @tff_names.tensorflow_computation(pair.type_signature.member)
    def join(one, other):
        return collections.OrderedDict([*one.items(), (NAME, other)])

    return tff_names.federated_map(join, pair)
