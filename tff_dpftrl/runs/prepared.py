"""A run that has been prepared: everything that the kernel of a run needs, and no options.

Training, fine-tuning and the fine-tuning of a custom model turn their options into a `Prepared`
once. `run.begin`, `run.resume` and `run.report` take it from there, for all of them alike.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.runs import (
    checkpoint,
    manifest,
    mechanism_plan,
    metrics_log,
    released_metrics,
    stopping,
)


class Trained(NamedTuple):
    """Outcome of a round.

    Attributes:
      state: State that the next round continues from, in TFF's layout (see `released_model`).
      loss: Mean loss on the round's training data; None if there was no data.
      top1: Accuracy on the round's training data; None if it was not measured.
      num_not_finite: Number of contributions that were not finite and counted as zero.
      bounded_sums: Sums of the round for `released_metrics`, without noise; None if there are none.
    """

    state: Any
    loss: float | None
    top1: float | None
    num_not_finite: int
    bounded_sums: np.ndarray | None = None


class Trainer(abc.ABC):
    """Trainer of the rounds of a run.

    Attributes:
      too_fast: Names of the options to lower if training diverges.
      unit: Name of what contributes to a round, in the plural: "clients".
    """

    too_fast: str
    unit: str

    @abc.abstractmethod
    def initial_state(self) -> Any:
        """Returns the state before the first round, with a new seed of the noise."""

    def restored(self, state: Any) -> Any:
        """Converts a state of NumPy arrays once to what rounds take, so that both need not stay."""
        return state

    @abc.abstractmethod
    def sample_with(self, seed: int) -> None:
        """Sets the seed of the cohorts, once, before the first call of `members`.

        Args:
          seed: The seed; the same one in every process of the run.
        """

    @abc.abstractmethod
    def members(self, round_index: int) -> Sequence[str]:
        """Returns the ids of the users in a round, the same ones if it is repeated."""

    @abc.abstractmethod
    def train(self, state: Any, round_index: int, members: Sequence[str]) -> Trained:
        """Trains a round that has begun.

        Args:
          state: State before the round.
          round_index: Number of the round, from 0.
          members: Ids that `members` returned for the round.

        Returns:
          The outcome.
        """


class Evaluator(abc.ABC):
    """Evaluator of the models of a run on held-out data."""

    @abc.abstractmethod
    def evaluate(self, weights: list[np.ndarray]) -> Mapping[str, float]:
        """Measures a model.

        Args:
          weights: Weights of the model.

        Returns:
          Values by column of `metrics.csv`, all named "eval_..."; empty if there is no
          held-out data.
        """

    def bounded_sums(
        self, weights: list[np.ndarray], figures: released_metrics.Figures
    ) -> np.ndarray:
        """Measures a model on protected held-out users, for a run that releases it with noise.

        Args:
          weights: Weights of the model.
          figures: What is released.

        Returns:
          Sums over the users without noise, as `released_metrics.Figures.bounded_sums` adds them.
        """
        raise NotImplementedError(f"{type(self).__name__} measures no sums of users.")

    def examine(self, output: pathlib.Path, rounds_done: int, weights: list[np.ndarray]) -> None:
        """Measures and writes what is measured only once, after the last round.

        Args:
          output: Folder of the run.
          rounds_done: Number of rounds that the model has seen.
          weights: Weights of the model.

        Raises:
          OSError: If a file cannot be written.
        """
        del output, rounds_done, weights


class Outcome(NamedTuple):
    """Outcome of the committed rounds, one row of metrics each, for the presentation of a run.

    Attributes:
      weights: Weights of the model that is published.
      progress: A sentence on why the run ended, or on how to resume it.
    """

    rows: list[metrics_log.Row]
    weights: list[np.ndarray]
    statement: statement_lib.PrivacyStatement
    progress: str


class Presentation(abc.ABC):
    """Writer of the model, the curves and the summary of a run. It needs no data.

    Attributes:
      has_events: Whether the rows are written as TensorBoard events too.
      is_renewed: Whether the report is written at every evaluation, not only at the end.
    """

    columns: tuple[metrics_log.Column, ...]
    has_events: bool = True
    is_renewed: bool = False
    model_file: str = "model.npz"

    def write_best(self, output: pathlib.Path, weights: list[np.ndarray]) -> None:
        """Writes the model with the best held-out accuracy so far.

        Args:
          output: Folder of the run.
          weights: Weights of the model.

        Raises:
          OSError: If the file cannot be written.
        """
        del output, weights

    @abc.abstractmethod
    def write_model(self, output: pathlib.Path, weights: list[np.ndarray]) -> None:
        """Writes the model that is published, before the statement, which has its digest.

        Args:
          output: Folder of the run.
          weights: Weights of the model.

        Raises:
          OSError: If the file cannot be written.
        """

    @abc.abstractmethod
    def write(self, output: pathlib.Path, outcome: Outcome) -> Any:
        """Writes the curves; model and statement have been written.

        Args:
          output: Folder of the run.
          outcome: Outcome of the committed rounds.

        Returns:
          The results, for the caller of the run.

        Raises:
          OSError: If a file cannot be written.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class Reportable:
    """Material of a report on a run: its manifest, and nothing that needs data.

    Attributes:
      facts: Facts of the run that its statement reports.
      released: Function from the state of the run to the weights that are published.
      go_on: Command, or call in Python, that resumes the run.
      figures: Figures of the training cohorts that are released with noise; None for none.
      evaluation: Figures of the held-out users that are released with noise; None for none.
      publish: Function of the run's folder and state that writes the model in other layouts, once
        model and statement have been written.
    """

    known: manifest.Manifest
    plan: mechanism_plan.MechanismPlan
    facts: facts_lib.Facts
    schedule: stopping.Schedule
    released: Callable[[checkpoint.Snapshot], list[np.ndarray]]
    presentation: Presentation
    go_on: str
    figures: released_metrics.Figures | None = None
    evaluation: released_metrics.Figures | None = None
    publish: Callable[[pathlib.Path, checkpoint.Snapshot], None] = lambda output, snapshot: None


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A run that can begin or go on.

    Attributes:
      trainer: Context in which the rounds are trained.
      public_seed: Seed of the cohorts where they need not be secret.
      keep: Function that writes to the run's folder what a report or a resumption reads there, such
        as the vocabulary.
      keep_first: Function that writes to the folder's `private/` what was drawn once, and must be
        there before the folder holds a run: a run that goes on would draw it again.
      announcement: Progress lines that follow once the folder holds the run.
    """

    report: Reportable
    trainer: contextlib.AbstractContextManager[Trainer]
    evaluator: Evaluator
    public_seed: int
    keep: Callable[[pathlib.Path], None] = lambda output: None
    keep_first: Callable[[pathlib.Path], None] = lambda output: None
    announcement: Sequence[str] = ()
