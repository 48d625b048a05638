"""From options to a signed and tested task. Needs TFF, as nothing else of tasks does."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow_federated as tff
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation, version
from tff_dpftrl.accounting import display
from tff_dpftrl.data import docstrings, sources, tokenizer, user_text, vocabulary
from tff_dpftrl.discretization import grid
from tff_dpftrl.execution import contexts
from tff_dpftrl.learning import functional_model, secure_metrics
from tff_dpftrl.models import language_model, metrics, table
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import interface
from tff_dpftrl.runs import dp_ftrl_privacy
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.device import text_examples
from tff_dpftrl.runtime.plans import bounding, building, plan_pb2, predicates, text_pipeline
from tff_dpftrl.runtime.tasks import config as config_lib
from tff_dpftrl.runtime.tasks import privacy, secure_groups, summation_sentences, task_folder
from tff_dpftrl.runtime.tasks import terms as terms_lib
from tff_dpftrl.training import corpus, process, startup, warm_start

Progress = Callable[[str], None]
"""Receives what a person should know, line by line."""

_STANDARD_LIBRARY = "standard-library"
_UPLOAD_BYTES = 1_000_000  # Of metrics, besides the update.
_LARGEST_LOSS = 100.0  # Nats of a target on average, over all targets that a device can have.
_LEARNED_NORM = "active"  # Of `adaptive_clipping.ClipState`.


@dataclasses.dataclass(frozen=True, eq=False)
class _Material:
    """What both kinds of tasks are made of."""

    config: config_lib.TaskConfig
    words: vocabulary.Vocabulary
    rule: tokenizer.Tokenizer
    model: language_model.LanguageModel
    functional: tff.learning.models.FunctionalModel
    initial_weights: warm_start.InitialWeights | None


def make(
    config: config_lib.TaskConfig,
    output: str | pathlib.Path,
    key: ed25519.Ed25519PrivateKey,
    *,
    progress: Progress,
) -> task_folder.TaskFolder:
    """Makes a training task: plans, tests, signatures, folder.

    The devices' data is not read; tests use public text.

    Args:
      config: Its options.
      output: The new folder; its name is the task's if the options give none.
      key: Signs plans and terms.
      progress: Callback for progress lines.

    Returns:
      The task, as it was read back.

    Raises:
      predicates.TaskRefusedError: If the tests fail; with all reasons.
      ValueError: If an option cannot be used, or there is something at `output`.
      OSError: If the folder cannot be written.
    """
    task_folder.check_is_free(output)
    config = config.resolved(pathlib.Path(output).name)
    proxies = _proxies(config)
    material = _material(config, progress)
    plan = _privacy_plan(config, material.model.num_parameters)
    for line in startup.describe_plan(plan, material.model.num_parameters):
        progress(line)
    terms = _terms(material, plan)
    refusal = privacy.TaskPrivacy(terms).refusal(participation_histograms.ObservedRounds())
    if refusal:
        raise validation.UsageError(
            f"max_epsilon={config.max_epsilon:g} does not pay for one round: {refusal}. Raise it, "
            "or noise_multiplier."
        )
    progress("Building the plans ...")
    with contexts.compiled_only():
        built = process.build_process(
            plan, config, material.functional, metrics_aggregator=_metrics_aggregator(config)
        )
        plans = _build(
            material,
            built,
            plan.schema,
            plan_pb2.TRAINING,
            _limits(config, plan),
            private_round=_private_round(plan, config),
        )
    return _finish(material, plans, terms, proxies, output, key, progress)


def make_evaluation(
    of: task_folder.TaskFolder,
    config: config_lib.TaskConfig,
    output: str | pathlib.Path,
    key: ed25519.Ed25519PrivateKey,
    *,
    progress: Progress,
) -> task_folder.TaskFolder:
    """Makes a task that evaluates the model of another one while it trains.

    Args:
      of: The task that trains.
      config: Its options: those of `of`, with another name, goal, number of rounds or weight.
      output: As for `make`, like what follows, what is returned and raised.
      key: Signs plans and terms.
      progress: Callback for progress lines.
    """
    task_folder.check_is_free(output)
    schema = schema_lib.MinSep.unrestricted(config.num_rounds)
    config = dataclasses.replace(config, min_sep=1, max_participations=config.num_rounds)
    config = config.resolved(pathlib.Path(output).name)
    if config.task == of.name:
        raise validation.UsageError(
            f"task {config.task!r} is the task that is evaluated: give another name."
        )
    proxies = _proxies(config)
    material = _material(config, progress)
    if material.words != of.words:
        raise validation.UsageError(f"vocabulary is another than that of the task {of.name!r}.")
    progress("Building the plans ...")
    with contexts.compiled_only():
        built = tff.learning.algorithms.build_fed_eval(
            material.functional,
            metrics_aggregation_process=_metrics_process(config, material.functional),
            loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
        )
        broadcast = of.server.prepare.outputs
        limits = _limits(config, None)
        plans = _build(material, built, schema, plan_pb2.EVALUATION, limits, broadcast=broadcast)
    terms = dataclasses.replace(
        of.terms,
        kind="evaluation",
        model_of=of.name,
        task=config.task,
        schema=schema,
        strategy=None,
        noise_multiplier=0.0,
        max_epsilon=None,
        parameters={},
        secure_aggregation=secure_groups.stated(config),
    )
    return _finish(material, plans, terms, proxies, output, key, progress)


def _material(config: config_lib.TaskConfig, progress: Progress) -> _Material:
    words = corpus.read_vocabulary(config, None)
    progress(f"Vocabulary: {len(words.words)} words ({words.source}).")
    model = table.build(
        config.model,
        vocabulary_size=words.size,
        sequence_length=config.sequence_length,
        **config.model_sizes,
    )
    progress(f"Model: {config.model}, {model.num_parameters} weights.")
    initial = None
    if config.initial_weights is not None:
        initial = warm_start.read(
            pathlib.Path(config.initial_weights), model, words, config.seed, protected=config.data
        )
        progress(f"Initial weights: {initial.source}.")
    special = metrics.SpecialIds(oov=words.oov, bos=words.bos, eos=words.eos)
    functional = functional_model.build(
        model, special, config.seed, None if initial is None else initial.weights
    )
    rule = tokenizer.Tokenizer(words.lower_case, config.pretokenized)
    return _Material(config, words, rule, model, functional, initial)


def _privacy_plan(config: config_lib.TaskConfig, num_parameters: int) -> dp_ftrl_privacy.DpFtrlPlan:
    """As for `train`, but a sum may hold the reports of all devices that were chosen."""
    plan = config.privacy().plan(config.num_devices, num_parameters)
    if plan.encoding is None:
        return plan
    encoding = grid.for_bits(num_parameters, config.rounds.wanted, config.secagg_bits)
    return dataclasses.replace(plan, encoding=encoding)


def _metrics_aggregator(config: config_lib.TaskConfig) -> Callable[..., tff.Computation]:
    """How metrics of training are summed: like the updates, if these are summed securely."""
    if config.secure_aggregation is None:
        return tff.learning.metrics.sum_then_finalize
    return secure_metrics.secure_sum_then_finalize


def _metrics_process(
    config: config_lib.TaskConfig, model: tff.learning.models.FunctionalModel
) -> tff.templates.AggregationProcess | None:
    """The same of an evaluation; None for TFF's own."""
    if config.secure_aggregation is None:
        return None
    return secure_metrics.build_evaluation_process(model)


def _private_round(
    plan: dp_ftrl_privacy.DpFtrlPlan, config: config_lib.TaskConfig
) -> interface.PrivateRound | None:
    """Returns the mechanism of a task's aggregator; None without noise."""
    if plan.strategy is None:
        return None
    return process.build_aggregator(config, plan).private_round


def _build(
    material: _Material,
    built: tff.learning.templates.LearningProcess,
    schema: schema_lib.MinSep,
    kind: plan_pb2.TaskKind,
    limits: bounding.ReportLimits,
    broadcast: Sequence[plan_pb2.Tensor] | None = None,
    private_round: interface.PrivateRound | None = None,
) -> building.Plans:
    config = material.config
    pipeline = text_pipeline.text_pipeline(
        material.words,
        config.sequence_length,
        feature=config.text_feature,
        is_tokenized=config.pretokenized,
        batch_size=config.batch_size,
        epochs=config.client_epochs if kind == plan_pb2.TRAINING else 1,
        shuffle=config.shuffle,
        max_rows=config.max_sequences_per_client,
    )
    buckets = participation_histograms.ParticipationBuckets.for_schema(schema)
    return building.build_plans(
        built,
        pipeline,
        population=config.population,
        task=config.task,
        kind=kind,
        selection=plan_pb2.Selection(
            collection=config.collection,
            max_examples=config.max_examples,
            max_age_hours=config.max_age_hours,
        ),
        limits=plan_pb2.Limits(
            memory_bytes=config.memory_bytes,
            seconds=config.work_seconds,
            # With secure aggregation an update is padded to a power of two.
            upload_bytes=8 * material.model.num_parameters + _UPLOAD_BYTES,
        ),
        participation=plan_pb2.Participation(
            min_sep_rounds=schema.min_sep,
            min_sep_hours=config.min_sep_hours,
            stride_edges=buckets.stride_edges,
            times_edges=buckets.times_edges,
        ),
        secure_aggregation=secure_groups.wanted(config),
        broadcast=broadcast,
        private_round=private_round,
        report_limits=limits,
    )


def _limits(
    config: config_lib.TaskConfig, plan: dp_ftrl_privacy.DpFtrlPlan | None
) -> bounding.ReportLimits:
    """What an honest device reports at most; `plan` is None for an evaluation."""
    num_rows = config.max_sequences_per_client * (1 if plan is None else config.client_epochs)
    num_targets = num_rows * config.sequence_length
    unit = 1.0 if config.secure_aggregation is None else 2.0**secure_metrics.FRACTION_BITS
    counts = metrics.zero_counts()
    largest = {
        name: _LARGEST_LOSS * num_targets * unit if zero.dtype.is_floating else float(num_targets)
        for name, zero in counts.items()
    }
    clip_norm: float | str | None = None
    if plan is not None and plan.strategy is not None:
        clip_norm = _LEARNED_NORM if config.adaptive_clipping else plan.clip_norm
    return bounding.ReportLimits(
        clip_norm=clip_norm,
        encoding=None if plan is None else plan.encoding,
        metrics=largest | {"num_sequences": float(num_rows)},
        most_reports=config.rounds.wanted,
    )


def _terms(material: _Material, plan: dp_ftrl_privacy.DpFtrlPlan) -> terms_lib.Terms:
    config, initial = material.config, material.initial_weights
    parameters: dict[str, Any] = {
        "clients_per_round": config.clients_per_round,
        "server_optimizer": config.server_optimizer,
    }
    if plan.encoding is not None:
        parameters |= {
            "secagg_norm_inflation": plan.encoding.inflation,
            "secagg_bits_per_parameter": plan.encoding.bits_per_parameter,
            "noise_multiplier_is_relative_to": "clip_norm times secagg_norm_inflation",
        }
    return terms_lib.Terms(
        server_plan="",
        files={},
        kind="training",
        population=config.population,
        task=config.task,
        num_devices=config.num_devices,
        schema=plan.schema,
        delta=config.delta,
        strategy=plan.strategy,
        noise_multiplier=plan.noise_multiplier,
        clip_norm=plan.clip_norm,
        adaptive_clipping=config.adaptive_clipping,
        max_epsilon=config.max_epsilon,
        data=pathlib.PurePath(config.data).name,
        vocabulary_source=material.words.source,
        vocabulary_is_public=material.words.is_public,
        initial_weights_source=None if initial is None else initial.source,
        initial_weights_are_public=initial is not None and initial.is_public,
        parameters=parameters,
        secure_aggregation=secure_groups.stated(config),
    )


def _finish(
    material: _Material,
    plans: building.Plans,
    terms: terms_lib.Terms,
    proxies: Sequence[Sequence[bytes]],
    output: str | pathlib.Path,
    key: ed25519.Ed25519PrivateKey,
    progress: Progress,
) -> task_folder.TaskFolder:
    """Tests, signs and writes a task."""
    config = material.config
    progress(f"Testing the plans on public text, {len(proxies)} devices ...")
    findings = predicates.check_task(
        plans.server,
        plans.devices,
        proxies,
        predicates.Predicates(
            num_rounds=config.proxy_rounds,
            devices_per_proxy=-(-config.clients_per_round // len(proxies)),
        ),
    )
    tested = _tested(findings)
    for line in tested:
        progress(line)
    task_folder.write(
        output,
        signed=plans.sign(key),
        terms=terms,
        config=config,
        words=material.words,
        rule=material.rule,
        key=key,
        readme=_readme(material, terms, plans, tested),
    )
    return task_folder.read(output, [key.public_key()])


def _tested(findings: dict[int, predicates.Findings]) -> list[str]:
    lines = []
    for least, found in findings.items():
        loss = f"loss {found.losses[0]:.3f} to {found.losses[-1]:.3f}, " if found.losses else ""
        lines.append(
            f"Tested for devices of version {least} and later: {loss}largest change "
            f"{max(found.changes):.3g}, {found.cost.seconds:.2g} s and "
            f"{found.cost.memory_bytes / 1e6:.0f} MB on a device."
        )
    return lines


def _proxies(config: config_lib.TaskConfig) -> list[list[bytes]]:
    """Examples of simulated devices, of public text."""
    public = _public_text(config)
    every = max(1, len(public) // config.proxy_devices)
    users = public.user_ids[::every][: config.proxy_devices]
    proxies = []
    for user in users:
        texts = public.examples(user)[-config.max_examples :]
        proxies.append([text_examples.encode({config.text_feature: [text]}) for text in texts])
    return proxies


def _public_text(config: config_lib.TaskConfig) -> user_text.UserText:
    if config.proxy_data == _STANDARD_LIBRARY:
        return docstrings.read_standard_library()
    if sources.are_same_text(config.proxy_data, config.data):
        raise validation.UsageError(
            f"proxy_data {config.proxy_data!r} is the data that is protected, or a copy of it: "
            "name public text."
        )
    return sources.load_user_text(config.proxy_data, pretokenized=config.pretokenized)


def _readme(
    material: _Material,
    terms: terms_lib.Terms,
    plans: building.Plans,
    tested: Sequence[str],
) -> str:
    config, schema = material.config, terms.schema
    purpose = "trains" if terms.kind == "training" else f"evaluates the model of {terms.model_of}"
    rounds = config.rounds
    lines = [
        f"# Task {terms.task} of the population {terms.population}",
        "",
        f"It {purpose}: {config.model}, {material.model.num_parameters} weights, "
        f"{len(material.words.words)} words. Made by tff_dpftrl {version.__version__}.",
        "",
        f"- Rounds: {schema.num_rounds}, of {rounds.goal_count} reports ({rounds.least} are "
        f"enough when time is over; {rounds.wanted} devices are chosen).",
        f"- A device takes part at most {schema.max_participations} times, {schema.min_sep} "
        f"rounds (stride) and {config.min_sep_hours:g} hours apart.",
        f"- It takes the newest {config.max_examples} examples of its collection "
        f"{config.collection!r}: texts, in the feature {config.text_feature!r}. Up to "
        f"{config.max_sequences_per_client} sequences of {config.sequence_length} words are used.",
        f"- Its work takes up to {config.work_seconds:g} s and {config.memory_bytes / 1e6:.0f} MB, "
        f"and needs runtime version {min(plan.least_runtime_version for plan in plans.devices)}.",
        *(f"- {line}" for line in tested),
        "",
        "## Privacy",
        "",
        *_promise(terms),
        "",
        _who_sees(terms),
        "",
        f"Devices have to trust the key in `{task_folder.PUBLIC_KEY}`. Nothing in this folder is "
        "secret; it is signed, and must not be changed.",
    ]
    return "\n".join(lines) + "\n"


def _who_sees(terms: terms_lib.Terms) -> str:
    secure = terms.secure_aggregation
    if secure is None:
        return summation_sentences.in_short(secure)
    return summation_sentences.who_sees(secure)


def _promise(terms: terms_lib.Terms) -> list[str]:
    if terms.kind == "evaluation":
        return ["None: metrics are sums of the devices' exact figures, without noise."]
    accounting = privacy.TaskPrivacy(terms)
    if not accounting.has_guarantee:
        return ["NO guarantee: no noise is added."]
    lines = [
        f"{terms.strategy.name} noise, z = {terms.noise_multiplier:.6g}, clip norm "
        f"{terms.clip_norm:g}{' at first' if terms.adaptive_clipping else ''}: ε at most "
        f"{display.round_up(accounting.declared_epsilon)} at δ = {terms.delta:g} after all rounds, "
        f"per device, of {terms.num_devices} or more. {privacy.HONEST_DEVICES}"
    ]
    if terms.max_epsilon is not None:
        lines.append(f"No round begins that would bring ε above {terms.max_epsilon:g}.")
    return lines
