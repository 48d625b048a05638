"""DP-FTRL with a fixed clip norm, as a TFF aggregation factory.

In a round every client's update is clipped to `clip_norm` and summed; the server
adds `noise_multiplier · clip_norm · (C⁻¹ z)_t` and divides by `clients_per_round`,
however many clients reported (McMahan, Xu & Zhang 2024, algorithm 1). Any server
optimizer may follow.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.aggregators import factory_parts, updates
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.private_round import clip_ops, noise_stream, seeds

UPDATE_STREAM = 0
"""Number of the stream of noise for the updates; see `seeds`."""


class DPFTRLState(NamedTuple):
    """State of the aggregator between rounds; enough to go on after a crash.

    Secret: it lets a reader subtract the noise.

    Attributes:
      round_index: int64 scalar, the next round.
      seed: int64 tensor of shape [2], the root seed of all noise.
      buffer: Past noise as `noise_stream.NoiseStream` keeps it; () for many strategies.
      sum_state: State of the inner sum.
    """

    round_index: Any
    seed: Any
    buffer: Any
    sum_state: Any


class DPFTRLFactory(tff.aggregators.UnweightedAggregationFactory):
    """Creates the processes of `build_dp_ftrl_aggregator`, see there.

    Attributes:
      strategy: The strategy C.
      noise_multiplier: Standard deviation of z per unit of `encoded_norm`.
      clipping: How updates are clipped.
      encoded_norm: Norm of one client's contribution that the noise is scaled by.
      clients_per_round: The fixed denominator.
      deterministic_seed: None for a private run; a run with a given seed is not.
    """

    def __init__(
        self,
        strategy: strategy_lib.Strategy,
        *,
        noise_multiplier: float,
        clipping: clip_ops.Clipping,
        clients_per_round: float,
        deterministic_seed: int | None = None,
        sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
        encoded_norm: float | None = None,
        report_non_finite_clients: bool = False,
    ):
        """Initialises the factory; arguments as in `build_dp_ftrl_aggregator`."""
        self.strategy = strategy
        self.noise_multiplier = factory_parts.check_noise_multiplier(noise_multiplier)
        self.clipping = clipping
        self.clients_per_round = factory_parts.check_positive(
            "clients_per_round", clients_per_round
        )
        self.deterministic_seed = seeds.check_deterministic_seed(deterministic_seed)
        self.encoded_norm = clipping.clip_norm if encoded_norm is None else float(encoded_norm)
        if not clipping.clip_norm <= self.encoded_norm <= clip_ops.MAX_CLIP_NORM:
            raise ValueError(
                f"encoded_norm must be a number and at least the clip norm {clipping.clip_norm}, "
                f"got {encoded_norm!r}: encoding cannot make a client's contribution smaller."
            )
        self._sum_factory = sum_factory
        self._report_non_finite_clients = report_non_finite_clients

    def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
        """Creates the process for updates of one type.

        Args:
          value_type: A floating-point tensor or any nesting of such tensors.

        Returns:
          The process; its state is a `DPFTRLState`.

        Raises:
          ValueError: If the type has no tensors, other dtypes or unknown shapes, or
            does not fit `clipping` or `sum_factory`.
        """
        update = updates.UpdateType(value_type)
        self.clipping.check_num_tensors(len(update.specs))
        stream = noise_stream.NoiseStream(
            self.strategy.noise_recipe(), update.shapes, max_rounds=self.strategy.max_rounds
        )

        @tff.tensorflow.computation(value_type)
        def clip(value):
            clipped, norm = self.clipping.clip(update.flatten(value))
            return update.pack(clipped), tf.math.is_finite(norm)

        summed_type = clip.type_signature.result[0]
        sum_process = factory_parts.create_sum(self._sum_factory, summed_type)

        @tff.tensorflow.computation
        def initial_noise():
            seed = seeds.root_seed(self.deterministic_seed)
            return tf.constant(0, tf.int64), seed, stream.initial_buffer()

        round_type, seed_type, buffer_type = initial_noise.type_signature.result

        @tff.federated_computation
        def initialize():
            round_index, seed, buffer = tff.federated_eval(initial_noise, tff.SERVER)
            return tff.federated_zip(
                DPFTRLState(round_index, seed, buffer, sum_process.initialize())
            )

        @tff.tensorflow.computation(round_type, seed_type, buffer_type, summed_type)
        def release(round_index, seed, buffer, total):
            stream_seed = seeds.derive(seed, UPDATE_STREAM)
            noise, buffer = stream.next(buffer, round_index, stream_seed)
            stddev = tf.constant(self.noise_multiplier, tf.float32) * self.encoded_norm
            mean = factory_parts.noised_mean(
                update.flatten(total), noise, stddev, self.clients_per_round
            )
            return round_index + 1, buffer, update.pack_as_update(mean)

        @tff.federated_computation(
            initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            round_index, seed, buffer, sum_state = state
            clipped, is_finite = tff.federated_map(clip, value)
            summed = sum_process.next(sum_state, clipped)
            round_index, buffer, result = tff.federated_map(
                release, (round_index, seed, buffer, summed.result)
            )
            measurements = collections.OrderedDict(
                clip_norm=tff.federated_value(self.clipping.clip_norm, tff.SERVER),
                noise_stddev=tff.federated_value(
                    self.noise_multiplier * self.encoded_norm, tff.SERVER
                ),
            )
            if self._report_non_finite_clients:
                measurements["non_finite_clients"] = factory_parts.count_non_finite(is_finite)
            return tff.templates.MeasuredProcessOutput(
                state=tff.federated_zip(DPFTRLState(round_index, seed, buffer, summed.state)),
                result=result,
                measurements=factory_parts.merge_measurements(measurements, summed.measurements),
            )

        return tff.templates.AggregationProcess(initialize, next_fn)


def build_dp_ftrl_aggregator(
    strategy: strategy_lib.Strategy,
    *,
    noise_multiplier: float,
    clip_norm: float,
    clients_per_round: float,
    layer_clip_norms: Sequence[float] | None = None,
    deterministic_seed: int | None = None,
    sum_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
    encoded_norm: float | None = None,
    report_non_finite_clients: bool = False,
) -> DPFTRLFactory:
    """DP-FTRL as the `model_aggregator` of any unweighted TFF learning process.

    With S the sensitivity of the strategy under the participation schema that the
    cohorts keep to, the run satisfies ρ-zCDP with ρ = S² / (2 noise_multiplier²)
    against zeroing out one client. It replaces
    `tff.aggregators.DifferentiallyPrivateFactory.tree_aggregation`.

    A client whose update has a norm that is not finite in float32 (NaN, Inf or
    overflow) counts as zero. A client can move the average of a round by at most
    `clip_norm / clients_per_round`, whatever it sends.

    Sums and noise are float32, whatever the dtype of the updates; the average is
    cast back at the end.

    Args:
      strategy: The strategy C that correlates the noise of different rounds.
      noise_multiplier: Standard deviation of z for clip norm 1. With 0 there is no
        noise and no privacy.
      clip_norm: L2 norm that one client's update is clipped to.
      clients_per_round: The number the noised sum is divided by, whatever the
        number of clients that reported: the report goal.
      layer_clip_norms: If given, every tensor is clipped on its own to its entry,
        in the order of `tf.nest.flatten`, and √Σ layer_clip_norms² must equal
        `clip_norm` (McMahan et al. 2018, per-layer clipping). For equal shares use
        `clip_ops.even_layer_clip_norms`.
      deterministic_seed: Only for tests: an integer in [0, 2^128) that all noise
        is made from. Whoever knows it can remove the noise, so the run is not private.
        If None, `initialize` takes 128 bits from the operating system each time
        it runs.
      sum_factory: Sums the clipped updates, float32, nested like the updates; TFF's plain
        `SumFactory` if None. Its measurements are passed on as they are.
      encoded_norm: L2 norm that one client's contribution can have in the sum, if
        `sum_factory` encodes it so that `clip_norm` no longer bounds it; the noise
        is scaled by it.
      report_non_finite_clients: If True, the measurement "non_finite_clients"
        counts updates dropped as not finite. It is an exact count that no noise
        covers and so is outside the privacy guarantee; leave it off unless only
        the operator sees it.

    Returns:
      The factory. Its attributes are the arguments.

    Raises:
      ValueError: If an argument is out of range.
    """
    if layer_clip_norms is None:
        clipping = clip_ops.FlatClipping(clip_norm)
    else:
        clipping = clip_ops.PerLayerClipping(tuple(layer_clip_norms))
        if not math.isclose(clipping.clip_norm, clip_norm, rel_tol=1e-6):
            raise ValueError(
                f"clip_norm must be the norm of layer_clip_norms, {clipping.clip_norm}, "
                f"got {clip_norm!r}."
            )
    return DPFTRLFactory(
        strategy,
        noise_multiplier=noise_multiplier,
        clipping=clipping,
        clients_per_round=clients_per_round,
        deterministic_seed=deterministic_seed,
        sum_factory=sum_factory,
        encoded_norm=encoded_norm,
        report_non_finite_clients=report_non_finite_clients,
    )
