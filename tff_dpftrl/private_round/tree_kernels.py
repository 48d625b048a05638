"""Noise kernels of tree aggregation; the state of both has no nodes, whose draws are repeated.

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


def _bits(t: tf.Tensor, num_bits: int) -> tf.Tensor:
    """Returns the bits of t, lowest first, as a boolean tensor of shape [num_bits]."""
    shifted = tf.bitwise.right_shift(t, tf.range(num_bits, dtype=tf.int64))
    return tf.equal(tf.bitwise.bitwise_and(shifted, tf.constant(1, tf.int64)), 1)


def _weighted_draws(ids: tf.Tensor, weights: tf.Tensor, draw: kernel.Draw) -> tf.Tensor:
    """Computes Σ_i weights[i] draw(ids[i]); at least one weight is not zero."""
    used = tf.not_equal(weights, tf.zeros([], weights.dtype))
    ids, weights = tf.boolean_mask(ids, used), tf.boolean_mask(weights, used)
    _, total = tf.while_loop(
        lambda i, _: i < tf.size(ids),
        lambda i, total: (i + 1, total + weights[i] * draw(ids[i])),
        (tf.constant(1), weights[0] * draw(ids[0])),
        parallel_iterations=1,
    )
    return total


class VanillaTreeKernel(kernel.Kernel):
    """Kernel with one draw for each node; a round needs two draws on average."""

    def __init__(self, recipe: noise_recipe.TreeNoise, dtype: tf.DType = tf.float32):
        """Reads the recipe; `dtype` is that of draws and noise."""
        self.dtype = dtype
        self._num_levels = recipe.num_levels
        self.max_rounds = recipe.max_rounds

    @override
    def step(self, buffer, t, draw):
        levels = tf.range(self._num_levels, dtype=tf.int64)
        spine = tf.bitwise.right_shift(t, levels)
        ones = tf.cast(_bits(t, self._num_levels), tf.int64)
        completed = tf.reduce_sum(tf.math.cumprod(ones))
        ids = levels * noise_recipe.LEVEL_STRIDE + tf.where(levels < completed, spine - 1, spine)
        # Not `==`: in the graphs that TFF builds it compares identities.
        is_top = tf.cast(tf.equal(levels, completed), self.dtype)
        weights = tf.where(levels < completed, tf.constant(-1.0, self.dtype), is_top)
        return _weighted_draws(ids, weights, draw), buffer


class ReducedTreeKernel(kernel.Kernel):
    """Kernel of Honaker's bottom-up estimates, sampled from the top down.

    Bottom-up, est(P) = v_h own(P) + (1 - v_h) (est(L) + est(R)) for a node P at
    level h with children L and R, where v_0 = 1 and
    v_h = 2 v_{h-1} / (1 + 2 v_{h-1}) is the variance of est(P). Since est(P) is
    the best linear unbiased combination, cov(est(P), est(L) + est(R)) = v_h. With
    independent Gaussians e ~ N(0, 2 v_{h-1} - v_h) and d ~ N(0, 2 v_{h-1}) therefore

        est(L) = est(P) / 2 + U,   U = (e + d) / 2,
        est(R) = est(P) / 2 + W,   W = (e - d) / 2

    has the right joint law of the three estimates. What happens below L depends on
    the rest of the tree only through est(L), so descending from the root gives the
    joint law of all estimates. U is one draw, W = κ U + an independent second draw.

    Unrolled, with the path from the root at level H to leaf t and G_h = U or W as
    it goes to the left or the right child of its node at level h, the noise is

        2^-H est(root) + Σ_{h > r} 2^(1-h) G_h - Σ_{1 <= h <= r} (U_h + (1 - 2^(1-h)) W_h).
    """

    def __init__(self, recipe: noise_recipe.TreeNoise, dtype: tf.DType = tf.float32):
        """Reads the recipe; `dtype` is that of draws and noise."""
        self.dtype = dtype
        self._num_levels = recipe.num_levels
        self.max_rounds = recipe.max_rounds
        self._scales = recipe.descent(dtype.as_numpy_dtype)
        self.num_slots = 2 * (recipe.num_levels - 1)

    @override
    def slot(self, index):
        """Keeps the root, then each level's first draw, then the second, from the top down.

        At level h, the first draw belongs to all 2^h rounds of a node, the second one to those of
        its right half: to one round, at level 1.
        """
        top = self._num_levels - 1
        level = index // noise_recipe.LEVEL_STRIDE
        below_top = tf.where(tf.equal(tf.math.floormod(index, 2), 0), top - level, 2 * top - level)
        return tf.where(level > top, tf.zeros_like(level), 1 + below_top)

    @override
    def step(self, buffer, t, draw):
        bits = _bits(t, self._num_levels)
        as_int = tf.cast(bits, tf.int64)
        completed = tf.reduce_sum(tf.math.cumprod(as_int))
        # The rounds of the horizon 2^num_levels - 1 form complete trees of falling height;
        # as many leading ones of t as there are trees before its own.
        height = self._num_levels - 1 - tf.reduce_sum(tf.math.cumprod(as_int, reverse=True))
        levels = tf.range(1, self._num_levels, dtype=tf.int64)
        one, zero = tf.ones([], self.dtype), tf.zeros([], self.dtype)
        scale = tf.pow(2 * one, tf.cast(1 - levels, self.dtype))
        on_spine = levels <= completed
        goes_right = bits[:-1]
        u_weight = tf.where(on_spine, -one, tf.where(goes_right, zero, scale))
        w_weight = tf.where(on_spine, scale - one, tf.where(goes_right, scale, zero))
        below_root = levels <= height
        first = tf.where(
            below_root, (u_weight + w_weight * self._scales.slope) * self._scales.left_stddev, zero
        )
        second = tf.where(below_root, w_weight * self._scales.right_stddev, zero)
        root = tf.gather(self._scales.root_stddev, height) * tf.pow(
            2 * one, -tf.cast(height, self.dtype)
        )
        nodes = tf.bitwise.right_shift(t, levels)
        ids = levels * noise_recipe.LEVEL_STRIDE + 2 * nodes
        root_id = (self._num_levels + height) * noise_recipe.LEVEL_STRIDE
        noise = _weighted_draws(
            tf.concat([root_id[tf.newaxis], ids, ids + 1], 0),
            tf.concat([root[tf.newaxis], first, second], 0),
            draw,
        )
        return noise, buffer
