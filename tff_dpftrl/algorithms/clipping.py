"""Projections that bound a client's update: flat, or one ball per layer.

The clip norm may change from round to round; the noise follows it, so that the
noise multiplier, and with it the privacy of a round, stays the same (McMahan et
al. 2018, section 3, "Adjusting noise and clipping as training progresses").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

Schedule: TypeAlias = float | Sequence[float] | Callable[[tf.Tensor], tf.Tensor]
"""A clip norm: one for all rounds, one a round (the last one stays), or a function.

The function maps an int64 scalar, the round from 0, to a positive scalar. It
must not depend on private data.
"""


def _checked(schedule: Schedule) -> Schedule:
    if callable(schedule):
        return schedule
    values = np.asarray(schedule, np.float64)
    if values.ndim > 1 or values.size == 0 or not np.all((values > 0) & np.isfinite(values)):
        raise ValueError(
            "clip_norm must be a positive number, a non-empty list of them (one a round) or a "
            f"function of the round, got {schedule!r}."
        )
    return float(values) if values.ndim == 0 else tuple(values.tolist())


def _value_in_round(schedule: Schedule, round_index: tf.Tensor) -> tf.Tensor:
    if isinstance(schedule, float):
        return tf.constant(schedule, tf.float32)
    if isinstance(schedule, tuple):
        last = tf.constant(len(schedule) - 1, tf.int64)
        return tf.gather(tf.constant(schedule, tf.float32), tf.minimum(round_index, last))
    value = tf.reshape(tf.cast(schedule(round_index), tf.float32), [])
    check = tf.debugging.Assert(
        tf.math.is_finite(value) & (value > 0),
        ["The function clip_norm must return a positive, finite number; round and value:"]
        + [round_index, value],
    )
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(value)


def l2_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """L2 norm over all tensors together.

    Args:
      tensors: Float tensors.

    Returns:
      float32 scalar (float64 if any tensor is); it is not finite if an entry is
      not, or if the squares overflow.
    """
    wide = tf.float64 if any(t.dtype == tf.float64 for t in tensors) else tf.float32
    squares = [tf.reduce_sum(tf.square(tf.cast(t, wide))) for t in tensors]
    return tf.sqrt(tf.add_n(squares))


def _project(tensors: Sequence[tf.Tensor], radius: tf.Tensor) -> list[tf.Tensor]:
    """π(Δ, S) = Δ min(1, S / ‖Δ‖) (McMahan et al. 2018, equation 1)."""
    norm = l2_norm(tensors)
    radius = tf.cast(radius, norm.dtype)
    scale = radius / tf.maximum(norm, radius)
    return [t * tf.cast(scale, t.dtype) for t in tensors]


@dataclasses.dataclass(frozen=True)
class FlatClip:
    """FlatClip: scales the whole update into a ball of radius S.

    Attributes:
      clip_norm: S.
    """

    clip_norm: Schedule

    def __post_init__(self):
        object.__setattr__(self, "clip_norm", _checked(self.clip_norm))

    def norm(self, round_index: tf.Tensor) -> tf.Tensor:
        """S in a round, float32 scalar; `round_index` is an int64 scalar."""
        return _value_in_round(self.clip_norm, round_index)

    def project(self, update: Sequence[tf.Tensor], round_index: tf.Tensor) -> list[tf.Tensor]:
        """Clips an update.

        Args:
          update: Float tensors.
          round_index: int64 scalar, from 0.

        Returns:
          Tensors like `update`; not finite where `update` is not.
        """
        return _project(update, self.norm(round_index))


@dataclasses.dataclass(frozen=True)
class PerLayerClip:
    """PerLayerClip: scales each tensor j into a ball of radius S_j.

    The update's norm is then at most S = √Σ S_j², which is `clip_norm`: the
    sensitivity is that of flat clipping with the same S.

    Attributes:
      clip_norm: S.
      proportions: The S_j up to a common factor, one for each trainable tensor;
        equal if None, so that S_j = S / √m.
    """

    clip_norm: Schedule
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
    def from_layer_norms(cls, layer_clip_norms: Sequence[float]) -> PerLayerClip:
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
        return _value_in_round(self.clip_norm, round_index)

    def project(self, update: Sequence[tf.Tensor], round_index: tf.Tensor) -> list[tf.Tensor]:
        """Clips each tensor of an update.

        Args:
          update: Float tensors.
          round_index: int64 scalar, from 0.

        Returns:
          Tensors like `update`; not finite where `update` is not.

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
        return [
            _project([tensor], clip_norm * tf.constant(share, tf.float32))[0]
            for tensor, share in zip(update, shares, strict=True)
        ]


Clip: TypeAlias = FlatClip | PerLayerClip
