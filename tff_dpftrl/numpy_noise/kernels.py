"""Noise kernels in NumPy: the recipes of `mechanisms`, one round at a time.

Every kernel is the one of `private_round` in float32. No product of matrices here is left to
a library, whose order of summation may depend on the number of threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import noise_recipe

Draw: TypeAlias = Callable[[int], np.ndarray]
"""Function from i ≥ 0 to a new array: the i-th float32 vector of independent N(0, 1)."""

Terms: TypeAlias = Sequence[tuple[int, float]]
"""Pairs (index of a draw, its weight), at least one."""


class Kernel:
    """Kernel of a recipe whose noise is a weighted sum of draws; it keeps nothing."""

    num_buffers: int = 0
    """Number of vectors kept between rounds, the rows of the buffer."""

    def __init__(self, terms: Callable[[int], Terms]):
        """Initialises the kernel.

        Args:
          terms: Function from the round within its block to the draws of its noise; no lambda,
            so that streams can be pickled.
        """
        self._terms = terms

    def step(self, buffer: np.ndarray, t: int, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """Computes the noise of one round.

        The call can be repeated: it changes nothing in `buffer` that it reads.

        Args:
          buffer: float32 array of shape [num_buffers, size]; ignored in round 0.
          t: Index of the round within its block, from 0.
          draw: Draws of this block; the same i always gives the same vector of shape [size].

        Returns:
          The noise, a new float32 array of shape [size], and the buffer after the round.
        """
        (index, weight), *others = self._terms(t)
        noise = draw(index)
        noise *= np.float32(weight)
        for index, weight in others:
            noise += np.float32(weight) * draw(index)
        return noise, buffer


class BufferedKernel(Kernel):
    """Kernel of BLT noise; it keeps one buffer for each decay."""

    def __init__(self, recipe: noise_recipe.BufferedNoise):
        """Initialises the kernel.

        Args:
          recipe: Decays θ and scales ω of the BLT.
        """
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
        """Initialises the kernel.

        Args:
          recipe: Bands of C.
        """
        self._rows = recipe.rows
        bands = len(recipe.rows[0])
        self.num_buffers = bands if bands > 1 else 0

    @override
    def step(self, buffer, t, draw):
        row = _row(self._rows, t)
        noise = draw(t)
        noise *= np.float32(1 / row[0])
        for lag in range(1, min(t + 1, len(row))):
            noise -= np.float32(row[lag] / row[0]) * buffer[(t - lag) % len(row)]
        if self.num_buffers:
            buffer[t % len(row)] = noise
        return noise, buffer


class BlockKernel(Kernel):
    """Kernel that sums over the rows of C⁻¹ for a block of rounds at a time, and keeps it."""

    def __init__(self, recipe: noise_recipe.InverseBandedNoise):
        """Initialises the kernel.

        Args:
          recipe: Rows of C⁻¹, and the number of rounds in a block.
        """
        self._rows = recipe.rows
        self._max_rounds = recipe.max_rounds
        self.num_buffers = recipe.rounds_at_once

    @override
    def step(self, buffer, t, draw):
        position = t % self.num_buffers
        if position == 0:
            buffer = np.zeros_like(buffer)
            end = min(t + self.num_buffers, self._max_rounds or t + self.num_buffers)
            rows = [_row(self._rows, s)[: s + 1] for s in range(t, end)]
            earliest = min(s - len(row) + 1 for s, row in enumerate(rows, t))
            # From the latest draw backwards, in which order a round alone has its sum, too.
            for index in range(end - 1, earliest - 1, -1):
                drawn = draw(index)
                for s in range(max(t, index), end):
                    if s - index < len(rows[s - t]):
                        buffer[s - t] += np.float32(rows[s - t][s - index]) * drawn
        return buffer[position].copy(), buffer


@functools.singledispatch
def build(recipe: noise_recipe.BlockRecipe) -> Kernel:
    """Builds the kernel that runs a recipe.

    Args:
      recipe: Recipe of one block, without restarts.

    Returns:
      The kernel.

    Raises:
      ValueError: If `recipe` is not a recipe for one block.
    """
    raise validation.UsageError(f"recipe must be a recipe for one block of rounds, got {recipe!r}.")


@build.register
def _(recipe: noise_recipe.IdentityNoise) -> Kernel:
    del recipe  # It has no parameters.
    return Kernel(_identity_terms)


@build.register
def _(recipe: noise_recipe.BufferedNoise) -> Kernel:
    return BufferedKernel(recipe)


@build.register
def _(recipe: noise_recipe.BandedNoise) -> Kernel:
    return BandedKernel(recipe)


@build.register
def _(recipe: noise_recipe.InverseBandedNoise) -> Kernel:
    if recipe.rounds_at_once > 1:
        return BlockKernel(recipe)
    return Kernel(functools.partial(_inverse_banded_terms, recipe.rows))


@build.register
def _(recipe: noise_recipe.TreeNoise) -> Kernel:
    if recipe.variance_reduction:
        terms = functools.partial(_reduced_tree_terms, recipe.num_levels, recipe.descent())
        return Kernel(terms)
    return Kernel(_tree_terms)


def _row(rows: Sequence[Sequence[float]], t: int) -> Sequence[float]:
    """Returns the row of round t: the only one, or that with its number."""
    return rows[0] if len(rows) == 1 else rows[t]


def _identity_terms(t: int) -> Terms:
    return [(t, 1.0)]


def _inverse_banded_terms(rows: Sequence[Sequence[float]], t: int) -> Terms:
    return [(t - lag, entry) for lag, entry in enumerate(_row(rows, t)[: t + 1])]


def _trailing_ones(t: int) -> int:
    return (~t & (t + 1)).bit_length() - 1


def _tree_terms(t: int) -> Terms:
    """Returns the nodes whose noise is new in round t, less those that leave the sum."""
    completed = _trailing_ones(t)
    top = (completed * noise_recipe.LEVEL_STRIDE + (t >> completed), 1.0)
    return [
        *(
            (level * noise_recipe.LEVEL_STRIDE + (t >> level) - 1, -1.0)
            for level in range(completed)
        ),
        top,
    ]


def _reduced_tree_terms(num_levels: int, scales: noise_recipe.TreeDescent, t: int) -> Terms:
    """Returns the draws of Honaker's estimates; `private_round.tree_kernels` has the formula."""
    completed = _trailing_ones(t)
    # The rounds of the horizon 2^num_levels − 1 form complete trees of falling height; as many
    # leading ones of t as there are trees before its own.
    height = (2**num_levels - 1 - t).bit_length() - 1
    root = (num_levels + height) * noise_recipe.LEVEL_STRIDE
    terms = [(root, scales.root_stddev[height] * np.float32(2.0**-height))]
    right_terms = []
    for level in range(1, height + 1):
        scale = 2.0 ** (1 - level)
        if level <= completed:
            u_weight, w_weight = -1.0, scale - 1.0
        else:
            goes_right = t >> (level - 1) & 1
            u_weight, w_weight = (0.0, scale) if goes_right else (scale, 0.0)
        of_node = level - 1
        left = (u_weight + w_weight * scales.slope[of_node]) * scales.left_stddev[of_node]
        right = w_weight * scales.right_stddev[of_node]
        node = level * noise_recipe.LEVEL_STRIDE + 2 * (t >> level)
        terms.append((node, left))
        right_terms.append((node + 1, right))
    return [(index, weight) for index, weight in terms + right_terms if weight != 0.0]
