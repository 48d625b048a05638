"""Noise of a noise party: that of a private round, as integers that it adds to a secure sum.

The server of such a round adds no noise. What it decodes is the sum of the clients' vectors and of
the party's. In the terms of `discretize`: a client sends round(R x), with R the round's rotation,
and the party sends round(R n) modulo M, with n the noise in grid steps. The decoded sum is
R⁻¹ (Σ round(R x) + round(R n)).

- *Rounding.* Clients' vectors are integers, so that Σ + round(R n) = round(Σ + R n): it is
  post-processing of the noised sum, and so is the modulus.
- *Rotation.* A Gaussian that is rotated has the same law, and Σ + R n = R (R⁻¹ Σ + n). The noises n
  of different rounds are correlated before the rotation, as they are where the server adds them.
- *Padding.* Vectors are padded with zeros before they are rotated, but rounding leaves the space of
  padded vectors: the last `padded_dim - dim` coordinates of R⁻¹ Σ depend on the clients, and the
  server sees them. They get the same correlated noise, as one more tensor of the update.
- *Scale.* In grid steps the noise does not depend on the clip norm, of which a step is a fraction.
- *Count.* The bits of adaptive clipping are summed as the integers 2 b + 1. The noise on their
  sum is doubled and rounded.

TensorFlow without TFF. The first `dim` coordinates have the bits of the noise that the server would
add with the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import noise_recipe
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.private_round import (
    adaptive_clipping,
    discretize,
    fixed_clip,
    noise_stream,
    seeds,
    walsh_hadamard,
)

State: TypeAlias = fixed_clip.FixedClipState | adaptive_clipping.AdaptiveClipState
"""State of the private round between rounds, for an update with its padding. Secret."""


class PartyNoise:
    """Noise of all rounds of one task, on the grid of its secure sum."""

    def __init__(
        self,
        private_round: fixed_clip.FixedClipRound | adaptive_clipping.AdaptiveClipRound,
        shapes: Sequence[Sequence[int]],
        encoding: grid.GridEncoding,
    ):
        """Traces the functions at their first call; shapes are those without padding."""
        self._round = private_round
        self._shapes = [tuple(shape) for shape in shapes]
        size = sum(int(np.prod(shape)) for shape in self._shapes)
        if size != encoding.dim:
            raise validation.UsageError(
                f"encoding is for dim {encoding.dim}, and an update has {size} numbers."
            )
        if encoding.padded_dim > encoding.dim:
            self._shapes.append((encoding.padded_dim - encoding.dim,))
        self.encoding = encoding
        self._multiplier, self._count_stddev = private_round.noise_multiplier, 0.0
        if isinstance(private_round, adaptive_clipping.AdaptiveClipRound):
            self._multiplier = private_round.update_noise_multiplier
            self._count_stddev = private_round.clipped_count_stddev
        recipe = private_round.strategy.noise_recipe()
        self._stream = noise_stream.NoiseStream(recipe, [])
        self.is_reduced_tree = getattr(noise_recipe.blocks(recipe)[0], "variance_reduction", False)
        self._next = tf.function(self._draw, autograph=False)
        self._to_grid = tf.function(self._encode, autograph=False)

    def initial_state(self, seed: np.ndarray) -> State:
        """Returns the state before the first round.

        The seed is int64, of the length that the mechanism's seeds have, or longer.
        """
        made = self._round.initial_state(self._shapes)
        return made._replace(seed=tf.broadcast_to(self._words(made, seed), made.seed.shape))

    def block_start(self, round_index: int) -> int:
        """Returns the round from which on the noise of a round depends on no noise before."""
        return max(start for start in self._stream.starts if start <= round_index)

    def before_round(
        self, state: State, round_index: int, root_of: Callable[[int], np.ndarray]
    ) -> State:
        """Returns the state before a round; what cannot be left out is drawn again.

        `root_of` returns the seed of the new draws of a round, as for `draw`.
        """
        reached = int(state.round_index)
        if reached > round_index:
            raise validation.UsageError(f"state is before round {reached}, after {round_index}.")
        for t in range(max(reached, self.block_start(round_index)), round_index):
            state = state._replace(round_index=tf.constant(t, tf.int64))
            if isinstance(state.buffer, tuple):  # Nothing is kept but seeds.
                root = self._words(state, root_of(t))
                _, seed = self._stream.execution_seeds(state.seed, state.round_index, None, root)
                state = state._replace(seed=seed)
            else:
                state = self.draw(state, root_of(t))[-1]
        return state._replace(round_index=tf.constant(round_index, tf.int64))

    def draw(self, state: State, root: np.ndarray) -> tuple[tf.Tensor, tf.Tensor, State]:
        """Draws the unit noise of the next round, whose new draws have the seed `root`.

        It returns the noise of the update and its padding, of shape [encoding.padded_dim]; the
        noise of the count, 0 where none is noised; and the state after the round.
        """
        return self._next(state, self._words(state, root))

    def encode(
        self, noise: tf.Tensor, count_noise: tf.Tensor, round_seed: np.ndarray
    ) -> tuple[np.ndarray, int]:
        """Brings unit noise to the grid of the secure sum.

        It returns integers in [0, `encoding.sum_modulus`), int64, of shape [encoding.padded_dim];
        and the integer to add to the doubled count of unclipped clients, which may be negative.
        """
        vector, count = self._to_grid(noise, count_noise, tf.constant(round_seed, tf.int64))
        return vector.numpy(), int(count)

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on a coordinate of the sum for unit noise, in steps."""
        return self._multiplier * self.encoding.inflation * self.encoding.scaled_clip_norm

    def _words(self, state, root):
        return tf.constant(root[: state.seed.shape[-1]], tf.int64)

    def _draw(self, state, root):
        drawn, *counts, after = self._round.noise(state, self._shapes, root)
        flat = tf.concat([tf.reshape(part, [-1]) for part in drawn], axis=0)
        return flat, counts[0] if counts else tf.constant(0.0), after

    def _encode(self, noise, count_noise, round_seed):
        steps = tf.cast(noise, tf.float64) * tf.constant(self.stddev, tf.float64)
        rotated = walsh_hadamard.rotate(steps, seeds.derive(round_seed, discretize.ROTATION_STREAM))
        vector = tf.cast(tf.round(rotated), tf.int64)
        modulus = tf.constant(self.encoding.sum_modulus, tf.int64)
        doubled = 2 * self._count_stddev * tf.cast(count_noise, tf.float64)
        return tf.math.floormod(vector, modulus), tf.cast(tf.round(doubled), tf.int64)


def noise_ratio(
    strategy: strategy_lib.Strategy,
    update_noise_multiplier: float,
    num_rounds: int,
    num_parties: int = 1,
) -> float:
    """Computes `GridEncoding.noise_ratio` of a task with noise parties.

    It is the standard deviation of the noise of all parties on one coordinate, in the round in
    which it is largest, over the inflated clip norm.
    """
    largest = float(np.max(strategy.round_noise_variance(num_rounds)))
    return update_noise_multiplier * math.sqrt(num_parties * largest)
