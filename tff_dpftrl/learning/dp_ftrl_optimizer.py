"""Server update of DP-FTRL, written with prefix sums.

θ^{t+1} = θ⁰ − η · (sum of the updates of rounds 0 ... t). The aggregators emit
per-round residuals whose prefix sums carry the correlated noise, so plain SGD on
them gives the same weights. This optimizer shows that, and keeps the rounding of
each step from adding up in the weights.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.learning import optimizers

_MOMENTUM = "momentum"
_STEP = "step"
_INITIAL_WEIGHTS = "initial_weights"
_PREFIX_SUM = "prefix_sum"
_VELOCITY_SUM = "velocity_sum"


@dataclasses.dataclass(frozen=True)
class _DpFtrl(optimizers.Optimizer):
    """Optimizer of `build_dp_ftrl_optimizer`."""

    learning_rate: float
    momentum: float

    def initialize(self, specs: Any) -> collections.OrderedDict[str, Any]:
        state = collections.OrderedDict()
        state[optimizers.LEARNING_RATE] = tf.constant(self.learning_rate)
        state[_STEP] = tf.constant(0, tf.int64)
        state[_INITIAL_WEIGHTS] = optimizers.zeros(specs)
        state[_PREFIX_SUM] = optimizers.zeros(specs)
        if self.momentum > 0:
            state[_MOMENTUM] = tf.constant(self.momentum)
            state[_VELOCITY_SUM] = optimizers.zeros(specs)
        return state

    def next(self, state, weights, gradients):
        gradients = optimizers.dense_gradients(weights, gradients)
        new_state = collections.OrderedDict(state)
        new_state[_STEP] = state[_STEP] + 1
        is_first = tf.equal(state[_STEP], 0)  # In TFF's graphs == compares identities.
        initial = tf.nest.map_structure(
            lambda now, kept: tf.where(is_first, now, kept),
            weights,
            state[_INITIAL_WEIGHTS],
        )
        total = tf.nest.map_structure(tf.add, state[_PREFIX_SUM], gradients)
        new_state[_INITIAL_WEIGHTS] = initial
        new_state[_PREFIX_SUM] = total
        if _MOMENTUM in state:
            momentum = state[_MOMENTUM]
            total = tf.nest.map_structure(
                lambda v, s: tf.cast(momentum, v.dtype) * v + s, state[_VELOCITY_SUM], total
            )
            new_state[_VELOCITY_SUM] = total
        learning_rate = state[optimizers.LEARNING_RATE]
        new_weights = tf.nest.map_structure(
            lambda w0, s: w0 - tf.cast(learning_rate, s.dtype) * s, initial, total
        )
        return new_state, new_weights


def build_dp_ftrl_optimizer(learning_rate: float, momentum: float = 0.0) -> optimizers.Optimizer:
    """Builds the DP-FTRL server optimizer (Kairouz et al. 2021, Algorithm 1).

    With updates g_t, prefix sums s_t = g_0 + ... + g_t and v_t = momentum · v_{t−1} + s_t, the
    weights after round t are θ⁰ − learning_rate · v_t. These are the weights of `optimizers.sgdm`
    with the same arguments, up to rounding.

    θ⁰ are the weights that the first step is applied to. Weights set from outside after it have no
    effect on later steps. A changed learning rate applies to the whole sum, unlike in SGD. The
    state holds two copies of the model, three with momentum.
    """
    return _DpFtrl(
        validation.positive("learning_rate", learning_rate),
        validation.number("momentum", momentum, at_least=0, below=1),
    )
