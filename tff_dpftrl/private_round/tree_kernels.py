"""Noise kernels of tree aggregation.

Notation: t has r trailing ones, so round t completes one node at each of the
levels 0 ... r. They lie on the *right spine* of the topmost, V: the right child
of V, its right child, and so on down to leaf t. Their left siblings, the left
children along the spine, were in the released sum until now. Hence the noise
emitted in round t is

    est(V) - Σ_{l < r} est(left sibling at level l).
"""

from __future__ import annotations

import tensorflow as tf
from typing_extensions import override

from tff_dpftrl.mechanisms import noise_recipe
from tff_dpftrl.private_round import kernel


def _trailing_ones(t: tf.Tensor, num_levels: int) -> tf.Tensor:
    """Returns the level of the topmost node that round t completes, an int64 scalar."""
    bits = tf.bitwise.right_shift(t, tf.range(num_levels, dtype=tf.int64))
    return tf.reduce_sum(tf.math.cumprod(tf.bitwise.bitwise_and(bits, tf.constant(1, tf.int64))))


class VanillaTreeKernel(kernel.Kernel):
    """Kernel with one draw for each node; a round needs two draws on average.

    The nodes that leave the sum are drawn again. At each level it is the one drawn last.
    """

    def __init__(self, recipe: noise_recipe.TreeNoise, dtype: tf.DType = tf.float32):
        """Reads the recipe; `dtype` is that of draws and noise."""
        self.dtype = dtype
        self.num_seeds = recipe.num_levels
        self.max_rounds = recipe.max_rounds

    @override
    def seed_of(self, index):
        return index // noise_recipe.LEVEL_STRIDE

    @override
    def new_draw(self, t):
        top = _trailing_ones(t, self.num_seeds)
        return top * noise_recipe.LEVEL_STRIDE + tf.bitwise.right_shift(t, top)

    @override
    def step(self, buffer, t, draw):
        def remove_node(level, total):
            node = level * noise_recipe.LEVEL_STRIDE + tf.bitwise.right_shift(t, level) - 1
            return level + 1, total - draw(node)

        _, noise = tf.while_loop(
            lambda level, _: level < _trailing_ones(t, self.num_seeds),
            remove_node,
            (tf.constant(0, tf.int64), draw(self.new_draw(t))),
            parallel_iterations=1,
        )
        return noise, buffer


class ReducedTreeKernel(kernel.Kernel):
    """Kernel of Honaker's bottom-up estimates; it keeps the last estimate of each level.

    est(P) = v_h own(P) + (1 - v_h) (est(L) + est(R)) for a node P at level h with children L and
    R, where v_0 = 1 and v_h = 2 v_{h-1} / (1 + 2 v_{h-1}) is the variance of est(P). The own draws
    along the spine of a round are in est(V) only, so one draw stands for all of them
    (`noise_recipe.TreeNoise.bottom_up`). To sample the tree from the top down would need nothing
    but draws, but two branches of a run would share what no past round has released.
    """

    def __init__(self, recipe: noise_recipe.TreeNoise, dtype: tf.DType = tf.float32):
        """Reads the recipe; `dtype` is that of draws, buffer and noise."""
        self.dtype = dtype
        self.num_buffers = recipe.num_levels
        self.max_rounds = recipe.max_rounds
        self._own, self._left = (part.astype(dtype.as_numpy_dtype) for part in recipe.bottom_up())

    @override
    def step(self, buffer, t, draw):
        assert buffer is not None
        top = _trailing_ones(t, self.num_buffers)
        fresh = self.fresh(draw, t, tf.gather(self._own, top))
        is_left = tf.range(self.num_buffers, dtype=tf.int64) < top
        zeros = tf.zeros([self.num_buffers], self.dtype)
        left = tf.where(is_left, tf.gather(self._left, top), zeros)
        removed = tf.where(is_left, tf.ones_like(zeros), zeros)
        from_left, sum_of_left = tf.unstack(tf.matmul(tf.stack([left, removed]), buffer))
        estimate = fresh + from_left
        buffer = tf.tensor_scatter_nd_update(buffer, [[top]], [estimate])
        return estimate - sum_of_left, buffer
