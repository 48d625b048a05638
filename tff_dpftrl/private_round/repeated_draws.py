"""Draws that several rounds use: a call in the graph that an engine may answer from memory.

The draws of a tree's node are part of the noise of all rounds below it. Graphs make them again in
every round. Each such draw is a call of a function whose name has a fixed form, so that
`execution.draw_memory` can find the calls in a graph and keep what they return.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tff_dpftrl.private_round import gaussians, secure_calls, seeds

_NAME = "repeated_draw_tensor_{}_size_{}_slots_{}_end"
_SECURE_NAME = "repeated_draw_tensor_{}_size_{}_slots_{}_seed_{}_end"
_PATTERN = re.compile(r"repeated_draw_tensor_(\d+)_size_(\d+)_slots_(\d+)(?:_seed_(\d+))?_end")


class TensorDraws(NamedTuple):
    """The draws of one tensor.

    Attributes:
      tensor: Position of the tensor in its stream.
      size: Number of its coordinates.
      num_slots: Number of draws that are worth keeping at a time.
      seed_length: Length of a draw's seed: 2, or that of a secure seed with its indices.
    """

    tensor: int
    size: int
    num_slots: int
    seed_length: int = seeds.PHILOX_WORDS


def drawing(kind: TensorDraws) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns the function that makes the draws of a tensor.

    It takes a seed and a slot, int64, and makes `gaussians.repeated` of the seed. A slot below
    `num_slots` says where to keep the draw; the lower ones save more.
    """
    # A function keeps each `tf.Graph` that it was called in: those of TFF have theirs.
    return _made(kind) if secure_calls.is_for_others() else _lasting(kind)


def _made(kind: TensorDraws) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    def draw(seed: tf.Tensor, slot: tf.Tensor) -> tf.Tensor:
        del slot  # For an engine with a memory.
        with tf.device("CPU:0"):
            return gaussians.repeated(seed, kind.size)

    draw.__name__ = _name(kind)
    signature = [tf.TensorSpec([kind.seed_length], tf.int64), tf.TensorSpec([], tf.int64)]
    return tf.function(draw, input_signature=signature, autograph=False)


_lasting = functools.cache(_made)


def _name(kind: TensorDraws) -> str:
    is_philox = kind.seed_length == seeds.PHILOX_WORDS
    return (_NAME if is_philox else _SECURE_NAME).format(*kind)


def kind_of(function_name: str) -> TensorDraws | None:
    """Reads the name of a function in a graph; None if it is not one of `drawing`."""
    found = _PATTERN.search(function_name)
    return TensorDraws(*map(int, filter(None, found.groups()))) if found else None
