"""The loop of a run: rounds are drawn, begun, trained, committed and published.

What a round trains is a `Trainer`'s: federated clients (`training.run`) or a batch of
examples in one place (`finetuning.run`). All of them begin, commit and resume by one
protocol, and keep the same books.
"""

from __future__ import annotations

import abc
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tqdm

from tff_dpftrl import validation
from tff_dpftrl.accounting import display
from tff_dpftrl.models import export
from tff_dpftrl.runs import (
    checkpoint,
    cohort_seed,
    committed_rounds,
    manifest,
    metrics_log,
    privacy,
    tensorboard_log,
)
from tff_dpftrl.training import released_model, report, stopping, text_task

Progress = Callable[[str], None]
"""Receives what a person should know while a run starts and goes on, line by line."""


class RunConfig(stopping.StoppingConfig, Protocol):
    """What the loop has to know of the options of a run, besides when it ends.

    Attributes:
      eval_every: Rounds between evaluations.
      iterate_averaging: Decay of the average of the models that is evaluated and kept; None
        if the last one is.
    """

    eval_every: int
    iterate_averaging: float | None


class Trained(NamedTuple):
    """What a round came to.

    Attributes:
      state: What the next round continues from, in TFF's layout (see `released_model`).
      loss: Mean loss on what was trained on; None if that was nothing.
      top1: Accuracy on it; None if there was nothing to predict, or it was not measured.
      num_not_finite: Number of contributions that were not finite, and counted as zero.
    """

    state: Any
    loss: float | None
    top1: float | None
    num_not_finite: int


class Trainer(abc.ABC):
    """What trains a round.

    Attributes:
      too_fast: What to lower if training diverges, by the names of the options.
      unit: What contributes to a round, in the plural: "clients".
    """

    too_fast: str
    unit: str

    @abc.abstractmethod
    def members(self, round_index: int) -> Sequence[str]:
        """The users who take part in a round, the same ones if it is repeated."""

    @abc.abstractmethod
    def train(self, state: Any, round_index: int, members: Sequence[str]) -> Trained:
        """Trains a round that has begun.

        Args:
          state: The state before it.
          round_index: The round.
          members: What `members` returned.

        Returns:
          What it came to.
        """


class CommittedRun:
    """The rounds of one process of a run.

    One object is used once: `run`.
    """

    def __init__(
        self,
        config: RunConfig,
        output: pathlib.Path,
        task: text_task.TextTask,
        plan: privacy.PrivacyPlan,
        trainer: Trainer,
        rounds: committed_rounds.CommittedRounds,
        progress: Progress,
        *,
        baselines: Mapping[str, float] | None = None,
        whole: released_model.Whole = list,
    ):
        """Keeps its arguments; nothing is read yet.

        Args:
          config: Options of the run.
          output: Folder of the run.
          task: Model and text.
          plan: The run's privacy.
          trainer: What trains a round.
          rounds: The rounds, open.
          progress: Receives warnings.
          baselines: Top-1 accuracies of models to compare with, besides those of the task.
          whole: From the weights that are trained to the task's model's; the same by default.
        """
        self._config = config
        self._output = output
        self._task = task
        self._plan = plan
        self._trainer = trainer
        self._rounds = rounds
        self._progress = progress
        self._baselines = baselines or {}
        self._whole = whole

    def run(self, template: Any) -> None:
        """Runs the rounds that are left and evaluates the last model.

        Args:
          template: A state of the same structure as the run's.

        Raises:
          ValueError: If training diverges; every committed round is kept.
          ledger_rules.LedgerRefusal: If a round may not begin.
          OSError: If a file cannot be written; every committed round is kept.
        """
        self._restore(template)
        self._run_rounds()
        self._finish()

    def _restore(self, template: Any) -> None:
        """Reads the state that the ledger committed last."""
        snapshot, row = self._rounds.restore()
        self._state = snapshot.in_structure_of(template)
        self._log = metrics_log.MetricsLog(self._output, report.COLUMNS, self._rounds.rounds_done)
        self._events = tensorboard_log.TensorBoardLog(self._output)
        if row:
            # The crash may have come between the commit and the row.
            self._publish(row)

    def _run_rounds(self) -> None:
        """Runs the rounds that are left, with a progress bar."""
        interval = 0.1 if sys.stderr.isatty() else 10.0
        with tqdm.tqdm(
            total=self._config.num_rounds,
            initial=self._rounds.rounds_done,
            unit=self._config.unit,
            mininterval=interval,
            dynamic_ncols=True,
        ) as bar:
            while not self._is_over():
                row = self._run_round(self._rounds.rounds_done)
                shown = {}
                if row["loss"] is not None:
                    shown["loss"] = f"{row['loss']:.3f}"
                if row["top1"] is not None:
                    shown["top-1"] = f"{row['top1']:.1%}"
                if row["epsilon"] is not None:
                    shown["ε"] = display.round_up(row["epsilon"], 3)
                bar.set_postfix(shown, refresh=False)
                bar.update()

    def _is_over(self) -> bool:
        rows, done = self._log.rows, self._rounds.rounds_done
        return stopping.reason(self._config, self._plan, rows, done) is not None

    def _run_round(self, round_index: int) -> dict[str, Any]:
        start = time.monotonic()
        members = self._trainer.members(round_index)
        self._rounds.begin(round_index, members)
        trained = self._trainer.train(self._state, round_index, members)
        row = {
            "round": round_index + 1,
            "loss": trained.loss,
            "top1": trained.top1,
            "epsilon": self._plan.epsilon_after(round_index + 1),
            "clients": None if self._plan.needs_secret_cohorts else len(members),
        }
        self._warn_of_dropped(trained.num_not_finite, round_index, len(members))
        self._check_finite(trained.state, round_index)
        self._state = trained.state
        if (round_index + 1) % self._config.eval_every == 0 or (
            round_index + 1 == self._config.num_rounds
        ):
            row |= self._evaluate()
        row["seconds"] = time.monotonic() - start
        self._rounds.commit(round_index, self._state, row)
        self._publish(row)
        return row

    def _evaluate(self) -> dict[str, float]:
        weights = self._released_weights()
        measured = self._task.evaluate(weights)
        return {f"eval_{name}": measured[name] for name in report.EVALUATION_METRICS}

    def _released_weights(self) -> list[np.ndarray]:
        return released_model.weights(
            self._config.iterate_averaging,
            checkpoint.Snapshot.of(self._state),
            whole=self._whole,
        )

    def _publish(self, row: Mapping[str, Any]) -> None:
        """Publishes what has been committed: the row and, if it is the best, the model."""
        row = self._log.append(row)
        self._events.append(row)
        accuracy = row[stopping.ACCURACY]
        if accuracy is not None and accuracy == stopping.best_accuracy(self._log.rows):
            weights = self._released_weights()
            export.write(self._output / "best_model.npz", self._task.model, weights)

    def _warn_of_dropped(self, num_dropped: int, round_index: int, num_members: int) -> None:
        if not num_dropped:
            return
        # A secret cohort's size is secret too.
        who = "some" if self._plan.needs_secret_cohorts else f"{num_dropped} of {num_members}"
        self._progress(
            f"{self._config.unit.capitalize()} {round_index + 1}: {who} {self._trainer.unit} had "
            "an update that is not finite (NaN, Inf), which counts as zero; lower "
            f"{self._trainer.too_fast}."
        )

    def _check_finite(self, state: Any, round_index: int) -> None:
        """Stops before a model that has diverged is committed."""
        weights = released_model.last_weights(checkpoint.Snapshot.of(state))
        if not all(np.all(np.isfinite(weight)) for weight in weights):
            raise validation.UsageError(
                f"Training diverged: the weights after {self._config.unit} {round_index + 1} are "
                f"not finite. Lower {self._trainer.too_fast} and start a new run."
            )

    def _finish(self) -> None:
        """Evaluates the last model and simpler ones, if that has not been done yet."""
        last = self._log.rows[-1]
        if last[stopping.ACCURACY] is None:
            self._publish(last | self._evaluate())
        self._events.close()
        weights = self._released_weights()
        report.write_held_out(self._output, last["round"], self._task.examine(weights))
        report.write_baselines(self._output, {**self._baselines, **self._task.baselines()})


def open_rounds(
    output: pathlib.Path,
    plan: privacy.PrivacyPlan,
    known: manifest.Manifest,
    state: Any,
    *,
    max_epsilon: float | None,
    is_new: bool,
) -> committed_rounds.CommittedRounds:
    """Opens the rounds of a run, after making its folder if it is new.

    Args:
      output: Folder of the run.
      plan: Its privacy.
      known: Its manifest, which a new run writes.
      state: What a new run begins with.
      max_epsilon: ε above which no round begins; None for no such budget.
      is_new: Whether the run is new.

    Returns:
      The rounds, open.

    Raises:
      ValueError: If the rounds of another run are in the folder, or another process has it
        open.
      OSError: If a file cannot be written.
    """
    private = output / "private"
    options = {
        "noise_part": "aggregator" if plan.has_noise else None,
        "binding": known.digest,
        "budget_guard": plan.budget_guard(max_epsilon),
    }
    if not is_new:
        return committed_rounds.CommittedRounds.open(private, plan.declared, **options)
    shutil.rmtree(private, ignore_errors=True)  # Of a run that never got as far as round 1.
    output.mkdir(parents=True, exist_ok=True)
    rounds = committed_rounds.CommittedRounds.create(private, plan.declared, state, {}, **options)
    try:
        if _is_secret(plan):
            cohort_seed.create(private)
        known.write(output)  # Last of all files: from now on the folder holds a run.
    except BaseException:
        rounds.close()
        raise
    return rounds


def sampling_seed(output: pathlib.Path, plan: privacy.PrivacyPlan, public_seed: int) -> int:
    """The seed of a run's cohorts: secret if its privacy rests on that.

    Args:
      output: Folder of the run, whose rounds have been opened.
      plan: Its privacy.
      public_seed: The seed for cohorts that need not be secret.

    Returns:
      The seed, the same for every process of the run.
    """
    return cohort_seed.read(output / "private") if _is_secret(plan) else public_seed


def to_stderr(line: str) -> None:
    """Says a line beside a progress bar."""
    tqdm.tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()


def _is_secret(plan: privacy.PrivacyPlan) -> bool:
    # A run with a known noise seed is not private, and is meant to be repeatable.
    return plan.needs_secret_cohorts and plan.deterministic_seed is None
