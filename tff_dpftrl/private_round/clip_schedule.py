"""Clipping whose norm may change from round to round: flat, or layer by layer.

The noise follows the clip norm, so that the noise multiplier, and with it the
privacy of a round, stays the same (McMahan et al. 2018, section 3, "Adjusting
noise and clipping as training progresses").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tff_dpftrl.private_round import clip_ops

ClipNorm: TypeAlias = float | Sequence[float] | Callable[[tf.Tensor], tf.Tensor]
"""A clip norm: one for all rounds, one a round (the last one stays), or a function.

The function maps an int64 scalar, the round from 0, to a scalar. It must not
depend on private data.
"""


def _checked(clip_norm: ClipNorm) -> Callable[[tf.Tensor], tf.Tensor] | tuple[float, ...]:
    if callable(clip_norm):
        return clip_norm
    values = np.asarray(clip_norm, np.float64)
    if values.ndim > 1 or values.size == 0:
        raise ValueError(
            "clip_norm must be a number, a non-empty list of numbers (one a round) or a function "
            f"of the round, got {clip_norm!r}."
        )
    return tuple(clip_ops.check_clip_norm("clip_norm", value) for value in values.ravel().tolist())


def _norm_in_round(
    clip_norm: Callable[[tf.Tensor], tf.Tensor] | tuple[float, ...], round_index: tf.Tensor
) -> tf.Tensor:
    if isinstance(clip_norm, tuple):
        last = tf.constant(len(clip_norm) - 1, tf.int64)
        return tf.gather(tf.constant(clip_norm, tf.float32), tf.minimum(round_index, last))
    value = tf.reshape(tf.cast(clip_norm(round_index), tf.float32), [])
    check = tf.debugging.Assert(
        (value >= clip_ops.MIN_CLIP_NORM) & (value <= clip_ops.MAX_CLIP_NORM),
        ["The function clip_norm returned an unusable clip norm; round and value:"]
        + [round_index, value],
    )
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(value)


@dataclasses.dataclass(frozen=True)
class FlatClipSchedule:
    """FlatClip: scales the whole update into a ball of radius S.

    Attributes:
      clip_norm: S; a tuple, one a round, or a function of the round.
    """

    clip_norm: ClipNorm

    def __post_init__(self):
        object.__setattr__(self, "clip_norm", _checked(self.clip_norm))

    def norm(self, round_index: tf.Tensor) -> tf.Tensor:
        """S in a round, float32 scalar; `round_index` is an int64 scalar."""
        return _norm_in_round(self.clip_norm, round_index)

    def clip(self, update: Sequence[tf.Tensor], round_index: tf.Tensor) -> list[tf.Tensor]:
        """Clips an update.

        Args:
          update: float32 tensors.
          round_index: int64 scalar, from 0.

        Returns:
          Tensors of joint norm at most S; all zero if the norm is not finite.
        """
        return clip_ops.clip_by_norm(update, self.norm(round_index))[0]


@dataclasses.dataclass(frozen=True)
class PerLayerClipSchedule:
    """PerLayerClip: scales each tensor j into a ball of radius S_j.

    The update's norm is then at most S = √Σ S_j², which is `clip_norm`: the
    sensitivity is that of flat clipping with the same S.

    Attributes:
      clip_norm: S; a tuple, one a round, or a function of the round.
      proportions: The S_j up to a common factor, one for each trainable tensor;
        equal if None, so that S_j = S / √m.
    """

    clip_norm: ClipNorm
    proportions: tuple[float, ...] | None = None

    def __post_init__(self):
        object.__setattr__(self, "clip_norm", _checked(self.clip_norm))
        if self.proportions is None:
            return
        values = np.asarray(self.proportions, np.float64)
        if values.ndim != 1 or values.size == 0 or not np.all((values > 0) & np.isfinite(values)):
            raise ValueError(
                "proportions must be None or positive numbers, one for each trainable tensor, "
                f"got {self.proportions!r}."
            )
        object.__setattr__(self, "proportions", tuple(values.tolist()))

    @classmethod
    def from_layer_norms(cls, layer_clip_norms: Sequence[float]) -> PerLayerClipSchedule:
        """Clips tensor j to `layer_clip_norms[j]`, the same in all rounds.

        Args:
          layer_clip_norms: S_j, in the order of the trainable tensors.

        Returns:
          The clipping with `clip_norm` = √Σ S_j².

        Raises:
          ValueError: If a norm is not positive and finite.
        """
        return cls(math.hypot(*layer_clip_norms), tuple(layer_clip_norms))

    def norm(self, round_index: tf.Tensor) -> tf.Tensor:
        """S in a round, float32 scalar; `round_index` is an int64 scalar."""
        return _norm_in_round(self.clip_norm, round_index)

    def clip(self, update: Sequence[tf.Tensor], round_index: tf.Tensor) -> list[tf.Tensor]:
        """Clips each tensor of an update.

        Args:
          update: float32 tensors.
          round_index: int64 scalar, from 0.

        Returns:
          Tensors of norms at most S_j; all zero if the joint norm is not finite.

        Raises:
          ValueError: If the update has another number of tensors than `proportions`.
        """
        proportions = np.ones(len(update)) if self.proportions is None else self.proportions
        if len(proportions) != len(update):
            raise ValueError(
                f"proportions has {len(proportions)} entries, but the model has {len(update)} "
                "trainable tensors: give one for each."
            )
        shares = proportions / np.linalg.norm(proportions)
        clip_norm = self.norm(round_index)
        is_finite = tf.math.is_finite(clip_ops.global_norm(update))
        clipped = []
        for tensor, share in zip(update, shares, strict=True):
            [layer], _ = clip_ops.clip_by_norm([tensor], clip_norm * tf.cast(share, tf.float32))
            clipped.append(tf.where(is_finite, layer, 0.0))
        return clipped


ClipSchedule: TypeAlias = FlatClipSchedule | PerLayerClipSchedule
