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
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl import durable_files, validation
from tff_dpftrl.accounting import display
from tff_dpftrl.models import table
from tff_dpftrl.participation import cohorts
from tff_dpftrl.runs import manifest, privacy
from tff_dpftrl.training import (
    committed_run,
    corpus,
    engine,
    own_models,
    process,
    report,
    startup,
    task,
    trained_model,
    warm_start,
)
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import options as options_lib
from tff_dpftrl.training import placement as placement_lib

_USERS = "training users"
_WORDS = "words of the vocabulary"


_HERE = placement_lib.Placement()


def train(
    config: config_lib.TrainingConfig | None,
    output: str | pathlib.Path,
    *,
    text: corpus.RunText | None = None,
    model: own_models.Own | None = None,
    model_trained_on: str | None = None,
    progress: committed_run.Progress = committed_run.to_stderr,
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
      progress: Receives the facts of the run as soon as each is known, and warnings; the
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
        progress("Reading the data ...")
    elif is_new:
        corpus.check_named(config, text.train)
    language_task = task.build_language_task(config, text, model)
    num_clients = len(language_task.train.user_ids)
    num_parameters = language_task.model.num_parameters
    for line in startup.describe_task(language_task):
        progress(line)
    facts: dict[str, Any] = {}
    if is_new and model is not None:
        facts |= own_models.weights_facts(model_trained_on)
        progress(
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
        progress(
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
        progress(line)
    if config.max_epsilon is not None and plan.epsilon_after(1) > config.max_epsilon:
        raise validation.UsageError(
            f"max_epsilon={config.max_epsilon:g} does not pay for one round, which costs "
            f"{display.round_up(plan.epsilon_after(1))}: raise it or noise_multiplier."
        )
    if config.engine == "tff":
        process.check_state_fits(plan, num_parameters)
    plan.sampler(seed=0)  # Refuses what the population cannot do before anything is written.
    progress("Building the computations ...")
    with engine.open_engine(config, plan, language_task, placement) as (
        learning_process,
        client_value,
    ):
        state = learning_process.initialize()
        with committed_run.open_rounds(
            output, plan, known, state, max_epsilon=config.max_epsilon, is_new=is_new
        ) as rounds:
            durable_files.remove_leftovers(output)
            trained_model.write_vocabulary(
                output, language_task.words, language_task.train.corpus.is_tokenized
            )
            progress(f"Results: {output}/, {rounds.rounds_done} of {plan.num_rounds} rounds done.")
            sampler = plan.sampler(committed_run.sampling_seed(output, plan, config.seed))
            users = language_task.train.user_ids
            clients = _Clients(users, sampler, learning_process, client_value)
            committed_run.CommittedRun(
                config, output, language_task, plan, clients, rounds, progress
            ).run(template=state)
            go_on = own_models.how_to_go_on(config.model, output)
            return report.write(output, known, config, plan, rounds, go_on=go_on)


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


class _Clients(committed_run.Trainer):
    """A round of federated learning."""

    too_fast = "client_learning_rate or server_learning_rate"
    unit = "clients"

    def __init__(
        self,
        users: Sequence[str],
        sampler: cohorts.CohortSampler,
        process: engine.Process,
        client_value: engine.ClientValue,
    ):
        self._users = users
        self._sampler = sampler
        self._process = process
        self._client_value = client_value

    def members(self, round_index):
        return [self._users[index] for index in self._sampler.cohort(round_index)]

    def train(self, state, round_index, members):
        client_data = [self._client_value(user, round_index) for user in members]
        output = self._process.next(state, client_data)
        trained = output.metrics["client_work"]["train"]
        aggregated = output.metrics["aggregator"] if output.metrics else {}
        # A cohort without text has neither: TFF's quotients of nothing are 0.
        return committed_run.Trained(
            state=output.state,
            loss=float(trained["loss"]) if trained["num_targets"] else None,
            top1=float(trained["top1_in_vocab"]) if trained["num_in_vocab"] else None,
            num_not_finite=int(aggregated.get("non_finite_clients", 0)) if aggregated else 0,
        )
