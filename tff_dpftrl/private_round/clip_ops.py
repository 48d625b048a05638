"""Clipping in float32 that never exceeds its bound. Pure TensorFlow."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

MIN_CLIP_NORM = 1e-6
MAX_CLIP_NORM = 1e18
"""Outside these, squares of float32 numbers lose norm to underflow or overflow."""

# Norms are reduced in float32. The reduction's error stays below this fraction, by which
# clipped values are held short of the bound: what is released is never above it.
_NORM_MARGIN = 1e-5


def check_clip_norm(name: str, value: float) -> float:
    """Returns `value` as a float after checking its range.

    Args:
      name: The argument's name, for the message.
      value: A clip norm.

    Returns:
      The same value.

    Raises:
      ValueError: If it is not a number in [MIN_CLIP_NORM, MAX_CLIP_NORM].
    """
    if not MIN_CLIP_NORM <= value <= MAX_CLIP_NORM:
        raise ValueError(
            f"{name} must be a number in [{MIN_CLIP_NORM}, {MAX_CLIP_NORM}], where float32 norms "
            f"are safe, got {value!r}. Rescale the updates if they are that small or large."
        )
    return float(value)


def global_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """L2 norm of all tensors together, a float32 scalar; not finite on overflow, NaN or Inf."""
    return tf.sqrt(2.0 * tf.add_n([tf.nn.l2_loss(tensor) for tensor in tensors]))


def _scale_to(norm: tf.Tensor, bound: tf.Tensor | float) -> tf.Tensor:
    limit = bound * (1.0 - _NORM_MARGIN)
    return tf.where(norm > limit, limit / norm, 1.0)


def clip_by_norm(
    tensors: Sequence[tf.Tensor], clip_norm: tf.Tensor | float
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Scales all tensors by one factor so that their joint norm is at most `clip_norm`.

    Args:
      tensors: float32 tensors, not empty.
      clip_norm: The bound.

    Returns:
      The clipped tensors, all zero if the norm is not finite, and the norm before
      clipping.
    """
    norm = global_norm(tensors)
    bound = tf.convert_to_tensor(clip_norm, tf.float32)
    scale = tf.where(tf.math.is_finite(norm), _scale_to(norm, bound), 0.0)
    return [tf.math.multiply_no_nan(tensor, scale) for tensor in tensors], norm


def even_layer_clip_norms(clip_norm: float, num_tensors: int) -> tuple[float, ...]:
    """Equal shares S_j = S / √m of a clip norm (McMahan et al. 2018, per-layer clipping).

    Args:
      clip_norm: S, the norm of the whole clipped update.
      num_tensors: m, the number of tensors.

    Returns:
      m equal norms.
    """
    return (clip_norm / math.sqrt(num_tensors),) * num_tensors


class Clipping(abc.ABC):
    """How one client's update is bounded.

    Attributes:
      clip_norm: The L2 norm that no clipped update exceeds.
    """

    clip_norm: float

    @abc.abstractmethod
    def clip(self, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Clips float32 tensors; returns them and the joint norm before clipping.

        If that norm is not finite, all of them are zero.
        """

    @abc.abstractmethod
    def check_num_tensors(self, num_tensors: int) -> None:
        """Raises ValueError if an update of `num_tensors` tensors cannot be clipped."""


@dataclasses.dataclass(frozen=True)
class FlatClipping(Clipping):
    """One norm for the whole update (McMahan et al. 2018, "flat clipping").

    Attributes:
      clip_norm: The L2 norm that no clipped update exceeds.
    """

    clip_norm: float

    def __post_init__(self):
        object.__setattr__(self, "clip_norm", check_clip_norm("clip_norm", self.clip_norm))

    def clip(self, tensors):
        """See base class."""
        return clip_by_norm(tensors, self.clip_norm)

    def check_num_tensors(self, num_tensors):
        """See base class; any number will do."""


@dataclasses.dataclass(frozen=True)
class PerLayerClipping(Clipping):
    """One norm S_j for each tensor; S = √Σ S_j² (McMahan et al. 2018, "per-layer clipping").

    Attributes:
      layer_clip_norms: S_j, in the order of the flattened update.
    """

    layer_clip_norms: tuple[float, ...]

    def __post_init__(self):
        norms = tuple(check_clip_norm("layer_clip_norms", norm) for norm in self.layer_clip_norms)
        if not norms:
            raise ValueError("layer_clip_norms must have one entry for each tensor, got none.")
        object.__setattr__(self, "layer_clip_norms", norms)

    @property
    def clip_norm(self) -> float:
        """S = √Σ S_j², the L2 norm that no clipped update exceeds."""
        return math.sqrt(sum(norm**2 for norm in self.layer_clip_norms))

    def clip(self, tensors):
        """See base class."""
        norm = global_norm(tensors)
        clipped = []
        for tensor, layer_clip_norm in zip(tensors, self.layer_clip_norms, strict=True):
            scale = _scale_to(global_norm([tensor]), layer_clip_norm)
            scale = tf.where(tf.math.is_finite(norm), scale, 0.0)
            clipped.append(tf.math.multiply_no_nan(tensor, scale))
        return clipped, norm

    def check_num_tensors(self, num_tensors):
        """See base class."""
        if num_tensors != len(self.layer_clip_norms):
            raise ValueError(
                f"layer_clip_norms has {len(self.layer_clip_norms)} entries, but the updates have "
                f"{num_tensors} tensors: give one entry for each."
            )
