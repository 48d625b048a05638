"""DP-FTRL with a fixed clip norm, as TensorFlow functions.

In a round every client's update is clipped to the clip norm and summed; the server
adds `noise_multiplier · encoded_norm · (C⁻¹ z)_t` and divides by `clients_per_round`,
however many clients reported (McMahan, Xu & Zhang 2024, algorithm 1).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.private_round import clipping as clipping_lib
from tff_dpftrl.private_round import interface, noise_stream, seeds, summation

UPDATE_STREAM = 0
"""Index of the sub-seed for the noise on the updates."""


class FixedClipState(NamedTuple):
    """State between rounds, complete for resuming after a crash. Secret.

    `round_index` is that of the next round. Seed and buffer, past noise, are from
    `noise_stream.NoiseStream`; the buffer is () for many strategies.
    """

    round_index: Any
    seed: Any
    buffer: Any


class FixedClipRound(interface.PrivateRound):
    """Mechanism of DP-FTRL with one clip norm for all rounds.

    A client moves a round's average by at most encoded_norm / clients_per_round, whatever it sends,
    for up to `summation.MAX_CLIENTS` clients in a round. `encoded_norm` is the L2 norm of its
    contribution, and `noise_multiplier` the standard deviation of z per unit of it.

    With a `deterministic_seed` the run is not private. With any `noise_parties`, each has added the
    whole noise to the sums: `release` adds none, and the state has no secret. With `secure_noise`,
    the noise is of a cryptographic generator, on a grid.
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
        noise_parties: int = 0,
        secure_noise: bool = False,
    ):
        """Initialises the round with its attributes; `encoded_norm` is the clip norm if None."""
        if not isinstance(clipping, clipping_lib.Clipping):
            raise validation.UsageError(
                f"clipping must be a FlatClipping or a PerLayerClipping, got {clipping!r}."
            )
        self.strategy = strategy_lib.check_strategy(strategy)
        self.noise_multiplier = validation.noise_multiplier(noise_multiplier)
        self.clipping = clipping
        self.clients_per_round = summation.check_clients_per_round(clients_per_round)
        self.deterministic_seed = validation.seed("deterministic_seed", deterministic_seed)
        self.secure_noise = secure_noise
        self.encoded_norm = validation.number(
            "encoded_norm",
            clipping.constant_norm if encoded_norm is None else encoded_norm,
            at_least=clipping.constant_norm,
            at_most=validation.MAX_CLIP_NORM,
            remedy="Encoding cannot make a client's contribution smaller than the clip norm.",
        )
        self.noise_parties = noise_parties
        self._recipe = strategy.noise_recipe()

    @override
    def initial_state(self, shapes):
        self.clipping.check_num_tensors(len(shapes))
        if self.noise_parties:
            return FixedClipState(tf.constant(0, tf.int64), tf.zeros([2], tf.int64), ())
        root = seeds.root_seed(self.deterministic_seed, secure=self.secure_noise)
        stream = self._stream(shapes)
        seed, buffer = stream.initial_seed(root), stream.initial_buffer()
        return FixedClipState(tf.constant(0, tf.int64), seed, buffer)

    @override
    def clip_client(self, tensors, broadcast, weight=None):
        interface.refuse_weight(weight)
        clipped, norm = self.clipping.clip(tensors, broadcast)
        return interface.Contribution(clipped), tf.math.is_finite(norm)

    @override
    def release(self, state, totals):
        """Adds the noise; measures `clip_norm` and `noise_stddev`.

        The latter is before the division, of the noise of all parties together.
        """
        noise, new_state = self.noise(state, [tensor.shape for tensor in totals.update])
        stddev = self._stddev
        if self.secure_noise and self.noise_multiplier > 0 and not self.noise_parties:
            average = summation.noised_mean_on_grid(
                totals.update, noise, stddev, self.clients_per_round, self.noise_multiplier
            )
        else:
            average = summation.noised_mean(totals.update, noise, stddev, self.clients_per_round)
        measurements = {
            "clip_norm": tf.constant(self.clipping.constant_norm, tf.float32),
            "noise_stddev": tf.cast(stddev * math.sqrt(max(self.noise_parties, 1)), tf.float32),
        }
        return new_state, average, measurements

    @property
    def is_separable(self) -> bool:
        """Whether `release_tensor` can release one tensor after the other."""
        is_plain = not self.secure_noise and not self.noise_parties
        return is_plain and self._stream([]).is_separable

    def execute(self, state: FixedClipState) -> tuple[tf.Tensor, FixedClipState]:
        """Begins a round whose tensors are released one after the other.

        It returns the seed with which the round is executed, and the state after the round.
        """
        executed, seed = self._stream([]).execution_seeds(
            state.seed, state.round_index, self.deterministic_seed
        )
        return executed, FixedClipState(state.round_index + 1, seed, state.buffer)

    def release_tensor(
        self, round_index: tf.Tensor, executed: tf.Tensor, position: tf.Tensor, total: tf.Tensor
    ) -> tf.Tensor:
        """Releases one tensor of a round, for models whose noise is a burden to the memory.

        It has the same bits as `release` has for it, if `is_separable`.
        """
        noise = self._stream([]).of_tensor(position, total.shape, round_index, executed)
        return summation.noised_mean([total], [noise], self._stddev, self.clients_per_round)[0]

    @property
    def _stddev(self) -> tf.Tensor:
        """Standard deviation of the noise in the sum."""
        return tf.constant(self.noise_multiplier * self.encoded_norm, tf.float64)

    @override
    def skip(self, state, shapes):
        return self.noise(state, shapes)[-1]

    def noise(self, state, shapes, root=None):
        """Draws a round's unit noise; the state is that after a round without a release.

        `root` is the seed of the round's new draw, if somebody else has drawn it.
        """
        if self.noise_parties:
            noise = [tf.zeros(shape, tf.float32) for shape in shapes]
            return noise, state._replace(round_index=state.round_index + 1)
        stream = self._stream(shapes)
        t = state.round_index
        executed, seed = stream.execution_seeds(state.seed, t, self.deterministic_seed, root)
        noise, buffer = stream.next(state.buffer, t, executed)
        return noise, FixedClipState(t + 1, seed, buffer)

    def _stream(self, shapes) -> noise_stream.NoiseStream:
        return noise_stream.NoiseStream(
            self._recipe,
            shapes,
            index=UPDATE_STREAM,
            max_rounds=self.strategy.max_rounds,
            secure=self.secure_noise,
        )
