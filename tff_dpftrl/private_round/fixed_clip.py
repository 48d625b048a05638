"""DP-FTRL with a fixed clip norm, as TensorFlow functions.

In a round every client's update is clipped to the clip norm and summed; the server
adds `noise_multiplier · encoded_norm · (C⁻¹ z)_t` and divides by `clients_per_round`,
however many clients reported (McMahan, Xu & Zhang 2024, algorithm 1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.private_round import clipping as clipping_lib
from tff_dpftrl.private_round import interface, noise_stream, seeds, summation

UPDATE_STREAM = 0
"""Number of the stream of noise for the updates; see `seeds`."""


class FixedClipState(NamedTuple):
    """State between rounds; enough to go on after a crash. Secret.

    Attributes:
      round_index: int64 scalar, the next round.
      seed: int64 tensor of shape [2], the root seed of all noise.
      buffer: Past noise as `noise_stream.NoiseStream` keeps it; () for many strategies.
    """

    round_index: Any
    seed: Any
    buffer: Any


class FixedClipRound(interface.PrivateRound):
    """DP-FTRL with one clip norm for all rounds.

    A client moves a round's average by at most encoded_norm / clients_per_round,
    whatever it sends, for up to `summation.MAX_CLIENTS` clients in a round.

    Attributes:
      strategy: The strategy C.
      noise_multiplier: Standard deviation of z per unit of `encoded_norm`.
      clipping: How updates are clipped.
      encoded_norm: Norm of one client's contribution that the noise is scaled by.
      clients_per_round: The fixed denominator.
      deterministic_seed: None for a private run; a run with a given seed is not.
    """

    state_type = FixedClipState
    broadcast_field = "round_index"

    def __init__(
        self,
        strategy: strategy_lib.Strategy,
        *,
        noise_multiplier: float,
        clipping: clipping_lib.Clipping,
        clients_per_round: float,
        encoded_norm: float | None = None,
        deterministic_seed: int | None = None,
    ):
        """Initialises the round.

        Args:
          strategy: The strategy C that correlates the noise of different rounds.
          noise_multiplier: Standard deviation of z for encoded norm 1. With 0 there is
            no noise and no privacy.
          clipping: How updates are clipped; to the same norm in all rounds.
          clients_per_round: The number the noised sum is divided by.
          encoded_norm: L2 norm that one client's contribution can have in the sum, if
            it is encoded so that the clip norm no longer bounds it; the clip norm
            if None.
          deterministic_seed: Only for tests: an integer in [0, 2^128).

        Raises:
          ValueError: If an argument cannot be used.
        """
        if not isinstance(clipping, clipping_lib.Clipping):
            raise validation.UsageError(
                f"clipping must be a FlatClipping or a PerLayerClipping, got {clipping!r}."
            )
        self.strategy = strategy_lib.check_strategy(strategy)
        self.noise_multiplier = validation.noise_multiplier(noise_multiplier)
        self.clipping = clipping
        self.clients_per_round = summation.check_clients_per_round(clients_per_round)
        self.deterministic_seed = seeds.check_deterministic_seed(deterministic_seed)
        self.encoded_norm = validation.number(
            "encoded_norm",
            clipping.constant_norm if encoded_norm is None else encoded_norm,
            at_least=clipping.constant_norm,
            at_most=clipping_lib.MAX_CLIP_NORM,
            remedy="Encoding cannot make a client's contribution smaller than the clip norm.",
        )
        self._recipe = strategy.noise_recipe()

    def initial_state(self, shapes):
        """See base class; a `FixedClipState`."""
        self.clipping.check_num_tensors(len(shapes))
        seed = seeds.root_seed(self.deterministic_seed)
        return FixedClipState(tf.constant(0, tf.int64), seed, self._stream(shapes).initial_buffer())

    def clip_client(self, tensors, broadcast, weight=None):
        """See base class; a `interface.Contribution`."""
        interface.refuse_weight(weight)
        clipped, norm = self.clipping.clip(tensors, broadcast)
        return interface.Contribution(clipped), tf.math.is_finite(norm)

    def release(self, state, totals):
        """See base class; measures `clip_norm` and `noise_stddev`, before the division."""
        noise, new_state = self._noise(state, [tensor.shape for tensor in totals.update])
        stddev = tf.constant(self.noise_multiplier * self.encoded_norm, tf.float64)
        average = summation.noised_mean(totals.update, noise, stddev, self.clients_per_round)
        measurements = {
            "clip_norm": tf.constant(self.clipping.constant_norm, tf.float32),
            "noise_stddev": tf.cast(stddev, tf.float32),
        }
        return new_state, average, measurements

    def skip(self, state, shapes):
        """See base class."""
        return self._noise(state, shapes)[1]

    def _noise(self, state, shapes):
        """Draws the unit noise of a round; returns it with the state after the round."""
        stream_seed = seeds.derive(state.seed, UPDATE_STREAM)
        noise, buffer = self._stream(shapes).next(state.buffer, state.round_index, stream_seed)
        return noise, FixedClipState(state.round_index + 1, state.seed, buffer)

    def _stream(self, shapes) -> noise_stream.NoiseStream:
        return noise_stream.NoiseStream(self._recipe, shapes, max_rounds=self.strategy.max_rounds)
