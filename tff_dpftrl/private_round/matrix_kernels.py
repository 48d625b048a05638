"""Noise kernels of the strategies with a square C: identity, BLT, banded.

Recurrences: McMahan, Xu & Zhang 2024, equation 3 (buffered); the others are
forward substitution with few bands of C, or few bands of C⁻¹.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tff_dpftrl.mechanisms import noise_recipe
from tff_dpftrl.private_round import kernel


class IdentityKernel(kernel.Kernel):
    """Kernel of independent noise."""

    @override
    def step(self, buffer, t, draw):
        return draw(t), buffer


class BufferedKernel(kernel.Kernel):
    """Kernel of BLT noise; it keeps one buffer for each decay."""

    def __init__(self, recipe: noise_recipe.BufferedNoise, dtype: tf.DType = tf.float32):
        """Reads the recipe; `dtype` is that of draws, buffer and noise."""
        self.dtype = dtype
        decay = np.asarray(recipe.buf_decay, np.float64)
        scale = np.asarray(recipe.output_scale, np.float64)
        self.num_buffers = len(decay)
        # With ẑ = z - ωᵀS and S' = diag(θ) S + 1 ẑ, the rows of (ẑ, S') are one matrix times S,
        # plus z in every row: a single pass over the buffers.
        next_buffers = np.diag(decay) - scale[np.newaxis]
        self._transition = np.concatenate([-scale[np.newaxis], next_buffers])
        self._transition = self._transition.astype(dtype.as_numpy_dtype)

    @override
    def step(self, buffer, t, draw):
        z = draw(t)
        if buffer is None:
            return z, None
        keep = tf.cast(t > 0, self.dtype)
        rows = tf.matmul(keep * self._transition, buffer) + z
        return rows[0], rows[1:]


class BandedKernel(kernel.Kernel):
    """Kernel of forward substitution with the bands of C; the last outputs are kept in a ring."""

    def __init__(self, recipe: noise_recipe.BandedNoise, dtype: tf.DType = tf.float32):
        """Reads the recipe; `dtype` is that of draws, buffer and noise."""
        self.dtype = dtype
        rows = np.asarray(recipe.rows, np.float64)
        self._toeplitz = len(rows) == 1
        self.max_rounds = recipe.max_rounds
        self.num_buffers = rows.shape[1] - 1
        self._inverse_diagonal = (1 / rows[:, 0]).astype(dtype.as_numpy_dtype)
        self._bands = (rows[:, 1:] / rows[:, :1]).astype(dtype.as_numpy_dtype)

    @override
    def step(self, buffer, t, draw):
        row = 0 if self._toeplitz else t
        noise = self.fresh(draw, t, tf.gather(self._inverse_diagonal, row))
        if buffer is None:
            return noise, None
        # Slot s holds the output of the latest round before t that is s modulo the ring's size.
        size = self.num_buffers
        lag_minus_one = tf.math.floormod(t - 1 - tf.range(size, dtype=tf.int64), size)
        weights = tf.gather(tf.gather(self._bands, row), lag_minus_one)
        weights = tf.where(lag_minus_one < t, weights, tf.zeros([], self.dtype))
        noise -= tf.matmul(weights[tf.newaxis], buffer)[0]
        slot = tf.math.floormod(t, size)
        buffer = tf.tensor_scatter_nd_update(
            buffer, slot[tf.newaxis, tf.newaxis], noise[tf.newaxis]
        )
        return noise, buffer


class InverseBandedKernel(kernel.Kernel):
    """Kernel that sums over a row of C⁻¹; past draws are made again.

    A row is summed over the past alone or for a block of rounds, whose sums are kept.
    """

    def __init__(self, recipe: noise_recipe.InverseBandedNoise, dtype: tf.DType = tf.float32):
        """Reads the recipe; `dtype` is that of draws, buffer and noise."""
        self.dtype = dtype
        self._block = recipe.rounds_at_once
        self.num_buffers = self._block if self._block > 1 else 0
        self._toeplitz = len(recipe.rows) == 1
        self.max_rounds = recipe.max_rounds
        lengths = np.asarray([len(row) for row in recipe.rows], np.int64)
        self._lengths = lengths
        # A past draw is made again up to the first round of a later block.
        self.num_seeds = int(np.max(lengths))
        self._offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        rows = [np.asarray(row, dtype.as_numpy_dtype) for row in recipe.rows]
        self._entries = np.concatenate(rows)

    @override
    def seed_of(self, index):
        return tf.math.floormod(index, self.num_seeds)

    @override
    def step(self, buffer, t, draw):
        new = draw(t)
        weight = self._weights(t[tf.newaxis], t)[0]
        own = new * weight if self.dtype == tf.float32 else self.fresh(draw, t, weight)
        if buffer is None:
            return own + self._past(t[tf.newaxis], t, draw, tf.zeros_like([own]))[0], None
        position = tf.math.floormod(t, self._block)
        rounds = t - position + tf.range(self._block, dtype=tf.int64)
        if self.max_rounds is not None:
            rounds = tf.minimum(rounds, self.max_rounds - 1)
        kept = tf.convert_to_tensor(buffer)
        buffer = tf.cond(
            tf.equal(position, 0),
            lambda: self._past(rounds, t, draw, tf.zeros_like(kept)),
            lambda: kept,
        )
        later = tf.where(rounds > t, self._weights(rounds, t), tf.zeros([], self.dtype))
        return own + tf.gather(buffer, position), buffer + later[:, tf.newaxis] * new

    def _weights(self, rounds, index):
        """Returns the weights of a draw in the noise of rounds, of their shape."""
        rows = tf.zeros_like(rounds) if self._toeplitz else rounds
        lag = rounds - index
        is_used = (lag >= 0) & (lag < tf.gather(self._lengths, rows))
        places = tf.gather(self._offsets, rows) + tf.where(is_used, lag, tf.zeros_like(lag))
        return tf.where(is_used, tf.gather(self._entries, places), tf.zeros([], self.dtype))

    def _past(self, rounds, t, draw, totals):
        """Adds what rounds have of the draws before round t, from the earliest one on.

        `totals` is of shape [rounds, size].
        """
        rows = tf.zeros_like(rounds) if self._toeplitz else rounds
        earliest = tf.maximum(tf.reduce_min(rounds - tf.gather(self._lengths, rows) + 1), 0)
        _, totals = tf.while_loop(
            lambda index, _: index < t,
            lambda index, totals: (
                index + 1,
                totals + self._weights(rounds, index)[:, tf.newaxis] * draw(index),
            ),
            (earliest, totals),
            parallel_iterations=1,
        )
        return totals
