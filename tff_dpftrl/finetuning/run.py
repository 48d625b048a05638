"""A fine-tuning run from its options to its results folder, and its resumption.

Its folder is that of a training run (`training.run`); its rounds are steps.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tff_dpftrl import durable_files, validation
from tff_dpftrl.data import sequences, split
from tff_dpftrl.finetuning import (
    choosing,
    contributions,
    ghost,
    optimizers,
    private_steps,
    proxies,
    run_privacy,
    step_trainer,
    trained_part,
)
from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.models import table
from tff_dpftrl.runs import manifest, privacy
from tff_dpftrl.training import (
    committed_run,
    corpus,
    report,
    startup,
    stopping,
    text_task,
    trained_model,
    warm_start,
)
from tff_dpftrl.training import options as options_lib


def finetune(
    config: config_lib.FinetuningConfig | None,
    output: str | pathlib.Path,
    *,
    text: split.UserSplit | None = None,
    progress: committed_run.Progress = committed_run.to_stderr,
) -> report.TrainingResults:
    """Fine-tunes a model with a user-level guarantee, and writes all there is to know.

    Each step is committed before the next one begins, as in `training.run.train`: a run
    killed at any moment goes on with the same batch and the same noise.

    Args:
      config: Options of a new run, or None to go on with the run in `output`.
      output: Folder of the run; created for a new one.
      text: The users, as `training.corpus.read_users` returns them for the config; they are
        read now if None.
      progress: Receives the facts of the run as soon as each is known, and warnings.

    Returns:
      Metrics, statement and summary, which are also in the folder.

    Raises:
      ValueError: If an option, the data, the model or the folder cannot be used; nothing has
        been written then.
      OSError: If a file cannot be written; every committed step is kept.
    """
    output, is_new = pathlib.Path(output), config is not None
    if is_new:
        manifest.check_is_free(output)
        config = config.with_absolute_paths()
    else:
        known = manifest.read(output)
        config = config_of(known, output)
    if text is None:
        progress("Reading the data ...")
        text = corpus.read_users(config)
    elif is_new:
        corpus.check_named(config, text.train)
    initial = _initial(config, output, None if is_new else known)
    part = trained_part.TrainedPart.of(config, initial)
    task = _task(config, text, initial)
    for line in startup.describe_task(task):
        progress(line)
    users = users_of(task)
    if is_new:
        # Also refuses held-out text without words, before anything is written.
        pretrained = float(task.evaluate(initial.weights)["top1_in_vocab"])
        source, weights_are_public = warm_start.source(pathlib.Path(config.initial_weights))
        progress(f"Initial weights: {source}; {initial.model.num_parameters} of them.")
        for line in part.describe():
            progress(line)
        trained = dataclasses.replace(initial, model=part.model, weights=part.weights)
        chosen = _choose(config, users, trained, progress)
        plan = chosen.privacy
        facts = {
            "pretrained_top1": pretrained,
            "initial_weights_source": source,
            "initial_weights_are_public": weights_are_public,
        }
        known = _manifest(config, chosen, task, users, part, facts)
    else:
        _check_identities(known, _identities(task, users, part))
        plan = plan_of(known, config)
    group_size = known.derived["group_size"]
    if config.max_epsilon is not None and plan.epsilon_after(1) > config.max_epsilon:
        # What it costs may depend on the private median, which is not told before it is kept.
        raise validation.UsageError(
            f"max_epsilon={config.max_epsilon:g} does not pay for one step: raise it."
        )
    steps = steps_of(config, plan, group_size, part.model, part.weights)
    state = steps.initial_state()
    with committed_run.open_rounds(
        output, plan, known, state, max_epsilon=config.max_epsilon, is_new=is_new
    ) as rounds:
        durable_files.remove_leftovers(output)
        part.keep(output)
        trained_model.write_vocabulary(output, task.words, task.train.corpus.is_tokenized)
        # Not before the choice is kept: who starts anew until a private median pleases has
        # looked at it each time.
        for line in chosen.reasons if is_new else ():
            progress(line)
        for line in startup.describe_plan(
            plan, part.model.num_parameters, unit=config.unit, swamped=run_privacy.SWAMPED
        ):
            progress(line)
        progress(f"Results: {output}/, {rounds.rounds_done} of {plan.num_rounds} steps done.")
        public_seed = config.seed
        if config.deterministic_noise_seed is not None:
            public_seed = config.deterministic_noise_seed
        seed = committed_run.sampling_seed(output, plan, public_seed)
        batches = batches_of(plan, users, group_size, seed)
        trainer = step_trainer.StepTrainer(users.ids, batches, steps, _reader(task.train))
        if rounds.rounds_done < plan.num_rounds:
            progress(
                "Compiling the step: the first one takes seconds, of a large model minutes ..."
            )
        before = {stopping.PRETRAINED: known.facts["pretrained_top1"]}
        committed_run.CommittedRun(
            config,
            output,
            task,
            plan,
            trainer,
            rounds,
            progress,
            baselines=before,
            whole=part.whole,
        ).run(state)
        go_on = how_to_go_on(output, config.data)
        return report.write(output, known, config, plan, rounds, go_on=go_on, whole=part.whole)


def steps_of(
    config: config_lib.FinetuningConfig,
    plan: privacy.PrivacyPlan,
    group_size: int,
    model: Any,
    weights: Sequence[np.ndarray],
) -> private_steps.PrivateSteps:
    """The steps of a run, for whoever runs them without a results folder.

    Args:
      config: Options of the run.
      plan: Its privacy, as `choosing.choose` returns it.
      group_size: G.
      model: What is trained: the model, or its adapters (`trained_part`).
      weights: Where it begins.

    Returns:
      The steps.
    """
    if isinstance(plan, run_privacy.SampledFinetuning):
        strategy, rows_per_unit = identity.Identity(), plan.plan.rows_per_unit
    else:
        strategy, rows_per_unit = plan.strategy, group_size
    return private_steps.PrivateSteps(
        private_steps.round_of(plan, strategy),
        ghost.fastest_clipped_sum(model, rows_per_unit),
        optimizers.build(config),
        weights,
        units_at_once=max(1, config.examples_at_once // rows_per_unit),
        normalised=config.normalised_clipping,
        iterate_averaging=config.iterate_averaging,
        learning_rate=lambda step: optimizers.learning_rate(config, step),
    )


def batches_of(
    plan: privacy.PrivacyPlan, users: contributions.Users, group_size: int, seed: int
) -> Callable[[int], contributions.Batch]:
    """What is in a step, as a function of it.

    Args:
      plan: The privacy of a run, as `choosing.choose` returns it.
      users: Its users.
      group_size: G.
      seed: Of the samples; secret unless `plan` says that cohorts need not be.

    Returns:
      From a step, from 0, to its batch, the same one each time.
    """
    if isinstance(plan, run_privacy.SampledFinetuning):
        return plan.plan.contributions(users, seed).batch
    sampler = plan.sampler(seed)

    def turns(step: int) -> contributions.Batch:
        # No secret is needed: the guarantee holds whoever knows whose turn it is.
        members = sampler.cohort(step)
        return contributions.batch_of_users(users, members, group_size, f"turns/{seed}/{step}")

    return turns


def config_of(known: manifest.Manifest, output: pathlib.Path) -> config_lib.FinetuningConfig:
    """The options of a run that was begun.

    Raises:
      ValueError: If it is a training run.
    """
    if not config_lib.is_finetuning(known.config):
        raise validation.UsageError(
            f"The run in {output} is one of tff-dpftrl train: go on with it by tff-dpftrl train "
            f"--resume --output {shlex.quote(str(output))}."
        )
    return options_lib.config_from_mapping(
        known.config, str(output / "config.json"), config_lib.FinetuningConfig
    )


def plan_of(known: manifest.Manifest, config: config_lib.FinetuningConfig) -> privacy.PrivacyPlan:
    """The privacy of a run that was begun, from its manifest."""
    if "plan" in known.derived:
        return run_privacy.SampledFinetuning.resumed(
            known.derived, deterministic_seed=config.deterministic_noise_seed
        )
    facts, derived = known.facts, known.derived
    asked = choosing.asked_of_passes(config, clip_norm=derived["clip_norm"])
    return asked.resumed(facts["training_users"], facts["num_parameters"], known.derived)


def how_to_go_on(output: pathlib.Path, data: str) -> str:
    """The command, or the call in Python, that goes on with a run.

    Args:
      output: Folder of the run.
      data: The config's.

    Returns:
      What to type; text that was in memory has to be given again.
    """
    if data != config_lib.FinetuningConfig.data and not os.path.exists(data):
        return f"finetuning.run.finetune(None, {str(output)!r}, text=...)"
    return f"tff-dpftrl finetune --resume --output {shlex.quote(str(output))}"


def write_report(output: pathlib.Path) -> report.TrainingResults:
    """Writes statement, curves and model of what a run has committed; see `report.report`."""
    known = manifest.read(output)
    config = config_of(known, output)
    plan = plan_of(known, config)

    def whole(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
        if config.adapter_rank is None:
            return list(weights)
        part = trained_part.TrainedPart.of(config, _initial(config, output, known))
        _check_identities(known, part.identities())
        return part.whole(weights)

    go_on = how_to_go_on(output, config.data)
    return report.of_rounds(output, known, config, plan, go_on=go_on, whole=whole)


def _manifest(
    config: config_lib.FinetuningConfig,
    chosen: choosing.Chosen,
    task: text_task.TextTask,
    users: contributions.Users,
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
            "not_covered": list(chosen.not_covered),
            "training_users": len(users),
            "user_unit": task.train.corpus.user_unit,
            "vocabulary_source": task.words.source,
            "vocabulary_is_public": task.words.is_public,
            "vocabulary_size": task.words.size,
            "model": table.describe(task.model),
            "num_parameters": part.model.num_parameters,
        },
        identities={
            name: manifest.identity(names) for name, names in _identities(task, users, part).items()
        },
    )


def _identities(
    task: text_task.TextTask, users: contributions.Users, part: trained_part.TrainedPart
) -> dict[str, Sequence[str]]:
    """What must not change while a run lasts, by name."""
    return {
        "training users": users.ids,
        "numbers of the users' examples": list(map(str, users.num_examples)),
        "model and words": [repr(table.describe(task.model)), *task.words.words],
        **part.identities(),
    }


def _check_identities(known: manifest.Manifest, found: Mapping[str, Sequence[str]]) -> None:
    for name, names in found.items():
        known.check_identity(name, names, remedy="restore data and model")


def _initial(
    config: config_lib.FinetuningConfig, output: pathlib.Path, known: manifest.Manifest | None
) -> trained_model.TrainedModel:
    """The model to begin with; of a run that goes on, what it kept of it is enough."""
    folder = pathlib.Path(config.initial_weights)
    if known is None:
        warm_start.refuse_protected(folder, config.data)
    elif trained_model.has_vocabulary(output):  # Else it crashed before step 1.
        if config.adapter_rank is not None:
            kept = trained_part.kept(output)
        else:
            model = table.from_description(known.facts["model"])
            shapes = model.weight_shapes.values()
            kept = model, [np.zeros(shape, np.float32) for shape in shapes]
        if kept is not None:
            return trained_model.TrainedModel(*kept, *trained_model.read_vocabulary(output))
    return warm_start.find(folder).load()


def _task(
    config: config_lib.FinetuningConfig,
    text: split.UserSplit,
    initial: trained_model.TrainedModel,
) -> text_task.TextTask:
    return text_task.TextTask(
        **text_task.sequences_of(
            text.train,
            text.validation,
            initial.words,
            proxies.sequence_spec(initial.model),
            max_held_out=config.eval_sequences,
        ),
        num_untouched_users=len(text.test),
        model=initial.model,
    )


def users_of(task: text_task.TextTask) -> contributions.Users:
    """The users who have examples.

    Args:
      task: The text, all of which is split into words now.

    Returns:
      The users.

    Raises:
      ValueError: If there is none.
    """
    sizes = {user: len(task.train.sequences(user)) for user in task.train.user_ids}
    ids = tuple(user for user, size in sizes.items() if size)
    if not ids:
        raise validation.UsageError(
            f"data {task.train.corpus.name!r} has no user to train on who has a text with a word: "
            "use other text."
        )
    return contributions.Users(ids, np.array([sizes[user] for user in ids]))


def _choose(
    config: config_lib.FinetuningConfig,
    users: contributions.Users,
    trained: trained_model.TrainedModel,
    progress: committed_run.Progress,
) -> choosing.Chosen:
    public = None
    if choosing.needs_proxies(config):
        progress("Measuring gradients of public text ...")
        public = proxies.of_model(
            trained,
            config.proxy_data,
            protected=config.data,
            largest_group=choosing.largest_group(config, len(users)),
            is_tokenized=config.pretokenized,
            seed=config.seed,
        )
    return choosing.choose(config, users, public, trained.model.num_parameters)


def _reader(train: sequences.SequenceCorpus) -> step_trainer.ReadExamples:
    """Reads sentences as words and the words that follow them."""

    def read(examples: Sequence[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray]:
        rows = np.stack([train.sequences(user)[example] for user, example in examples])
        return rows[:, :-1], rows[:, 1:]

    return read
