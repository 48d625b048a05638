"""Optimizers whose Python code is traced as it is, without AutoGraph."""

from __future__ import annotations

import tensorflow as tf
import tensorflow_federated as tff


class _WithoutAutoGraph(tff.learning.optimizers.Optimizer):
    """Optimizer of `without_autograph`."""

    def __init__(self, optimizer: tff.learning.optimizers.Optimizer):
        self._optimizer = optimizer

    @tf.autograph.experimental.do_not_convert
    def initialize(self, specs):
        return self._optimizer.initialize(specs)

    @tf.autograph.experimental.do_not_convert
    def next(self, state, weights, gradients):
        return self._optimizer.next(state, weights, gradients)

    def get_hparams(self, state):
        return self._optimizer.get_hparams(state)

    def set_hparams(self, state, hparams):
        return self._optimizer.set_hparams(state, hparams)


def without_autograph(
    optimizer: tff.learning.optimizers.Optimizer,
) -> tff.learning.optimizers.Optimizer:
    """Makes AutoGraph leave an optimizer alone, which saves most of a second of tracing.

    Args:
      optimizer: Optimizer without an `if` or a loop that depends on a tensor, as all of TFF's
        are.

    Returns:
      The optimizer, with the same state and the same steps.
    """
    return _WithoutAutoGraph(optimizer)
