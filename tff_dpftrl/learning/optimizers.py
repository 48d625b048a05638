"""Optimizers of clients and of the server: functions of a state, weights and gradients.

The states and the bits of the steps are those of TensorFlow Federated's (TFF's) optimizers.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tff_dpftrl import validation

LEARNING_RATE = "learning_rate"
"""Key of the learning rate in the state of an optimizer."""

_MOMENTUM = "momentum"
_BETA_1 = "beta_1"
_BETA_2 = "beta_2"
_EPSILON = "epsilon"
_HYPERPARAMETERS = (LEARNING_RATE, _MOMENTUM, _BETA_1, _BETA_2, _EPSILON)
_STEP = "step"
_ACCUMULATOR = "accumulator"
_PRECONDITIONER = "preconditioner"
_ROUND = "round_num"
_OPTIMIZER = "optimizer"


class Optimizer(abc.ABC):
    """Optimizer whose steps can be traced as TensorFlow functions, without variables.

    It is a `tff.learning.optimizers.Optimizer` too, if TFF was imported before it was made.
    """

    def __new__(cls, *args, **kwargs):
        """Tells TFF, whose builders ask for its class; importing TFF would make all need it."""
        tff = sys.modules.get("tensorflow_federated")
        if tff is not None:
            tff.learning.optimizers.Optimizer.register(Optimizer)
        return super().__new__(cls)

    @abc.abstractmethod
    def initialize(self, specs: Any) -> collections.OrderedDict[str, Any]:
        """Returns the initial state.

        Args:
          specs: Structure of `tf.TensorSpec` of the weights.

        Returns:
          A structure of tensors.
        """

    @abc.abstractmethod
    def next(
        self, state: Any, weights: Any, gradients: Any
    ) -> tuple[collections.OrderedDict[str, Any], Any]:
        """Takes a step.

        Args:
          state: State before the step.
          weights: Structure of tensors.
          gradients: Structure of the same shapes and dtypes.

        Returns:
          The new state, and the new weights.
        """

    def get_hparams(self, state: Any) -> collections.OrderedDict[str, Any]:
        """Returns the hyperparameters in a state, such as the learning rate, by name.

        Args:
          state: State of this optimizer.

        Returns:
          Those that `set_hparams` can change.
        """
        return collections.OrderedDict((k, state[k]) for k in _HYPERPARAMETERS if k in state)

    def set_hparams(self, state: Any, hparams: Any) -> collections.OrderedDict[str, Any]:
        """Returns a state with other hyperparameters.

        Args:
          state: State of this optimizer.
          hparams: Numbers by the names of `get_hparams`, some or all of them.

        Returns:
          The new state.
        """
        changed = {key: tf.cast(value, tf.float32) for key, value in hparams.items()}
        return collections.OrderedDict(state, **changed)


def zeros(specs: Any) -> Any:
    """Makes tensors of zeros of these `tf.TensorSpec`s."""
    return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), specs)


def dense_gradients(weights: Any, gradients: Any) -> Any:
    """Makes tensors of gradients of a `tf.GradientTape`.

    They may be tensors, `tf.IndexedSlices` or None, which counts as zero, of the shapes and dtypes
    of the weights.
    """

    def dense(weight, gradient):
        if gradient is None:
            return tf.zeros_like(weight)
        tensor = tf.convert_to_tensor(gradient, weight.dtype)
        tensor.shape.assert_is_compatible_with(weight.shape)
        return tensor

    return tf.nest.map_structure(dense, weights, gradients)


@dataclasses.dataclass(frozen=True)
class _Sgdm(Optimizer):
    """Optimizer of `sgdm`."""

    learning_rate: float
    momentum: float

    def initialize(self, specs):
        state = collections.OrderedDict({LEARNING_RATE: tf.constant(self.learning_rate)})
        if self.momentum > 0:
            state[_MOMENTUM] = tf.constant(self.momentum)
            state[_ACCUMULATOR] = zeros(specs)
        return state

    def next(self, state, weights, gradients):
        moves = dense_gradients(weights, gradients)
        state = collections.OrderedDict(state)
        if _MOMENTUM in state:
            moves = tf.nest.map_structure(
                lambda a, g: tf.cast(state[_MOMENTUM], g.dtype) * a + g, state[_ACCUMULATOR], moves
            )
            state[_ACCUMULATOR] = moves
        rate = state[LEARNING_RATE]
        return state, tf.nest.map_structure(
            lambda w, m: w - tf.cast(rate, m.dtype) * m, weights, moves
        )


def sgdm(learning_rate: float, momentum: float | None = None) -> Optimizer:
    """Builds stochastic gradient descent: v ← momentum · v + g, w ← w − learning_rate · v.

    State and steps are those of `tff.learning.optimizers.build_sgdm`.
    """
    return _Sgdm(
        validation.number(LEARNING_RATE, learning_rate, at_least=0),
        validation.number(_MOMENTUM, momentum or 0.0, at_least=0, at_most=1),
    )


@dataclasses.dataclass(frozen=True)
class _Adam(Optimizer):
    """Optimizer of `adam`."""

    learning_rate: float
    epsilon: float

    def initialize(self, specs):
        return collections.OrderedDict(
            {
                LEARNING_RATE: tf.constant(self.learning_rate),
                _BETA_1: tf.constant(0.9),
                _BETA_2: tf.constant(0.999),
                _EPSILON: tf.constant(self.epsilon),
                _STEP: tf.constant(0),
                _ACCUMULATOR: zeros(specs),
                _PRECONDITIONER: zeros(specs),
            }
        )

    def next(self, state, weights, gradients):
        gradients = dense_gradients(weights, gradients)
        rate, beta_1, beta_2, epsilon = self.get_hparams(state).values()
        step = state[_STEP] + 1
        power = tf.cast(step, tf.float32)
        rate = rate * tf.sqrt(1.0 - tf.pow(beta_2, power)) / (1.0 - tf.pow(beta_1, power))
        first = tf.nest.map_structure(
            lambda a, g: a + (g - a) * (1.0 - tf.cast(beta_1, a.dtype)),
            state[_ACCUMULATOR],
            gradients,
        )
        second = tf.nest.map_structure(
            lambda p, g: p + (tf.square(g) - p) * (1.0 - tf.cast(beta_2, p.dtype)),
            state[_PRECONDITIONER],
            gradients,
        )
        weights = tf.nest.map_structure(
            lambda w, a, p: (
                w - tf.cast(rate, a.dtype) * a / (tf.sqrt(p) + tf.cast(epsilon, p.dtype))
            ),
            weights,
            first,
            second,
        )
        changed = {_STEP: step, _ACCUMULATOR: first, _PRECONDITIONER: second}
        return collections.OrderedDict(state, **changed), weights


def adam(learning_rate: float, epsilon: float = 1e-7) -> Optimizer:
    """Builds Adam (Kingma and Ba 2014), with β₁ = 0.9 and β₂ = 0.999.

    `epsilon` is added to the root of the second moment. State and steps are those of
    `tff.learning.optimizers.build_adam`.
    """
    return _Adam(
        validation.number(LEARNING_RATE, learning_rate, at_least=0),
        validation.number(_EPSILON, epsilon, at_least=0),
    )


@dataclasses.dataclass(frozen=True)
class _Scheduled(Optimizer):
    """Optimizer of `scheduled`."""

    optimizer: Optimizer
    schedule_fn: Callable[[tf.Tensor], tf.Tensor]

    def initialize(self, specs):
        inner = self.optimizer.initialize(specs)
        if LEARNING_RATE not in inner:
            raise validation.UsageError(
                f"optimizer must have a {LEARNING_RATE} in its state, got one with {[*inner]}: "
                "schedule an optimizer before its iterates are averaged."
            )
        return self._state(tf.constant(0), inner)

    def next(self, state, weights, gradients):
        inner, weights = self.optimizer.next(state[_OPTIMIZER], weights, gradients)
        return self._state(state[_ROUND] + 1, inner), weights

    def _state(self, index: tf.Tensor, inner: Any) -> collections.OrderedDict[str, Any]:
        inner = collections.OrderedDict(inner, **{LEARNING_RATE: self.schedule_fn(index)})
        return collections.OrderedDict({_ROUND: index, _OPTIMIZER: inner})


def scheduled(optimizer: Optimizer, schedule_fn: Callable[[tf.Tensor], tf.Tensor]) -> Optimizer:
    """Makes the learning rate of an optimizer follow a function of the index of a step, from 0.

    State and steps are those of `tff.learning.optimizers.schedule_learning_rate`.
    """
    return _Scheduled(optimizer, schedule_fn)
