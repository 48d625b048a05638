"""A training run from its config to its results folder, and its resumption.

The folder of a run:

    config.json                 resolved options, what was derived from them, versions
    metrics.csv, curves.png, tensorboard/
    model.npz, best_model.npz   of the last round and of the best evaluation (models/export.py)
    privacy_statement.json, .md
    private/ledger.sqlite       who took part when, and which state was committed
    private/checkpoints/        state of the process, with seed and noise buffers
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_federated as tff
import tqdm

from tff_dpftrl import durable_files, execution
from tff_dpftrl.accounting import display
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.models import export
from tff_dpftrl.participation import cohorts, ledger
from tff_dpftrl.training import (
    checkpoint,
    cohort_seed,
    manifest,
    privacy,
    process,
    results,
    sampled_privacy,
    task,
)
from tff_dpftrl.training import config as config_lib

_ACCURACY = "eval_top1_in_vocab"
_COLUMNS = (
    "round",
    "loss",
    "top1",
    "epsilon",
    *(f"eval_{name}" for name in task.EVALUATION_METRICS),
    "clients",
    "seconds",
)


@dataclasses.dataclass(frozen=True)
class TrainingResults:
    """What a finished run has to say.

    Attributes:
      rows: One row of metrics for each round.
      baselines: Top-1 accuracy of n-gram models on the same held-out users.
      statement: The privacy statement.
      summary: The outcome in a few lines.
    """

    rows: Sequence[Mapping[str, Any]]
    baselines: Mapping[str, float]
    statement: statement_lib.PrivacyStatement
    summary: str


def train(config: config_lib.TrainingConfig | None, output: pathlib.Path) -> TrainingResults:
    """Trains a model and writes everything there is to know to a folder.

    Each round is committed before the next one begins: its cohort to the ledger
    before a client runs, then state and metrics to a checkpoint, then the
    checkpoint's fingerprint to the ledger. A run killed at any moment goes on
    with the same cohort and the same noise.

    Args:
      config: Options of a new run, or None to go on with the run in `output`.
      output: Folder of the run; created for a new one.

    Returns:
      Metrics, statement and summary, which are also in the folder.

    Raises:
      ValueError: If an option, the data or the folder cannot be used; nothing has
        been written then.
      OSError: If a file cannot be written; every committed round is kept.
    """
    known = None
    if config is None:
        known = manifest.read(output)
        config = known.config
    else:
        manifest.check_is_free(output)
    language_task = task.build_language_task(config)
    if known is not None:
        known.check_task(language_task)
    plan = _plan(config, language_task, known)
    if config.max_epsilon is not None and plan.epsilon_after(1) > config.max_epsilon:
        raise ValueError(
            f"max_epsilon={config.max_epsilon:g} does not pay for one round, which costs "
            f"{display.round_up(plan.epsilon_after(1))}: raise it or noise_multiplier."
        )
    plan.sampler(seed=0)  # Refuses what the population cannot do before anything is written.
    context = execution.local if config.secagg_bits is None else execution.secure_sum_simulation
    with context():
        learning_process = process.build_process(config, plan, language_task.functional_model())
        state = learning_process.initialize()
        private = output / "private"
        checkpoints = checkpoint.CheckpointFolder(private / "checkpoints")
        ledger_path = private / "ledger.sqlite"
        if known is None:
            shutil.rmtree(private, ignore_errors=True)  # Of a run that never got as far as round 1.
            output.mkdir(parents=True, exist_ok=True)
            private.mkdir(mode=0o700)
            fingerprint = checkpoints.save(0, state, {})
            ledger.Ledger.create(ledger_path, plan.schema, initial_checkpoint=fingerprint).close()
            cohort_seed.create(private, config, plan)
            manifest.write(output, config, plan, language_task)
        sampler = plan.sampler(cohort_seed.read(private, config, plan))
        guard = plan.budget_guard(config.max_epsilon)
        with ledger.Ledger.open(ledger_path, plan.schema, budget_guard=guard) as book:
            run = _Run(config, output, language_task, plan, sampler, learning_process, book)
            run.restore(checkpoints, template=state)
            run.run_rounds()
            return run.finish()


def _plan(
    config: config_lib.TrainingConfig,
    language_task: task.LanguageTask,
    known: manifest.Manifest | None,
) -> privacy.PrivacyPlan:
    """The plan of a new run, or of the one that is being resumed."""
    num_clients = len(language_task.train.user_ids)
    if config.algorithm != "dp-ftrl":
        if known is None:
            return sampled_privacy.SampledPlan.make(config, num_clients)
        return sampled_privacy.SampledPlan.resumed(config, num_clients, known.derived)
    num_parameters = language_task.model.num_parameters
    if known is None:
        return privacy.DpFtrlPlan.make(config, num_clients, num_parameters)
    return privacy.DpFtrlPlan.resumed(config, num_clients, num_parameters, known.derived)


class _Run:
    """The rounds of one process of a run."""

    def __init__(
        self,
        config: config_lib.TrainingConfig,
        output: pathlib.Path,
        language_task: task.LanguageTask,
        plan: privacy.PrivacyPlan,
        sampler: cohorts.CohortSampler,
        learning_process: tff.learning.templates.LearningProcess,
        book: ledger.Ledger,
    ):
        self._config = config
        self._output = output
        self._task = language_task
        self._plan = plan
        self._sampler = sampler
        self._process = learning_process
        self._ledger = book

    def restore(self, checkpoints: checkpoint.CheckpointFolder, template: Any) -> None:
        """Reads the state that the ledger committed last."""
        last = self._ledger.last_committed_round
        self._rounds_done = 0 if last is None else last + 1
        self._fingerprint = self._ledger.last_checkpoint
        self._checkpoints = checkpoints
        self._state, row = checkpoints.load(self._rounds_done, self._fingerprint, template)
        self._log = results.MetricsLog(self._output, _COLUMNS, self._rounds_done)
        if row:
            # The crash may have come between the commit and the row.
            self._report(row)

    def run_rounds(self) -> None:
        """Runs the rounds that are left, with a progress bar."""
        interval = 0.1 if sys.stderr.isatty() else 10.0
        with tqdm.tqdm(
            total=self._config.num_rounds,
            initial=self._rounds_done,
            unit="round",
            mininterval=interval,
            dynamic_ncols=True,
        ) as bar:
            while not self._is_over():
                row = self._run_round(self._rounds_done)
                shown = {"loss": f"{row['loss']:.3f}", "top-1": f"{row['top1']:.1%}"}
                if row["epsilon"] is not None:
                    shown["ε"] = display.round_up(row["epsilon"], 3)
                bar.set_postfix(shown, refresh=False)
                bar.update()

    def _is_over(self) -> bool:
        config, done = self._config, self._rounds_done
        if done == config.num_rounds:
            return True
        if config.max_epsilon is not None and (
            self._plan.epsilon_after(done + 1) > config.max_epsilon
        ):
            return True
        best = self._best_accuracy()
        return best is not None and (
            config.stop_at_accuracy is not None and best >= config.stop_at_accuracy
        )

    def _best_accuracy(self) -> float | None:
        found = [row[_ACCURACY] for row in self._log.rows if row[_ACCURACY] is not None]
        return max(found, default=None)

    def _run_round(self, round_index: int) -> dict[str, Any]:
        start = time.monotonic()
        members = [self._task.train.user_ids[i] for i in self._sampler.cohort(round_index)]
        self._ledger.begin_round(
            round_index,
            members,
            noise_fingerprint=self._noise_fingerprint(),
            checkpoint_fingerprint=self._fingerprint,
        )
        client_data = [self._task.client_dataset(user, round_index) for user in members]
        output = self._process.next(self._state, client_data)
        trained = output.metrics["client_work"]["train"]
        row = {
            "round": round_index + 1,
            "loss": float(trained["loss"]),
            "top1": float(trained["top1_in_vocab"]),
            "epsilon": self._plan.epsilon_after(round_index + 1),
            "clients": None if self._plan.needs_secret_cohorts else len(members),
        }
        self._warn_of_dropped(output.metrics, round_index, len(members))
        self._check_finite(output.state, round_index)
        self._state = output.state
        if (round_index + 1) % self._config.eval_every == 0 or (
            round_index + 1 == self._config.num_rounds
        ):
            row |= self._evaluate()
        row["seconds"] = time.monotonic() - start
        self._fingerprint = self._checkpoints.save(round_index + 1, self._state, row)
        self._ledger.commit_round(round_index, members, self._fingerprint)
        self._checkpoints.keep_only(round_index + 1, self._fingerprint)
        self._rounds_done = round_index + 1
        self._report(row)
        return row

    def _evaluate(self) -> dict[str, float]:
        weights = self._process.get_model_weights(self._state).trainable
        measured = self._task.evaluate(weights)
        return {f"eval_{name}": measured[name] for name in task.EVALUATION_METRICS}

    def _report(self, row: Mapping[str, Any]) -> None:
        """Publishes what has been committed: the row and, if it is the best, the model."""
        self._log.append(row)
        if row.get(_ACCURACY) is not None and row[_ACCURACY] == self._best_accuracy():
            self._write_model("best_model.npz")

    def _warn_of_dropped(self, metrics: Any, round_index: int, num_members: int) -> None:
        dropped = int(metrics["aggregator"].get("non_finite_clients", 0)) if metrics else 0
        if dropped:
            tqdm.tqdm.write(
                f"Round {round_index + 1}: {dropped} of {num_members} clients had an update that "
                "is not finite (NaN, Inf), which counts as zero; lower client_learning_rate.",
                file=sys.stderr,
            )

    def _check_finite(self, state: Any, round_index: int) -> None:
        """Stops before a model that has diverged is committed."""
        weights = self._process.get_model_weights(state).trainable
        if not all(np.all(np.isfinite(weight)) for weight in weights):
            raise ValueError(
                f"Training diverged: the weights after round {round_index + 1} are not finite. "
                "Lower client_learning_rate or server_learning_rate and start a new run."
            )

    def _noise_fingerprint(self) -> str | None:
        """Differs from round to round: the aggregator's state counts the rounds."""
        if not self._plan.has_noise:
            return None
        return checkpoint.fingerprint(self._state.aggregator)

    def finish(self) -> TrainingResults:
        """Writes model, curves and statement."""
        last = self._log.rows[-1]
        if last[_ACCURACY] is None:
            self._report(last | self._evaluate())
        self._log.close()
        statement = self._plan.statement(
            self._ledger.observed(),
            config=self._config,
            user_unit=self._task.train.corpus.user_unit,
            vocabulary_source=self._task.words.source,
        )
        for name, text in (
            ("privacy_statement.json", statement.to_json() + "\n"),
            ("privacy_statement.md", statement.to_markdown()),
        ):
            durable_files.write(self._output / name, text.encode("utf-8"))
        self._write_model("model.npz")
        baselines = self._task.baselines()
        results.plot_curves(
            self._output / "curves.png",
            self._log.rows,
            title=self._title(statement),
            baselines=baselines,
        )
        return TrainingResults(
            self._log.rows, baselines, statement, self._summary(statement, baselines)
        )

    def _write_model(self, name: str) -> None:
        weights = self._process.get_model_weights(self._state)
        export.write(self._output / name, self._task.model, weights.trainable)

    def _title(self, statement: statement_lib.PrivacyStatement) -> str:
        promised = (
            f"ε = {display.round_up(statement.epsilon, 3)} at δ = {statement.delta:g}"
            if statement.has_guarantee
            else "no privacy guarantee"
        )
        return f"{self._config.data}: {statement.mechanism}, {promised}"

    def _summary(
        self, statement: statement_lib.PrivacyStatement, baselines: Mapping[str, float]
    ) -> str:
        last = self._log.rows[-1]
        lines = [
            f"After {last['round']} rounds: top-1 accuracy on held-out users "
            f"{last[_ACCURACY]:.2%} ("
            + ", ".join(f"{name} {value:.2%}" for name, value in baselines.items())
            + ")."
        ]
        if statement.has_guarantee:
            lines.append(
                f"Privacy: ε = {display.round_up(statement.epsilon)} at δ = {statement.delta:g}, "
                + (
                    f"ρ-zCDP {display.round_up(statement.rho_zcdp)}, "
                    if statement.rho_zcdp is not None
                    else ""
                )
                + "per user; see privacy_statement.md."
            )
        else:
            lines.append("Privacy: NO guarantee. " + " ".join(statement.no_guarantee))
        return "\n".join(lines)
