"""Noise kernels in NumPy: the recipes of `mechanisms`, one round at a time.

Every kernel is the one of `private_round` in float32. No product of matrices here is left to
a library, whose order of summation may depend on the number of threads.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import noise_recipe

Draw: TypeAlias = Callable[[int], np.ndarray]
"""Function from i ≥ 0 to a new array: the i-th float32 vector of independent N(0, 1)."""


class Kernel(abc.ABC):
    """Noise of a recipe. Every round makes one new draw; some make earlier ones again."""

    num_buffers: int = 0
    """Number of vectors kept between rounds, the rows of the buffer."""

    num_seeds: int = 0
    """Number of draws that later rounds may make again, at most: their seeds are kept."""

    def new_draw(self, t: int) -> int:
        """Returns the index of the new draw of a round."""
        return t

    def slot(self, index: int) -> int:
        """Returns the place of a draw's seed among the `num_seeds`, until another draw takes it."""
        return index % self.num_seeds

    @abc.abstractmethod
    def step(self, buffer: np.ndarray, t: int, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """Computes the noise of one round.

        The call can be repeated: it changes nothing in `buffer` that it reads.

        Args:
          buffer: float32 array of shape [num_buffers, size]; ignored in round 0.
          t: Index of the round within its block, from 0.
          draw: Draws of this block, of shape [size]: the new one, and those whose seeds are kept.

        Returns:
          The noise, a new float32 array of shape [size], and the buffer after the round.
        """


class IdentityKernel(Kernel):
    """Kernel of independent noise."""

    @override
    def step(self, buffer, t, draw):
        return draw(t), buffer


class BufferedKernel(Kernel):
    """Kernel of BLT noise; it keeps one buffer for each decay."""

    def __init__(self, recipe: noise_recipe.BufferedNoise):
        self._decay = np.asarray(recipe.buf_decay, np.float32)
        self._scale = np.asarray(recipe.output_scale, np.float32)
        self.num_buffers = len(self._decay)

    @override
    def step(self, buffer, t, draw):
        noise = draw(t)
        after = np.zeros_like(buffer)
        if t > 0:
            for scale, row in zip(self._scale, buffer, strict=True):
                noise -= scale * row
            np.multiply(self._decay[:, np.newaxis], buffer, out=after)
        after += noise
        return noise, after


class BandedKernel(Kernel):
    """Kernel of forward substitution with the bands of C; the last outputs are kept in a ring.

    The ring has a slot for the round itself, so that a round can be repeated.
    """

    def __init__(self, recipe: noise_recipe.BandedNoise):
        self._rows = recipe.rows
        bands = len(recipe.rows[0])
        self.num_buffers = bands if bands > 1 else 0

    @override
    def step(self, buffer, t, draw):
        row = self._rows[0] if len(self._rows) == 1 else self._rows[t]
        noise = draw(t)
        noise *= np.float32(1 / row[0])
        for lag in range(1, min(t + 1, len(row))):
            noise -= np.float32(row[lag] / row[0]) * buffer[(t - lag) % len(row)]
        if self.num_buffers:
            buffer[t % len(row)] = noise
        return noise, buffer


class InverseBandedKernel(Kernel):
    """Kernel that sums over a row of C⁻¹; the draws of earlier rounds are made again.

    In a block of B > 1 rounds the earlier draws are made once, in its first round, and summed for
    each of its rounds. Every round adds its own draw to the sums of itself and of the later ones.
    So each sum is from the earliest draw on, for any B, and no draw is made before its round.
    """

    def __init__(self, recipe: noise_recipe.InverseBandedNoise):
        self._rows = recipe.rows
        self._block = recipe.rounds_at_once
        self._max_rounds = recipe.max_rounds
        self.num_buffers = self._block if self._block > 1 else 0
        self.num_seeds = max(map(len, recipe.rows))

    @override
    def step(self, buffer, t, draw):
        position = t % self._block
        end = t - position + self._block
        if self._max_rounds is not None:
            end = min(end, self._max_rounds)
        rows = [self._rows[s if len(self._rows) > 1 else 0][: s + 1] for s in range(t, end)]
        first = t
        if position:
            sums = buffer.copy()
        else:
            sums = np.zeros([self._block, buffer.shape[1]], buffer.dtype)
            first = min(s - len(row) + 1 for s, row in enumerate(rows, t))
        for index in range(first, t + 1):
            drawn = draw(index)
            for s, row in enumerate(rows, t):
                if s - index < len(row):
                    sums[s % self._block] += np.float32(row[s - index]) * drawn
        return sums[position].copy(), sums if self.num_buffers else buffer


class TreeKernel(Kernel):
    """Kernel of tree aggregation, where the estimate of a node is its own draw."""

    def __init__(self, recipe: noise_recipe.TreeNoise):
        self.num_seeds = recipe.num_levels

    @override
    def new_draw(self, t):
        level = _trailing_ones(t)
        return level * noise_recipe.LEVEL_STRIDE + (t >> level)

    @override
    def slot(self, index):
        return index // noise_recipe.LEVEL_STRIDE

    @override
    def step(self, buffer, t, draw):
        noise = draw(self.new_draw(t))
        for level in range(_trailing_ones(t)):  # The left siblings, which leave the sum.
            noise -= draw(level * noise_recipe.LEVEL_STRIDE + (t >> level) - 1)
        return noise, buffer


class ReducedTreeKernel(Kernel):
    """Kernel of tree aggregation with variance reduction; it keeps one estimate for each level."""

    def __init__(self, recipe: noise_recipe.TreeNoise):
        self.num_buffers = recipe.num_levels
        self._own, self._left = (weights.astype(np.float32) for weights in recipe.bottom_up())

    @override
    def step(self, buffer, t, draw):
        level = _trailing_ones(t)
        estimate = draw(t)
        estimate *= self._own[level]
        for below, weight in enumerate(self._left[level, :level]):
            estimate += weight * buffer[below]
        noise = estimate.copy()
        for left in buffer[:level]:
            noise -= left
        buffer[level] = estimate
        return noise, buffer


@functools.singledispatch
def build(recipe: noise_recipe.BlockRecipe) -> Kernel:
    """Builds the kernel that runs the recipe of one block, without restarts."""
    raise validation.UsageError(f"recipe must be a recipe for one block of rounds, got {recipe!r}.")


@build.register
def _(recipe: noise_recipe.IdentityNoise) -> Kernel:
    del recipe  # It has no parameters.
    return IdentityKernel()


@build.register
def _(recipe: noise_recipe.BufferedNoise) -> Kernel:
    return BufferedKernel(recipe)


@build.register
def _(recipe: noise_recipe.BandedNoise) -> Kernel:
    return BandedKernel(recipe)


@build.register
def _(recipe: noise_recipe.InverseBandedNoise) -> Kernel:
    return InverseBandedKernel(recipe)


@build.register
def _(recipe: noise_recipe.TreeNoise) -> Kernel:
    return ReducedTreeKernel(recipe) if recipe.variance_reduction else TreeKernel(recipe)


def _trailing_ones(t: int) -> int:
    return (~t & (t + 1)).bit_length() - 1
