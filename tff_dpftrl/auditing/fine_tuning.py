"""Canaries in fine-tuning on texts in one place: units whose gradient is chosen.

    canaries = RowCanaries(row_losses, weights, example, number=100)
    steps = private_steps.PrivateSteps(
        private_round, clipped_sums.looped(canaries.row_losses), optimizer, weights, ...)
    audit_training(Steps(steps), canaries=canaries, cohorts=units_of_step, ...)

A unit is clipped as one: a user of ULS, an example of ELS. It works for sums of clipped
gradients that differentiate the loss of the rows of one unit, such as `clipped_sums.looped`. It
does not work for `ghost`: `booked` computes norms from a model's layers and would see no canary,
and `booked_losses` refuses a gradient that is not that of the operations.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.auditing import directions as directions_lib
from tff_dpftrl.finetuning import clipped_sums, private_steps


class RowCanaries:
    """Canaries among units of rows, for the argument `canaries` of `audit_training`.

    Their directions are secret until training is over.
    """

    def __init__(
        self,
        row_losses: clipped_sums.RowLosses,
        weights: Sequence[np.ndarray],
        example: clipped_sums.Rows,
        *,
        number: int,
        gradient_norm: float = 1e6,
        seed: int | None = None,
    ):
        """Draws the directions.

        `example` is the unit of every canary: made-up or public rows of finite loss. `number` is at
        most a twentieth of the weights, and `gradient_norm` far above the clip norm.
        """
        self.gradient_norm = validation.positive("gradient_norm", gradient_norm)
        self.directions = directions_lib.Directions(
            [np.shape(weight) for weight in weights], number=number, seed=seed
        )
        self.number = self.directions.number
        self._row_losses = row_losses
        self._example = example

    def row_losses(self, weights: Sequence[tf.Tensor], rows: clipped_sums.Rows) -> tf.Tensor:
        """Computes losses of one unit's rows, marked with its canary, for `clipped_sums.looped`."""
        unit, marks = rows
        canary = tf.reduce_max(tf.concat([marks, [directions_lib.REAL]], 0))
        attached = self.directions.attach(weights, canary, self.gradient_norm)
        return self._row_losses(attached, unit)

    def real(self, unit: clipped_sums.Rows) -> clipped_sums.Rows:
        """Marks the rows of a user, or of one example, as real data."""
        return _marked(unit, directions_lib.REAL)

    def client(self, canary: int, sign: int = 1) -> clipped_sums.Rows:
        """Returns the rows of a canary, in the direction `sign`."""
        return _marked(self._example, canary if sign == 1 else self.number + canary)

    def weights(self, model_weights: Any) -> list[np.ndarray]:
        """Copies the weights of `Steps.get_model_weights(state)`."""
        return [np.array(weight) for weight in model_weights.trainable]


def _marked(rows: clipped_sums.Rows, canary: int) -> clipped_sums.Rows:
    count = len(tf.nest.flatten(rows)[0])
    return rows, np.full(count, canary, np.int32)


class Steps:
    """`PrivateSteps` as a process, whose clients are the units of a step."""

    def __init__(self, steps: private_steps.PrivateSteps):
        """Initialises the process from steps whose sum is of `RowCanaries.row_losses`."""
        self._steps = steps

    def initialize(self) -> dict[str, Any]:
        """Returns the state before the first step, with a new root seed each time."""
        return self._steps.initial_state()

    def next(self, state: dict[str, Any], units: Sequence[clipped_sums.Rows]) -> Any:
        """Runs a step."""
        sizes = [len(tf.nest.flatten(unit)[0]) for unit in units]
        row_splits = np.cumsum([0, *sizes])
        rows = units and tf.nest.map_structure(lambda *parts: np.concatenate(parts), *units)

        def read_rows(begin: int, end: int) -> clipped_sums.Rows:
            return tf.nest.map_structure(lambda values: values[begin:end], rows)

        state, _ = self._steps.step(state, row_splits, read_rows)
        return types.SimpleNamespace(state=state)

    def get_model_weights(self, state: dict[str, Any]) -> Any:
        """Returns an object with the weights of a state as its attribute `trainable`."""
        return types.SimpleNamespace(**state["global_model_weights"])
