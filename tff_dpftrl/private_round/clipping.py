"""Clipping of one client's update, and the handling of updates that are not finite.

A clip norm is a number, one number a round, or a function of the round. The noise
follows it, so that the noise multiplier, and with it the privacy of a round, stays
the same (McMahan et al. 2018, section 3, "Adjusting noise and clipping as training
progresses"). Where the noise of different rounds is correlated it has to be constant.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.private_round import summation

CLIP_MARGIN = 1e-5
"""Fraction by which clipped updates stay below the bound, so that rounding cannot exceed it."""

_LARGEST_NORM = math.sqrt(np.finfo(np.float32).max)

ClipNorm: TypeAlias = float | Sequence[float] | Callable[[tf.Tensor], tf.Tensor]
"""Clip norm: one for all rounds, one a round (the last one stays), or a function.

The function maps an int64 scalar, the round from 0, to a scalar. It must not
depend on private data.
"""


def global_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Computes the L2 norm of all tensors together.

    It is float64; infinity if an entry is NaN or infinite, or if the norm is above 1.8e19, where
    its square overflows in float32: training diverged.
    """
    norm = tf.sqrt(2.0 * tf.add_n([tf.nn.l2_loss(x) for x in summation.in_float64(tensors)]))
    return tf.where(norm <= _LARGEST_NORM, norm, tf.constant(math.inf, tf.float64))


def count_as_zero_if_not_finite(
    tensors: Sequence[tf.Tensor], norm: tf.Tensor, scales: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Multiplies an update by `scales`, or by 0 if its norm is not finite.

    Wherever this package clips, an update with NaN, an infinity or a norm above 1.8e19
    counts as zero. So do the client's bit in adaptive clipping and its weight in
    DP-FedAvg. An aggregator with `report_non_finite_clients` counts such clients.
    """
    is_finite = tf.math.is_finite(norm)
    return [
        tf.math.multiply_no_nan(tensor, tf.where(is_finite, scale, tf.zeros_like(scale)))
        for tensor, scale in zip(tensors, scales, strict=True)
    ]


def clip_by_norm(
    tensors: Sequence[tf.Tensor], clip_norm: tf.Tensor | float
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Scales all tensors by one factor so that their joint norm is at most `clip_norm`.

    The float64 results have a norm of at most (1 - CLIP_MARGIN) (1 + 1e-7) `clip_norm`, and are
    zero if the norm is not finite. The norm before clipping is returned, too.
    """
    tensors = summation.in_float64(tensors)
    norm = global_norm(tensors)
    scales = [scale_to(norm, clip_norm)] * len(tensors)
    return count_as_zero_if_not_finite(tensors, norm, scales), norm


def scale_to(norm: tf.Tensor, bound: tf.Tensor | float) -> tf.Tensor:
    """Computes the factors that scale updates to norms of at most `bound`.

    Scaled norms stay below the bound by the fraction `CLIP_MARGIN`.
    """
    if not tf.is_tensor(bound):
        bound = tf.constant(bound, tf.float64)  # A cast would make it a float32 first.
    limit = tf.cast(bound, tf.float64) * (1.0 - CLIP_MARGIN)
    return tf.where(norm > limit, limit / norm, tf.ones_like(norm))


def _checked(
    clip_norm: ClipNorm,
) -> float | tuple[float, ...] | Callable[[tf.Tensor], tf.Tensor]:
    if callable(clip_norm):
        return clip_norm
    values = np.asarray(clip_norm)
    if values.ndim > 1 or values.size == 0:
        raise validation.UsageError(
            "clip_norm must be a number, a non-empty list of numbers (one a round) or a function "
            f"of the round, got {clip_norm!r}."
        )
    if values.ndim == 0:
        return validation.clip_norm("clip_norm", values.item())
    return tuple(validation.clip_norm("clip_norm", value) for value in values.tolist())


@dataclasses.dataclass(frozen=True)
class Clipping(abc.ABC):
    """Rule that bounds the L2 norm of one client's update.

    Attributes:
      clip_norm: S, the L2 norm that no clipped update exceeds: a number, a tuple with
        one number a round (the last one stays), or a function of the round.
    """

    clip_norm: ClipNorm

    def __post_init__(self):
        object.__setattr__(self, "clip_norm", _checked(self.clip_norm))

    def norm(self, round_index: tf.Tensor) -> tf.Tensor:
        """Returns the clip norm S of a round.

        Args:
          round_index: Index of the round, an int64 scalar, from 0.

        Returns:
          float64 scalar.

        Raises:
          tf.errors.InvalidArgumentError: When run, if `clip_norm` is a function
            that returned a number out of range.
        """
        if isinstance(self.clip_norm, tuple):
            last = tf.constant(len(self.clip_norm) - 1, tf.int64)
            return tf.gather(tf.constant(self.clip_norm, tf.float64), tf.minimum(round_index, last))
        if not callable(self.clip_norm):
            return tf.constant(self.clip_norm, tf.float64)
        value = tf.reshape(tf.cast(self.clip_norm(round_index), tf.float64), [])
        check = tf.debugging.Assert(
            (value >= validation.MIN_CLIP_NORM) & (value <= validation.MAX_CLIP_NORM),
            ["The function clip_norm returned an unusable clip norm; round and value:"]
            + [round_index, value],
        )
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(value)

    @property
    def constant_norm(self) -> float:
        """The clip norm S, which must be the same in all rounds; else raises `ValueError`."""
        if not isinstance(self.clip_norm, float):
            raise validation.UsageError(
                "clipping must have one clip norm for all rounds: DP-FTRL's noise of different "
                "rounds is correlated, and cancels only if its scale is the same in all of them; "
                f"got {self.clip_norm!r}. Give one number, or use adaptive clipping with restarts."
            )
        return self.clip_norm

    @abc.abstractmethod
    def clip(
        self, tensors: Sequence[tf.Tensor], round_index: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Clips an update.

        Args:
          tensors: Floats of any dtype, not empty.
          round_index: Index of the round, an int64 scalar, from 0.

        Returns:
          float64 tensors of joint norm at most (1 - CLIP_MARGIN) (1 + 2e-7) S, all
          zero if the norm is not finite; and the joint norm before clipping, float64.
        """

    @abc.abstractmethod
    def check_num_tensors(self, num_tensors: int) -> None:
        """Raises ValueError if an update of `num_tensors` tensors cannot be clipped."""


@dataclasses.dataclass(frozen=True)
class FlatClipping(Clipping):
    """Clipping of the whole update to one norm (McMahan et al. 2018, FlatClip).

    Attributes:
      clip_norm: S, the L2 norm that no clipped update exceeds: a number, a tuple with
        one number a round (the last one stays), or a function of the round.
    """

    @override
    def clip(self, tensors, round_index):
        return clip_by_norm(tensors, self.norm(round_index))

    @override
    def check_num_tensors(self, num_tensors):
        """Accepts any number of tensors."""


@dataclasses.dataclass(frozen=True)
class PerLayerClipping(Clipping):
    """Clipping of each tensor to a norm S_j of its own (McMahan et al. 2018, PerLayerClip).

    The update's norm is then at most S = √Σ S_j², which is `clip_norm`: the
    sensitivity is that of flat clipping with the same S.

    Attributes:
      clip_norm: S, the L2 norm that no clipped update exceeds: a number, a tuple with
        one number a round (the last one stays), or a function of the round.
      proportions: Norms S_j up to a common factor, one for each tensor in the order of
        the flattened update; equal if None, so that each is S divided by the square root
        of the number of tensors.
    """

    proportions: tuple[float, ...] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.proportions is None:
            return
        values = np.asarray(self.proportions, np.float64)
        if values.ndim != 1 or values.size == 0 or not np.all((values > 0) & np.isfinite(values)):
            raise validation.UsageError(
                "proportions must be None or positive numbers, one for each tensor of an update, "
                f"got {self.proportions!r}."
            )
        object.__setattr__(self, "proportions", tuple(values.tolist()))

    @classmethod
    def from_layer_norms(cls, layer_clip_norms: Sequence[float]) -> PerLayerClipping:
        """Makes the clipping of tensor j to `layer_clip_norms[j]`, the same in all rounds.

        Args:
          layer_clip_norms: Norms S_j, in the order of the flattened update.

        Returns:
          The clipping with `clip_norm` = √Σ S_j².

        Raises:
          ValueError: If a norm is not positive and finite, or there is none.
        """
        norms = tuple(validation.clip_norm("layer_clip_norms", norm) for norm in layer_clip_norms)
        if not norms:
            raise validation.UsageError(
                "layer_clip_norms must have one entry for each tensor, got none."
            )
        return cls(math.hypot(*norms), norms)

    @override
    def clip(self, tensors, round_index):
        self.check_num_tensors(len(tensors))
        proportions = np.asarray(self.proportions or np.ones(len(tensors)), np.float64)
        shares = proportions / np.linalg.norm(proportions)
        clip_norm = self.norm(round_index)
        tensors = summation.in_float64(tensors)
        scales = [
            scale_to(global_norm([tensor]), clip_norm * share)
            for tensor, share in zip(tensors, shares, strict=True)
        ]
        norm = global_norm(tensors)
        return count_as_zero_if_not_finite(tensors, norm, scales), norm

    @override
    def check_num_tensors(self, num_tensors):
        if self.proportions is not None and num_tensors != len(self.proportions):
            raise validation.UsageError(
                f"proportions has {len(self.proportions)} entries, but an update has "
                f"{num_tensors} tensors: give one for each."
            )
