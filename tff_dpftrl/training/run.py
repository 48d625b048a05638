"""Federated training of a language model, from its options to its results folder.

To the folder of every run (`runs.run`) it adds:

    tensorboard/
    model.npz, best_model.npz   of the last round and of the best evaluation (models/export.py)
    vocabulary.json             the words of their ids, and how text is split into them
    private/vocabulary.json     the same if the words were counted with noise; it is written first
    held_out.json               what is measured once on the held-out users, after training
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl.data import vocabulary_file
from tff_dpftrl.execution import allocator
from tff_dpftrl.learning import metric_sums
from tff_dpftrl.models import table
from tff_dpftrl.runs import earlier_runs, manifest, prepared, privacy
from tff_dpftrl.runs import progress as progress_lib
from tff_dpftrl.runs import run as run_lib
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import (
    corpus,
    custom_models,
    federated_trainer,
    opening,
    process,
    report,
    startup,
    task,
    trained_model,
    warm_start,
)
from tff_dpftrl.training import placement as placement_lib

# Number of weights, 100 MB of them, from which on a run takes less memory rather than less time.
_MEMORY_FIRST = 25_000_000


def train(
    config: config_lib.TrainingConfig | None,
    output: str | pathlib.Path,
    *,
    text: corpus.RunText | None = None,
    rows: Any = None,
    model: custom_models.Model | None = None,
    model_trained_on: str | os.PathLike[str] | None = None,
    progress: progress_lib.Progress = progress_lib.to_stderr,
    placement: placement_lib.Placement = opening.IN_THIS_PROCESS,
) -> report.TrainingResults:
    """Trains a model with federated learning and writes all results to a folder.

    A run that is killed at any moment can be resumed: it goes on from the last committed round,
    with the same cohort. `manifest.exists(output)` tells whether there is a run to go on with.

    Args:
      config: Options of a new run, or None to go on with the run in `output`.
      output: Folder of the run; created for a new one.
      text: Text and vocabulary of the run, as `corpus.read` returns them; read now from
        the files that the config names if None. Text in memory can be given too
        (docs/how_to/custom_models.md).
      rows: A table in memory instead of files: a pandas or polars data frame, an Arrow table, a
        `datasets.Dataset`, or an iterable of (user, text) pairs, which is read once
        (docs/how_to/tables.md). The config's `data` is its name. Give the same rows again to go on.
      model: A `tf.keras.Model` or a functional model (`learning.model.Model` or
        `tff.learning.models.FunctionalModel`) instead of the model that the config names: it maps
        word ids, int32, [batch, T], to scores (logits) of the next words, float32, [batch, T, V],
        where T is `sequence_length` and V is `text.words.size`. It begins with the weights that it
        has, and is not changed; loss and metrics are those of this package. To go on with such a
        run, give the same model again.
      model_trained_on: Public text that the weights of a custom model were trained on, as the
        statement is to name it, or "nothing" for weights drawn at random; or the folder of an
        earlier run, as a path, with which this one is then composed. For a new run only. If None,
        the statement says beside ε that they may tell of the same people.
      progress: Callback for progress lines and warnings; prints to standard error by default.
      placement: Where clients work; in this process by default.

    Returns:
      Metrics, statement and summary, which are also in the folder.

    Raises:
      UsageError: If an option, the data, the model or the folder cannot be used; nothing has
        been written then.
      OSError: If a file cannot be written; every committed round is kept.
    """
    opened = opening.open_run(
        config,
        pathlib.Path(output),
        text=text,
        rows=rows,
        model=model,
        model_trained_on=model_trained_on,
        progress=progress,
        placement=placement,
    )
    return train_opened(opened, progress)


def train_opened(
    opened: opening.OpenedRun, progress: progress_lib.Progress = progress_lib.to_stderr
) -> report.TrainingResults:
    """Trains a run that `opening` has opened, to its end."""
    is_new = opened.known is None
    run = _new(opened, progress) if is_new else _begun(opened, progress)
    return run_lib.train(opened.output, run, progress, is_new=is_new)


def _new(opened: opening.OpenedRun, progress: progress_lib.Progress) -> prepared.Prepared:
    """Prepares a new run: chooses its initial weights and its noise."""
    config, language = opened.config, opened.config.language
    # If words were shown before they are kept, starting anew would show two noisy counts.
    held: list[str] = []
    say = held.append if config.is_counted else progress
    language_task = _task(opened, say)
    facts: dict[str, Any] = {}
    if opened.model is not None:
        facts |= custom_models.weights_facts(opened.model_trained_on, language_task.train.user_ids)
        say(
            f"Model: your own, of {language_task.model.num_parameters} weights. Text that they "
            f"were trained on: {facts['initial_weights_source']}."
        )
    if language.initial_weights is not None:
        initial = warm_start.read(
            pathlib.Path(language.initial_weights),
            language_task.model,
            language_task.words,
            config.seed,
            protected=language.data,
            table=language.table,
            users=(opened.text.train, opened.text.held_out),
        )
        say(
            f"Initial weights: {initial.source}; it knows {initial.num_known_words} of "
            f"{len(language_task.words.words)} words."
        )
        folder = pathlib.Path(language.initial_weights).expanduser()
        words = language_task.words
        if pathlib.Path(language.vocabulary or "").expanduser().parent == folder:
            words, not_covered = warm_start.words_of(words, initial.source, initial.is_public)
            facts |= {"not_covered": not_covered} if not_covered else {}
        language_task = dataclasses.replace(
            language_task, initial_weights=initial.weights, words=words
        )
        facts["initial_weights_source"] = initial.source
        facts["initial_weights_are_public"] = initial.is_public
        facts |= earlier_runs.facts_of(folder, language_task.train.user_ids)
    plan = config.plan(len(language_task.train.user_ids), language_task.model.num_parameters)
    known = _manifest(config, plan, language_task, facts).bound_to_choice(opened.output)
    run = _prepared(opened, known, plan, language_task, say, progress)
    return dataclasses.replace(run, announcement=held)


def _begun(opened: opening.OpenedRun, progress: progress_lib.Progress) -> prepared.Prepared:
    """Prepares a run to go on with; refuses other data, and another model."""
    known = opened.known
    assert known is not None
    language_task = _task(opened, progress)
    remedy = "restore the data"
    if opened.config.language.data == "docs":
        remedy += " (with data 'docs': the same installed packages)"
    known.check_identities(_identities(opened.config, language_task), remedy=remedy)
    custom_models.check_same(known.facts["model"], language_task.model)
    plan = opened.config.request().resumed(
        len(language_task.train.user_ids), language_task.model.num_parameters, known.derived
    )
    return _prepared(opened, known, plan, language_task, progress, progress)


def _task(opened: opening.OpenedRun, progress: progress_lib.Progress) -> task.LanguageTask:
    options = opened.config.part(task.TaskOptions)
    language_task = task.build_language_task(options, opened.text, opened.model)
    if language_task.model.num_parameters >= _MEMORY_FIRST:
        allocator.give_back_memory()
    for line in startup.describe_task(language_task):
        progress(line)
    return language_task


def _prepared(
    opened: opening.OpenedRun,
    known: manifest.Manifest,
    plan: privacy.FederatedPlan,
    language_task: task.LanguageTask,
    say: progress_lib.Progress,
    progress: progress_lib.Progress,
) -> prepared.Prepared:
    config, num_parameters = opened.config, language_task.model.num_parameters
    for line in startup.describe_plan(plan, num_parameters):
        say(line)
    reportable = report.of_training_run(
        config.part(report.ReportOptions), known, plan, opened.output
    )
    bounds = None if reportable.figures is None else reportable.figures.bounds
    reportable.schedule.check_budget(plan)
    words, is_tokenized = language_task.words, language_task.train.corpus.is_tokenized

    def keep_first(output: pathlib.Path) -> None:
        if config.is_counted:
            path = output / manifest.PRIVATE / vocabulary_file.NAME
            vocabulary_file.write(path, words, words.rule(is_tokenized), private=True)

    return prepared.Prepared(
        report=reportable,
        trainer=federated_trainer.open_trainer(
            lambda: process.build_round(
                plan,
                config.rules,
                language_task.functional_model(),
                metrics=functools.partial(metric_sums.build, bounds=bounds),
            ),
            plan,
            language_task,
            placement=opened.placement,
            progress=progress,
        ),
        evaluator=report.TextEvaluator(
            language_task,
            protects_held_out=config.evaluation.protects_held_out,
            counts_of_users=language_task.counts_of_users(config.evaluation.eval_sequences)
            if reportable.evaluation is not None
            else None,
        ),
        public_seed=config.seed,
        keep=functools.partial(
            trained_model.write_vocabulary, words=words, is_tokenized=is_tokenized
        ),
        keep_first=keep_first,
    )


def _manifest(
    config: config_lib.TrainingConfig,
    plan: privacy.PrivacyPlan,
    language_task: task.LanguageTask,
    facts: Mapping[str, Any],
) -> manifest.Manifest:
    words = language_task.words
    not_covered = [
        *facts.get("not_covered", ()),
        *report.not_covered_of_held_out(
            config.evaluation.held_out_users, released=config.num_evaluations > 0
        ),
    ]
    return manifest.Manifest(
        config=config.to_dict(),
        derived=plan.derived(),
        facts={
            **facts,
            **({"not_covered": not_covered} if not_covered else {}),
            "training_users": len(language_task.train.user_ids),
            "user_unit": language_task.train.corpus.user_unit,
            "vocabulary_source": words.source,
            "vocabulary_is_public": words.is_public,
            **({"vocabulary_is_noised": True} if words.is_noised else {}),
            "vocabulary_size": words.size,
            "model": table.describe(language_task.model),
            "num_parameters": language_task.model.num_parameters,
        },
        identities=manifest.identities(_identities(config, language_task)),
        recorded_kind=manifest.TRAINING,
    )


def _identities(
    config: config_lib.TrainingConfig, language_task: task.LanguageTask
) -> dict[str, Sequence[str]]:
    """Returns what must not change while a run lasts, by name."""
    released = {}
    if config.num_evaluations:
        released["texts of the held-out users"] = [language_task.held_out_text.survey.digest]
    return {
        **released,
        "training users": language_task.train.user_ids,
        "words of the vocabulary": language_task.words.identity,
        manifest.TEXTS: [language_task.train.survey.digest],
    }
