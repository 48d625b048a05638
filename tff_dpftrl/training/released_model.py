"""Which weights of a run's state are its model: the last round's, or their average."""

from __future__ import annotations

import numpy as np

from tff_dpftrl.runs import checkpoint

_LAST = "global_model_weights/trainable"  # Of TFF's LearningAlgorithmState.
_AVERAGE = "finalizer/average"  # Of `learning.iterate_averaging`, which needs TFF.


def weights(iterate_averaging: float | None, snapshot: checkpoint.Snapshot) -> list[np.ndarray]:
    """Returns what a run evaluates, keeps and publishes.

    Args:
      iterate_averaging: Decay of the average that the run is of; None if there is none.
      snapshot: Its state after a round.

    Returns:
      The trainable weights; before the first round an average is zero.
    """
    return last_weights(snapshot) if iterate_averaging is None else snapshot.part(_AVERAGE)


def last_weights(snapshot: checkpoint.Snapshot) -> list[np.ndarray]:
    """Returns the weights that the next round begins with."""
    return snapshot.part(_LAST)
