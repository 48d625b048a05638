"""Which weights of a run's state are its model: the last round's, or their average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from tff_dpftrl.runs import checkpoint

_LAST = "global_model_weights/trainable"  # Of TFF's LearningAlgorithmState.
_AVERAGE = "finalizer/average"  # Of `learning.iterate_averaging`, which needs TFF.

Whole: TypeAlias = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
"""From the weights that a run trains, as they are in its state, to all of its model's."""


def weights(
    iterate_averaging: float | None, snapshot: checkpoint.Snapshot, *, whole: Whole = list
) -> list[np.ndarray]:
    """Returns what a run evaluates, keeps and publishes.

    Args:
      iterate_averaging: Decay of the average that the run is of; None if there is none.
      snapshot: Its state after a round.
      whole: Makes a model of what the run trains; by default that is all of it.

    Returns:
      The model's weights; before the first round an average is zero.
    """
    averaged = iterate_averaging is not None
    return whole(snapshot.part(_AVERAGE) if averaged else last_weights(snapshot))


def last_weights(snapshot: checkpoint.Snapshot) -> list[np.ndarray]:
    """Returns the weights that the next round begins with."""
    return snapshot.part(_LAST)
