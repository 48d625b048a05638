"""Noise of one stream, for all tensors of a model, round after round.

Pure TensorFlow. A stream is a recipe of `mechanisms.noise_recipe` together with
the shapes of the tensors it covers. Each execution of a round has a seed of its own for what is new
in the round's noise. The state keeps the seeds of those past draws that later rounds make again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import noise_recipe
from tff_dpftrl.numpy_noise import secure_draws
from tff_dpftrl.private_round import (
    gaussians,
    kernel,
    matrix_kernels,
    secure_calls,
    seeds,
    tree_kernels,
)

_KERNELS: dict[type, Callable[..., kernel.Kernel]] = {
    noise_recipe.BufferedNoise: matrix_kernels.BufferedKernel,
    noise_recipe.BandedNoise: matrix_kernels.BandedKernel,
    noise_recipe.InverseBandedNoise: matrix_kernels.InverseBandedKernel,
}


def build_kernel(recipe: noise_recipe.BlockRecipe, dtype: tf.DType = tf.float32) -> kernel.Kernel:
    """Builds the kernel that runs a recipe of one block, without restarts."""
    if isinstance(recipe, noise_recipe.IdentityNoise):
        return matrix_kernels.IdentityKernel()
    if isinstance(recipe, noise_recipe.TreeNoise):
        if recipe.variance_reduction:
            return tree_kernels.ReducedTreeKernel(recipe, dtype)
        return tree_kernels.VanillaTreeKernel(recipe, dtype)
    build = _KERNELS.get(type(recipe))
    if build is None:
        raise validation.UsageError(
            f"recipe must be a recipe for one block of rounds, got {recipe!r}."
        )
    return build(recipe, dtype)


class NoiseStream:
    """Stream of unit noise C⁻¹ z for a list of tensors; multiply it by z · clip norm.

    Secure noise is float64, on the grid of `secure_draws.STEP`, for
    `summation.noised_mean_on_grid`. If the noise is a sum of whole draws, it is exact
    (`noise_recipe.is_sum_of_draws`). Other noise is correlated in float64 and rounded to the grid.
    The rounding moves a coordinate by less than a step. All coordinates and rounds together count
    as a change of the sums by at most √(coordinates · rounds) steps, times the norm of C. That is
    6·10⁻⁴ standard deviations for 4 million coordinates, 2,000 rounds and a BLT of stride 400,
    whose norm is 29. The rounding leaves no gaps: each round has a draw that no earlier round used,
    and this draw is rounded to the grid by itself.
    """

    def __init__(
        self,
        recipe: noise_recipe.NoiseRecipe,
        shapes: Sequence[Sequence[int]],
        *,
        index: int = 0,
        max_rounds: int | None = None,
        secure: bool = False,
    ):
        """Initialises the stream.

        `index` tells it from other streams of the same seeds; `max_rounds` is that of all blocks
        together.
        """
        block_recipe, self.starts = noise_recipe.blocks(recipe)
        self._shapes = [tuple(shape) for shape in shapes]
        self._sizes = [int(np.prod(shape)) for shape in self._shapes]
        self._index = index
        self._max_rounds = max_rounds
        self._secure = secure
        self._kernel = build_kernel(block_recipe, *([secure_calls.DTYPE] if secure else []))

    def initial_buffer(self) -> tf.Tensor | tuple[()]:
        """Returns the buffer before the first round; an empty tuple if nothing is ever kept.

        It is one tensor for all tensors of the model, of shape [number of buffers, number of
        coordinates]: TFF copies its state several times a round, once more for every level of
        nesting.
        """
        num_buffers = self._kernel.num_buffers
        shape = [num_buffers, sum(self._sizes)]
        return tf.zeros(shape, self._kernel.dtype) if num_buffers else ()

    def block(self, round_index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the index of a round's block, and the round's index within it."""
        starts = tf.constant(self.starts, tf.int64)
        block = tf.reduce_sum(tf.cast(starts <= round_index, tf.int64)) - 1
        return block, round_index - tf.gather(starts, block)

    def initial_seed(self, root: tf.Tensor) -> tf.Tensor:
        """Returns the seed of a state before the first round.

        It is the root seed of the run, int64 of shape [words]. If past draws are made again, it is
        a row of shape [1 + n, words], before the seeds of n past draws.
        """
        num_seeds = self._kernel.num_seeds
        return tf.tile(root[tf.newaxis], [1 + num_seeds, 1]) if num_seeds else root

    def execution_seeds(
        self,
        seed: tf.Tensor,
        round_index: tf.Tensor,
        deterministic_seed: int | None,
        root: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the seed to execute a round with, and that of the state after the round.

        `seed` is that of the state before it. The round's new draw has the seed `root`. If that is
        None, fresh bits of the operating system join the run's seed, unless it is deterministic.
        """
        seed, num_seeds = tf.convert_to_tensor(seed), self._kernel.num_seeds
        if root is None:
            root = seeds.of_execution(seed[0] if num_seeds else seed, deterministic_seed)
        if not num_seeds:
            return root, seed
        _, t = self.block(tf.convert_to_tensor(round_index))
        place = 1 + self._kernel.seed_of(self._kernel.new_draw(t))
        executed = tf.tensor_scatter_nd_update(seed, [[place]], [root])
        return executed, executed

    def next(
        self, buffer: tf.Tensor | tuple[()], round_index: tf.Tensor, executed: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor | tuple[()]]:
        """Returns the noise of one round and the buffer after it.

        Rounds must be run in order. The noise is float32, or float64 if it is secure.
        """
        # Always on the CPU: a GPU would round the matrix products of some kernels to
        # TensorFloat-32, and what past rounds were noised with has to be made again.
        with tf.device("CPU:0"):
            block, t = self._at(round_index)
            draws = [
                self._draws(executed, block, position, size)
                for position, size in enumerate(self._sizes)
            ]
            if self._kernel.num_buffers == 0:
                vectors = [self._kernel.step(None, t, draw)[0] for draw in draws]
            else:
                joint, next_buffer = self._kernel.step(
                    tf.convert_to_tensor(buffer),
                    t,
                    lambda *draw_args: tf.concat([draw(*draw_args) for draw in draws], axis=0),
                )
                buffer = buffer if next_buffer is None else next_buffer
                vectors = tf.split(joint, self._sizes)
            vectors = [self._on_grid(vector) for vector in vectors]
        return [tf.reshape(*pair) for pair in zip(vectors, self._shapes, strict=True)], buffer

    @property
    def is_separable(self) -> bool:
        """Whether each tensor's noise can be had without that of the others: nothing is kept."""
        return self._kernel.num_buffers == 0

    def of_tensor(
        self,
        position: tf.Tensor,
        shape: tf.TensorShape,
        round_index: tf.Tensor,
        executed: tf.Tensor,
    ) -> tf.Tensor:
        """Returns one tensor's noise with the bits of `next`, if the stream `is_separable`."""
        with tf.device("CPU:0"):  # As in `next`.
            block, t = self._at(round_index)
            draw = self._draws(executed, block, position, shape.num_elements())
            return tf.reshape(self._on_grid(self._kernel.step(None, t, draw)[0]), shape)

    def _on_grid(self, noise: tf.Tensor) -> tf.Tensor:
        """Rounds secure noise to the grid of the draws.

        Half a step is rounded up: the new draw of the round, a multiple of the step, must not
        decide where what was drawn before is rounded to, as it would if halves became even.
        """
        if not self._secure:
            return noise
        return tf.floor(noise * (1 / secure_draws.STEP) + 0.5) * secure_draws.STEP

    def _at(self, round_index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the index of a round's block, and the round's index within it."""
        block, t = self.block(kernel.within_horizon(round_index, self._max_rounds))
        return block, kernel.within_horizon(t, self._kernel.max_rounds)

    def _draws(
        self, executed: tf.Tensor, block: tf.Tensor, position: tf.Tensor | int, size: int
    ) -> kernel.Draw:
        """Returns the draws of a tensor in a block."""

        def draw(index: tf.Tensor, *scale: tf.Tensor) -> tf.Tensor:
            seed = executed
            if self._kernel.num_seeds:
                seed = executed[1 + self._kernel.seed_of(index)]
            for part in (self._index, block, position, index):
                seed = seeds.derive(seed, part)
            return gaussians.normal(seed, size, *scale)

        return draw
