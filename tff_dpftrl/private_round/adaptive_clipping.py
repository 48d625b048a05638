"""DP-FTRL whose clip norm follows a quantile of the clients' norms.

Two private streams run under one strategy C: the sum of the clipped updates, and
the number of clients whose norm is at most an estimate (Xu et al. 2023,
algorithm 1; Andrew et al. 2021). The estimate moves every round. The norm that is
clipped to, and that scales the noise, must stay constant within a block of
correlated noise: it takes over the estimate where a block starts.

Adjacency is zeroing out one client, its bit included: a client counts as +1/2 if its
norm is at most the estimate, as -1/2 if it is above, and as 0 if it has no norm or
norm 0. So for any client, with C the active clip norm and z split into z_Δ and σ_b as
`mechanisms.noise_split` does,

    (‖Δ‖ / (z_Δ C))² + (bit / σ_b)² ≤ z_Δ⁻² + (2 σ_b)⁻² = z⁻².

A bit of +1/2 for a zero update would move the count by up to 1 when a client is
zeroed out, twice what is charged.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import noise_split
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.private_round import (
    clipping,
    fixed_clip,
    interface,
    noise_stream,
    seeds,
    summation,
)

COUNT_STREAM = 1
"""Index of the sub-seed for the noise on the counts of unclipped clients."""


_EXPENSIVE = 1.25


class ExpensiveClippingWarning(UserWarning):
    """Estimating the clip norm takes much of the privacy budget from the updates."""


@dataclasses.dataclass(frozen=True)
class AdaptiveClipping:
    """Settings of the estimation of the clip norm while training.

    Attributes:
      initial_clip_norm: Clip norm and estimate before the first round.
      target_unclipped_quantile: γ, the fraction of clients to leave unclipped.
      clip_learning_rate: η_γ; the estimate changes by a factor of at most about
        exp(η_γ) in a round.
      clipped_count_stddev: σ_b, stddev of the noise on a round's number of
        unclipped clients; `clients_per_round / 20` if None.
      geometric_update: Whether the estimate is C⁰ exp(-η_γ Σ (fraction - γ)), as in
        the papers, or, if False, C⁰ - η_γ Σ (fraction - γ).
      only_estimates: Whether the strategy has no restarts, so that the estimate is released and
        every update is clipped to the initial norm.
    """

    initial_clip_norm: float = 0.1
    target_unclipped_quantile: float = 0.5
    clip_learning_rate: float = 0.2
    clipped_count_stddev: float | None = None
    geometric_update: bool = True
    only_estimates: bool = False

    def __post_init__(self):
        validation.clip_norm("initial_clip_norm", self.initial_clip_norm)
        validation.number(
            "target_unclipped_quantile", self.target_unclipped_quantile, at_least=0, at_most=1
        )
        validation.number("clip_learning_rate", self.clip_learning_rate, at_least=0)
        if self.clipped_count_stddev is not None:
            validation.number("clipped_count_stddev", self.clipped_count_stddev, at_least=0)

    def count_stddev(self, noise_multiplier: float, clients_per_round: float) -> float:
        """Returns σ_b: as given, or clients_per_round / 20, or 0 if noise_multiplier is 0."""
        if self.clipped_count_stddev is not None:
            return float(self.clipped_count_stddev)
        return clients_per_round / 20 if noise_multiplier > 0 else 0.0

    def estimate(self, excess: tf.Tensor) -> tf.Tensor:
        """Computes the clip norm from the sum of (unclipped fraction - γ), float32 scalars."""
        change = self.clip_learning_rate * excess
        if self.geometric_update:
            estimate = self.initial_clip_norm * tf.exp(-change)
        else:
            estimate = self.initial_clip_norm - change
        return tf.clip_by_value(estimate, validation.MIN_CLIP_NORM, validation.MAX_CLIP_NORM)


DEFAULT_CLIPPING = AdaptiveClipping()
"""The settings of Xu et al. 2023, but for the initial clip norm."""


class ClipState(NamedTuple):
    """Clip norms between rounds, float32 scalars. They are released, and so not secret.

    The next round clips to `active`. `estimate` is that of the quantile of the clients' norms,
    computed from `excess`, the sum of (noised unclipped fraction - target) over the rounds so far.
    """

    active: Any
    estimate: Any
    excess: Any


class AdaptiveClipState(NamedTuple):
    """State between rounds, complete for resuming after a crash. Secret, but for `clip`.

    `round_index` is that of the next round. The buffers have past noise on the updates and on the
    counts, from `noise_stream.NoiseStream`, as does the seed.
    """

    round_index: Any
    seed: Any
    buffer: Any
    count_buffer: Any
    clip: Any


class CountedContribution(NamedTuple):
    """Contribution of one client to the sums, or the sums themselves, in float64.

    The update is clipped and, if it is to be encoded, divided by the active clip norm. The bit is
    1/2 if the norm is at most the estimate, -1/2 if it is above, 0 if the norm is 0 or not finite.
    """

    update: Any
    bit: Any


class AdaptiveClipRound(interface.PrivateRound):
    """Mechanism of DP-FTRL with an estimated clip norm and restarts.

    A client moves a round's average by at most clip_norm · unit_inflation / clients_per_round and
    the unclipped fraction by at most 1 / (2 clients_per_round), whatever it sends, for up to
    `summation.MAX_CLIENTS` clients in a round. Clients missing to `clients_per_round` count as half
    unclipped.

    Account for `noise_multiplier`, z of both streams together. It is split into z_Δ,
    `update_noise_multiplier`, and σ_b, `clipped_count_stddev`. `unit_inflation` is the factor by
    which encoding may lengthen a contribution; None if the updates are summed as they are clipped.
    With a `deterministic_seed` the run is not private. With any `noise_parties`, each has added the
    whole noise to both sums: `release` adds none, and the state has no secret. With `secure_noise`,
    the noise is of a cryptographic generator, on a grid.
    """

    contribution_type = CountedContribution
    state_type = AdaptiveClipState
    broadcast_field = "clip"

    def __init__(
        self,
        strategy: strategy_lib.Strategy,
        *,
        noise_multiplier: float,
        clients_per_round: float,
        clipping: AdaptiveClipping = DEFAULT_CLIPPING,
        unit_inflation: float | None = None,
        deterministic_seed: int | None = None,
        noise_parties: int = 0,
        secure_noise: bool = False,
    ):
        """Initialises the round; arguments are the attributes.

        With `unit_inflation`, updates are divided by the active clip norm before they are summed,
        and the sum is multiplied by it again.
        """
        if not isinstance(clipping, AdaptiveClipping):
            raise validation.UsageError(f"clipping must be an AdaptiveClipping, got {clipping!r}.")
        self.strategy = strategy_lib.check_strategy(strategy)
        self.clipping = clipping
        self.noise_multiplier = validation.noise_multiplier(noise_multiplier)
        self.clients_per_round = summation.check_clients_per_round(clients_per_round)
        self.clipped_count_stddev = clipping.count_stddev(
            self.noise_multiplier, self.clients_per_round
        )
        self.update_noise_multiplier = noise_split.update_noise_multiplier(
            self.noise_multiplier, self.clipped_count_stddev
        )
        if unit_inflation is not None:
            unit_inflation = validation.number(
                "unit_inflation",
                unit_inflation,
                at_least=1,
                remedy="Encoding cannot make a client's contribution smaller.",
            )
        self.unit_inflation = unit_inflation
        self.deterministic_seed = validation.seed("deterministic_seed", deterministic_seed)
        self.noise_parties = noise_parties
        self.secure_noise = secure_noise
        self._recipe = strategy.noise_recipe()

    @property
    def estimation_cost(self) -> float:
        """Ratio z_Δ / z of the updates' noise to that with a fixed clip norm."""
        if self.noise_multiplier == 0:
            return 1.0
        return self.update_noise_multiplier / self.noise_multiplier

    @property
    def expensive_clipping(self) -> str | None:
        """Sentence about the cost of estimating the clip norm, None if the cost is small."""
        if self.estimation_cost <= _EXPENSIVE:
            return None
        return (
            f"Estimating the clip norm with clipped_count_stddev = {self.clipped_count_stddev:g} "
            f"multiplies the noise of the updates by {self.estimation_cost:.2f}; a larger "
            "clipped_count_stddev, or more clients in a round, costs less."
        )

    @override
    def initial_state(self, shapes):
        initial = tf.constant(self.clipping.initial_clip_norm, tf.float32)
        clip = ClipState(active=initial, estimate=initial, excess=tf.constant(0.0))
        if self.noise_parties:
            start = tf.constant(0, tf.int64)
            return AdaptiveClipState(start, tf.zeros([2], tf.int64), (), (), clip)
        stream = self._stream(shapes)
        root = seeds.root_seed(self.deterministic_seed, secure=self.secure_noise)
        return AdaptiveClipState(
            round_index=tf.constant(0, tf.int64),
            seed=stream.initial_seed(root),
            buffer=stream.initial_buffer(),
            count_buffer=self._count_stream.initial_buffer(),
            clip=clip,
        )

    @override
    def clip_client(self, tensors, broadcast, weight=None):
        interface.refuse_weight(weight)
        clipped, norm = clipping.clip_by_norm(tensors, broadcast.active)
        if self.unit_inflation is not None:
            active = tf.cast(broadcast.active, tf.float64)
            clipped = [tensor / active for tensor in clipped]
        is_finite = tf.math.is_finite(norm)
        half = tf.constant(noise_split.COUNT_SENSITIVITY, tf.float64)
        bit = tf.where(tf.cast(norm, tf.float32) <= broadcast.estimate, half, -half)
        bit = tf.where(is_finite & (norm > 0), bit, tf.zeros_like(half))
        return CountedContribution(clipped, bit), is_finite

    @override
    def release(self, state, totals):
        """Adds the noise of a round to both sums, and moves the estimate of the clip norm.

        The measurements are `clip_norm` (active in the round), `estimated_clip_norm` (after
        it), `unclipped_fraction` (noised), `noise_stddev` (on the updates, before the
        division, of all parties together) and `num_restarts`.
        """
        shapes = [tensor.shape for tensor in totals.update]
        noise, count_noise, skipped = self.noise(state, shapes)
        active = tf.cast(state.clip.active, tf.float64)
        update, multiplier = totals.update, self.update_noise_multiplier
        if self.unit_inflation is not None:
            update = [tensor * active for tensor in summation.in_float64(update)]
            multiplier *= self.unit_inflation
        stddev = multiplier * active
        average = self._noised_mean(update, noise, stddev, self.update_noise_multiplier)
        count_stddev = tf.constant(self.clipped_count_stddev, tf.float64)
        count_multiplier = self.clipped_count_stddev / noise_split.COUNT_SENSITIVITY
        (fraction,) = self._noised_mean([totals.bit], [count_noise], count_stddev, count_multiplier)
        fraction = tf.cast(fraction + noise_split.COUNT_SENSITIVITY, tf.float32)
        excess = state.clip.excess + fraction - self.clipping.target_unclipped_quantile
        estimate = self.clipping.estimate(excess)
        clip = self._next_clip(state, estimate, excess)
        measurements = {
            "clip_norm": state.clip.active,
            "estimated_clip_norm": estimate,
            "unclipped_fraction": fraction,
            "noise_stddev": tf.cast(stddev * math.sqrt(max(self.noise_parties, 1)), tf.float32),
            "num_restarts": self._count_stream.block(state.round_index)[0],
        }
        return skipped._replace(clip=clip), average, measurements

    def _noised_mean(self, total, noise, stddev, noise_multiplier):
        if self.secure_noise and noise_multiplier > 0 and not self.noise_parties:
            return summation.noised_mean_on_grid(
                total, noise, stddev, self.clients_per_round, noise_multiplier
            )
        return summation.noised_mean(total, noise, stddev, self.clients_per_round)

    @override
    def skip(self, state, shapes):
        """Passes over a round; a restart takes over the estimate as it stands."""
        return self.noise(state, shapes)[-1]

    def noise(self, state, shapes, root=None):
        """Draws a round's unit noise of both streams; the state is that without a release.

        `root` is the seed of the round's new draws, if somebody else has drawn it.
        """
        clip = self._next_clip(state, state.clip.estimate, state.clip.excess)
        if self.noise_parties:
            noise = [tf.zeros(shape, tf.float32) for shape in shapes]
            skipped = state._replace(round_index=state.round_index + 1, clip=clip)
            return noise, tf.constant(0.0), skipped
        stream, t = self._stream(shapes), state.round_index
        executed, seed = stream.execution_seeds(state.seed, t, self.deterministic_seed, root)
        noise, buffer = stream.next(state.buffer, t, executed)
        (count_noise,), count_buffer = self._count_stream.next(state.count_buffer, t, executed)
        skipped = AdaptiveClipState(t + 1, seed, buffer, count_buffer, clip)
        return noise, count_noise, skipped

    def _next_clip(self, state, estimate, excess):
        """Returns the clip norms after a round, a `ClipState`."""
        _, next_in_block = self._count_stream.block(state.round_index + 1)
        active = tf.where(tf.equal(next_in_block, 0), estimate, state.clip.active)
        return ClipState(active, estimate, excess)

    def _stream(self, shapes, index=fixed_clip.UPDATE_STREAM) -> noise_stream.NoiseStream:
        return noise_stream.NoiseStream(
            self._recipe,
            shapes,
            index=index,
            max_rounds=self.strategy.max_rounds,
            secure=self.secure_noise,
        )

    @property
    def _count_stream(self) -> noise_stream.NoiseStream:
        return self._stream([()], COUNT_STREAM)
