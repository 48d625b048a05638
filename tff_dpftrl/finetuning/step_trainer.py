"""A step of fine-tuning as what the books of a run take: who is in it, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tff_dpftrl.finetuning import clipped_sums, contributions, private_steps
from tff_dpftrl.training import committed_run

ReadExamples = Callable[[Sequence[tuple[str, int]]], clipped_sums.Rows]
"""From (user id, number of the example among the user's, from 0) of some rows to the rows."""


class StepTrainer(committed_run.Trainer):
    """Batches and steps of ELS, ULS or passes."""

    too_fast = "learning_rate"
    unit = "users or examples"

    def __init__(
        self,
        user_ids: Sequence[str],
        batches: Callable[[int], contributions.Batch],
        steps: private_steps.PrivateSteps,
        read_examples: ReadExamples,
    ):
        """Keeps its arguments.

        Args:
          user_ids: Ids of the users, as `contributions.Users` has them.
          batches: From a step to its batch, the same one each time.
          steps: The steps.
          read_examples: Reads examples, in the order asked for.
        """
        self._user_ids = user_ids
        self._batches = batches
        self._steps = steps
        self._read_examples = read_examples
        self._drawn: tuple[int, contributions.Batch] | None = None

    def _batch(self, step: int) -> contributions.Batch:
        if self._drawn is None or self._drawn[0] != step:
            self._drawn = step, self._batches(step)
        return self._drawn[1]

    def members(self, round_index):
        """As the base class says."""
        return [self._user_ids[user] for user in np.unique(self._batch(round_index).unit_users)]

    def train(self, state, round_index, members):
        """As the base class says."""
        batch = self._batch(round_index)
        owners = batch.row_users

        def read_rows(begin: int, end: int) -> clipped_sums.Rows:
            return self._read_examples(
                [
                    (self._user_ids[owners[row]], int(batch.examples[row]))
                    for row in range(begin, end)
                ]
            )

        state, units = self._steps.step(state, batch.row_splits, read_rows)
        counts = np.isfinite(units.norms)  # All units of a batch have rows.
        loss = float(np.mean(units.losses[counts])) if counts.any() else None
        return committed_run.Trained(state, loss, None, int(np.sum(~counts)))
