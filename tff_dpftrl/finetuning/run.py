"""Fine-tuning with a user-level guarantee, from its options to its results folder.

Its folder is that of a training run (`training.run`); its rounds are steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.data import sequences, split, tables, vocabulary_file
from tff_dpftrl.finetuning import (
    amplified,
    choosing,
    example_sampling,
    ghost,
    opening,
    optimizers,
    passes,
    private_steps,
    proxies,
    run_privacy,
    step_trainer,
    trained_part,
)
from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.finetuning import group_size as group_size_lib
from tff_dpftrl.models import hugging_face, table
from tff_dpftrl.runs import (
    checkpoint,
    earlier_runs,
    manifest,
    metrics_share,
    prepared,
    released_metrics,
    released_model,
)
from tff_dpftrl.runs import progress as progress_lib
from tff_dpftrl.runs import run as run_lib
from tff_dpftrl.training import (
    report,
    startup,
    text_task,
    trained_model,
    warm_start,
)


def finetune(
    config: config_lib.FinetuningConfig | None,
    output: str | pathlib.Path,
    *,
    text: split.UserSplit | None = None,
    rows: Any = None,
    progress: progress_lib.Progress = progress_lib.to_stderr,
) -> report.TrainingResults:
    """Fine-tunes a model with a user-level guarantee, and writes all results to a folder.

    Each step is committed before the next one begins, as in `training.run.train`: a run
    killed at any moment goes on from the last committed step, with the same batch.

    Args:
      config: Options of a new run, or None to go on with the run in `output`.
      output: Folder of the run; created for a new one.
      text: The users, as `training.corpus.read_users` returns them; they are read now from the
        files that the config names if None.
      rows: A table in memory instead of files, as for `training.run.train`.
      progress: Callback for progress lines and warnings; prints to standard error by default.

    Returns:
      Metrics, statement and summary, which are also in the folder.

    Raises:
      UsageError: If an option, the data, the model or the folder cannot be used; nothing has
        been written then.
      OSError: If a file cannot be written; every committed step is kept.
    """
    opened = opening.open_run(config, pathlib.Path(output), text=text, rows=rows, progress=progress)
    return finetune_opened(opened, progress)


def finetune_opened(
    opened: opening.OpenedRun, progress: progress_lib.Progress = progress_lib.to_stderr
) -> report.TrainingResults:
    """Fine-tunes in a run that `opening` has opened; errors keep every committed step."""
    return run_lib.train(
        opened.output,
        opened.known,
        lambda: _new(opened, progress),
        lambda known: _begun(opened, known, progress),
        progress,
    )


def _new(opened: opening.OpenedRun, progress: progress_lib.Progress) -> prepared.Prepared:
    """Prepares a new run: chooses what it samples, how much of it, and its noise."""
    config = opened.config
    found = warm_start.find(config.initial_folder)
    initial = found.load(sequence_length=config.sequence_length)
    source, weights_are_public = warm_start.source(config.initial_folder, config.trained_on)
    words, not_covered = warm_start.words_of(initial.words, source, weights_are_public)
    initial = dataclasses.replace(initial, words=words)
    part = trained_part.TrainedPart.of(initial, config.adapter_rank, seed=config.seed)
    task = _task(opened, initial, progress)
    users = users_of(task)
    # Also refuses held-out text without words, before anything is written.
    before = task.evaluate(initial.weights)
    progress(f"Initial weights: {source}; {initial.model.num_parameters} of them.")
    for line in part.describe():
        progress(line)
    chosen = _choose(
        opened,
        users,
        dataclasses.replace(initial, model=part.model, weights=part.weights),
        progress,
    )
    chosen = dataclasses.replace(chosen, privacy=_with_figures(config, chosen.privacy))
    # These are exact figures of the held-out users, but `config.json` may be published.
    exact = {
        "pretrained_top1": float(before["top1_in_vocab"]),
        "pretrained_loss": float(before["loss"]),
    }
    protected = config.held_out_users == "protected"
    if protected:
        progress(f"Held-out loss before fine-tuning: {before['loss']:.3f}.")
    facts = {
        **({} if protected else exact),
        "loss_unit": task.words.unit.removesuffix("s"),
        "initial_weights_source": source,
        "initial_weights_are_public": weights_are_public,
        "not_covered": not_covered,
        **earlier_runs.facts_of(warm_start.run_folder(config.initial_folder), users.ids),
    }
    known = _manifest(config, chosen, task, users, part, facts).bound_to_choice(opened.output)
    run = _prepared(opened, known, chosen.privacy, part, task, users, progress)
    # What a step costs may depend on the private median. It is not shown before the choice is
    # kept, and neither are the reasons: who starts anew until a private median pleases has looked
    # at it each time.
    run.report.schedule.check_budget(chosen.privacy, show_cost=False)
    kept = {report.PRETRAINED: exact["pretrained_top1"]} if protected else {}
    return dataclasses.replace(
        run,
        announcement=(*chosen.reasons, *run.announcement),
        keep_first=functools.partial(report.add_baselines, baselines=kept),
    )


def _begun(
    opened: opening.OpenedRun, known: manifest.Manifest, progress: progress_lib.Progress
) -> prepared.Prepared:
    """Prepares a run to go on with; refuses other data, and another model."""
    config = opened.config
    initial = _kept_initial(config, opened.output, known)
    part = trained_part.TrainedPart.of(initial, config.adapter_rank, seed=config.seed)
    task = _task(opened, initial, progress)
    users = users_of(task)
    known.check_identities(_identities(task, users, part), remedy=_REMEDY)
    plan = plan_of(known, config)
    run = _prepared(opened, known, plan, part, task, users, progress)
    run.report.schedule.check_budget(plan)
    return run


def _prepared(
    opened: opening.OpenedRun,
    known: manifest.Manifest,
    plan: run_privacy.FinetuningPlan,
    part: trained_part.TrainedPart,
    task: text_task.TextTask,
    users: example_sampling.Users,
    progress: progress_lib.Progress,
) -> prepared.Prepared:
    config, group_size = opened.config, known.derived["group_size"]
    seed = config.deterministic_noise_seed
    reportable = _of_run(opened.output, known, config, plan, part.whole)
    released = reportable.figures
    return prepared.Prepared(
        report=_publishing(reportable, config, lambda: part),
        trainer=contextlib.nullcontext(
            step_trainer.StepTrainer(
                users.ids,
                functools.partial(passes.batches_of, plan, users, group_size),
                steps_of(config, plan, group_size, part.model, part.weights),
                _reader(task.train),
                progress=progress,
                loss_bound=None if released is None else released.bounds["loss_sum"],
            )
        ),
        evaluator=report.TextEvaluator(
            task,
            {report.PRETRAINED: known.facts["pretrained_top1"]}
            if "pretrained_top1" in known.facts
            else {},  # They are protected, and the file has it.
            protects_held_out=config.held_out_users == "protected",
        ),
        public_seed=config.seed if seed is None else seed,
        keep=functools.partial(_keep, part, task, plan, users, group_size),
        announcement=(
            *startup.describe_plan(
                plan, part.model.num_parameters, unit="step", swamped=run_privacy.SWAMPED
            ),
            *_rate_hint(config, plan),
        ),
    )


def _rate_hint(
    config: config_lib.FinetuningConfig, plan: run_privacy.FinetuningPlan
) -> Iterator[str]:
    divides = config.optimizer not in ("sgd", "momentum")
    hint = run_privacy.rate_hint(plan) if divides else None
    if hint is not None:
        yield f"{hint} It is {config.learning_rate:g}."


def write_report(output: pathlib.Path) -> report.TrainingResults:
    """Writes statement, curves and model of what a fine-tuning run has committed so far.

    The run may be interrupted or finished, but not under way. It can be resumed afterwards.
    """
    return run_lib.report(output, lambda known: reportable(known, output))


def reportable(known: manifest.Manifest, output: pathlib.Path) -> prepared.Reportable:
    """Returns what the report on a fine-tuning run is made of; refuses another kind of run."""
    config = opening.config_of(known, output)

    @functools.cache
    def part() -> trained_part.TrainedPart:
        initial = _kept_initial(config, output, known)
        kept = trained_part.TrainedPart.of(initial, config.adapter_rank, seed=config.seed)
        known.check_identities(kept.identities(), remedy=_REMEDY)
        return kept

    def whole(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(weights) if config.adapter_rank is None else part().whole(weights)

    run = _of_run(output, known, config, plan_of(known, config), whole)
    return _publishing(run, config, part)


def _figures_of(known: manifest.Manifest) -> released_metrics.Figures:
    """Returns the figures that a run may release of its steps, from its manifest."""
    return run_privacy.figures_of_steps(known.facts["vocabulary_size"])


def _of_run(
    output: pathlib.Path,
    known: manifest.Manifest,
    config: config_lib.FinetuningConfig,
    plan: run_privacy.FinetuningPlan,
    whole: released_model.Whole,
) -> prepared.Reportable:
    return report.of_run(
        config.part(report.ReportOptions),
        known,
        plan,
        unit="step",
        exact=run_privacy.METRICS_NOT_COVERED,
        go_on=opening.resume_command(output, config.data),
        whole=whole,
        figures=functools.partial(_figures_of, known),
    )


def _publishing(
    run: prepared.Reportable,
    config: config_lib.FinetuningConfig,
    part: Callable[[], trained_part.TrainedPart],
) -> prepared.Reportable:
    """Returns a report that writes the model in Hugging Face's layout, if the run began in that."""

    def publish(output: pathlib.Path, snapshot: checkpoint.Snapshot) -> None:
        if (output / hugging_face.FOLDER).exists():
            weights = released_model.weights(config.iterate_averaging, snapshot)
            part().publish(output, weights, base=config.initial_folder)

    return dataclasses.replace(run, publish=publish)


_REMEDY = "restore data and model"


def steps_of(
    config: config_lib.FinetuningConfig,
    plan: run_privacy.FinetuningPlan,
    group_size: int,
    model: Any,
    weights: Sequence[np.ndarray],
) -> private_steps.PrivateSteps:
    """Returns the steps of a run with a plan of `choosing.choose`. They need no results folder.

    `model` is the trained model, or its adapters (`trained_part`), with its initial weights,
    float32.
    """
    rows_per_unit = run_privacy.rows_per_unit(plan, group_size)
    options = config.part(optimizers.OptimizerOptions)
    return private_steps.PrivateSteps(
        private_steps.round_of(
            plan, run_privacy.strategy_of(plan), secure_noise=config.noise == "secure"
        ),
        ghost.fastest_clipped_sum(
            model,
            rows_per_unit,
            compute_dtype=config.compute_dtype,
            recompute=config.gradient_checkpointing,
        ),
        optimizers.build(options),
        weights,
        units_at_once=max(1, config.examples_at_once // rows_per_unit),
        normalised=config.normalised_clipping,
        iterate_averaging=config.iterate_averaging,
        learning_rate=lambda step: optimizers.learning_rate(options, step),
    )


def planned(
    config: config_lib.FinetuningConfig, text: split.UserSplit
) -> run_privacy.FinetuningPlan:
    """Returns the privacy of a run that has not begun, whose options leave nothing to be chosen."""
    initial = warm_start.find(config.initial_folder).load(sequence_length=config.sequence_length)
    opened = opening.OpenedRun(pathlib.Path(), config, None, text)
    users = users_of(_task(opened, initial, lambda line: None))
    options = config.part(choosing.SamplingOptions)
    chosen = choosing.choose(options, users, None, initial.model.num_parameters)
    return _with_figures(config, chosen.privacy)


def _with_figures(
    config: config_lib.FinetuningConfig, plan: run_privacy.FinetuningPlan
) -> run_privacy.FinetuningPlan:
    """Returns the privacy of a run together with the figures of steps that it releases, if any."""
    share = metrics_share.of(config.budget_shares)
    if config.metrics_epsilon is None and share is None:
        return plan
    return run_privacy.with_figures(
        plan, config.metrics_epsilon, share, meets_target=config.target_epsilon is not None
    )


def plan_of(
    known: manifest.Manifest, config: config_lib.FinetuningConfig
) -> run_privacy.FinetuningPlan:
    """Returns the privacy of a run that has begun, from its manifest."""
    if "plan" in known.derived:
        return run_privacy.SampledFinetuning.resumed(
            known.derived, deterministic_seed=config.deterministic_noise_seed
        )
    facts, derived = known.facts, known.derived
    if config.is_amplified:
        return amplified.resumed(
            derived,
            facts["training_users"],
            deterministic_seed=config.deterministic_noise_seed,
            workload=config.model_workload,
        )
    options = config.part(choosing.SamplingOptions)
    asked = choosing.asked_of_passes(options, clip_norm=derived["clip_norm"])
    return asked.resumed(facts["training_users"], facts["num_parameters"], known.derived)


def _manifest(
    config: config_lib.FinetuningConfig,
    chosen: choosing.Chosen,
    task: text_task.TextTask,
    users: example_sampling.Users,
    part: trained_part.TrainedPart,
    facts: Mapping[str, Any],
) -> manifest.Manifest:
    plan = chosen.privacy
    return manifest.Manifest(
        config=config.to_dict(),
        derived={"group_size": chosen.group_size, "clip_norm": plan.clip_norm} | plan.derived(),
        facts={
            **facts,
            "choices": {**chosen.facts, **part.facts()},
            "not_covered": [
                *facts["not_covered"],
                *chosen.not_covered,
                *report.not_covered_of_held_out(config.held_out_users),
                *_not_covered_of_owners(config),
            ],
            **({"caveats": list(chosen.caveats)} if chosen.caveats else {}),
            "training_users": len(users),
            "user_unit": task.train.corpus.user_unit,
            "vocabulary_source": task.words.source,
            "vocabulary_is_public": task.words.is_public,
            **({"vocabulary_is_noised": True} if task.words.is_noised else {}),
            "vocabulary_size": task.words.size,
            "model": table.describe(task.model),
            "num_parameters": part.model.num_parameters,
        },
        identities=manifest.identities(_identities(task, users, part)),
        recorded_kind=manifest.FINETUNING,
    )


def _not_covered_of_owners(config: config_lib.FinetuningConfig) -> list[str]:
    if config.rows_per_owner is None:
        return []
    return [
        "Which users own which row, and so which rows were selected to train on: neighbouring data "
        "sets have the same lists of owners, and differ in the content of all rows that name one "
        "user, whoever else they name."
    ]


def _identities(
    task: text_task.TextTask, users: example_sampling.Users, part: trained_part.TrainedPart
) -> dict[str, Sequence[str]]:
    """Returns what must not change while a run lasts, by name."""
    return {
        "training users": users.ids,
        "numbers of the users' examples": list(map(str, users.num_examples)),
        manifest.TEXTS: [task.train.survey.digest],
        "model and words": [repr(table.describe(task.model)), *task.words.identity],
        **part.identities(),
    }


def _keep(
    part: trained_part.TrainedPart,
    task: text_task.TextTask,
    plan: run_privacy.FinetuningPlan,
    users: example_sampling.Users,
    group_size: int,
    output: pathlib.Path,
) -> None:
    """Writes what a resumption or a recount reads in the folder, besides what every run has."""
    run_privacy.keep_pool(plan, users, group_size, output)
    part.keep(output)
    trained_model.write_vocabulary(output, task.words, task.train.corpus.is_tokenized)


def _kept_initial(
    config: config_lib.FinetuningConfig, output: pathlib.Path, known: manifest.Manifest
) -> trained_model.TrainedModel:
    """Returns the model that a run began with, as far as it matters for the rest of the run."""
    kept = None
    words = output / vocabulary_file.NAME
    if words.exists():  # Else it crashed before step 1.
        if config.adapter_rank is not None:
            kept = trained_part.kept(output)
        else:  # All weights are in the checkpoint.
            model = table.from_description(known.facts["model"])
            shapes = model.weight_shapes.values()
            kept = model, [np.zeros(shape, np.float32) for shape in shapes]
    if kept is None:
        found = warm_start.find(config.initial_folder)
        return found.load(sequence_length=config.sequence_length)
    return trained_model.TrainedModel(*kept, *vocabulary_file.read(words))


def _task(
    opened: opening.OpenedRun,
    initial: trained_model.TrainedModel,
    progress: progress_lib.Progress,
) -> text_task.TextTask:
    text = opened.text
    task = text_task.TextTask(
        **text_task.sequences_of(
            text.train,
            text.validation,
            initial.words,
            proxies.sequence_spec(initial.model),
            max_held_out=opened.config.eval_sequences,
        ),
        num_untouched_users=len(text.test),
        model=initial.model,
    )
    for line in startup.describe_task(task, words_are_kept=True):
        progress(line)
    return task


def users_of(task: text_task.TextTask) -> example_sampling.Users:
    """Returns the users who have examples; all of the task's text is split into words now."""
    sizes = task.train.survey.num_sequences
    ids = tuple(user for user, size in zip(task.train.user_ids, sizes, strict=True) if size)
    if not ids:
        raise validation.UsageError(
            f"data {task.train.corpus.name!r} has no user to train on who has a text with a word: "
            "use other text."
        )
    return example_sampling.Users(ids, sizes[sizes > 0])


def _choose(
    opened: opening.OpenedRun,
    users: example_sampling.Users,
    trained: trained_model.TrainedModel,
    progress: progress_lib.Progress,
) -> choosing.Chosen:
    public, config = None, opened.config
    options = config.part(choosing.SamplingOptions)
    if config.chooses_median:
        warning = group_size_lib.median_warning(len(users), config.group_size_epsilon)
        if warning is not None:
            progress(warning)
    if choosing.needs_proxies(options):
        progress("Measuring gradients of public text ...")
        public = proxies.of_model(
            trained,
            config.proxy_data,
            protected=config.data,
            largest_group=choosing.largest_group(options, len(users)),
            is_tokenized=config.pretokenized,
            seed=config.seed,
            table=config.part(tables.TableOptions),
            users=opened.parts,
        )
    chosen = choosing.choose(options, users, public, trained.model.num_parameters)
    if config.rows_per_owner is None:
        return chosen
    assert isinstance(chosen.privacy, run_privacy.SampledFinetuning)
    owners = opened.text.train.count_owners(users.ids)
    return dataclasses.replace(chosen, privacy=chosen.privacy.of_users(owners))


def _reader(train: sequences.SequenceCorpus) -> step_trainer.ReadExamples:
    """Reads sentences as words and the words that follow them."""

    def read(examples: Sequence[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray]:
        rows = np.stack([train.sequences(user)[example] for user, example in examples])
        return rows[:, :-1], rows[:, 1:]

    return read
