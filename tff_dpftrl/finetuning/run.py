"""Fine-tuning with a user-level guarantee, from its options to its results folder.

Its folder is that of a training run (`training.run`); its rounds are steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.data import split
from tff_dpftrl.finetuning import (
    choosing,
    example_sampling,
    ghost,
    opening,
    optimizers,
    private_steps,
    proxies,
    resuming,
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
    is_new = opened.known is None
    run = _new(opened, progress) if is_new else _begun(opened, progress)
    return run_lib.train(opened.output, run, progress, is_new=is_new)


def _new(opened: opening.OpenedRun, progress: progress_lib.Progress) -> prepared.Prepared:
    """Prepares a new run: chooses what it samples, how much of it, and its noise."""
    config = opened.config
    assert opened.initial is not None
    initial = opened.initial.load(sequence_length=config.sequence_length)
    public = opened.source, opened.weights_are_public
    words, not_covered = warm_start.words_of(initial.words, *public)
    initial = dataclasses.replace(initial, words=words)
    part = trained_part.TrainedPart.of(initial, config.adapter_rank, seed=config.seed)
    task, users = _task(opened.text, initial, config.eval_sequences, progress)
    # Also refuses held-out text without words, before anything is written.
    before = task.evaluate(initial.weights)
    progress(f"Initial weights: {opened.source}; {initial.model.num_parameters} of them.")
    for line in part.describe():
        progress(line)
    chosen = _choose(opened, users, part, progress)
    # These are exact figures of the held-out users, but `config.json` may be published.
    exact = {
        "pretrained_top1": float(before["top1_in_vocab"]),
        "pretrained_loss": float(before["loss"]),
    }
    is_protected = config.held_out_users == "protected"
    if is_protected:
        progress(f"Held-out loss before fine-tuning: {before['loss']:.3f}.")
    known = manifest.Manifest(
        config=config.to_dict(),
        derived={
            "group_size": chosen.group_size,
            "clip_norm": chosen.privacy.clip_norm,
            **chosen.privacy.derived(),
        },
        facts={
            **({} if is_protected else exact),
            "loss_unit": words.unit.removesuffix("s"),
            "initial_weights_source": opened.source,
            "initial_weights_are_public": opened.weights_are_public,
            **earlier_runs.facts_of(warm_start.run_folder(config.initial_folder), users.ids),
            "choices": {**chosen.facts, **part.facts()},
            "not_covered": [
                *not_covered,
                *chosen.not_covered,
                *report.not_covered_of_held_out(config.held_out_users),
                *([] if config.rows_per_owner is None else [_OWNERS_NOT_COVERED]),
            ],
            **({"caveats": list(chosen.caveats)} if chosen.caveats else {}),
            "training_users": len(users),
            "user_unit": task.train.corpus.user_unit,
            "vocabulary_source": words.source,
            "vocabulary_is_public": words.is_public,
            **({"vocabulary_is_noised": True} if words.is_noised else {}),
            "vocabulary_size": words.size,
            "model": table.describe(task.model),
            "num_parameters": part.model.num_parameters,
        },
        identities=manifest.identities(_identities(task, users, part)),
        recorded_kind=manifest.FINETUNING,
    ).bound_to_choice(opened.output)
    run = _prepared(opened, known, chosen.privacy, part, task, users, progress)
    # What a step costs may depend on the private median. It is not shown before the choice is
    # kept, and neither are the reasons: who starts anew until a private median pleases has looked
    # at it each time.
    run.report.schedule.check_budget(chosen.privacy, show_cost=False)
    kept = {report.PRETRAINED: exact["pretrained_top1"]} if is_protected else {}
    return dataclasses.replace(
        run,
        announcement=(*chosen.reasons, *run.announcement),
        keep_first=functools.partial(report.add_baselines, baselines=kept),
    )


def _begun(opened: opening.OpenedRun, progress: progress_lib.Progress) -> prepared.Prepared:
    """Prepares a run to go on with; refuses other data, and another model."""
    config, known = opened.config, opened.known
    assert known is not None
    options = config.part(trained_part.InitialOptions)
    part = trained_part.TrainedPart.begun(options, opened.output, known)
    task, users = _task(opened.text, part.initial, config.eval_sequences, progress)
    known.check_identities(_identities(task, users, part), remedy=_REMEDY)
    plan = resuming.plan_of(known, config.model_workload)
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
    seed, top1 = config.deterministic_noise_seed, known.facts.get("pretrained_top1")
    reported = _report(config, known, plan, opened.output, lambda: part)

    def keep(output: pathlib.Path) -> None:  # What a resumption or a recount reads there.
        run_privacy.keep_pool(plan, users, group_size, output)
        part.keep(output)
        trained_model.write_vocabulary(output, task.words, task.train.corpus.is_tokenized)

    def read(examples: Sequence[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray]:
        rows = np.stack([task.train.sequences(user)[example] for user, example in examples])
        return rows[:, :-1], rows[:, 1:]  # Words, and those that follow them.

    trainer = step_trainer.StepTrainer(
        plan,
        users,
        group_size,
        steps_of(config, plan, group_size, part.model, part.weights),
        read,
        figures=reported.figures,
        progress=progress,
    )
    hint = None
    if config.optimizer not in ("sgd", "momentum"):  # The others divide by the gradient's size.
        hint = run_privacy.rate_hint(plan)
    return prepared.Prepared(
        reported,
        contextlib.nullcontext(trainer),
        report.TextEvaluator(
            task,
            {} if top1 is None else {report.PRETRAINED: top1},  # Else the file has it.
            protects_held_out=config.held_out_users == "protected",
        ),
        public_seed=config.seed if seed is None else seed,
        keep=keep,
        announcement=(
            *startup.describe_plan(
                plan, part.model.num_parameters, unit="step", swamped=run_privacy.SWAMPED
            ),
            *([] if hint is None else [f"{hint} It is {config.learning_rate:g}."]),
        ),
    )


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
        options = config.part(trained_part.InitialOptions)
        kept = trained_part.TrainedPart.begun(options, output, known)
        known.check_identities(kept.identities(), remedy=_REMEDY)
        return kept

    return _report(config, known, resuming.plan_of(known, config.model_workload), output, part)


def _report(
    config: config_lib.FinetuningConfig,
    known: manifest.Manifest,
    plan: run_privacy.FinetuningPlan,
    output: pathlib.Path,
    part: Callable[[], trained_part.TrainedPart],
) -> prepared.Reportable:
    """Returns the material of a report, which reads the trained part only where it needs it."""

    def whole(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(weights) if config.adapter_rank is None else part().whole(weights)

    def publish(output: pathlib.Path, snapshot: checkpoint.Snapshot) -> None:
        if (output / hugging_face.FOLDER).exists():  # The run began in this layout.
            weights = released_model.weights(config.iterate_averaging, snapshot)
            part().publish(output, weights, base=config.initial_folder)

    run = report.of_run(
        config.part(report.ReportOptions),
        known,
        plan,
        unit="step",
        exact=run_privacy.METRICS_NOT_COVERED,
        go_on=opening.resume_command(output, config.data),
        whole=whole,
        figures=lambda: run_privacy.figures_of_steps(known.facts["vocabulary_size"]),
    )
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
    initial = config.part(trained_part.InitialOptions).load()
    _, users = _task(text, initial, config.eval_sequences, lambda line: None)
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


_OWNERS_NOT_COVERED = (
    "Which users own which row, and so which rows were selected to train on: neighbouring data "
    "sets have the same lists of owners, and differ in the content of all rows that name one user, "
    "whoever else they name."
)


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


def _task(
    text: split.UserSplit,
    initial: trained_model.TrainedModel,
    eval_sequences: int,
    progress: progress_lib.Progress,
) -> tuple[text_task.TextTask, example_sampling.Users]:
    """Encodes the text, for the model that a run begins with, and finds the users of it."""
    task = text_task.TextTask(
        **text_task.sequences_of(
            text.train,
            text.validation,
            initial.words,
            proxies.sequence_spec(initial.model),
            max_held_out=eval_sequences,
        ),
        num_untouched_users=len(text.test),
        model=initial.model,
    )
    for line in startup.describe_task(task, words_are_kept=True):
        progress(line)
    return task, users_of(task)


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
    part: trained_part.TrainedPart,
    progress: progress_lib.Progress,
) -> choosing.Chosen:
    """Chooses sampling and noise, together with what is released besides the weights."""
    public, config = None, opened.config
    options = config.part(choosing.SamplingOptions)
    if config.chooses_median:
        warning = group_size_lib.median_warning(len(users), config.group_size_epsilon)
        if warning is not None:
            progress(warning)
    if choosing.needs_proxies(options):
        progress("Measuring gradients of public text ...")
        public = proxies.of_model(
            dataclasses.replace(part.initial, model=part.model, weights=part.weights),
            config.proxy_data,
            protected=config.data,
            largest_group=choosing.largest_group(options, len(users)),
            is_tokenized=config.pretokenized,
            seed=config.seed,
            table=config.table,
            users=opened.parts,
        )
    chosen = choosing.choose(options, users, public, part.model.num_parameters)
    plan = chosen.privacy
    if config.rows_per_owner is not None:
        assert isinstance(plan, run_privacy.SampledFinetuning)
        plan = plan.of_users(opened.text.train.count_owners(users.ids))
    return dataclasses.replace(chosen, privacy=_with_figures(config, plan))
