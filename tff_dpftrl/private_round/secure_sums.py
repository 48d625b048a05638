"""Sums over clients by secure modular sums of integers: what a client sends, and its decoding.

    vector_sum = VectorSum(encoding, clip_norm)
    state = vector_sum.initial_state()
    # In every round, with the cohort's updates:
    round_seed, state = vector_sum.start_round(state)
    sent = [vector_sum.encode(update, round_seed) for update in updates]
    # Each part of `sent` is summed modulo its entry of `vector_sum.moduli`.
    (total, *_) = sent  # One client's.
    tensors, count = vector_sum.decode(total, round_seed, shapes)

TensorFlow without TFF: the functions work eagerly and in graphs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.discretization import grid
from tff_dpftrl.private_round import discretize, seeds

COUNT_MODULUS = 2**31 - 1
"""Modulus of sums of counts."""


class SecAggSumState(NamedTuple):
    """State of the sum between rounds. Public: every client receives it.

    The seed of every round's rotation is unrelated to the seed of the noise.
    """

    round_index: Any
    rotation_seed: Any


@dataclasses.dataclass(frozen=True)
class VectorSum:
    """Sum of the updates, each clipped to `clip_norm`, up to rounding.

    The rounding has a stddev of at most `encoding.rounding_stddev_bound` per coordinate. Updates
    are clipped here even if the caller has clipped them by other rules before. They have
    `encoding.dim` numbers in total.

    Clients compute in float32. The sum is exact, and decoded in float64. In float32 it would have a
    rounding that the noise does not cover.

    Any number of clients from 0 to `encoding.max_clients` is summed exactly as sent.
    `rotation_seed` is public, from the operating system if None. A given seed does not harm
    privacy, only the independence of the updates and the rotation.
    """

    encoding: grid.GridEncoding
    clip_norm: float
    rotation_seed: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "clip_norm", validation.clip_norm("clip_norm", self.clip_norm))
        rotation_seed = validation.seed("rotation_seed", self.rotation_seed)
        object.__setattr__(self, "rotation_seed", rotation_seed)

    @property
    def contribution_norm(self) -> float:
        """Inflated clip norm, the L2 sensitivity of the sum to one client, whatever it sends."""
        return self.encoding.inflated_clip_norm(self.clip_norm)

    @property
    def moduli(self) -> collections.OrderedDict[str, int]:
        """Modulus of the sum of each part of what a client sends."""
        return collections.OrderedDict(vector=self.encoding.sum_modulus, count=COUNT_MODULUS)

    def initial_state(self) -> SecAggSumState:
        """Returns the state before the first round, with a seed of its own each time it runs."""
        return SecAggSumState(tf.constant(0, tf.int64), seeds.root_seed(self.rotation_seed))

    def start_round(self, state: SecAggSumState) -> tuple[tf.Tensor, SecAggSumState]:
        """Returns the seed that a round's clients encode with, and the state after the round."""
        round_seed = seeds.derive(state.rotation_seed, state.round_index)
        return round_seed, SecAggSumState(state.round_index + 1, state.rotation_seed)

    def encode(
        self, tensors: Sequence[tf.Tensor], round_seed: tf.Tensor
    ) -> collections.OrderedDict[str, tf.Tensor]:
        """Encodes one client's update."""
        flat = tf.concat([tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors], axis=0)
        size = flat.shape[0]
        if size != self.encoding.dim:
            raise validation.UsageError(
                f"encoding is for dim {self.encoding.dim}, but an update has {size} numbers: "
                f"build the encoding with dim={size}."
            )
        vector = discretize.encode(flat, round_seed, self.encoding, self.clip_norm)
        return collections.OrderedDict(vector=vector, count=tf.constant(1, tf.int32))

    def decode(
        self,
        total: Mapping[str, tf.Tensor],
        round_seed: tf.Tensor,
        shapes: Sequence[Sequence[int]],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Decodes the sum of what clients sent.

        It returns float64 tensors and the number of clients. More than `encoding.max_clients` fail.
        """
        too_many = tf.debugging.assert_less_equal(
            total["count"],
            self.encoding.max_clients,
            message=(
                "More clients were summed than the encoding's max_clients, so the sum may have "
                "wrapped around. Discard the round and build the encoding for more clients."
            ),
        )
        with tf.control_dependencies([] if too_many is None else [too_many]):
            count = tf.identity(total["count"])
        flat = discretize.decode(total["vector"], count, round_seed, self.encoding, self.clip_norm)
        parts = tf.split(flat, [math.prod(shape) for shape in shapes])
        return [tf.reshape(*pair) for pair in zip(parts, shapes, strict=True)], count


@dataclasses.dataclass(frozen=True)
class HalfBitSum:
    """Exact sum of float32 scalars in {-1/2, 0, 1/2}.

    These are the shifted bits of adaptive clipping, 0 for a client that has none. Other values are
    rounded to the nearest of the three, NaN to 0. With `has_noise`, noise is added within the sum,
    which may carry it below zero.
    """

    has_noise: bool = False
    contribution_norm: ClassVar[float] = 0.5
    moduli: ClassVar = collections.OrderedDict(doubled=COUNT_MODULUS, count=COUNT_MODULUS)

    def encode(self, half_bit: tf.Tensor) -> collections.OrderedDict[str, tf.Tensor]:
        """Returns one client's doubled bit and the count of one client, int32."""
        # Divided by a half, shifted by 1: 0, 1 or 2, so that no sum is negative.
        half_bit = tf.where(tf.math.is_nan(half_bit), 0.0, half_bit)
        doubled = tf.clip_by_value(tf.round(2.0 * half_bit), -1.0, 1.0)
        return collections.OrderedDict(
            doubled=tf.cast(doubled, tf.int32) + 1, count=tf.constant(1, tf.int32)
        )

    def decode(self, total: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Decodes the sum of what clients sent, modulo `moduli`, to a float32 scalar."""
        doubled = total["doubled"] - total["count"]
        if self.has_noise:
            doubled = discretize.to_centre(doubled, COUNT_MODULUS)
        return tf.cast(doubled, tf.float32) / 2.0
