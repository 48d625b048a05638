"""Server optimizer that also keeps an average of the models of all rounds."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.learning import optimizers

AVERAGE = "average"
"""Key of the averaged weights in the optimizer's state."""

_STEP = "step"
_OPTIMIZER = "optimizer"


@dataclasses.dataclass(frozen=True)
class _IterateAveraging(optimizers.Optimizer):
    """Optimizer of `average_iterates`."""

    optimizer: optimizers.Optimizer
    decay: float

    def initialize(self, specs: Any) -> collections.OrderedDict[str, Any]:
        return collections.OrderedDict(
            [
                (_STEP, tf.constant(0, tf.int64)),
                (AVERAGE, optimizers.zeros(specs)),
                (_OPTIMIZER, self.optimizer.initialize(specs)),
            ]
        )

    def next(self, state, weights, gradients):
        inner, new_weights = self.optimizer.next(state[_OPTIMIZER], weights, gradients)
        step = state[_STEP] + 1
        # Σ_s decay^(t−s) θ_s / Σ_s decay^(t−s), of which the first one is θ_1.
        decay = tf.constant(self.decay, tf.float64)
        rate = (1.0 - decay) / (1.0 - decay ** tf.cast(step, tf.float64))
        average = tf.nest.map_structure(
            lambda old, new: old + tf.cast(rate, old.dtype) * (new - old),
            state[AVERAGE],
            new_weights,
        )
        new_state = collections.OrderedDict(
            [(_STEP, step), (AVERAGE, average), (_OPTIMIZER, inner)]
        )
        return new_state, new_weights

    def get_hparams(self, state):
        return self.optimizer.get_hparams(state[_OPTIMIZER])

    def set_hparams(self, state, hparams):
        inner = self.optimizer.set_hparams(state[_OPTIMIZER], hparams)
        return collections.OrderedDict(state, **{_OPTIMIZER: inner})


def average_iterates(optimizer: optimizers.Optimizer, decay: float) -> optimizers.Optimizer:
    """Makes a server optimizer keep the exponential moving average of its models.

    Training does not change: clients receive the model of the last round. The average is in the
    optimizer's state under `AVERAGE`. It is computed from models that are released anyway, so that
    it costs no privacy, and evens out the noise of single rounds (De et al. 2022, "Unlocking
    high-accuracy differentially private image classification through scale").

    The average after round t has the weights of round s in proportion to decay^(t − s), with no
    share of the initial model. The decay is in (0, 1); 0.95 averages about the last 20 rounds. The
    state holds one more copy of the model.
    """
    return _IterateAveraging(optimizer, validation.number("decay", decay, above=0, below=1))
