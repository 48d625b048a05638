"""Which weights of a run's state are its model: the last round's, or their average."""

from __future__ import annotations

import numpy as np

from tff_dpftrl.runs import checkpoint
from tff_dpftrl.training import config as config_lib

_LAST = "global_model_weights/trainable"  # Of TFF's LearningAlgorithmState.
_AVERAGE = "finalizer/average"  # Of `learning.iterate_averaging`, which needs TFF.


def weights(config: config_lib.TrainingConfig, snapshot: checkpoint.Snapshot) -> list[np.ndarray]:
    """Returns what a run evaluates, keeps and publishes.

    Args:
      config: Options of the run.
      snapshot: Its state after a round.

    Returns:
      The trainable weights; before the first round an average is zero.
    """
    return snapshot.part(_LAST if config.iterate_averaging is None else _AVERAGE)
