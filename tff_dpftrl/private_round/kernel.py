"""Interface of a noise kernel: one recipe, one tensor, one round at a time."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from tff_dpftrl.mechanisms import noise_recipe

Draw: TypeAlias = Callable[..., tf.Tensor]
"""Function from an int64 scalar i to the i-th vector of independent N(0, 1), of `Kernel.dtype`.

Secure draws take a scale after i, a float64 scalar: the vector is that times as large before it is
rounded to the grid.
"""


class Kernel(abc.ABC):
    """Source of the noise (C⁻¹ z)_t of one block, coordinate by coordinate.

    A round with t = 0 ignores the buffer, so that a restart needs nothing but fresh
    draws.
    """

    dtype: tf.DType = tf.float32
    """Dtype of draws, buffer and noise."""

    num_buffers: int = 0
    """Number of vectors kept between rounds, the rows of the buffer."""

    max_rounds: int | None = None
    """Number of rounds that the recipe is defined for; None if any."""

    num_seeds: int = 0
    """Number of past draws at a time that are made again; the state keeps their seeds."""

    def fresh(self, draw: Draw, index: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        """Draws the only vector of a round that no earlier round has used, times its weight.

        A product of secure draws with the weight would leave the grid, and rounding it to the
        grid would leave gaps or steps in the law of the noise. So they are scaled before they are
        rounded.

        Args:
          draw: Draws of this tensor and block.
          index: Number of the draw, an int64 scalar.
          scale: Weight of the draw, a scalar of `dtype`.

        Returns:
          The vector, of shape [size].
        """
        return draw(index, scale) if self.dtype == tf.float64 else draw(index) * scale

    def seed_of(self, index: tf.Tensor) -> tf.Tensor:
        """Returns the place, below `num_seeds`, at which the seed of a draw is kept.

        Args:
          index: Number of the draw, an int64 scalar.

        Returns:
          int64 scalar. A later draw may take the place when this one is not made again any more.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no seed of draw {index}.")

    def new_draw(self, t: tf.Tensor) -> tf.Tensor:
        """Returns the number of the only draw of a round that no earlier round has used.

        Args:
          t: Index of the round within its block, an int64 scalar, from 0.

        Returns:
          int64 scalar.
        """
        return t

    @abc.abstractmethod
    def step(
        self, buffer: tf.Tensor | None, t: tf.Tensor, draw: Draw
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Emits the noise of one round.

        Args:
          buffer: Tensor of shape [num_buffers, size], zeros before the
            first round; None if `num_buffers` is 0.
          t: Index of the round within its block, an int64 scalar, from 0.
          draw: Draws of this tensor and block; the same i always gives the
            same vector of shape [size].

        Returns:
          The noise, of shape [size], and the new buffer.
        """


def within_horizon(t: tf.Tensor, max_rounds: int | None) -> tf.Tensor:
    """Returns `t` after checking, when the op runs, that round t is defined."""
    if max_rounds is None:
        return t
    check = tf.debugging.assert_less(
        t,
        tf.constant(max_rounds, tf.int64),
        message=noise_recipe.beyond_horizon(max_rounds),
    )
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(t)
