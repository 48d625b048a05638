"""DP-FTRL whose clip norm follows a quantile of the clients' norms.

Two private streams run under one strategy C: the sum of the clipped updates, and
the number of clients whose norm is at most an estimate (Xu et al. 2023,
algorithm 1; Andrew et al. 2021). The estimate moves every round. The norm that is
clipped to, and that scales the noise, must stay constant within a block of
correlated noise: it takes over the estimate where a block starts.
"""

from __future__ import annotations

import collections
import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.aggregators import dp_ftrl, factory_parts, updates
from tff_dpftrl.mechanisms import noise_split
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.private_round import clip_ops, noise_stream, seeds

COUNT_STREAM = 1
"""Number of the stream of noise for the counts of unclipped clients; see `seeds`."""

_EXPENSIVE = 1.25


class ClipState(NamedTuple):
    """Clip norms; released, and so not secret.

    Attributes:
      active: float32 scalar, the norm the next round clips to.
      estimate: float32 scalar, the estimated quantile of the clients' norms.
      excess: float32 scalar, the noised sum over the rounds so far of
        (unclipped fraction - target), which the estimate is a function of.
    """

    active: Any
    estimate: Any
    excess: Any


class AdaptiveDPFTRLState(NamedTuple):
    """State of the aggregator between rounds; enough to go on after a crash.

    Secret, but for `clip`: it lets a reader subtract the noise.

    Attributes:
      round_index: int64 scalar, the next round.
      seed: int64 tensor of shape [2], the root seed of all noise.
      buffer: Past noise on the updates as `noise_stream.NoiseStream` keeps it.
      count_buffer: Past noise on the counts, likewise.
      clip: A `ClipState`.
      sum_state: State of the inner sum.
      count_state: State of the inner sum of counts.
    """

    round_index: Any
    seed: Any
    buffer: Any
    count_buffer: Any
    clip: Any
    sum_state: Any
    count_state: Any


class AdaptiveDPFTRLFactory(tff.aggregators.UnweightedAggregationFactory):
    """Creates the processes of `build_adaptive_dp_ftrl_aggregator`, see there.

    Attributes:
      strategy: The strategy C of both streams, with its restarts.
      noise_multiplier: z, of both streams together; what to account for.
      update_noise_multiplier: z_Δ, of the updates.
      clipped_count_stddev: σ_b, of the counts.
      clients_per_round: The fixed denominator.
      deterministic_seed: None for a private run; a run with a given seed is not.
      unit_inflation: Factor by which encoding may lengthen a contribution; None if
        `sum_factory` is handed the clipped updates themselves.
    """

    def __init__(
        self,
        strategy: strategy_lib.Strategy,
        *,
        noise_multiplier: float,
        clients_per_round: float,
        initial_clip_norm: float,
        target_unclipped_quantile: float,
        clip_learning_rate: float,
        clipped_count_stddev: float | None,
        geometric_update: bool,
        deterministic_seed: int | None,
        sum_factory: tff.aggregators.UnweightedAggregationFactory | None,
        count_sum_factory: tff.aggregators.UnweightedAggregationFactory | None,
        unit_inflation: float | None,
        report_non_finite_clients: bool,
    ):
        """Initialises the factory; see `build_adaptive_dp_ftrl_aggregator`."""
        self.strategy = strategy
        self.noise_multiplier = factory_parts.check_noise_multiplier(noise_multiplier)
        self.clients_per_round = factory_parts.check_positive(
            "clients_per_round", clients_per_round
        )
        if clipped_count_stddev is None:
            clipped_count_stddev = clients_per_round / 20 if noise_multiplier > 0 else 0.0
        if not (clipped_count_stddev >= 0 and math.isfinite(clipped_count_stddev)):
            raise ValueError(
                f"clipped_count_stddev must be a finite number, at least 0, "
                f"got {clipped_count_stddev!r}."
            )
        self.clipped_count_stddev = float(clipped_count_stddev)
        self.update_noise_multiplier = noise_split.update_noise_multiplier(
            self.noise_multiplier, self.clipped_count_stddev
        )
        if self.update_noise_multiplier > _EXPENSIVE * self.noise_multiplier:
            factor = self.update_noise_multiplier / self.noise_multiplier
            warnings.warn(
                f"Estimating the clip norm with clipped_count_stddev = {clipped_count_stddev:g} "
                f"multiplies the noise of the updates by {factor:.2f}; a larger "
                "clipped_count_stddev, or more clients in a round, costs less.",
                stacklevel=3,
            )
        if not 0 <= target_unclipped_quantile <= 1:
            raise ValueError(
                f"target_unclipped_quantile must lie in [0, 1], got {target_unclipped_quantile!r}."
            )
        if not (clip_learning_rate >= 0 and math.isfinite(clip_learning_rate)):
            raise ValueError(
                f"clip_learning_rate must be a finite number, at least 0, "
                f"got {clip_learning_rate!r}."
            )
        self.deterministic_seed = seeds.check_deterministic_seed(deterministic_seed)
        self._initial_clip_norm = clip_ops.check_clip_norm("initial_clip_norm", initial_clip_norm)
        self._target = float(target_unclipped_quantile)
        self._clip_learning_rate = float(clip_learning_rate)
        self._geometric_update = geometric_update
        if unit_inflation is not None and not 1 <= unit_inflation < math.inf:
            raise ValueError(
                f"unit_inflation must be None or a finite number, at least 1, "
                f"got {unit_inflation!r}: encoding cannot make a client's contribution smaller."
            )
        self.unit_inflation = unit_inflation
        self._sum_factory = sum_factory
        self._count_sum_factory = count_sum_factory
        self._report_non_finite_clients = report_non_finite_clients

    def _estimate(self, excess: tf.Tensor) -> tf.Tensor:
        """The clip norm after the given sum of (unclipped fraction - target)."""
        change = self._clip_learning_rate * excess
        if self._geometric_update:
            estimate = self._initial_clip_norm * tf.exp(-change)
        else:
            estimate = self._initial_clip_norm - change
        return tf.clip_by_value(estimate, clip_ops.MIN_CLIP_NORM, clip_ops.MAX_CLIP_NORM)

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        """Creates the process for updates of one type.

        Args:
          value_type: A floating-point tensor or any nesting of such tensors.

        Returns:
          The process; its state is an `AdaptiveDPFTRLState`.

        Raises:
          ValueError: If the type has no tensors, other dtypes or unknown shapes, or
            does not fit a sum factory.
        """
        update = updates.UpdateType(value_type)
        recipe, max_rounds = self.strategy.noise_recipe(), self.strategy.max_rounds
        stream = noise_stream.NoiseStream(recipe, update.shapes, max_rounds=max_rounds)
        count_stream = noise_stream.NoiseStream(recipe, [()], max_rounds=max_rounds)

        @tff.tensorflow.computation
        def initial_own_state():
            initial = tf.constant(self._initial_clip_norm, tf.float32)
            return (
                tf.constant(0, tf.int64),
                seeds.root_seed(self.deterministic_seed),
                stream.initial_buffer(),
                count_stream.initial_buffer(),
                ClipState(active=initial, estimate=initial, excess=tf.constant(0.0)),
            )

        own_types = list(initial_own_state.type_signature.result)
        clip_type = own_types[-1]

        @tff.tensorflow.computation(value_type, clip_type)
        def clip_client(value, clip):
            clipped, norm = clip_ops.clip_by_norm(update.flatten(value), clip.active)
            if self.unit_inflation is not None:
                clipped = [tensor / clip.active for tensor in clipped]
            is_finite = tf.math.is_finite(norm)
            bit = tf.where(
                norm <= clip.estimate, noise_split.COUNT_SENSITIVITY, -noise_split.COUNT_SENSITIVITY
            )
            return update.pack(clipped), tf.where(is_finite, bit, 0.0), is_finite

        summed_type = clip_client.type_signature.result[0]
        sum_process = factory_parts.create_sum(self._sum_factory, summed_type)
        count_process = factory_parts.create_sum(
            self._count_sum_factory, tff.TensorType(np.float32)
        )

        @tff.federated_computation
        def initialize():
            own = tff.federated_eval(initial_own_state, tff.SERVER)
            sums = sum_process.initialize(), count_process.initialize()
            return tff.federated_zip(AdaptiveDPFTRLState(*own, *sums))

        @tff.tensorflow.computation(*own_types, summed_type, np.float32)
        def release(round_index, seed, buffer, count_buffer, clip, total, count):
            noise, buffer = stream.next(
                buffer, round_index, seeds.derive(seed, dp_ftrl.UPDATE_STREAM)
            )
            total, multiplier = update.flatten(total), self.update_noise_multiplier
            if self.unit_inflation is not None:
                total = [tensor * clip.active for tensor in total]
                multiplier *= self.unit_inflation
            stddev = tf.constant(multiplier, tf.float32) * clip.active
            mean = factory_parts.noised_mean(total, noise, stddev, self.clients_per_round)
            (count_noise,), count_buffer = count_stream.next(
                count_buffer, round_index, seeds.derive(seed, COUNT_STREAM)
            )
            # Of fewer clients than planned the missing ones count as half unclipped.
            noised_count = count + self.clipped_count_stddev * count_noise
            fraction = noised_count / self.clients_per_round + noise_split.COUNT_SENSITIVITY
            excess = clip.excess + fraction - self._target
            estimate = self._estimate(excess)
            _, next_in_block = stream.block(round_index + 1)
            active = tf.where(tf.equal(next_in_block, 0), estimate, clip.active)
            measurements = collections.OrderedDict(
                clip_norm=clip.active,
                estimated_clip_norm=estimate,
                unclipped_fraction=fraction,
                noise_stddev=stddev,
                num_restarts=stream.block(round_index)[0],
            )
            return (
                round_index + 1,
                buffer,
                count_buffer,
                ClipState(active, estimate, excess),
                update.pack_as_update(mean),
                measurements,
            )

        @tff.federated_computation(
            initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            round_index, seed, buffer, count_buffer, clip, sum_state, count_state = state
            clipped, bit, is_finite = tff.federated_map(
                clip_client, (value, tff.federated_broadcast(clip))
            )
            summed = sum_process.next(sum_state, clipped)
            counted = count_process.next(count_state, bit)
            round_index, buffer, count_buffer, clip, result, own = tff.federated_map(
                release,
                (round_index, seed, buffer, count_buffer, clip, summed.result, counted.result),
            )
            new_state = AdaptiveDPFTRLState(
                round_index, seed, buffer, count_buffer, clip, summed.state, counted.state
            )
            measurements = collections.OrderedDict(
                (name, own[name])
                for name, _ in tff.structure.iter_elements(own.type_signature.member)
            )
            if self._report_non_finite_clients:
                measurements["non_finite_clients"] = factory_parts.count_non_finite(is_finite)
            return tff.templates.MeasuredProcessOutput(
                state=tff.federated_zip(new_state),
                result=result,
                measurements=factory_parts.merge_measurements(measurements, summed.measurements),
            )

        return tff.templates.AggregationProcess(initialize, next_fn)


def build_adaptive_dp_ftrl_aggregator(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    clients_per_round: float,
    initial_clip_norm: float = 0.1,
    target_unclipped_quantile: float = 0.5,
    clip_learning_rate: float = 0.2,
    clipped_count_stddev: float | None = None,
    geometric_update: bool = True,
    deterministic_seed: int | None = None,
    sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    count_sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    unit_inflation: float | None = None,
    report_non_finite_clients: bool = False,
) -> AdaptiveDPFTRLFactory:
    """DP-FTRL with adaptive clipping and restarts, for any strategy.

    With S the sensitivity of `strategy`, restarts included, under the schema the
    cohorts keep to, the run satisfies ρ-zCDP with ρ = S² / (2 noise_multiplier²):
    the estimation of the clip norm is inside, its price is more noise on the
    updates (`update_noise_multiplier`). It replaces
    `tff.aggregators.DifferentiallyPrivateFactory.tree_adaptive`.

    Measurements, all of them covered by the guarantee: "clip_norm" (active in the
    round), "estimated_clip_norm" (after it), "unclipped_fraction" (noised),
    "noise_stddev" (of z on the updates, before the division), "num_restarts".

    A client whose update has no norm that is finite in float32 counts as zero in
    both sums. A client moves a round's average by at most clip_norm / clients_per_round and
    the unclipped fraction by at most 1 / (2 clients_per_round), whatever it sends.

    Args:
      strategy: The strategy C of both streams. Its restarts are the rounds that
        take over the estimate, and restart both noises; without restarts the
        estimate is released but never used. The paper's schedule is
        `restarts.Restarted(base, (0, *range(128, num_rounds, 1024)))`.
      noise_multiplier: z, of both streams together.
      clients_per_round: The number both noised sums are divided by: the report goal.
      initial_clip_norm: Clip norm and estimate before the first round.
      target_unclipped_quantile: γ, the fraction of clients to leave unclipped.
      clip_learning_rate: η_γ; the estimate changes by a factor of at most about
        exp(η_γ) in a round.
      clipped_count_stddev: σ_b, stddev of the noise on a round's number of
        unclipped clients; `clients_per_round / 20` if None.
      geometric_update: Whether the estimate is C⁰ exp(-η_γ Σ (fraction - γ)), as in
        the papers, or, if False, C⁰ - η_γ Σ (fraction - γ).
      deterministic_seed: As in `dp_ftrl.build_dp_ftrl_aggregator`.
      sum_factory: As in `dp_ftrl.build_dp_ftrl_aggregator`; it must not raise the
        norm of a client's contribution.
      count_sum_factory: Sums the clients' bits, float32 scalars of ±1/2; TFF's
        plain `SumFactory` if None. Use a secure one where `sum_factory` is secure.
      unit_inflation: If given, `sum_factory` is handed updates divided by the active
        clip norm, of norm at most 1, and its sum is multiplied by it again. It may
        lengthen a client's contribution to at most this, which scales the noise.
      report_non_finite_clients: As in `dp_ftrl.build_dp_ftrl_aggregator`.

    Returns:
      The factory.

    Raises:
      ValueError: If an argument is out of range, or the noise cannot be split.
    """
    return AdaptiveDPFTRLFactory(
        strategy,
        noise_multiplier=noise_multiplier,
        clients_per_round=clients_per_round,
        initial_clip_norm=initial_clip_norm,
        target_unclipped_quantile=target_unclipped_quantile,
        clip_learning_rate=clip_learning_rate,
        clipped_count_stddev=clipped_count_stddev,
        geometric_update=geometric_update,
        deterministic_seed=deterministic_seed,
        sum_factory=sum_factory,
        count_sum_factory=count_sum_factory,
        unit_inflation=unit_inflation,
        report_non_finite_clients=report_non_finite_clients,
    )
