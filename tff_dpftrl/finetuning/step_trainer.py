"""Steps of fine-tuning, as the kernel of a run trains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.finetuning import clipped_sums, example_sampling, private_steps
from tff_dpftrl.runs import prepared
from tff_dpftrl.runs import progress as progress_lib

_TRIED_ROWS = 4
# If the gradients of so many units are all not finite, the model is the reason, not bad examples.
_NOT_FINITE_UNITS = 8

ReadExamples = Callable[[Sequence[tuple[str, int]]], clipped_sums.Rows]
"""Function from (user id, index of one of the user's examples, from 0) pairs to their rows."""


class StepTrainer(prepared.Trainer):
    """Trainer of steps on batches of ELS, ULS or passes."""

    too_fast = "learning_rate"
    unit = "users or examples"

    def __init__(
        self,
        user_ids: Sequence[str],
        sample: Callable[[int], Callable[[int], example_sampling.Batch]],
        steps: private_steps.PrivateSteps,
        read_examples: ReadExamples,
        *,
        progress: progress_lib.Progress | None = None,
        try_losses: Callable[[Sequence[np.ndarray], clipped_sums.Rows], None] | None = None,
        loss_bound: float | None = None,
    ):
        """Keeps its arguments.

        `sample` maps a seed to a function from a step to its batch, the same one each time.
        `read_examples` reads in the order asked for. `progress` gets a line before the first step,
        which takes long. `try_losses` raises an error if the losses are unfit, given weights and
        some rows of a batch; it is called at the steps 1, 2, 4, 8 … and at the first one of this
        process, and is None for losses of the package. `loss_bound` divides the loss of a unit in
        bounded sums; None for no such sums.
        """
        self._loss_bound = loss_bound
        self._user_ids = user_ids
        self._sample = sample
        self._steps = steps
        self._read_examples = read_examples
        self._progress = progress
        self._try_losses = try_losses
        self._has_tried = False
        self._batches: Callable[[int], example_sampling.Batch] | None = None
        self._drawn: tuple[int, example_sampling.Batch] | None = None

    @override
    def initial_state(self) -> Any:
        return self._steps.initial_state()

    @override
    def sample_with(self, seed: int) -> None:
        self._batches = self._sample(seed)

    def _batch(self, step: int) -> example_sampling.Batch:
        if self._drawn is None or self._drawn[0] != step:
            if self._batches is None:
                raise RuntimeError("sample_with was not called.")
            self._drawn = step, self._batches(step)
        return self._drawn[1]

    @override
    def members(self, round_index: int) -> list[str]:
        users: list[int] = np.unique(self._batch(round_index).unit_users).tolist()
        return [self._user_ids[user] for user in users]

    @override
    def train(self, state: Any, round_index: int, members: Sequence[str]) -> prepared.Trained:
        if self._progress is not None:
            self._progress(
                "Compiling the step: the first one takes seconds, of a large model minutes ..."
            )
            self._progress = None
        batch = self._batch(round_index)
        owners: list[int] = batch.row_users.tolist()

        def read_rows(begin: int, end: int) -> clipped_sums.Rows:
            rows = self._read_examples(
                [
                    (self._user_ids[owners[row]], int(batch.examples[row]))
                    for row in range(begin, end)
                ]
            )
            if begin == 0 and (round_index + 1 & round_index == 0 or not self._has_tried):
                self._has_tried = True
                self._try(state, rows)
            return rows

        state, units = self._steps.step(state, batch.row_splits, read_rows)
        counts = np.isfinite(units.norms)  # All units of a batch have rows.
        if len(counts) >= _NOT_FINITE_UNITS and not counts.any():
            raise validation.UsageError(
                f"No gradient of the {len(counts)} {self.unit} in step {round_index + 1} is "
                f"finite: look for NaN in the losses, and lower {self.too_fast}. The step is not "
                "committed."
            )
        losses = np.asarray(units.losses)[counts]
        loss = float(np.mean(losses)) if counts.any() else None
        sums = None
        if self._loss_bound is not None:
            sums = bounded_sums(np.asarray(units.losses), self._loss_bound)
        return prepared.Trained(state, loss, None, int(np.sum(~counts)), sums)

    def _try(self, state: Any, rows: clipped_sums.Rows) -> None:
        """Tries the losses on a few rows of a batch."""
        if self._try_losses is not None:
            few = tf.nest.map_structure(
                lambda x: x[:: max(1, len(x) // _TRIED_ROWS)][:_TRIED_ROWS], rows
            )
            self._try_losses(state["global_model_weights"]["trainable"], few)


def bounded_sums(losses: np.ndarray, bound: float) -> np.ndarray:
    """Sums losses over `bound`, and the number of units; no unit counts for more than a norm of 1.

    The pair of a scaled loss and of 1 is clipped, weighted alike. A loss that is not finite counts
    as nothing. Float64, shape [2].
    """
    scaled = losses[np.isfinite(losses)].astype(np.float64) / bound
    pairs = np.stack([scaled, np.ones_like(scaled)])
    norms = np.hypot(*pairs)  # At least 1, also where a float32 was large.
    return np.sum(pairs * ((1.0 - 1e-9) / norms), axis=1)
