"""The loop of a run: rounds are drawn, begun, trained, committed and published.

A `prepared.Trainer` trains a round: with federated clients, or with a batch of examples in one
place. Every run begins, commits and resumes its rounds by this one loop.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import tqdm

from tff_dpftrl import durable_files, validation
from tff_dpftrl.accounting import display
from tff_dpftrl.runs import (
    checkpoint,
    committed_rounds,
    manifest,
    metrics_log,
    released_metrics,
    released_model,
    reporting,
    stopping,
    tensorboard_log,
)
from tff_dpftrl.runs import prepared as prepared_lib
from tff_dpftrl.runs import progress as progress_lib


class Loop:
    """The rounds of a run in one process. Call `run` once."""

    def __init__(
        self,
        output: pathlib.Path,
        prepared: prepared_lib.Prepared,
        trainer: prepared_lib.Trainer,
        rounds: committed_rounds.CommittedRounds,
        progress: progress_lib.Progress,
    ):
        """Keeps its arguments; nothing is read yet."""
        self._output = output
        self._run = prepared.report
        self._trainer = trainer
        self._evaluator = prepared.evaluator
        self._rounds = rounds
        self._progress = progress

    def run(self, template: Any) -> None:
        """Runs the rounds that are left and evaluates the last model; errors keep committed rounds.

        `template` is a state with the structure of the run's; its values do not matter.
        """
        self._restore(template)
        self._refuse_diverged()
        self._run_rounds()
        self._finish()

    def _restore(self, template: Any) -> None:
        """Reads the state that the ledger committed last."""
        snapshot, row = self._rounds.restore()
        self._state = self._trainer.restored(snapshot.in_structure_of(template))
        presentation = self._run.presentation
        self._log = metrics_log.MetricsLog(
            self._output, presentation.columns, self._rounds.rounds_done
        )
        self._events = None
        if presentation.has_events:
            self._events = tensorboard_log.TensorBoardLog(self._output)
        self._release = self._evaluation = None
        if self._run.figures is not None:
            plan = self._run.plan
            seed = plan.deterministic_seed
            stddev = released_metrics.noise_of(plan)
            assert stddev is not None  # There are figures because the plan has their part.
            self._release = released_metrics.Release(self._run.figures, stddev, seed)
            if self._run.evaluation is not None:
                times = self._run.schedule.num_evaluations(plan.num_rounds)
                stddev = released_metrics.noise_of_evaluation(plan, times)
                assert stddev is not None
                self._evaluation = released_metrics.Release(
                    self._run.evaluation, stddev, seed, of_evaluation=True
                )
                self._refuse_lost_evaluation()
        if row:
            # The crash may have come between the commit and the row.
            self._publish(self._measured(row))

    def _refuse_lost_evaluation(self) -> None:
        """Refuses to go on without the rows that have what was evaluated with noise."""
        last = max((row["round"] for row in self._log.rows), default=0)
        if last < self._rounds.rounds_done - 1:
            raise validation.UsageError(
                f"{self._output / metrics_log.EXACT_TABLE} has lost rows. They have the noised "
                "evaluations of held-out users, and another one would be a second release: restore "
                "the file."
            )

    def _run_rounds(self) -> None:
        """Runs the rounds that are left, with a progress bar."""
        with tqdm.tqdm(
            total=self._run.plan.num_rounds,
            initial=self._rounds.rounds_done,
            unit=self._run.schedule.unit,
            mininterval=0.1 if sys.stderr.isatty() else 10.0,
            dynamic_ncols=True,
        ) as bar:
            while not self._is_over():
                row = self._run_round(self._rounds.rounds_done)
                bar.set_postfix(_shown(row), refresh=False)
                bar.update()

    def _is_over(self) -> bool:
        done = self._rounds.rounds_done
        return self._run.schedule.reason_to_end(self._run.plan, self._log.rows, done) is not None

    def _run_round(self, round_index: int) -> dict[str, Any]:
        start, plan = time.monotonic(), self._run.plan
        members = self._trainer.members(round_index)
        self._rounds.begin(round_index, members)
        trained = self._trainer.train(self._state, round_index, members)
        row = {
            "round": round_index + 1,
            "loss": trained.loss,
            "top1": trained.top1,
            "epsilon": plan.epsilon_after(round_index + 1),
            "clients": None if plan.needs_secret_cohorts else len(members),
        }
        if self._release is not None:
            assert trained.bounded_sums is not None  # A trainer of such a run measures them.
            row |= self._release.of_round(round_index, trained.bounded_sums)
        self._check_finite(trained.state)
        self._state = trained.state
        row["seconds"] = time.monotonic() - start
        # Nothing of a round is shown before its commit: it may be trained again, with other noise.
        self._rounds.commit(round_index, self._state, row)
        self._warn_of_dropped(trained.num_not_finite, round_index, len(members))
        self._publish(self._measured(row))
        is_evaluated = self._run.schedule.is_evaluated(round_index + 1, plan.num_rounds)
        is_last = round_index + 1 == plan.num_rounds  # A run ends with a report.
        if is_evaluated and not is_last and self._run.presentation.is_renewed:
            reporting.write(self._output, self._run, self._rounds)
        return row

    def _measured(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a committed row with its evaluation: the one in the log, if there is one."""
        logged = next((kept for kept in self._log.rows[-1:] if kept["round"] == row["round"]), None)
        if logged is not None:
            return {**logged, **{name: v for name, v in row.items() if v is not None}}
        if not self._run.schedule.is_evaluated(row["round"], self._run.plan.num_rounds):
            return dict(row)
        return {**row, **self._evaluated(row["round"])}

    def _evaluated(self, rounds_done: int) -> dict[str, Any]:
        """Evaluates the model; the row that has it is written before anybody sees it."""
        weights = self._released_weights()
        measured: dict[str, Any] = {**self._evaluator.evaluate(weights)}
        if self._evaluation is not None:
            assert self._run.evaluation is not None
            sums = self._evaluator.bounded_sums(weights, self._run.evaluation)
            measured |= self._evaluation.of_round(rounds_done, sums)
        return measured

    def _released_weights(self) -> list[np.ndarray]:
        return self._run.released(checkpoint.Snapshot.of(self._state))

    def _publish(self, row: Mapping[str, Any]) -> None:
        """Publishes what has been committed: the row and, if it is the best, the model."""
        row = self._log.append(row)
        if self._events is not None:
            self._events.append(row)
        column = self._run.schedule.accuracy
        accuracy = row.get(column)
        if accuracy is not None and accuracy == stopping.best_accuracy(self._log.rows, column):
            self._run.presentation.write_best(self._output, self._released_weights())

    def _warn_of_dropped(self, num_dropped: int, round_index: int, num_members: int) -> None:
        if not num_dropped:
            return
        # A secret cohort's size is secret too.
        is_secret = self._run.plan.needs_secret_cohorts
        who = "some" if is_secret else f"{num_dropped} of {num_members}"
        self._progress(
            f"{self._run.schedule.unit.capitalize()} {round_index + 1}: {who} "
            f"{self._trainer.unit} had an update that is not finite (NaN, Inf), which counts as "
            f"zero; lower {self._trainer.too_fast}."
        )

    def _check_finite(self, state: Any) -> None:
        """Stops before a model that has diverged is committed; a choice among runs reads why."""
        weights = released_model.last_weights(checkpoint.Snapshot.of(state))
        if not all(map(_is_finite, weights)):
            text = json.dumps({self._run.schedule.unit: self._rounds.rounds_done + 1}) + "\n"
            durable_files.write(self._output / manifest.DIVERGED, text.encode(), private=True)
            self._refuse_diverged()

    def _refuse_diverged(self) -> None:
        """Stops if the next round has diverged: with other noise, it would be a second release."""
        if (self._output / manifest.DIVERGED).exists():
            raise validation.UsageError(
                f"Training diverged: the weights after {self._run.schedule.unit} "
                f"{self._rounds.rounds_done + 1} are not finite. Lower {self._trainer.too_fast} "
                "and start a new run."
            )

    def _finish(self) -> None:
        """Evaluates the last model, if that has not been done yet, and examines it."""
        last = self._log.rows[-1]
        # Exact figures, or noised ones: without the private table, only the noised ones are left.
        measured = [value for name, value in last.items() if "eval_" in name]
        if measured and all(value is None for value in measured):
            self._publish({**last, **self._evaluated(last["round"])})
        if self._events is not None:
            self._events.close()
        self._evaluator.examine(self._output, last["round"], self._released_weights())


def _is_finite(tensor: np.ndarray) -> bool:
    # The sum of squares takes no memory. It is finite only if all entries are, but may overflow.
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.vdot(tensor, tensor)) or np.all(np.isfinite(tensor)))


def _shown(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the figures of a round for the progress bar."""
    shown = {}
    if row["loss"] is not None:
        shown["loss"] = f"{row['loss']:.3f}"
    if row["top1"] is not None:
        shown["top-1"] = f"{row['top1']:.1%}"
    if row["epsilon"] is not None:
        shown["ε"] = display.round_up(row["epsilon"], 3)
    return shown
