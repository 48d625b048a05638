"""Server optimizer whose momentum and moments are reset where the noise restarts."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import validation

_ROUND = "restarts_round"


class _Restarting(tff.learning.optimizers.Optimizer):
    """Optimizer of `restart_at`. Its state stays flat: schedules look for their rate in it."""

    def __init__(self, optimizer: tff.learning.optimizers.Optimizer, rounds: tuple[int, ...]):
        self._optimizer = optimizer
        self._rounds = rounds

    def initialize(self, specs: Any) -> collections.OrderedDict[str, Any]:
        return _with_round(self._optimizer.initialize(specs), tf.constant(0, tf.int64))

    def next(self, state, weights, gradients):
        begins_anew = tf.reduce_any(tf.equal(state[_ROUND], tf.constant(self._rounds, tf.int64)))
        specs = tf.nest.map_structure(lambda w: tf.TensorSpec(w.shape, w.dtype), weights)
        kept = _without_round(state)
        # Hyperparameters that were set, like a scheduled learning rate, stay.
        fresh = self._optimizer.set_hparams(
            self._optimizer.initialize(specs), self._optimizer.get_hparams(kept)
        )
        inner = tf.nest.map_structure(lambda a, b: tf.where(begins_anew, a, b), fresh, kept)
        inner, new_weights = self._optimizer.next(inner, weights, gradients)
        return _with_round(inner, state[_ROUND] + 1), new_weights

    def get_hparams(self, state):
        return self._optimizer.get_hparams(_without_round(state))

    def set_hparams(self, state, hparams):
        inner = self._optimizer.set_hparams(_without_round(state), hparams)
        return _with_round(inner, state[_ROUND])


def _with_round(inner: Any, index: tf.Tensor) -> collections.OrderedDict[str, Any]:
    return collections.OrderedDict([*inner.items(), (_ROUND, index)])


def _without_round(state: Any) -> collections.OrderedDict[str, Any]:
    return collections.OrderedDict((k, v) for k, v in state.items() if k != _ROUND)


def restart_at(
    optimizer: tff.learning.optimizers.Optimizer, rounds: Sequence[int]
) -> tff.learning.optimizers.Optimizer:
    """Makes a server optimizer reset its momentum and moments to zero in some rounds.

    For runs whose noise restarts. It only post-processes noised values: no cost in privacy.

    Args:
      optimizer: Server optimizer to wrap.
      rounds: Indices of the rounds, from 0, before whose step the optimizer is reset.

    Returns:
      The optimizer.

    Raises:
      ValueError: If a round is negative or there is none.
    """
    if not rounds:
        raise validation.UsageError(
            "rounds must name at least one round, got none: use the optimizer without restart_at."
        )
    checked = tuple(validation.integer("rounds", one, minimum=0) for one in rounds)
    return _Restarting(optimizer, checked)
