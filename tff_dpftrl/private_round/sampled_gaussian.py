"""DP-FedAvg's weighted estimate with fresh noise every round, as TensorFlow functions.

McMahan et al. 2018, Algorithm 1. The privacy of a round is that of a Gaussian
mechanism whose noise is `noise_multiplier` times its sensitivity, applied to a
cohort that each client joins with probability q.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import noise_recipe
from tff_dpftrl.private_round import clipping as clipping_lib
from tff_dpftrl.private_round import estimators, interface, noise_stream, seeds, summation

_NOISE_STREAM = 0


class SampledGaussianState(NamedTuple):
    """State between rounds: index of the next one, and root seed of the run's noise. Secret."""

    round_index: Any
    seed: Any


class WeightedContribution(NamedTuple):
    """Contribution of one client to the sums, or the sums themselves, in float64.

    The clipped update is multiplied by the client's weight in [0, 1].
    """

    update: Any
    weight: Any


class SampledGaussianRound(interface.PrivateRound):
    """Mechanism of DP-FedAvg: the noised average update of Poisson-sampled clients.

    A client with update Δ_k and weight n_k (a number of examples) contributes w_k clip(Δ_k) with
    w_k = min(n_k / weight_cap, 1), or nothing if n_k is not positive. The estimator divides the
    sum, and Gaussian noise of standard deviation noise_multiplier · clip
    norm · `estimator.unit_sensitivity` is added, once.

    An update whose norm is not finite, or above 1.8e19, counts as absent: zero update, zero weight.
    An empty cohort gives noise only.

    With a `deterministic_seed` the run is not private. With `secure_noise`, the noise is of a
    cryptographic generator, on a grid.
    """

    contribution_type = WeightedContribution
    state_type = SampledGaussianState
    broadcast_field = "round_index"

    def __init__(
        self,
        *,
        clipping: clipping_lib.Clipping,
        noise_multiplier: float,
        estimator: estimators.Estimator,
        weight_cap: float = 1.0,
        deterministic_seed: int | None = None,
        secure_noise: bool = False,
    ):
        """Initialises the round; arguments are the attributes."""
        if not isinstance(clipping, clipping_lib.Clipping):
            raise validation.UsageError(
                f"clipping must be a FlatClipping or a PerLayerClipping, got {clipping!r}."
            )
        if not isinstance(estimator, estimators.Estimator):
            raise validation.UsageError(
                f"estimator must be a FixedDenominator or a ClippedDenominator, got {estimator!r}."
            )
        self.clipping = clipping
        self.noise_multiplier = validation.noise_multiplier(noise_multiplier)
        self.estimator = estimator
        self.weight_cap = validation.positive("weight_cap", weight_cap)
        self.deterministic_seed = validation.seed("deterministic_seed", deterministic_seed)
        self.secure_noise = secure_noise

    @override
    def initial_state(self, shapes):
        self.clipping.check_num_tensors(len(shapes))
        seed = seeds.root_seed(self.deterministic_seed, secure=self.secure_noise)
        return SampledGaussianState(tf.constant(0, tf.int64), seed)

    @override
    def clip_client(self, tensors, broadcast, weight=None):
        """Clips and weighs one client's update; `weight` is required."""
        if weight is None:
            raise validation.UsageError("weight must be the client's number of examples, got None.")
        clipped, norm = self.clipping.clip(tensors, broadcast)
        is_finite = tf.math.is_finite(norm)
        weight = tf.cast(weight, tf.float64) / self.weight_cap
        one, zero = tf.ones_like(weight), tf.zeros_like(weight)
        weight = tf.where(is_finite & (weight > 0), tf.minimum(weight, one), zero)
        return WeightedContribution([weight * tensor for tensor in clipped], weight), is_finite

    @override
    def release(self, state, totals):
        """Adds the noise; measures `clip_norm` and `noise_stddev` (of the estimate)."""
        clip_norm = self.clipping.norm(state.round_index)
        stddev = self.noise_multiplier * self.estimator.unit_sensitivity * clip_norm
        shapes = [tensor.shape for tensor in totals.update]
        stream = noise_stream.NoiseStream(
            noise_recipe.IdentityNoise(), shapes, index=_NOISE_STREAM, secure=self.secure_noise
        )
        executed = seeds.of_execution(state.seed, self.deterministic_seed)
        noise, _ = stream.next((), state.round_index, executed)
        divisor = self.estimator.divisor(tf.cast(totals.weight, tf.float64))
        means = [tensor / divisor for tensor in summation.in_float64(totals.update)]
        if self.secure_noise and self.noise_multiplier > 0:
            estimate = summation.noised_mean_on_grid(
                means, noise, stddev, 1.0, self.noise_multiplier
            )
        else:
            estimate = summation.noised_mean(means, noise, stddev, 1.0)
        measurements = {
            "clip_norm": tf.cast(clip_norm, tf.float32),
            "noise_stddev": tf.cast(stddev, tf.float32),
        }
        return self.skip(state, shapes), estimate, measurements

    @override
    def skip(self, state, shapes):
        """Passes over a round; the noise of rounds is independent, so nothing is kept."""
        del shapes
        return SampledGaussianState(state.round_index + 1, state.seed)
