"""A training run from its config to its results folder, and its resumption.

The folder of a run:

    config.json                 resolved options, what was derived from them, versions
    metrics.csv, metrics_README.md, curves.png, tensorboard/
    model.npz, best_model.npz   of the last round and of the best evaluation (models/export.py)
    vocabulary.json             the words of their ids, and how text is split into them
    held_out.json               what is measured once on the held-out users, after training
    privacy_statement.json, .md
    private/ledger.sqlite       who took part when, and which state was committed
    private/checkpoints/        state of the process, with seed and noise buffers
    private/manifest.json       what config.json said when the run began
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tqdm

from tff_dpftrl import durable_files
from tff_dpftrl.accounting import display
from tff_dpftrl.models import export, table
from tff_dpftrl.participation import cohorts
from tff_dpftrl.runs import (
    checkpoint,
    cohort_seed,
    committed_rounds,
    manifest,
    metrics_log,
    privacy,
    tensorboard_log,
)
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import (
    corpus,
    engine,
    own_models,
    process,
    released_model,
    report,
    startup,
    stopping,
    task,
    trained_model,
    warm_start,
)
from tff_dpftrl.training import options as options_lib
from tff_dpftrl.training import placement as placement_lib

Say = Callable[[str], None]
"""Receives what a person should know while a run starts and goes on, line by line."""

_USERS = "training users"
_WORDS = "words of the vocabulary"


_HERE = placement_lib.Placement()


def _to_stderr(line: str) -> None:
    tqdm.tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()


def train(
    config: config_lib.TrainingConfig | None,
    output: str | pathlib.Path,
    *,
    text: corpus.RunText | None = None,
    model: own_models.Own | None = None,
    model_trained_on: str | None = None,
    say: Say = _to_stderr,
    placement: placement_lib.Placement = _HERE,
) -> report.TrainingResults:
    """Trains a model and writes everything there is to know to a folder.

    Each round is committed before the next one begins: its cohort to the ledger
    before a client runs, then state and metrics to a checkpoint, then the
    checkpoint's fingerprint to the ledger. A run killed at any moment goes on
    with the same cohort and the same noise. `manifest.exists(output)` tells whether
    there is a run to go on with.

    Args:
      config: Options of a new run, or None to go on with the run in `output`.
      output: Folder of the run; created for a new one.
      text: What `corpus.read` returned for the config; it is read now if None. Text that you
        have in memory can be given too (docs/own_models.md).
      model: A `tf.keras.Model` or `tff.learning.models.FunctionalModel` of your own instead of
        one that the config names: it maps word ids, int32, [batch, T], to scores (logits) of
        the next words, float32, [batch, T, V], where T is `sequence_length` and V is
        `text.words.size`. It begins with the weights that it has, and is not changed; loss and
        metrics are those of this package. To go on with such a run, give the same model again.
      model_trained_on: Of a new run with a model of your own: the public text that its weights
        were trained on, as the statement is to name it, or "nothing" if they were drawn at
        random. If None, the statement says beside ε that they may tell of the same people.
      say: Receives the facts of the run as soon as each is known, and warnings; the
        terminal's standard error by default.
      placement: Where clients work; in this process by default.

    Returns:
      Metrics, statement and summary, which are also in the folder.

    Raises:
      ValueError: If an option, the data, the model or the folder cannot be used; nothing has
        been written then.
      OSError: If a file cannot be written; every committed round is kept.
    """
    output, is_new = pathlib.Path(output), config is not None
    if not is_new:
        known = manifest.read(output)
        config = options_lib.of_begun_run(known.config, str(output / "config.json"))
        own_models.check_resumed(config, model, model_trained_on, output)
    else:
        manifest.check_is_free(output)
        config = own_models.named_in(config, model, model_trained_on)
        config = config.with_absolute_paths().with_model_sizes()
    placement.check(config.engine)
    if text is None:
        say("Reading the data ...")
    elif is_new:
        corpus.check_named(config, text)
    language_task = task.build_language_task(config, text, model)
    num_clients = len(language_task.train.user_ids)
    num_parameters = language_task.model.num_parameters
    for line in startup.describe_task(language_task):
        say(line)
    facts: dict[str, Any] = {}
    if is_new and model is not None:
        facts |= own_models.weights_facts(model_trained_on)
        say(
            f"Model: your own, of {num_parameters} weights. Text that they were trained on: "
            f"{facts['initial_weights_source']}."
        )
    if is_new and config.initial_weights is not None:
        initial = warm_start.read(
            pathlib.Path(config.initial_weights),
            language_task.model,
            language_task.words,
            config.seed,
            protected=config.data,
        )
        say(
            f"Initial weights: {initial.source}; it knows {initial.num_known_words} of "
            f"{len(language_task.words.words)} words."
        )
        language_task = dataclasses.replace(language_task, initial_weights=initial.weights)
        facts["initial_weights_source"] = initial.source
        facts["initial_weights_are_public"] = initial.is_public
    if is_new:
        plan = config.privacy().plan(num_clients, num_parameters)
        known = _manifest(config, plan, language_task, facts)
    else:
        _check_unchanged(known, config, language_task)
        plan = config.privacy().resumed(num_clients, num_parameters, known.derived)
    for line in startup.describe_plan(plan, num_parameters):
        say(line)
    if config.max_epsilon is not None and plan.epsilon_after(1) > config.max_epsilon:
        raise ValueError(
            f"max_epsilon={config.max_epsilon:g} does not pay for one round, which costs "
            f"{display.round_up(plan.epsilon_after(1))}: raise it or noise_multiplier."
        )
    if config.engine == "tff":
        process.check_state_fits(plan, num_parameters)
    plan.sampler(seed=0)  # Refuses what the population cannot do before anything is written.
    say("Building the computations ...")
    with engine.open_engine(config, plan, language_task, placement) as (
        learning_process,
        client_value,
    ):
        state = learning_process.initialize()
        with _open(output, plan, known, config, state, is_new) as rounds:
            durable_files.remove_leftovers(output)
            trained_model.write_vocabulary(
                output, language_task.words, language_task.train.corpus.is_tokenized
            )
            say(f"Results: {output}/, {rounds.rounds_done} of {plan.num_rounds} rounds done.")
            sampler = plan.sampler(_cohort_seed(output / "private", plan, config))
            run = _Run(
                config,
                output,
                language_task,
                plan,
                sampler,
                learning_process,
                client_value,
                rounds,
                say,
            )
            run.restore(template=state)
            run.run_rounds()
            run.finish()
            return report.write(output, known, config, plan, rounds)


def _manifest(
    config: config_lib.TrainingConfig,
    plan: privacy.PrivacyPlan,
    language_task: task.LanguageTask,
    facts: Mapping[str, Any],
) -> manifest.Manifest:
    users, words = language_task.train.user_ids, language_task.words
    return manifest.Manifest(
        config=config.to_dict(),
        derived=plan.derived(),
        facts={
            **facts,
            "training_users": len(users),
            "user_unit": language_task.train.corpus.user_unit,
            "vocabulary_source": words.source,
            "vocabulary_is_public": words.is_public,
            "vocabulary_size": words.size,
            "model": table.describe(language_task.model),
            "num_parameters": language_task.model.num_parameters,
        },
        identities={
            _USERS: manifest.identity(users),
            _WORDS: manifest.identity(words.words),
        },
    )


def _check_unchanged(
    known: manifest.Manifest,
    config: config_lib.TrainingConfig,
    language_task: task.LanguageTask,
) -> None:
    remedy = "restore the data"
    if config.data == "docs":
        remedy += " (with data 'docs': the same installed packages)"
    known.check_identity(_USERS, language_task.train.user_ids, remedy=remedy)
    known.check_identity(_WORDS, language_task.words.words, remedy=remedy)
    own_models.check_same(known.facts["model"], language_task.model)


def _open(
    output: pathlib.Path,
    plan: privacy.PrivacyPlan,
    known: manifest.Manifest,
    config: config_lib.TrainingConfig,
    state: Any,
    is_new: bool,
) -> committed_rounds.CommittedRounds:
    """Opens the rounds of a run, after making its folder if it is new."""
    private = output / "private"
    options = {
        "noise_part": "aggregator" if plan.has_noise else None,
        "binding": known.digest,
        "budget_guard": plan.budget_guard(config.max_epsilon),
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


def _is_secret(plan: privacy.PrivacyPlan) -> bool:
    # A run with a known noise seed is not private, and is meant to be repeatable.
    return plan.needs_secret_cohorts and plan.deterministic_seed is None


def _cohort_seed(
    private: pathlib.Path, plan: privacy.PrivacyPlan, config: config_lib.TrainingConfig
) -> int:
    return cohort_seed.read(private) if _is_secret(plan) else config.seed


class _Run:
    """The rounds of one process of a run."""

    def __init__(
        self,
        config: config_lib.TrainingConfig,
        output: pathlib.Path,
        language_task: task.LanguageTask,
        plan: privacy.PrivacyPlan,
        sampler: cohorts.CohortSampler,
        learning_process: engine.Process,
        client_value: engine.ClientValue,
        rounds: committed_rounds.CommittedRounds,
        say: Say,
    ):
        self._config = config
        self._output = output
        self._task = language_task
        self._plan = plan
        self._sampler = sampler
        self._process = learning_process
        self._client_value = client_value
        self._rounds = rounds
        self._say = say

    def restore(self, template: Any) -> None:
        """Reads the state that the ledger committed last."""
        snapshot, row = self._rounds.restore()
        self._state = snapshot.in_structure_of(template)
        self._log = metrics_log.MetricsLog(self._output, report.COLUMNS, self._rounds.rounds_done)
        self._events = tensorboard_log.TensorBoardLog(self._output)
        if row:
            # The crash may have come between the commit and the row.
            self._publish(row)

    def run_rounds(self) -> None:
        """Runs the rounds that are left, with a progress bar."""
        interval = 0.1 if sys.stderr.isatty() else 10.0
        with tqdm.tqdm(
            total=self._config.num_rounds,
            initial=self._rounds.rounds_done,
            unit="round",
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
        members = [self._task.train.user_ids[i] for i in self._sampler.cohort(round_index)]
        self._rounds.begin(round_index, members)
        client_data = [self._client_value(user, round_index) for user in members]
        output = self._process.next(self._state, client_data)
        trained = output.metrics["client_work"]["train"]
        row = {
            "round": round_index + 1,
            # A cohort without text has neither: TFF's quotients of nothing are 0.
            "loss": float(trained["loss"]) if trained["num_targets"] else None,
            "top1": float(trained["top1_in_vocab"]) if trained["num_in_vocab"] else None,
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
        self._rounds.commit(round_index, self._state, row)
        self._publish(row)
        return row

    def _evaluate(self) -> dict[str, float]:
        weights = self._released_weights()
        measured = self._task.evaluate(weights)
        return {f"eval_{name}": measured[name] for name in report.EVALUATION_METRICS}

    def _released_weights(self) -> list[np.ndarray]:
        return released_model.weights(self._config, checkpoint.Snapshot.of(self._state))

    def _publish(self, row: Mapping[str, Any]) -> None:
        """Publishes what has been committed: the row and, if it is the best, the model."""
        row = self._log.append(row)
        self._events.append(row)
        accuracy = row[stopping.ACCURACY]
        if accuracy is not None and accuracy == stopping.best_accuracy(self._log.rows):
            weights = self._released_weights()
            export.write(self._output / "best_model.npz", self._task.model, weights)

    def _warn_of_dropped(self, metrics: Any, round_index: int, num_members: int) -> None:
        dropped = int(metrics["aggregator"].get("non_finite_clients", 0)) if metrics else 0
        if not dropped:
            return
        # A secret cohort's size is secret too.
        who = "some" if self._plan.needs_secret_cohorts else f"{dropped} of {num_members}"
        self._say(
            f"Round {round_index + 1}: {who} clients had an update that is not finite (NaN, Inf), "
            "which counts as zero; lower client_learning_rate."
        )

    def _check_finite(self, state: Any, round_index: int) -> None:
        """Stops before a model that has diverged is committed."""
        weights = self._process.get_model_weights(state).trainable
        if not all(np.all(np.isfinite(weight)) for weight in weights):
            raise ValueError(
                f"Training diverged: the weights after round {round_index + 1} are not finite. "
                "Lower client_learning_rate or server_learning_rate and start a new run."
            )

    def finish(self) -> None:
        """Evaluates the last model and simpler ones, if that has not been done yet."""
        last = self._log.rows[-1]
        if last[stopping.ACCURACY] is None:
            self._publish(last | self._evaluate())
        self._events.close()
        weights = self._released_weights()
        report.write_held_out(self._output, last["round"], self._task.examine(weights))
        report.write_baselines(self._output, self._task.baselines())
