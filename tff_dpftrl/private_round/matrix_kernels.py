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

    A row is summed from its diagonal backwards in time, alone or in a block of rounds. The noise
    of a block is kept; that of single rounds is not.
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
        self._offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        rows = [np.asarray(row, dtype.as_numpy_dtype) for row in recipe.rows]
        self._entries = np.concatenate(rows)

    @override
    def step(self, buffer, t, draw):
        if buffer is not None:
            return self._step_of_block(buffer, t, draw)
        row = tf.zeros_like(t) if self._toeplitz else t
        offset = tf.gather(self._offsets, row)
        num_terms = tf.minimum(tf.gather(self._lengths, row), t + 1)

        def add_term(lag, total):
            return lag + 1, total + tf.gather(self._entries, offset + lag) * draw(t - lag)

        first = self.fresh(draw, t, tf.gather(self._entries, offset))
        _, noise = tf.while_loop(
            lambda lag, _: lag < num_terms,
            add_term,
            (tf.constant(1, tf.int64), first),
            parallel_iterations=1,
        )
        return noise, buffer

    def _step_of_block(self, buffer, t, draw):
        """Emits a row of the buffer, after filling it in the first round of a block.

        The draws of a block are made from the latest one backwards in time. Each is added to the
        rows of its round and later ones, so that a row is summed in the order of a single round.
        """
        position = tf.math.floormod(t, self._block)
        rounds = t - position + tf.range(self._block, dtype=tf.int64)
        if self.max_rounds is not None:
            rounds = tf.minimum(rounds, self.max_rounds - 1)
        rows = tf.zeros_like(rounds) if self._toeplitz else rounds
        offsets, lengths = tf.gather(self._offsets, rows), tf.gather(self._lengths, rows)
        earliest = tf.maximum(tf.reduce_min(rounds - lengths + 1), 0)
        is_first = tf.equal(position, 0)

        def add_draw(index, totals):
            lag = rounds - index
            is_used = (lag >= 0) & (lag < lengths)
            entries = tf.gather(self._entries, offsets + tf.where(is_used, lag, 0))
            weights = tf.where(is_used, entries, tf.zeros([], self.dtype))
            if self.dtype == tf.float64:
                is_fresh = tf.equal(lag, 0)
                scale = tf.reduce_max(tf.where(is_fresh, entries, tf.zeros([], self.dtype)))
                own = tf.cast(is_fresh, self.dtype)[:, tf.newaxis]
                totals += own * self.fresh(draw, index, scale)
                weights = tf.where(is_fresh, tf.zeros([], self.dtype), weights)
            return index - 1, totals + weights[:, tf.newaxis] * draw(index)

        _, buffer = tf.while_loop(
            lambda index, _: index >= earliest,
            add_draw,
            (
                tf.where(is_first, rounds[-1], earliest - 1),
                tf.where(is_first, tf.zeros_like(buffer), buffer),
            ),
            parallel_iterations=1,
        )
        return tf.gather(buffer, position), buffer
