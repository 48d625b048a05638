"""Noise recipes: the numbers with which `private_round` and `numpy_noise` stream C⁻¹ z.

Only numbers cross from the maths to TensorFlow. Each recipe defines
the noise ẑ_t emitted in round t = 0, 1, ... as a function of the i.i.d.
standard Gaussian draws z (later scaled by noise_multiplier · clip_norm).
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np

from tff_dpftrl import validation

LEVEL_STRIDE = 1 << 40
"""Distance of the draws of two levels: node (level, position) has draw level · stride + position.
"""


@dataclasses.dataclass(frozen=True)
class IdentityNoise:
    """Recipe of independent noise: ẑ_t = z_t. No state."""


@dataclasses.dataclass(frozen=True)
class BufferedNoise:
    """Recipe of BLT noise with d buffers S, zero at the start, decays θ and output scales ω.

    ẑ_t = z_t − Σ_i output_scale[i] S_i, then S_i ← buf_decay[i] S_i + ẑ_t (McMahan, Xu & Zhang
    2024, equation 3).
    """

    buf_decay: tuple[float, ...]
    output_scale: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class TreeNoise:
    """Recipe of binary-tree noise; every node has its own draw.

    ẑ_t = N_{t+1} − N_t, where N_t is the noise of the released sum of the first t rounds: the sum
    of the node estimates of the dyadic decomposition of t. A run can have up to 2^num_levels − 1
    rounds; an aggregator refuses more. With `variance_reduction`, a node's estimate combines,
    optimally, its own draw and the estimates of its two children (Honaker 2015, bottom-up);
    otherwise it is its own draw.
    """

    num_levels: int
    variance_reduction: bool

    @property
    def max_rounds(self) -> int:
        """Number of rounds that the tree has fresh draws for."""
        return 2**self.num_levels - 1

    def bottom_up(self) -> tuple[np.ndarray, np.ndarray]:
        """Computes the weights with which a tree with variance reduction is sampled bottom up.

        A round completes the right spine of a node V of level r: V, its right child and so on down
        to the leaf. The estimate of a node of level h > 0 is v_h times its own draw plus 1 − v_h
        times the estimates of its children; v_0 = 1, v_h = 2 v_{h−1} / (1 + 2 v_{h−1}). The own
        draws of the spine are in no estimate that is used later but that of V, so that one Gaussian
        replaces them: est(V) = own[r] · z + Σ_{l<r} left[r, l] · est(left child of level l).

        The weights are own, shape [num_levels], and left, shape [num_levels, num_levels] and zero
        for l ≥ r.
        """
        levels = self.num_levels
        variance = [1.0]
        while len(variance) < levels:
            variance.append(2 * variance[-1] / (1 + 2 * variance[-1]))
        own, left = np.ones(levels), np.zeros([levels, levels])
        for r in range(1, levels):
            below = 1 - variance[r]
            own[r] = np.hypot(variance[r], below * own[r - 1])
            left[r, :r] = below * left[r - 1, :r]
            left[r, r - 1] = below
        return own, left


@dataclasses.dataclass(frozen=True)
class BandedNoise:
    """Recipe of noise whose C has few bands; the last outputs are kept.

    ẑ_t = (z_t − Σ_{j=1..bands−1} row_t[j] ẑ_{t−j}) / row_t[0], with row_t[j] = C[t, t − j] and
    ẑ_s = 0 for s < 0. Either there is one row for all rounds (Toeplitz C), or one a round.
    """

    rows: tuple[tuple[float, ...], ...]

    @property
    def max_rounds(self) -> int | None:
        """Number of rounds that the rows are defined for; None if any."""
        return None if len(self.rows) == 1 else len(self.rows)


@dataclasses.dataclass(frozen=True)
class InverseBandedNoise:
    """Recipe of noise by the rows of C⁻¹; past draws are made again.

    ẑ_t = Σ_{j=0..min(t, bands−1)} row_t[j] z_{t−j}, row_t[j] = C⁻¹[t, t − j]. Either there is one
    row for all rounds (Toeplitz C⁻¹), or one a round (general C; row t then has t + 1 entries or
    fewer). The sums of B = `rounds_at_once` rounds over the draws before them are made together, in
    rounds 0, B, 2B, ..., and kept: a past draw is made again once for B rounds. The noise is the
    same, bit for bit. With 1 nothing is kept.
    """

    rows: tuple[tuple[float, ...], ...]
    rounds_at_once: int = 1

    @property
    def max_rounds(self) -> int | None:
        """Number of rounds that the rows are defined for; None if any."""
        return None if len(self.rows) == 1 else len(self.rows)


@dataclasses.dataclass(frozen=True)
class RestartedNoise:
    """Recipe that starts another recipe anew, with fresh draws, at `starts`, the first one 0."""

    recipe: BlockRecipe
    starts: tuple[int, ...]


BlockRecipe: TypeAlias = (
    IdentityNoise | BufferedNoise | TreeNoise | BandedNoise | InverseBandedNoise
)
NoiseRecipe: TypeAlias = BlockRecipe | RestartedNoise


def blocks(recipe: NoiseRecipe) -> tuple[BlockRecipe, tuple[int, ...]]:
    """Splits a recipe into that of every block and the blocks' first rounds."""
    if not isinstance(recipe, RestartedNoise):
        return recipe, (0,)
    starts = tuple(recipe.starts)
    if starts[:1] != (0,) or any(np.diff(starts) <= 0):
        raise validation.UsageError(
            f"starts must begin with 0 and increase strictly, got {list(starts)}."
        )
    return recipe.recipe, starts


def is_sum_of_draws(recipe: NoiseRecipe) -> bool:
    """Checks whether every round's noise is a sum of whole draws, so that grids add exactly.

    This holds for independent noise, and for a tree without variance reduction.
    """
    block, _ = blocks(recipe)
    is_plain_tree = isinstance(block, TreeNoise) and not block.variance_reduction
    return isinstance(block, IdentityNoise) or is_plain_tree


def state_is_of_0_4(recipe: NoiseRecipe) -> bool:
    """Checks whether the noise's state has the form of release 0.4, so that such runs go on.

    This holds where all past noise that later rounds need is in the buffer, and no seed of past
    draws.
    """
    block, _ = blocks(recipe)
    return isinstance(block, IdentityNoise | BufferedNoise | BandedNoise)


def beyond_horizon(max_rounds: int) -> str:
    """Returns the message that refuses a round after the last one that is defined."""
    return (
        f"This noise is defined for {max_rounds} rounds, which have all been run; noise "
        "beyond them would be too weak. Build the strategy for more rounds."
    )
