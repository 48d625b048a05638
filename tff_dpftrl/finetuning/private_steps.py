"""Steps of an optimizer on noised sums of clipped gradients: for any TensorFlow model.

    steps = PrivateSteps(private_round, clipped_sum, optimizer, weights, units_at_once=16)
    state = steps.initial_state()
    state, units = steps.step(state, batch.row_splits, read_rows)

The noise is that of `private_round`: added once to the whole sum, which is then divided by
a constant. An empty batch releases noise like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl import array_tensors
from tff_dpftrl.finetuning import clipped_sums
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.models import keras_versions
from tff_dpftrl.private_round import clipping, fixed_clip, interface
from tff_dpftrl.runs import mechanism_plan

ReadRows = Callable[[int, int], clipped_sums.Rows]
"""Function from the first row of a piece of a batch, and the row after its last, to the rows."""


def round_of(
    plan: mechanism_plan.MechanismPlan,
    strategy: strategy_lib.Strategy,
    *,
    secure_noise: bool = False,
) -> fixed_clip.FixedClipRound:
    """Returns the clipping and the noise of a run's steps, whose clients are units.

    The strategy is the identity where units are sampled. `secure_noise` is of a cryptographic
    generator, on a grid; else the noise is of Philox.
    """
    return fixed_clip.FixedClipRound(
        strategy,
        noise_multiplier=plan.noise_multiplier,
        clipping=clipping.FlatClipping(plan.clip_norm),
        clients_per_round=plan.clients_per_round,
        deterministic_seed=plan.deterministic_seed,
        secure_noise=secure_noise,
    )


_LARGE = 10_000_000
"""Weights from which on steps are taken tensor by tensor: each has some calls of its own."""


class PrivateSteps:
    """Steps of the optimizer, as functions of a state and a batch.

    The state is a dictionary in the layout of a run's checkpoints
    (`runs.released_model`): weights, what the optimizer and the average of the models
    keep, and, as its part "aggregator", what decides the noise. It is secret.
    """

    def __init__(
        self,
        private_round: fixed_clip.FixedClipRound,
        clipped_sum: clipped_sums.ClippedSum,
        optimizer: keras_versions.Optimizer,
        weights: Sequence[np.ndarray],
        *,
        units_at_once: int,
        normalised: bool = True,
        iterate_averaging: float | None = None,
        learning_rate: Callable[[int], float] | None = None,
        variables: Sequence[Any] = (),
    ):
        """Initialises the steps.

        `private_round` has clip norm, noise and denominator: the number of units expected in a
        step. The Keras optimizer is not built yet, or built for `variables`: variables of a Keras
        model with the initial weights, which the steps update; new ones if there are none.
        `units_at_once` is the number of units in a piece of a batch. With `normalised`, gradients
        are divided by the clip norm, noise and all. `iterate_averaging` is the decay of the average
        of the steps' models that the state keeps. `learning_rate` maps a step, counted from 0, to
        its rate; None for the optimizer's.
        """
        self._round = private_round
        self._clip_norm = private_round.clipping.constant_norm
        self._sum = clipped_sums.sum_in_chunks(clipped_sum, units_per_chunk=units_at_once)
        self._variables = list(variables) or [
            tf.Variable(array_tensors.tensor(np.asarray(weight, np.float32))) for weight in weights
        ]
        self._weights = [keras_versions.tensorflow_variable(each) for each in self._variables]
        self._optimizer = optimizer
        if not getattr(optimizer, "built", False):  # Keras 2 looks itself.
            self._optimizer.build(self._variables)
        keras_versions.refuse_hidden_state(optimizer)
        self._optimizer_state = keras_versions.optimizer_state(optimizer)
        self._first = (
            [np.asarray(weight, np.float32) for weight in weights],
            [kept(variable) for variable in self._optimizer_state],
        )
        # Values of all variables, as the last step left them.
        self._current: list[np.ndarray] = [array for arrays in self._first for array in arrays]
        self._scale = 1.0 / self._clip_norm if normalised else 1.0
        self._averaging = iterate_averaging
        self._learning_rate = learning_rate
        self._release = tf.function(self._noised, autograph=False)
        self._release_tensor = tf.function(self._noised_tensor, autograph=False)
        self._execute = tf.function(private_round.execute, autograph=False)
        self._goes_by_tensors = (
            sum(weight.size for weight in weights) >= _LARGE
            and private_round.is_separable
            and keras_versions.is_tensorwise(optimizer)
        )

    def initial_state(self) -> dict[str, Any]:
        """Returns the state before the first step, with a new root seed each time."""
        weights, of_optimizer = self._first
        shapes = [weight.shape for weight in weights]
        finalizer: dict[str, Any] = {"optimizer": list(of_optimizer)}
        if self._averaging is not None:
            finalizer["average"] = [np.zeros_like(weight) for weight in weights]
        return {
            "global_model_weights": {"trainable": list(weights)},
            "finalizer": finalizer,
            "aggregator": self._round.initial_state(shapes),
        }

    def step(
        self, state: dict[str, Any], row_splits: np.ndarray, read_rows: ReadRows
    ) -> tuple[dict[str, Any], clipped_sums.PerUnit]:
        """Takes a step from a state, which is not changed, and returns the state after it.

        The units' norms and losses come beside it, as arrays: exact, for the operator's eyes only.
        `row_splits` says which rows of the batch are whose, as in `example_sampling.Batch`.
        """
        self._restore(state)
        total, units = self._sum(self._weights, read_rows, row_splits, self._clip_norm)
        index = int(state["aggregator"].round_index)
        if self._learning_rate is not None:
            self._optimizer.learning_rate = self._learning_rate(index)
        self._current = []
        move = self._move_by_tensors if self._goes_by_tensors else self._move
        private = move(state["aggregator"], total)
        weights, of_optimizer = _values(self._weights), _values(self._optimizer_state)
        self._current = [*weights, *of_optimizer]
        finalizer: dict[str, Any] = {"optimizer": of_optimizer}
        if self._averaging is not None:
            finalizer["average"] = _averaged(
                state["finalizer"]["average"], weights, self._averaging, index + 1
            )
        return {
            "global_model_weights": {"trainable": weights},
            "finalizer": finalizer,
            "aggregator": private,
        }, units

    def _restore(self, state: dict[str, Any]) -> None:
        values = [*state["global_model_weights"]["trainable"], *state["finalizer"]["optimizer"]]
        if list(map(id, values)) == list(map(id, self._current)):
            return  # The variables have them.
        self._current = []
        for variable, value in zip([*self._weights, *self._optimizer_state], values, strict=True):
            variable.assign(array_tensors.tensor(np.asarray(value)))

    def _move(self, state: Any, total: list[tf.Tensor]) -> Any:
        """Releases the mean and takes a step of the optimizer; returns the state after it."""
        private, gradient = self._release(state, total)
        self._optimizer.apply_gradients(zip(gradient, self._variables, strict=True))
        return private

    def _move_by_tensors(self, state: Any, total: list[tf.Tensor]) -> Any:
        """Does the same, with noise and mean of one tensor in memory at a time; empties `total`."""
        done = int(self._optimizer.iterations)
        state = tf.nest.map_structure(tf.convert_to_tensor, state)
        total.reverse()
        executed, after = self._execute(state)
        for position, variable in enumerate(self._variables):
            given = state.round_index, executed, tf.constant(position), total.pop()
            # A call of the function itself would warn of so many shapes.
            gradient = self._release_tensor.get_concrete_function(*given)(*given)
            del given
            self._optimizer.iterations.assign(done)  # All tensors' steps are one.
            self._optimizer.apply_gradients([(gradient, variable)])
        return after

    def _noised_tensor(
        self, index: tf.Tensor, executed: tf.Tensor, position: tf.Tensor, total: tf.Tensor
    ) -> tf.Tensor:
        mean = self._round.release_tensor(index, executed, position, total)
        return tf.cast(self._scale * mean, tf.float32)

    def _noised(self, state: Any, total: list[tf.Tensor]) -> tuple[Any, list[tf.Tensor]]:
        state, average, _ = self._round.release(state, interface.Contribution(total))
        return state, [tf.cast(self._scale * tensor, tf.float32) for tensor in average]


def _values(variables: Sequence[tf.Variable]) -> list[np.ndarray]:
    """Returns the values without a copy; TensorFlow makes one before it changes a variable."""
    return [np.asarray(variable.read_value()) for variable in variables]


def kept(variable: tf.Variable) -> np.ndarray:
    """Returns a copy of a variable's value, which takes no memory if it is zero."""
    value = np.asarray(variable.read_value())
    return value.copy() if value.any() else np.zeros(value.shape, value.dtype)


def _averaged(
    average: Sequence[np.ndarray], weights: Sequence[np.ndarray], decay: float, step: int
) -> list[np.ndarray]:
    """Returns Σ_s decay^(t−s) θ_s / Σ_s decay^(t−s), of which the first one is θ_1."""
    rate = np.float32((1.0 - decay) / (1.0 - decay**step))
    return [old + rate * (new - old) for old, new in zip(average, weights, strict=True)]
