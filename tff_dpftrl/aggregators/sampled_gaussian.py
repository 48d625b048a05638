"""The aggregator of DP-FedAvg: a weighted estimate with fresh noise every round.

McMahan et al. 2018, Algorithm 1. The privacy of a round is that of a Gaussian
mechanism whose noise is `noise_multiplier` times its sensitivity, applied to a
cohort in which each client is with probability q.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.aggregators import factory_parts, updates
from tff_dpftrl.mechanisms import noise_recipe
from tff_dpftrl.private_round import clip_ops, clip_schedule, estimators, noise_stream, seeds

_NOISE_STREAM = 0


class SampledGaussianState(NamedTuple):
    """State of the aggregator. It is secret: the seed reveals the noise.

    Attributes:
      round_index: int64 scalar, the next round.
      seed: int64 tensor of shape [2], the root seed of the run's noise.
    """

    round_index: Any
    seed: Any


class _Contribution(NamedTuple):
    """What one client adds to the sums, or the sums themselves."""

    update: Any
    weight: Any


class SampledGaussianFactory(tff.aggregators.WeightedAggregationFactory):
    """Estimates the average update of Poisson-sampled clients, with noise.

    A client with update Δ_k and weight n_k (a number of examples) contributes
    w_k clip(Δ_k) with w_k = min(n_k / weight_cap, 1). The estimator divides the
    sum, and Gaussian noise of standard deviation noise_multiplier · clip norm ·
    `estimator.unit_sensitivity` is added to the result, once.

    An update whose norm is not finite in float32 counts as absent: zero update,
    zero weight. An empty cohort gives noise only. Sums and noise are float32,
    whatever the dtype of the updates; the estimate is cast back at the end.

    Measurements: `clip_norm`, `noise_stddev` (of the noise in the estimate) and, on
    demand, `non_finite_clients`.
    """

    def __init__(
        self,
        *,
        clip: clip_schedule.ClipSchedule,
        noise_multiplier: float,
        estimator: estimators.Estimator,
        weight_cap: float = 1.0,
        deterministic_seed: int | None = None,
        report_non_finite_clients: bool = False,
    ):
        """Initialises the factory.

        Args:
          clip: How each update is clipped.
          noise_multiplier: z, standard deviation of the noise per unit of
            sensitivity. 0 adds no noise and is not private.
          estimator: What the sum is divided by.
          weight_cap: ŵ, the number of examples from which on a client has weight
            1. With 1 every client that has examples weighs the same.
          deterministic_seed: Leave it None, for a seed from the operating system.
            A run with a known seed is not private; for tests.
          report_non_finite_clients: If True, the measurement "non_finite_clients"
            counts the updates dropped as not finite: an exact count, outside the
            privacy guarantee.

        Raises:
          ValueError: If an argument cannot be used.
        """
        if not isinstance(clip, clip_schedule.ClipSchedule):
            raise ValueError(
                f"clip must be a FlatClipSchedule or a PerLayerClipSchedule, got {clip!r}."
            )
        if not isinstance(estimator, estimators.Estimator):
            raise ValueError(
                f"estimator must be a FixedDenominator or a ClippedDenominator, got {estimator!r}."
            )
        self._clip = clip
        self._noise_multiplier = factory_parts.check_noise_multiplier(noise_multiplier)
        self._estimator = estimator
        self._weight_cap = factory_parts.check_positive("weight_cap", weight_cap)
        self._deterministic_seed = seeds.check_deterministic_seed(deterministic_seed)
        self._report_non_finite_clients = report_non_finite_clients

    def create(
        self, value_type: tff.Type, weight_type: tff.Type
    ) -> tff.templates.AggregationProcess:
        """Creates the process.

        Args:
          value_type: Type of an update: a nesting of float tensors of fixed shape.
          weight_type: Type of the number of examples n_k, a numeric scalar.

        Returns:
          The aggregation process; its state is a `SampledGaussianState` and its
          result has the type of an update.

        Raises:
          ValueError: If `value_type` is empty or has other tensors.
        """
        update_type = updates.UpdateType(value_type)
        stream = noise_stream.NoiseStream(noise_recipe.IdentityNoise(), update_type.shapes)

        @tff.tensorflow.computation
        def initial_state():
            return SampledGaussianState(
                round_index=tf.constant(0, tf.int64), seed=seeds.root_seed(self._deterministic_seed)
            )

        @tff.tensorflow.computation(value_type, weight_type, tf.int64)
        def contribute(value, num_examples, round_index):
            update = update_type.flatten(value)
            is_finite = tf.math.is_finite(clip_ops.global_norm(update))
            weight = tf.cast(num_examples, tf.float32) / self._weight_cap
            weight = tf.where(is_finite & (weight > 0), tf.minimum(weight, 1.0), 0.0)
            clipped = self._clip.clip(update, round_index)
            weighted = tuple(weight * tensor for tensor in clipped)
            return _Contribution(weighted, weight), is_finite

        @tff.tensorflow.computation(
            initial_state.type_signature.result, contribute.type_signature.result[0]
        )
        def release(state, totals):
            clip_norm = self._clip.norm(state.round_index)
            stddev = self._noise_multiplier * self._estimator.unit_sensitivity * clip_norm
            divisor = self._estimator.divisor(totals.weight)
            noise, _ = stream.next((), state.round_index, seeds.derive(state.seed, _NOISE_STREAM))
            estimate = [
                total / divisor + stddev * tensor
                for total, tensor in zip(totals.update, noise, strict=True)
            ]
            new_state = SampledGaussianState(state.round_index + 1, state.seed)
            measurements = collections.OrderedDict(clip_norm=clip_norm, noise_stddev=stddev)
            return new_state, update_type.pack_as_update(estimate), measurements

        @tff.federated_computation
        def initialize():
            return tff.federated_eval(initial_state, tff.SERVER)

        @tff.federated_computation(
            initialize.type_signature.result,
            tff.FederatedType(value_type, tff.CLIENTS),
            tff.FederatedType(weight_type, tff.CLIENTS),
        )
        def next_fn(state, value, weight):
            round_index = tff.federated_broadcast(state.round_index)
            contributions, is_finite = tff.federated_map(contribute, (value, weight, round_index))
            totals = tff.federated_sum(contributions)
            state, estimate, measurements = tff.federated_map(release, (state, totals))
            if self._report_non_finite_clients:
                count = factory_parts.count_non_finite(is_finite)
                measurements = factory_parts.merge_measurements(
                    collections.OrderedDict(non_finite_clients=count), measurements
                )
            return tff.templates.MeasuredProcessOutput(state, estimate, measurements)

        return tff.templates.AggregationProcess(initialize, next_fn)
