"""Selects the weights of a run's state that are its model: the last round's, or their average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from tff_dpftrl.runs import checkpoint

_LAST = "global_model_weights/trainable"  # Of TFF's LearningAlgorithmState.
_AVERAGE = "finalizer/average"  # Of `learning.iterate_averaging`.

Whole: TypeAlias = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
"""Function from the weights that a run trains, as its state has them, to those of the model."""


def weights(
    iterate_averaging: float | None, snapshot: checkpoint.Snapshot, *, whole: Whole = list
) -> list[np.ndarray]:
    """Returns the weights that a run evaluates, keeps and publishes.

    `iterate_averaging` is the decay of the average of the rounds' models; before the first round
    the average is zero. `whole` makes the model's weights of the trained ones.
    """
    averaged = iterate_averaging is not None
    return whole(snapshot.part(_AVERAGE) if averaged else last_weights(snapshot))


def is_in_model(path: str) -> bool:
    """Returns whether a tensor of a state, by its path, is one that `weights` may return."""
    return path.startswith((f"{_LAST}/", f"{_AVERAGE}/"))


def last_weights(snapshot: checkpoint.Snapshot) -> list[np.ndarray]:
    """Returns the weights that the next round begins with."""
    return snapshot.part(_LAST)
