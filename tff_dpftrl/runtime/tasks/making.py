"""From options to a signed and tested task. Needs TFF, as nothing else of tasks does.

Options are taken apart here and nowhere else: what follows gets the parts that it needs.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow_federated as tff
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation
from tff_dpftrl.data import tables, vocabulary
from tff_dpftrl.discretization import grid
from tff_dpftrl.execution import contexts, tff_names
from tff_dpftrl.learning import functional_model, metric_histograms, secure_metrics
from tff_dpftrl.models import language_model, metric_grid, metrics, table
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import interface
from tff_dpftrl.runs import dp_ftrl_privacy, privacy
from tff_dpftrl.runs import progress as progress_lib
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.plans import (
    bounding,
    building,
    plan_pb2,
    predicates,
    text_pipeline,
)
from tff_dpftrl.runtime.tasks import (
    proxies,
    readme,
    secure_groups,
    task_config,
    task_folder,
    task_privacy,
)
from tff_dpftrl.runtime.tasks import terms as terms_lib
from tff_dpftrl.training import corpus, process, startup, warm_start

_METRICS_BYTES = 1_000_000  # Room for metrics in an upload, besides the update.
_LARGEST_LOSS = 100.0  # Largest mean loss of a device's targets, in nats.
_LEARNED_NORM = "active"  # Field of `adaptive_clipping.ClipState` that holds the norm of a round.
_KINDS = {"training": plan_pb2.TRAINING, "evaluation": plan_pb2.EVALUATION}


@dataclasses.dataclass(frozen=True, eq=False)
class _Language:
    """A model and its words.

    Attributes:
      name: Name of the model, a key of `models.table.MODELS`.
      words: Vocabulary.
      rule: Rule by which texts become words.
      model: Language model.
      initial_weights: Weights of an earlier model to begin with; None for random ones.
      functional: The model as TFF takes it, with its initial weights.
    """

    name: str
    words: vocabulary.Vocabulary
    rule: vocabulary.Rule
    model: language_model.LanguageModel
    initial_weights: warm_start.InitialWeights | None
    functional: tff.learning.models.FunctionalModel

    @property
    def summary(self) -> str:
        """Name and sizes of the model."""
        return f"{self.name}, {self.model.num_parameters} weights, {len(self.words.words)} words"

    @property
    def upload_bytes(self) -> int:
        """Room for a report; with secure aggregation an update is padded to a power of two."""
        return 8 * self.model.num_parameters + _METRICS_BYTES


@dataclasses.dataclass(frozen=True)
class _Batches:
    """Batching of the texts of a device: arguments of `text_pipeline.text_pipeline`.

    Attributes:
      feature: Name of the feature of an example that holds texts.
      is_tokenized: Whether texts are words already, separated by white space.
      batch_size: Number of sequences in a batch.
      epochs: Number of passes over the sequences.
      shuffle: Whether each pass has a new order.
      max_rows: Largest number of sequences used.
    """

    feature: str
    is_tokenized: bool
    batch_size: int
    epochs: int
    shuffle: bool
    max_rows: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Demands:
    """Demands of a task on devices, besides the participation that its privacy rests on.

    Attributes:
      population: Name of the devices that take part.
      task: Name of the task.
      num_devices: Smallest number of devices in the population.
      rounds: Sizes and time-outs of a round.
      selection: Examples that a device takes from its store.
      limits: What the task may cost a device.
      min_sep_hours: Hours that a device rests after it took part.
      secure_groups: Groups that sum their reports securely; None if the server sees reports.
    """

    population: str
    task: str
    num_devices: int
    rounds: population.RoundSettings
    selection: plan_pb2.Selection
    limits: plan_pb2.Limits
    min_sep_hours: float
    secure_groups: secure_groups.SecureGroups | None

    @property
    def stated(self) -> terms_lib.SecureAggregation | None:
        """Terms of secure aggregation, as the task states them; None without it."""
        return None if self.secure_groups is None else self.secure_groups.stated()


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
    """Parts of a task of either kind.

    Attributes:
      proxies: Serialized examples of each simulated device, from public text.
      tests: What the task has to show on them.
      language: The model and its words.
      batches: How the texts of a device become batches.
      demands: What the task asks of devices.
      options: All options, as the task's folder keeps them.
      grids: Grids of the metrics of which order statistics are recorded, by name.
    """

    proxies: Sequence[Sequence[bytes]]
    tests: predicates.Predicates
    language: _Language
    batches: _Batches
    demands: _Demands
    options: Mapping[str, Any]
    grids: metric_histograms.Grids = dataclasses.field(default_factory=dict)


def make(
    config: task_config.TaskConfig,
    output: str | pathlib.Path,
    key: ed25519.Ed25519PrivateKey,
    *,
    progress: progress_lib.Progress,
) -> task_folder.TaskFolder:
    """Makes a training task: plans, tests, signatures, folder.

    The devices' data is not read. Tests use public text.

    Args:
      config: Options of the task.
      output: New folder. Its name is the task's if the options give none.
      key: Private key that signs plans and terms.
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
    parts = _prepare(config, config.client_epochs, progress)
    learning, plan = config.learning, _privacy_plan(config.privacy(), parts, progress)
    terms = terms_lib.of_training(
        plan,
        population=parts.demands.population,
        task=parts.demands.task,
        data=pathlib.PurePath(config.data).name,
        words=parts.language.words,
        initial_weights=parts.language.initial_weights,
        max_epsilon=config.max_epsilon,
        server_optimizer=learning.server_optimizer,
        secure_aggregation=parts.demands.stated,
    )
    if parts.grids:
        listed = {terms_lib.ORDER_STATISTICS: ", ".join(parts.grids)}
        terms = dataclasses.replace(terms, parameters={**terms.parameters, **listed})
    _check_budget(terms)
    progress("Building the plans ...")
    with contexts.compiled_only():
        training = process.build_process(
            plan,
            learning,
            parts.language.functional,
            metrics_aggregator=_metrics_aggregator(parts),
        )
        private_round = None
        if plan.strategy is not None:
            private_round = process.build_aggregator(learning, plan).private_round
        limits = _report_limits(parts, plan)
        plans = _build(parts, training, terms, limits, private_round=private_round)
    return _finish(parts, plans, terms, output, key, progress)


def make_evaluation(
    of: task_folder.TaskFolder,
    config: task_config.TaskConfig,
    output: str | pathlib.Path,
    key: ed25519.Ed25519PrivateKey,
    *,
    progress: progress_lib.Progress,
) -> task_folder.TaskFolder:
    """Makes a task that evaluates the model of another task while that one trains.

    Args:
      of: Task that trains the model.
      config: Options of that task, with another name, goal, number of rounds or weight.
      output: New folder. Its name is the task's if the options give none.
      key: Private key that signs plans and terms.
      progress: Callback for progress lines.

    Returns:
      The task, as it was read back.

    Raises:
      predicates.TaskRefusedError: If the tests fail; with all reasons.
      ValueError: If an option cannot be used, or there is something at `output`.
      OSError: If the folder cannot be written.
    """
    task_folder.check_is_free(output)
    schema = schema_lib.MinSep.unrestricted(config.num_rounds)
    config = dataclasses.replace(config, min_sep=1, max_participations=config.num_rounds)
    config = config.resolved(pathlib.Path(output).name)
    if config.task == of.name:
        raise validation.UsageError(
            f"task {config.task!r} is the task that is evaluated: give another name."
        )
    parts = _prepare(config, 1, progress)
    if parts.language.words != of.words:
        raise validation.UsageError(
            f"vocabulary is not that of the task {of.name!r}: give the same one."
        )
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
        secure_aggregation=parts.demands.stated,
    )
    progress("Building the plans ...")
    with contexts.compiled_only():
        evaluation = tff.learning.algorithms.build_fed_eval(
            parts.language.functional,
            metrics_aggregation_process=_metrics_process(parts),
            loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
        )
        limits, broadcast = _report_limits(parts, None), of.server.prepare.outputs
        plans = _build(parts, evaluation, terms, limits, broadcast=broadcast)
    return _finish(parts, plans, terms, output, key, progress)


def _prepare(
    config: task_config.TaskConfig, epochs: int, progress: progress_lib.Progress
) -> _Parts:
    """Reads and checks what the options name; `epochs` are passes over a device's sequences."""
    public = proxies.read(
        config.proxy_data,
        num_devices=config.proxy_devices,
        max_examples=config.max_examples,
        text_feature=config.text_feature,
        pretokenized=config.pretokenized,
        protected=config.data,
        table=config.part(tables.TableOptions),
    )
    words = corpus.public_vocabulary(
        config.vocabulary,
        config.vocabulary_size,
        tokenizer=config.tokenizer,
        lower_case=config.lower_case,
        pretokenized=config.pretokenized,
        data=config.data,
    )
    language = _read_language(
        words,
        config.model,
        {"sequence_length": config.sequence_length, **config.model_sizes},
        pretokenized=config.pretokenized,
        weights_folder=config.initial_weights,
        seed=config.seed,
        protected=config.data,
        reading=config.part(tables.TableOptions),
        progress=progress,
    )
    return _Parts(
        proxies=public,
        tests=_tests(config, len(public)),
        language=language,
        batches=_Batches(
            feature=config.text_feature,
            is_tokenized=config.pretokenized,
            batch_size=config.batch_size,
            epochs=epochs,
            shuffle=config.shuffle,
            max_rows=config.max_sequences_per_client,
        ),
        demands=_demands(config, language),
        options=dataclasses.asdict(config),
        grids=_grids(config, epochs) if config.order_statistics else {},
    )


def _grids(config: task_config.TaskConfig, epochs: int) -> metric_histograms.Grids:
    """Returns the grids of a language model's metrics, and of the seconds of a device's work."""
    logarithmic = metric_grid.MetricGrid.logarithmic
    return {
        "loss": logarithmic(2.0**-6, _LARGEST_LOSS, per_octave=16),
        "top1_in_vocab": metric_grid.MetricGrid.linear(0.0, 1.0, 50),
        "num_sequences": logarithmic(1.0, 2.0 * config.max_sequences_per_client * epochs),
        metric_grid.SECONDS: logarithmic(2.0**-6, max(config.work_seconds, 1.0)),
    }


def _tests(config: task_config.TaskConfig, num_proxies: int) -> predicates.Predicates:
    """Chooses the tests of a task, in which proxies stand for the devices of a round."""
    # After the task's last round, a decay has stopped the server's learning.
    num_rounds = max(min(config.proxy_rounds, config.num_rounds), 2)
    per_proxy = -(-config.clients_per_round // num_proxies)
    return predicates.Predicates(num_rounds, devices_per_proxy=per_proxy)


def _read_language(
    words: vocabulary.Vocabulary,
    name: str,
    sizes: Mapping[str, Any],
    *,
    pretokenized: bool,
    weights_folder: str | None,
    seed: int,
    protected: str,
    reading: tables.TableOptions,
    progress: progress_lib.Progress,
) -> _Language:
    """Builds the model of a name, and reads its initial weights if a folder is given."""
    progress(f"Vocabulary: {len(words.words)} {words.unit} ({words.source}).")
    model = table.build(name, vocabulary_size=words.size, **sizes)
    progress(f"Model: {name}, {model.num_parameters} weights.")
    initial = None
    if weights_folder is not None:
        folder = pathlib.Path(weights_folder)
        initial = warm_start.read(folder, model, words, seed, protected=protected, table=reading)
        progress(f"Initial weights: {initial.source}.")
    rule = words.rule(pretokenized)
    special = metrics.SpecialIds(oov=words.oov, bos=words.bos, eos=words.eos)
    weights = None if initial is None else initial.weights
    functional = functional_model.build(model, special, seed, weights)
    return _Language(name, words, rule, model, initial, functional)


def _demands(config: task_config.TaskConfig, language: _Language) -> _Demands:
    return _Demands(
        population=config.population,
        task=config.task,
        num_devices=config.num_devices,
        rounds=config.rounds,
        selection=plan_pb2.Selection(
            collection=config.collection,
            max_examples=config.max_examples,
            max_age_hours=config.max_age_hours,
        ),
        limits=plan_pb2.Limits(
            memory_bytes=config.memory_bytes,
            seconds=config.work_seconds,
            upload_bytes=language.upload_bytes,
        ),
        min_sep_hours=config.min_sep_hours,
        secure_groups=config.secure_groups,
    )


def _privacy_plan(
    wanted: privacy.Privacy, parts: _Parts, progress: progress_lib.Progress
) -> dp_ftrl_privacy.DpFtrlPlan:
    """Plans the noise; a sum has room for the reports of all devices that a round chooses."""
    if not isinstance(wanted, dp_ftrl_privacy.DpFtrlPrivacy):
        raise TypeError("The noise of a task is that of DP-FTRL.")
    num_parameters = parts.language.model.num_parameters
    plan = wanted.plan(parts.demands.num_devices, num_parameters)
    if wanted.secagg_bits is not None:
        most_reports = parts.demands.rounds.wanted
        encoding = grid.for_bits(num_parameters, most_reports, wanted.secagg_bits)
        plan = dataclasses.replace(plan, encoding=encoding)
    for line in startup.describe_plan(plan, num_parameters):
        progress(line)
    return plan


def _metrics_aggregator(parts: _Parts) -> Callable[..., tff_names.Computation]:
    """Chooses how metrics of training are summed: securely, if updates are."""
    is_secure = parts.demands.secure_groups is not None
    summing = (
        secure_metrics.secure_sum_then_finalize
        if is_secure
        else tff.learning.metrics.sum_then_finalize
    )
    if not parts.grids:
        return summing
    return metric_histograms.with_histograms(summing, parts.grids, is_secure=is_secure)


def _metrics_process(parts: _Parts) -> tff.templates.AggregationProcess | None:
    """Chooses how metrics of an evaluation are summed; None for TFF's default."""
    is_secure, model = parts.demands.secure_groups is not None, parts.language.functional
    if not is_secure and not parts.grids:
        return None
    process = secure_metrics.build_evaluation_process(model, is_secure=is_secure)
    if not parts.grids:
        return process
    return metric_histograms.evaluation_with_histograms(
        process, model.finalize_metrics, parts.grids, is_secure=is_secure
    )


def _report_limits(parts: _Parts, plan: dp_ftrl_privacy.DpFtrlPlan | None) -> bounding.ReportLimits:
    """Bounds what an honest device reports; `plan` is None for an evaluation."""
    num_rows = parts.batches.max_rows * parts.batches.epochs
    num_targets = num_rows * parts.language.model.sequence_length
    is_secure = parts.demands.secure_groups is not None
    unit = 2.0**secure_metrics.FRACTION_BITS if is_secure else 1.0
    largest = {
        name: _LARGEST_LOSS * num_targets * unit if zero.dtype.is_floating else float(num_targets)
        for name, zero in metrics.zero_counts().items()
    }
    clip_norm: float | str | None = None
    if plan is not None and plan.strategy is not None:
        clip_norm = _LEARNED_NORM if plan.adaptive_clipping else plan.clip_norm
    return bounding.ReportLimits(
        clip_norm=clip_norm,
        encoding=None if plan is None else plan.encoding,
        metrics=largest | {"num_sequences": float(num_rows)},
        most_reports=parts.demands.rounds.wanted,
        grids=parts.grids,
    )


def _check_budget(terms: terms_lib.Terms) -> None:
    refusal = task_privacy.TaskPrivacy(terms).refusal(participation_histograms.ObservedRounds())
    if refusal:
        raise validation.UsageError(
            f"max_epsilon={terms.max_epsilon:g} does not pay for one round: {refusal}. Raise it, "
            "or noise_multiplier."
        )


def _build(
    parts: _Parts,
    learning_process: tff.learning.templates.LearningProcess,
    terms: terms_lib.Terms,
    limits: bounding.ReportLimits,
    broadcast: Sequence[plan_pb2.Tensor] | None = None,
    private_round: interface.PrivateRound | None = None,
) -> building.Plans:
    """Builds the plans of a process, with the participation that the terms declare."""
    demands, schema = parts.demands, terms.schema
    buckets = participation_histograms.ParticipationBuckets.for_schema(schema)
    groups = demands.secure_groups
    pipeline = text_pipeline.text_pipeline(
        parts.language.words,
        parts.language.model.sequence_length,
        **dataclasses.asdict(parts.batches),
    )
    return building.build_plans(
        learning_process,
        pipeline,
        building.DeviceTerms(
            population=demands.population,
            task=demands.task,
            kind=_KINDS[terms.kind],
            selection=demands.selection,
            limits=demands.limits,
            participation=plan_pb2.Participation(
                min_sep_rounds=schema.min_sep,
                min_sep_hours=demands.min_sep_hours,
                stride_edges=buckets.stride_edges,
                times_edges=buckets.times_edges,
            ),
        ),
        secure_aggregation=None if groups is None else groups.demanded(),
        broadcast=broadcast,
        private_round=private_round,
        report_limits=limits,
    )


def _finish(
    parts: _Parts,
    plans: building.Plans,
    terms: terms_lib.Terms,
    output: str | pathlib.Path,
    key: ed25519.Ed25519PrivateKey,
    progress: progress_lib.Progress,
) -> task_folder.TaskFolder:
    """Tests, signs and writes a task."""
    progress(f"Testing the plans on public text, {len(parts.proxies)} devices ...")
    findings = predicates.check_task(plans.server, plans.devices, parts.proxies, parts.tests)
    tested = readme.test_results(findings)
    for line in tested:
        progress(line)
    task_folder.write(
        output,
        signed=plans.sign(key),
        terms=terms,
        options=parts.options,
        words=parts.language.words,
        rule=parts.language.rule,
        key=key,
        readme=readme.text(
            terms,
            plans.devices,
            parts.demands.rounds,
            feature=parts.batches.feature,
            max_sequences=parts.batches.max_rows,
            model=parts.language.summary,
            sequence_length=parts.language.model.sequence_length,
            tested=tested,
        ),
    )
    return task_folder.read(output, [key.public_key()])
