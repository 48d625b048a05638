"""From options to a signed and tested task. TFF is needed for its own models and algorithms only.

Options are taken apart here and nowhere else: what follows gets the parts that it needs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence

import tensorflow as tf
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.discretization import grid
from tff_dpftrl.execution import federated_round
from tff_dpftrl.learning import bucket_counts, metric_sums, own_model, rounds
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.learning import optimizers as optimizers_lib
from tff_dpftrl.mechanisms import noise_recipe, noise_split
from tff_dpftrl.models import metric_grid
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import adaptive_clipping, interface, party_noise
from tff_dpftrl.runs import dp_ftrl_privacy
from tff_dpftrl.runs import progress as progress_lib
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.plans import (
    bounding,
    building,
    expectations,
    measured_run,
    plan_pb2,
    predicates,
)
from tff_dpftrl.runtime.tasks import (
    analytics,
    language_task,
    provenance,
    readme,
    task_config,
    task_folder,
    task_privacy,
)
from tff_dpftrl.runtime.tasks import definition as definition_lib
from tff_dpftrl.runtime.tasks import terms as terms_lib
from tff_dpftrl.training import noise_options, optimizers, process, startup

_METRICS_BYTES = 1_000_000  # Room for metrics in an upload, besides the update.
_TRAINING_METRICS = "client_work/train"
_LEARNED_NORM = "active"  # Field of `adaptive_clipping.ClipState` that holds the norm of a round.
_KINDS = {"training": plan_pb2.TRAINING, "evaluation": plan_pb2.EVALUATION}


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
    """Parts of a task of either kind."""

    definition: definition_lib.TaskDefinition  # Model, examples and bounds of metrics.
    model: own_model.Model  # The model, as TFF takes it.
    num_parameters: int  # Number of its trainable weights.
    largest_metrics: Mapping[str, float]  # Largest entry of each summed metrics tensor, by path.
    proxies: Sequence[Sequence[bytes]]  # Serialized examples of each simulated device.
    tests: predicates.Predicates  # Tests that the task must pass on the proxies.
    config: task_config.TaskConfig  # All options, resolved.
    grids: metric_sums.Grids  # Grids of the metrics with recorded order statistics, by name.

    @property
    def has_own_algorithm(self) -> bool:
        """Whether options of learning have no meaning."""
        return self.definition.algorithm is not None or self.definition.buckets is not None


def make(
    config: task_config.TaskConfig,
    output: str | pathlib.Path,
    key: ed25519.Ed25519PrivateKey,
    *,
    built: plan_pb2.Provenance | None = None,
    progress: progress_lib.Progress,
    definition: definition_lib.TaskDefinition | None = None,
) -> task_folder.TaskFolder:
    """Makes a training task: plans, tests, signatures and folder. Returns it as read back.

    The devices' data is not read. Tests use proxies of it. The new folder's name is the task's if
    the options give none. `key` signs plans and terms. Without a definition, the task is that of
    the option `build`, or the language model of the options. It raises `TaskRefusedError` with all
    reasons if the tests fail.
    """
    task_folder.check_is_free(output)
    config = _resolved(config, output, definition)
    parts = _prepare(config, _define(config, definition, progress), progress)
    plan = _privacy_plan(parts, progress)
    if parts.has_own_algorithm:
        config.check_own_algorithm()
    if parts.definition.buckets is not None:
        _check_counts(plan)
    terms = _terms(parts, plan)
    _check_budget(terms)
    progress("Building the plans ...")
    aggregation = process.build_aggregation(config.rules, plan)
    private_round = getattr(aggregation, "private_round", None)
    training = _round(parts, plan, aggregation)
    limits = _report_limits(parts, plan)
    plans = _build(parts, training, terms, limits, private_round=private_round)
    return _finish(parts, plans, terms, output, key, built, progress)


def make_evaluation(
    of: task_folder.TaskFolder,
    config: task_config.TaskConfig,
    output: str | pathlib.Path,
    key: ed25519.Ed25519PrivateKey,
    *,
    built: plan_pb2.Provenance | None = None,
    progress: progress_lib.Progress,
    definition: definition_lib.TaskDefinition | None = None,
) -> task_folder.TaskFolder:
    """Makes a task that evaluates the model of the task `of` while that one trains.

    The other arguments, the result and the errors are those of `make`.
    """
    task_folder.check_is_free(output)
    num_rounds = config.learning.num_rounds
    schema = schema_lib.MinSep.unrestricted(num_rounds)
    # An evaluation has no noise that a party could add.
    config = config.changed(min_sep=1, max_participations=num_rounds, noise_party=None)
    config = _resolved(config, output, definition)
    if of.buckets is not None:
        raise validation.UsageError(
            f"The task {of.name!r} counts, and has no model that could be evaluated."
        )
    if config.serving.task == of.name:
        raise validation.UsageError(
            f"task {of.name!r} is the task that is evaluated: give another name."
        )
    once = config
    if isinstance(config.definition, task_config.LanguageTask):
        once = config.changed(client_epochs=1)
    defined = _define(once, definition, progress, with_cache=True)
    pipeline = dataclasses.replace(defined.pipeline, epochs=1)
    # Those are of the model in training, and the test evaluates the one that it begins with.
    defined = dataclasses.replace(defined, pipeline=pipeline, expectations=())
    parts = _prepare(config, defined, progress)
    if of.words != (None if defined.language is None else defined.language.words):
        raise validation.UsageError(
            f"vocabulary is not that of the task {of.name!r}: give the vocabulary.json of its "
            "folder, which also says how text is split into words."
        )
    terms = dataclasses.replace(
        of.terms,
        kind="evaluation",
        model_of=of.name,
        task=config.serving.task,
        schema=schema,
        strategy=None,
        noise_multiplier=0.0,
        max_epsilon=None,
        parameters={},
        secure_aggregation=config.secure_groups,
    )
    progress("Building the plans ...")
    if isinstance(parts.model, model_lib.Model):
        evaluation = rounds.build_evaluation(parts.model, metrics=_metric_sums(parts))
    else:
        from tff_dpftrl.learning import tff_rounds

        evaluation = tff_rounds.evaluation(parts.model, _metric_sums(parts))
    limits, broadcast = _report_limits(parts, None), of.server.prepare.outputs
    plans = _build(parts, evaluation, terms, limits, broadcast=broadcast)
    return _finish(parts, plans, terms, output, key, built, progress)


def _check_counts(plan: dp_ftrl_privacy.DpFtrlPlan) -> None:
    """Refuses noise with which counts would have no known scale, or no known error."""
    if plan.strategy is None:
        raise validation.UsageError(
            "mechanism 'none' has no clip norm, and divides by the number of devices that report: "
            "give a mechanism, whose sums are divided by clients_per_round."
        )
    if plan.adaptive_clipping:
        raise validation.UsageError(
            "adaptive_clipping changes the noise with the clip norm, so that estimates would have "
            "no known standard error: leave it out, and give clip_norm."
        )


def _terms(parts: _Parts, plan: dp_ftrl_privacy.DpFtrlPlan) -> terms_lib.Terms:
    """States what a training task promises, before its plans and files are hashed."""
    config, defined = parts.config, parts.definition
    words = None if defined.language is None else defined.language.words
    initial = defined.initial_weights(own_model.num_parameters(parts.model, trained=False))
    parameters: dict[str, str | int | float | bool | None] = {
        "clients_per_round": plan.clients_per_round,
        "server_optimizer": "own" if parts.has_own_algorithm else config.learning.server_optimizer,
    }
    if plan.encoding is not None:
        parameters |= {
            "secagg_norm_inflation": plan.encoding.inflation,
            "secagg_bits_per_parameter": plan.encoding.bits_per_parameter,
            "noise_multiplier_is_relative_to": "clip_norm times secagg_norm_inflation",
        }
    if (buckets := defined.buckets) is not None:
        histograms = (f"{name} ({len(names)} buckets)" for name, names in buckets.items())
        parameters[terms_lib.COUNTS] = ", ".join(histograms)
        parameters["max_examples_of_a_device_in_a_round"] = defined.pipeline.max_rows
    elif defined.language is None:
        parameters[terms_lib.METRICS] = _listed(own_model.metric_specs(parts.model))
    if config.noise == "secure" and plan.strategy is not None and plan.noise_multiplier > 0:
        parameters[sentences.NOISE_GENERATOR] = sentences.noise_generator(
            noise_recipe.is_sum_of_draws(plan.strategy.noise_recipe()), bool(plan.noise_parties)
        )
    if parts.grids:
        parameters[terms_lib.ORDER_STATISTICS] = ", ".join(parts.grids)
    return terms_lib.Terms(
        server_plan="",
        files={},
        kind="training",
        population=config.serving.population,
        task=config.serving.task,
        num_devices=plan.num_clients,
        schema=plan.schema,
        delta=plan.delta,
        strategy=plan.strategy,
        noise_multiplier=plan.noise_multiplier,
        clip_norm=plan.clip_norm,
        adaptive_clipping=plan.adaptive_clipping,
        max_epsilon=config.max_epsilon,
        data=defined.data,
        vocabulary_source=None if words is None else words.source,
        vocabulary_is_public=words is None or words.is_public,
        vocabulary_is_noised=words is not None and words.is_noised,
        initial_weights_source=None if initial is None else initial.source,
        initial_weights_are_public=initial is not None and initial.is_public,
        earlier_runs=() if initial is None else initial.runs,
        parameters=parameters,
        secure_aggregation=config.secure_groups,
    )


def _listed(specs: Mapping[str, tf.TensorSpec]) -> str:
    """Lists metrics, as in "loss (2 numbers)", with the entries of their sums."""
    counts: collections.Counter[str] = collections.Counter()
    for path, spec in specs.items():
        counts[path.partition("/")[0]] += spec.shape.num_elements()
    return ", ".join(f"{name} ({count} numbers)" for name, count in counts.items())


def _resolved(
    config: task_config.TaskConfig,
    output: str | pathlib.Path,
    definition: definition_lib.TaskDefinition | None,
) -> task_config.TaskConfig:
    """Fills in the options that follow from others, or from the new folder's name."""
    if definition is not None:
        config = config.changed(build=task_config.IN_MEMORY)
    return config.resolved(pathlib.Path(output).name)


def _define(
    config: task_config.TaskConfig,
    given: definition_lib.TaskDefinition | None,
    progress: progress_lib.Progress,
    *,
    with_cache: bool = False,
) -> definition_lib.TaskDefinition:
    """Returns the definition that is given, or the options name."""
    if given is not None:
        return given
    options, most = config.definition, config.devices.max_examples
    if isinstance(options, task_config.OwnDefinition):
        return definition_lib.load(options.build or "")
    if isinstance(options, task_config.WordCounts):
        return analytics.define_words(options, most, progress)
    return language_task.define(options, most, config.seed, progress, with_cache=with_cache)


def _prepare(
    config: task_config.TaskConfig,
    definition: definition_lib.TaskDefinition,
    progress: progress_lib.Progress,
) -> _Parts:
    """Checks that the parts of a definition fit each other."""
    public = definition.encoded_proxies()
    model = own_model.read(
        definition.model,
        definition.pipeline.batch_spec(),
        loss=definition.loss,
        metrics=definition.metrics,
    )
    num_parameters = own_model.num_parameters(model)
    progress(f"Model: {definition.description}, {num_parameters} weights.")
    return _Parts(
        definition=definition,
        model=model,
        num_parameters=num_parameters,
        largest_metrics=_largest_metrics(
            model, definition.largest_metrics, is_secure=config.secure_groups is not None
        ),
        proxies=public,
        tests=_tests(config, len(public), definition.loss_metric, definition.expectations),
        config=config,
        grids=_grids(config.devices.work_seconds, definition)
        if config.devices.order_statistics
        else {},
    )


def _grids(work_seconds: float, definition: definition_lib.TaskDefinition) -> metric_sums.Grids:
    """Returns the grids of a definition's metrics, and of the seconds of a device's work."""
    seconds = metric_grid.MetricGrid.logarithmic(2.0**-6, max(work_seconds, 1.0))
    return {**definition.grids, metric_grid.SECONDS: seconds}


def _tests(
    config: task_config.TaskConfig,
    num_proxies: int,
    loss: str,
    wanted: Sequence[expectations.Expectation],
) -> predicates.Predicates:
    """Chooses the tests of a task, in which proxies stand for the devices of a round."""
    # After the task's last round, a decay has stopped the server's learning.
    num_rounds = max(min(config.tests.proxy_rounds, config.learning.num_rounds), 2)
    per_proxy = -(-config.learning.clients_per_round // num_proxies)
    label = f"{_TRAINING_METRICS}/{loss}" if loss else ""
    tests = config.tests
    pythons = tests.test_python.split(",") if tests.test_python else []
    for python in pythons:
        measured_run.check_interpreter(python)
    return predicates.Predicates(
        num_rounds,
        devices_per_proxy=per_proxy,
        loss=label,
        expectations=(*wanted, *(expectations.from_text(tests.expect) if tests.expect else ())),
        pythons=pythons,
    )


def _privacy_plan(parts: _Parts, progress: progress_lib.Progress) -> dp_ftrl_privacy.DpFtrlPlan:
    """Plans the noise; a sum has room for the reports of all devices that a round chooses."""
    wanted, num_devices = parts.config.request(), parts.config.serving.num_devices
    assert num_devices is not None  # It must be given.
    plan = wanted.plan(num_devices, parts.num_parameters)
    if wanted.secagg_bits is not None:
        plan = _on_grid(plan, wanted.secagg_bits, parts)
    for line in startup.describe_plan(plan, parts.num_parameters):
        progress(line)
    return plan


def _on_grid(
    plan: dp_ftrl_privacy.DpFtrlPlan, bits: int, parts: _Parts
) -> dp_ftrl_privacy.DpFtrlPlan:
    """Chooses the grid of a plan, with room for the noise that parties add within the sum."""
    num_parties, strategy, noise_ratio = len(parts.config.noise_parties), plan.strategy, 0.0
    if num_parties and strategy is not None:
        if not plan.noise_multiplier:
            raise validation.UsageError(
                "noise_party adds the noise, and noise_multiplier is 0: raise it, give "
                "target_epsilon, or leave noise_party out."
            )
        z = plan.noise_multiplier
        if isinstance(adaptive := parts.config.privacy, noise_options.AdaptiveDpFtrl):
            clipping = adaptive_clipping.AdaptiveClipping(
                clipped_count_stddev=adaptive.clipped_count_stddev
            )
            stddev = clipping.count_stddev(z, plan.clients_per_round)
            z = noise_split.update_noise_multiplier(z, stddev)
        noise_ratio = party_noise.noise_ratio(strategy, z, plan.num_rounds, num_parties)
    most_reports = parts.config.round_settings.wanted
    encoding = grid.for_bits(parts.num_parameters, most_reports, bits, noise_ratio=noise_ratio)
    return dataclasses.replace(plan, encoding=encoding, noise_parties=num_parties)


def _round(
    parts: _Parts, plan: dp_ftrl_privacy.DpFtrlPlan, aggregation: rounds.Aggregation
) -> federated_round.FederatedRound:
    """Builds the round; that of an own algorithm must release all privately."""
    metrics, algorithm = _metric_sums(parts), parts.definition.algorithm
    rules = parts.config.rules
    if parts.definition.buckets is not None:
        return bucket_counts.build_round(parts.model, aggregation, metrics=metrics)
    if algorithm is None and isinstance(parts.model, model_lib.Model):
        return process.build_round(plan, rules, parts.model, metrics=metrics)
    from tff_dpftrl.learning import tff_rounds

    if algorithm is not None:
        return tff_rounds.training(algorithm, parts.model, aggregation, metrics)
    averaging = tff_rounds.federated_averaging(
        optimizers_lib.sgdm(rules.learning.client_learning_rate),
        optimizers.build_server_optimizer(rules),
    )
    name = "The model, in TFF's federated averaging,"
    return tff_rounds.training(averaging, parts.model, aggregation, metrics, name=name)


def _metric_sums(parts: _Parts) -> metric_sums.Build:
    """Chooses how metrics are summed."""
    is_secure = parts.config.secure_groups is not None
    return functools.partial(metric_sums.build, is_secure=is_secure, grids=parts.grids)


def _report_limits(parts: _Parts, plan: dp_ftrl_privacy.DpFtrlPlan | None) -> bounding.ReportLimits:
    """Bounds what an honest device reports; `plan` is None for an evaluation."""
    clip_norm: float | str | None = None
    if plan is not None and plan.strategy is not None:
        clip_norm = _LEARNED_NORM if plan.adaptive_clipping else plan.clip_norm
    return bounding.ReportLimits(
        clip_norm=clip_norm,
        encoding=None if plan is None else plan.encoding,
        metrics=parts.largest_metrics,
        names_all_metrics=True,
        most_reports=parts.config.round_settings.wanted,
        grids=parts.grids,
    )


def _largest_metrics(
    model: own_model.Model, given: Mapping[str, float], *, is_secure: bool
) -> dict[str, float]:
    """Returns the largest entry of each tensor of metrics, as it is summed, by its path."""
    largest, specs = {}, own_model.metric_specs(model)
    sizes = {path: 8 * spec.shape.num_elements() for path, spec in specs.items()}
    if sum(sizes.values()) > _METRICS_BYTES:
        most = max(sizes, key=sizes.__getitem__)
        raise validation.UsageError(
            f"metrics of a device have up to {sum(sizes.values())} bytes, and it may send "
            f"{_METRICS_BYTES}: leave out {most.partition('/')[0]!r}, or make it smaller."
        )
    for path, spec in specs.items():
        name = next((part for part in path.split("/") if part in given), None)
        if name is None:
            raise validation.UsageError(
                f"largest_metrics has no bound of the metric {path.partition('/')[0]!r}, which a "
                f"device could make as large as it likes; it names {sorted(given)}."
            )
        scaled = is_secure and spec.dtype.is_floating
        largest[path] = given[name] * (2.0**metric_sums.FRACTION_BITS if scaled else 1.0)
        if is_secure and largest[path] > metric_sums.LARGEST_ENTRY:
            raise validation.UsageError(
                f"largest_metrics[{name!r}]={given[name]:g} is more than secure sums have room "
                f"for: {given[name] * metric_sums.LARGEST_ENTRY / largest[path]:.6g}."
            )
    return largest


def _check_budget(terms: terms_lib.Terms) -> None:
    refusal = task_privacy.TaskPrivacy(terms).refusal(participation_histograms.ObservedRounds())
    if refusal:
        raise validation.UsageError(
            f"max_epsilon={terms.max_epsilon:g} does not pay for one round: {refusal}. Raise it, "
            "or noise_multiplier."
        )


def _build(
    parts: _Parts,
    round_: federated_round.FederatedRound,
    terms: terms_lib.Terms,
    limits: bounding.ReportLimits,
    broadcast: Sequence[plan_pb2.Tensor] | None = None,
    private_round: interface.PrivateRound | None = None,
) -> building.Plans:
    """Builds the plans of a round, with the participation that the terms declare."""
    config, devices, schema = parts.config, parts.config.devices, terms.schema
    # Rounding moves a bucket by a step of the largest one, in all devices the same way if they are
    # alike: over many reports that adds up to more than the noise.
    is_rounded = devices.update_bits == task_config.ROUNDED_BITS
    is_rounded &= parts.definition.buckets is None
    buckets = participation_histograms.ParticipationBuckets.for_schema(schema)
    groups = config.secure_groups
    return building.build_plans(
        round_,
        parts.definition.pipeline,
        building.DeviceTerms(
            population=config.serving.population,
            task=config.serving.task,
            kind=_KINDS[terms.kind],
            selection=plan_pb2.Selection(
                collection=devices.collection,
                max_examples=devices.max_examples,
                max_age_hours=devices.max_age_hours,
            ),
            limits=plan_pb2.Limits(
                memory_bytes=devices.memory_bytes,
                seconds=devices.work_seconds,
                # With secure aggregation an update is padded to a power of two.
                upload_bytes=8 * parts.num_parameters + _METRICS_BYTES,
            ),
            participation=plan_pb2.Participation(
                min_sep_rounds=schema.min_sep,
                min_sep_hours=config.serving.min_sep_hours,
                stride_edges=buckets.stride_edges,
                times_edges=buckets.times_edges,
            ),
        ),
        secure_aggregation=None
        if groups is None
        else groups.demanded(config.round_settings.wanted),
        broadcast=broadcast,
        private_round=private_round,
        report_limits=limits,
        rounds_updates=is_rounded,
    )


def _finish(
    parts: _Parts,
    plans: building.Plans,
    terms: terms_lib.Terms,
    output: str | pathlib.Path,
    key: ed25519.Ed25519PrivateKey,
    built: plan_pb2.Provenance | None,
    progress: progress_lib.Progress,
) -> task_folder.TaskFolder:
    """Tests, signs and writes a task."""
    if built is not None:
        provenance.put_into(built, plans.server, plans.devices)
        progress(provenance.sentence(built))
    progress(f"Testing the plans on {len(parts.proxies)} proxies of devices ...")
    findings = predicates.check_task(plans.server, plans.devices, parts.proxies, parts.tests)
    for device in plans.devices:
        if found := findings.get(device.least_runtime_version):
            versions = (found.tensorflow, *(other.tensorflow for other in found.elsewhere))
            device.tested_tensorflow[:] = dict.fromkeys(versions)
    tested = readme.test_results(findings)
    for line in tested:
        progress(line)
    features, language = parts.definition.features(), parts.definition.language
    task_folder.write(
        output,
        signed=plans.sign(key),
        terms=terms,
        options=parts.config.to_dict(),
        features=features,
        words=None if language is None else language.words,
        rule=None if language is None else language.rule,
        buckets=parts.definition.buckets,
        key=key,
        readme=readme.text(
            terms,
            plans.devices,
            parts.config.round_settings,
            features=features,
            max_rows=parts.definition.pipeline.max_rows,
            model=f"{parts.definition.description}, {parts.num_parameters} weights",
            tested=tested,
            built=None if built is None else provenance.sentence(built),
        ),
    )
    return task_folder.read(output, [key.public_key()])
