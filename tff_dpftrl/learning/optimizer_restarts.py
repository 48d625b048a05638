"""Server optimizer whose momentum and moments are reset where the noise restarts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.learning import optimizers

_ROUND = "restarts_round"


@dataclasses.dataclass(frozen=True)
class _Restarting(optimizers.Optimizer):
    """Optimizer of `restart_at`. Its state stays flat: schedules look for their rate in it."""

    optimizer: optimizers.Optimizer
    rounds: tuple[int, ...]

    def initialize(self, specs: Any) -> collections.OrderedDict[str, Any]:
        return _with_round(self.optimizer.initialize(specs), tf.constant(0, tf.int64))

    def next(self, state, weights, gradients):
        begins_anew = tf.reduce_any(tf.equal(state[_ROUND], tf.constant(self.rounds, tf.int64)))
        specs = tf.nest.map_structure(lambda w: tf.TensorSpec(w.shape, w.dtype), weights)
        kept = _without_round(state)
        # Hyperparameters that were set, like a scheduled learning rate, stay.
        fresh = self.optimizer.set_hparams(
            self.optimizer.initialize(specs), self.optimizer.get_hparams(kept)
        )
        inner = tf.nest.map_structure(lambda a, b: tf.where(begins_anew, a, b), fresh, kept)
        inner, new_weights = self.optimizer.next(inner, weights, gradients)
        return _with_round(inner, state[_ROUND] + 1), new_weights

    def get_hparams(self, state):
        return self.optimizer.get_hparams(_without_round(state))

    def set_hparams(self, state, hparams):
        inner = self.optimizer.set_hparams(_without_round(state), hparams)
        return _with_round(inner, state[_ROUND])


def _with_round(inner: Any, index: tf.Tensor) -> collections.OrderedDict[str, Any]:
    return collections.OrderedDict([*inner.items(), (_ROUND, index)])


def _without_round(state: Any) -> collections.OrderedDict[str, Any]:
    return collections.OrderedDict((k, v) for k, v in state.items() if k != _ROUND)


def restart_at(optimizer: optimizers.Optimizer, rounds: Sequence[int]) -> optimizers.Optimizer:
    """Makes a server optimizer reset momentum and moments to zero before the steps of some rounds.

    Rounds count from 0. For runs whose noise restarts. It only post-processes noised values: no
    cost in privacy.
    """
    if not rounds:
        raise validation.UsageError(
            "rounds must name at least one round, got none: use the optimizer without restart_at."
        )
    checked = tuple(validation.integer("rounds", one, minimum=0) for one in rounds)
    return _Restarting(optimizer, checked)
