"""The aggregator of DP-FedAvg: a weighted estimate with fresh noise every round.

McMahan et al. 2018, Algorithm 1. The privacy of a round is that of a Gaussian
mechanism whose noise is `noise_multiplier` times its sensitivity, applied to a
cohort in which each client is with probability q.
"""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.aggregators import noise_ops, seeds
from tff_dpftrl.algorithms import clipping, estimators
from tff_dpftrl.mechanisms import noise_recipe


class SampledGaussianState(NamedTuple):
    """State of the aggregator. It is secret: the seed reveals the noise.

    Attributes:
      seed: int64 of shape [2], the root of the run's noise.
      round_index: int64, the number of rounds done.
    """

    seed: Any
    round_index: Any


class _Contribution(NamedTuple):
    """What one client adds to the sums, or the sums themselves."""

    update: Any
    weight: Any
    non_finite: Any


class SampledGaussianFactory(tff.aggregators.WeightedAggregationFactory):
    """Estimates the average update of Poisson-sampled clients, with noise.

    A client with update Δ_k and weight n_k (a number of examples) contributes
    w_k clip(Δ_k) with w_k = min(n_k / weight_cap, 1). The estimator divides the
    sum, and Gaussian noise of standard deviation noise_multiplier · clip norm ·
    `estimator.unit_sensitivity` is added to the result, once.

    An update with an entry that is not finite counts as absent: zero update,
    zero weight. An empty cohort gives noise only. Sums and noise are float32
    (float64 for float64 updates), whatever the dtype of the updates.

    Measurements: `clip_norm`, `noise_stddev` (of the estimate), and
    `num_non_finite_clients`. The last one is an exact count, not covered by the
    privacy guarantee.
    """

    def __init__(
        self,
        *,
        clip: clipping.Clip,
        noise_multiplier: float,
        estimator: estimators.Estimator,
        weight_cap: float = 1.0,
        deterministic_seed: int | None = None,
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

        Raises:
          ValueError: If an argument cannot be used.
        """
        if not isinstance(clip, clipping.Clip):
            raise ValueError(f"clip must be a FlatClip or a PerLayerClip, got {clip!r}.")
        if not isinstance(estimator, estimators.Estimator):
            raise ValueError(
                f"estimator must be a FixedDenominator or a ClippedDenominator, got {estimator!r}."
            )
        if not 0 <= noise_multiplier < math.inf:
            raise ValueError(
                f"noise_multiplier must be finite and not negative, got {noise_multiplier!r}."
            )
        if not 0 < weight_cap < math.inf:
            raise ValueError(
                "weight_cap must be a positive number of examples, 1 for equal weights, "
                f"got {weight_cap!r}."
            )
        self._clip = clip
        self._noise_multiplier = float(noise_multiplier)
        self._estimator = estimator
        self._weight_cap = float(weight_cap)
        self._deterministic_seed = seeds.check_deterministic_seed(deterministic_seed)

    def create(
        self, value_type: tff.Type, weight_type: tff.Type
    ) -> tff.templates.AggregationProcess:
        """Creates the process.

        Args:
          value_type: Type of an update: float tensors of fixed shape.
          weight_type: Type of the number of examples n_k, a numeric scalar.

        Returns:
          The aggregation process; its result has the type of an update.

        Raises:
          ValueError: If `value_type` is empty or has other tensors.
        """
        specs = _checked_specs(value_type)
        noise_stream = noise_ops.NoiseStream(
            noise_recipe.IdentityNoise(), [spec.shape for spec in specs]
        )

        @tff.tensorflow.computation
        def initial_state():
            seed = seeds.root_seed(self._deterministic_seed)
            return SampledGaussianState(seed, tf.constant(0, tf.int64))

        @tff.tensorflow.computation(value_type, weight_type, tf.int64)
        def contribute(value, num_examples, round_index):
            return self._contribution(tf.nest.flatten(value), num_examples, round_index)

        @tff.tensorflow.computation(
            initial_state.type_signature.result, contribute.type_signature.result
        )
        def finish(state, totals):
            estimate, measurements = self._noised(state, totals, noise_stream)
            estimate = [tf.cast(e, spec.dtype) for e, spec in zip(estimate, specs, strict=True)]
            new_state = SampledGaussianState(state.seed, state.round_index + 1)
            structure = tff.types.type_to_tf_tensor_specs(value_type)
            return new_state, tf.nest.pack_sequence_as(structure, estimate), measurements

        @tff.federated_computation
        def init_fn():
            return tff.federated_eval(initial_state, tff.SERVER)

        @tff.federated_computation(
            init_fn.type_signature.result,
            tff.FederatedType(value_type, tff.CLIENTS),
            tff.FederatedType(weight_type, tff.CLIENTS),
        )
        def next_fn(state, value, weight):
            round_index = tff.federated_broadcast(state.round_index)
            contributions = tff.federated_map(contribute, (value, weight, round_index))
            totals = tff.federated_sum(contributions)
            state, estimate, measurements = tff.federated_map(finish, (state, totals))
            return tff.templates.MeasuredProcessOutput(state, estimate, measurements)

        return tff.templates.AggregationProcess(init_fn, next_fn)

    def _contribution(
        self, update: list[tf.Tensor], num_examples: tf.Tensor, round_index: tf.Tensor
    ) -> _Contribution:
        """One client's bounded, weighted update: of norm at most the clip norm."""
        update = [u if u.dtype == tf.float64 else tf.cast(u, tf.float32) for u in update]
        is_finite = tf.math.is_finite(clipping.l2_norm(update))
        # 0 · NaN is NaN: what is not finite is replaced before anything is multiplied.
        update = [tf.where(is_finite, u, tf.zeros_like(u)) for u in update]
        clipped = self._clip.project(update, round_index)
        weight = tf.cast(num_examples, tf.float32) / self._weight_cap
        weight = tf.where(is_finite & (weight > 0), tf.minimum(weight, 1.0), 0.0)
        return _Contribution(
            update=tuple(tf.cast(weight, c.dtype) * c for c in clipped),
            weight=weight,
            non_finite=1 - tf.cast(is_finite, tf.int32),
        )

    def _noised(
        self,
        state: SampledGaussianState,
        totals: _Contribution,
        noise_stream: noise_ops.NoiseStream,
    ) -> tuple[list[tf.Tensor], collections.OrderedDict[str, tf.Tensor]]:
        """The noised estimate and the measurements of a round."""
        clip_norm = self._clip.norm(state.round_index)
        stddev = self._noise_multiplier * self._estimator.unit_sensitivity * clip_norm
        divisor = self._estimator.divisor(totals.weight)
        noise, _ = noise_stream.next((), state.round_index, state.seed)
        estimate = [
            total / tf.cast(divisor, total.dtype) + tf.cast(stddev * draw, total.dtype)
            for total, draw in zip(totals.update, noise, strict=True)
        ]
        measurements = collections.OrderedDict(
            clip_norm=clip_norm, noise_stddev=stddev, num_non_finite_clients=totals.non_finite
        )
        return estimate, measurements


def _checked_specs(value_type: tff.Type) -> list[tf.TensorSpec]:
    if not tff.types.is_structure_of_floats(value_type):
        raise ValueError(f"value_type must consist of float tensors only, got {value_type}.")
    specs = tf.nest.flatten(tff.types.type_to_tf_tensor_specs(value_type))
    if not specs:
        raise ValueError("value_type has no tensors: there is nothing to aggregate.")
    if not all(spec.shape.is_fully_defined() for spec in specs):
        raise ValueError(f"value_type must have tensors of fixed shape, got {value_type}.")
    return specs
