"""Builds the plans of a task from a round of federated learning."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation
from tff_dpftrl.execution import (
    compiled_process,
    entropy,
    federated_round,
    graph_function,
    large_fills,
)
from tff_dpftrl.models import metric_grid
from tff_dpftrl.private_round import interface, secure_calls
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.plans import (
    allowed_ops,
    bounding,
    example_pipeline,
    graphs,
    plan_pb2,
    rounded_updates,
    secure_report,
    signing,
    tensor_values,
    verification,
)

if TYPE_CHECKING:
    import tensorflow_federated as tff

_EXAMPLES_SPEC = tf.TensorSpec([None], tf.string)
_SEED_SPEC = tf.TensorSpec([2], tf.int64)
# Prefixes of labels: of the aggregator's state, and of weights that are trained.
_AGGREGATOR, _TRAINABLE = "aggregator/", "trainable/"
_WEIGHTS = ("trainable", "non_trainable")  # Parts of the label of a weight.


class CannotPlanError(validation.UsageError):
    """Raised for a process of which no plan can be made; the message says why."""


@dataclasses.dataclass(frozen=True)
class Plans:
    """The plans of a task, not signed yet."""

    server: plan_pb2.ServerPlan
    devices: tuple[plan_pb2.DevicePlan, ...]  # One for each runtime version with its own variant.

    def sign(self, key: ed25519.Ed25519PrivateKey) -> plan_pb2.SignedTask:
        """Serialises, hashes and signs the plans."""
        return signing.sign_task(self.server, self.devices, key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTerms:
    """Terms on which devices take part in a task; its plans hold them."""

    population: str
    task: str
    kind: plan_pb2.TaskKind = plan_pb2.TRAINING  # Kind of the task, training or evaluation.
    selection: plan_pb2.Selection  # Examples that a device takes from its store.
    limits: plan_pb2.Limits  # Memory, time and upload that the task may cost a device.
    participation: plan_pb2.Participation  # Rests between rounds, and histogram buckets.

    def __post_init__(self) -> None:
        selection, participation = self.selection, self.participation
        names = {
            "population": self.population,
            "task": self.task,
            "selection.collection": selection.collection,
        }
        for name, value in names.items():
            if not value:
                raise validation.UsageError(f"{name} must not be empty.")
        validation.integer("selection.max_examples", selection.max_examples, minimum=1)
        validation.number("selection.max_age_hours", selection.max_age_hours, at_least=0)
        for name in ("memory_bytes", "seconds", "upload_bytes"):
            validation.positive(f"limits.{name}", getattr(self.limits, name))
        validation.integer("participation.min_sep_rounds", participation.min_sep_rounds, minimum=1)
        validation.number("participation.min_sep_hours", participation.min_sep_hours, at_least=0)
        participation_histograms.ParticipationBuckets(
            tuple(participation.stride_edges), tuple(participation.times_edges)
        )


def build_plans(
    process: federated_round.FederatedRound | tff.learning.templates.LearningProcess,
    pipeline: example_pipeline.ExamplePipeline,
    terms: DeviceTerms,
    *,
    secure_aggregation: plan_pb2.SecureAggregation | None = None,
    variants: Sequence[Callable[[tf.compat.v1.GraphDef], tf.compat.v1.GraphDef]] = (),
    broadcast: Sequence[plan_pb2.Tensor] | None = None,
    private_round: interface.PrivateRound | None = None,
    report_limits: bounding.ReportLimits | None = None,
    rounds_updates: bool = False,
) -> Plans:
    """Builds the plans, not signed, of a round of federated learning.

    A process of TFF must be one that `execution.compile_process` compiles: training with any
    aggregator of this package, or evaluation. It may draw random numbers from the seeds of its
    state and from the operating system's generator only. The least runtime version of a plan
    follows from its operations, and from whether it asks for secure aggregation.

    `secure_aggregation` demands that all sums of reports are secure sums of the process; None if
    reports are summed in the clear. `variants` rewrite the graph of the device part into one that
    computes the same for older runtime versions. `broadcast` are the tensors that devices get in
    the task whose model this one evaluates while it is trained: `prepare.outputs` of that task's
    server plan. The process takes what it needs by label. None for what the process itself
    broadcasts.

    `private_round` tells how the state passes over a skipped round. None for a process without
    noise, whose state a skipped round keeps. Devices cut their metrics to `report_limits`, and the
    server refuses reports beyond them; None for an update that is not clipped and metrics of
    unknown size. With `rounds_updates`, devices send updates in the clear, but never metrics, as
    integers of 16 bits.
    """
    common = {
        "population": terms.population,
        "task": terms.task,
        "kind": terms.kind,
        "participation": terms.participation,
        "secure_aggregation": secure_aggregation,
    }
    try:
        if not isinstance(process, federated_round.FederatedRound):
            from tff_dpftrl.execution import process_form

            process = process_form.round_of(process)
        server = _server_plan(process)
        server.skip.CopyFrom(_skip_graph(server, private_round))
        _check_noise("skip", server.skip)
        if broadcast is not None:
            server.prepare.CopyFrom(_prepare_like(server.prepare, broadcast))
        server.MergeFrom(
            plan_pb2.ServerPlan(
                update=map(graphs.tensor_of, process.report.specs, process.report.labels),
                secure_sums=_secure_sums(process),
                **common,
            )
        )
        bounding.bound_reports(server, terms.kind, report_limits or bounding.ReportLimits())
        graph = _device_graph(process, pipeline, server)
        del server.update[:]
        server.update.extend(graph.outputs)
        if rounds_updates:
            server.rounded.extend(rounded_updates.places_in(server.report_bounds, server.update))
    except bounding.UnboundedError as error:
        raise CannotPlanError(f"Reports of the process cannot be bounded: {error}") from None
    except graph_function.UnsupportedGraphError as error:
        raise CannotPlanError(f"No plan can be made of the process: {error}") from error
    if secure_aggregation is not None:
        _check_secure_aggregation(server)
        if secure_aggregation.noise_parties:
            server.party_noise.CopyFrom(_party_noise(server, private_round, report_limits))
            content = server.SerializeToString(deterministic=True)
            content += graph.SerializeToString(deterministic=True)
            server.secure_aggregation.noised_plans = hashlib.sha256(content).digest()
            common["secure_aggregation"] = server.secure_aggregation
    shuffled = plan_pb2.DEVICE_DRAWS if pipeline.shuffle else plan_pb2.NO_SEED
    device = plan_pb2.DevicePlan(
        graph=graph,
        secure_sums=server.secure_sums,
        selection=terms.selection,
        batch_size=pipeline.batch_size,
        epochs=pipeline.epochs,
        seed_policy=shuffled,
        limits=terms.limits,
        rounded=server.rounded,
        seconds=_seconds(graph, report_limits),
        **common,
    )
    _check_numbers([*server.prepare.inputs, *server.prepare.outputs, *graph.outputs])
    devices = [_with_graph(device, graph.graph_def)]
    for rewrite in variants:
        rewritten = rewrite(tf.compat.v1.GraphDef.FromString(graph.graph_def))
        devices.append(_with_graph(device, rewritten.SerializeToString(deterministic=True)))
    return Plans(server, tuple(devices))


def _check_secure_aggregation(server: plan_pb2.ServerPlan) -> None:
    try:
        secure_report.parameters_of(server)
    except secure_report.PlanNotSecureError as error:
        raise CannotPlanError(
            f"Reports of the process cannot be summed securely: {error} Give the aggregation a "
            "`vector_sum`, and take metrics of `learning.metric_sums` with `is_secure`; with TFF, "
            "`aggregators.secagg` and `learning.tff_metrics`."
        ) from None


def _party_noise(
    server: plan_pb2.ServerPlan,
    private_round: interface.PrivateRound | None,
    limits: bounding.ReportLimits | None,
) -> plan_pb2.PartyNoise:
    """Returns what a noise party has to know of the sums that it adds to."""
    encoding = None if limits is None else limits.encoding
    has_room = encoding is not None and encoding.noise_ratio > 0
    if not has_room or not getattr(private_round, "noise_parties", 0):
        raise CannotPlanError(
            "noise_parties add the noise within the sums, and the process adds its own, or has no "
            "grid with room for theirs: build it with noise_parties, on a grid with noise_ratio."
        )
    noised = [server.update[b.tensors[0]].label for b in server.report_bounds if b.noised]
    round_seeds = [
        tensor.label
        for tensor in server.prepare.outputs
        if (tensor.dtype, list(tensor.shape)) == ("int64", [2])
    ]
    count_stddev = getattr(private_round, "clipped_count_stddev", None)
    if len(round_seeds) != 1 or len(noised) != 1 + (count_stddev is not None):
        raise CannotPlanError(
            f"noise_parties add to one encoded update, and the process sums {noised} on grids of "
            f"the seeds {round_seeds}."
        )
    by_name = {label.rpartition("/")[2]: label for label in noised}
    return plan_pb2.PartyNoise(
        round_seed=round_seeds[0],
        vector=by_name[bounding.VECTOR],
        count=by_name.get(bounding.DOUBLED, ""),
        count_stddev=count_stddev or 0.0,
        scaled_clip_norm=encoding.scaled_clip_norm,
        rejection_bound=encoding.rejection_bound,
        noise_ratio=encoding.noise_ratio,
    )


def _with_graph(device: plan_pb2.DevicePlan, graph_def: bytes) -> plan_pb2.DevicePlan:
    """Copies a plan with another graph, and sets operations and version that follow from it."""
    plan = plan_pb2.DevicePlan()
    plan.CopyFrom(device)
    plan.graph.graph_def = graph_def
    ops = verification.operations(tf.compat.v1.GraphDef.FromString(graph_def))
    version = allowed_ops.least_version(ops)
    if version is None:
        forbidden = sorted(set(ops) - allowed_ops.allowed(allowed_ops.RUNTIME_VERSION))
        raise CannotPlanError(f"Devices do not run the operations {forbidden} of this process.")
    if secure_report.is_asked_for(plan):
        version = max(version, allowed_ops.SECURE_AGGREGATION_SINCE)
        if plan.secure_aggregation.noise_parties:
            version = max(version, allowed_ops.NOISE_PARTIES_SINCE)
    plan.ops[:] = ops
    plan.least_runtime_version = version
    return plan


def _device_graph(
    round_: federated_round.FederatedRound,
    pipeline: example_pipeline.ExamplePipeline,
    server: plan_pb2.ServerPlan,
) -> plan_pb2.Graph:
    """Joins parsing, batches, work and cutting of metrics in one graph.

    The graph may get more tensors than it uses.
    """
    own_specs = [_EXAMPLES_SPEC, _SEED_SPEC][: 1 + pipeline.shuffle]
    data = compiled_process.data_graph(
        lambda inputs: pipeline.batches(*inputs), tuple(own_specs), round_.client
    ).importer()
    run = round_.work.importer()
    broadcast = server.prepare.outputs
    labels = [tensor.label for tensor in broadcast]
    num_own = len(own_specs)
    known = [*map(_in_any_round, labels)]
    places = [num_own + known.index(_in_any_round(label)) for label in round_.broadcast.labels]

    def device(*arguments: tf.Tensor) -> list[tf.Tensor]:
        made = run(*data(*arguments[:num_own]), *(arguments[place] for place in places))
        return _cut(made, server.report_bounds)

    return graphs.traced(
        device,
        [*own_specs, *map(graphs.spec_of, broadcast)],
        inputs=[verification.EXAMPLES, verification.SEED][:num_own] + labels,
        outputs=round_.report.labels,
    )


def _seconds(
    graph: plan_pb2.Graph, limits: bounding.ReportLimits | None
) -> plan_pb2.Histogram | None:
    """Returns where a device puts the seconds of its work; None if the task does not ask."""
    grid = None if limits is None else limits.grids.get(metric_grid.SECONDS)
    if grid is None:
        return None
    (label,) = (
        tensor.label
        for tensor in graph.outputs
        if tensor.label.rpartition("/")[2] == metric_grid.SECONDS + metric_grid.SUFFIX
    )
    return plan_pb2.Histogram(label=label, edges=grid.edges)


def _cut(report: Sequence[tf.Tensor], bounds: Sequence[plan_pb2.ReportBound]) -> list[tf.Tensor]:
    """Cuts the metrics of a report to their bounds; NaN becomes 0.

    The server refuses a report beyond its bounds, and would lose the update of a device for its
    metrics. Tensors that have a bound on their norm are clipped or encoded by the process.
    """
    cut = list(report)
    for bound in bounds:
        if bound.HasField("norm"):
            continue
        (place,), entries = bound.tensors, bound.entries
        tensor, least, largest = cut[place], entries.least, entries.largest
        if tensor.dtype.is_floating:
            tensor = tf.where(tf.math.is_nan(tensor), tf.zeros_like(tensor), tensor)
        else:
            least, largest = int(least), int(largest)
        low, high = (tf.constant(limit, tensor.dtype) for limit in (least, largest))
        cut[place] = tf.clip_by_value(tensor, low, high)
    return cut


def _prepare_like(prepare: plan_pb2.Graph, broadcast: Sequence[plan_pb2.Tensor]) -> plan_pb2.Graph:
    """Rewrites `prepare` to give another task's broadcast, with zeros for what it does not have."""
    places = {_in_any_round(tensor.label): i for i, tensor in enumerate(prepare.outputs)}
    wanted = {_in_any_round(tensor.label): tensor for tensor in broadcast}
    for label, index in places.items():
        mine, theirs = prepare.outputs[index], wanted.get(label)
        if theirs is None or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            raise CannotPlanError(
                f"The other task broadcasts no {label} of dtype {mine.dtype} and shape "
                f"{list(mine.shape)}: its model is another one."
            )
    function = graphs.function_of(prepare)

    def prepared(*state: tf.Tensor) -> list[tf.Tensor]:
        made = function(*state)
        return [
            made[places[_in_any_round(tensor.label)]]
            if _in_any_round(tensor.label) in places
            else tf.zeros([max(size, 0) for size in tensor.shape], tensor.dtype)
            for tensor in broadcast
        ]

    return graphs.traced(
        prepared,
        [graphs.spec_of(tensor) for tensor in prepare.inputs],
        inputs=[tensor.label for tensor in prepare.inputs],
        outputs=[tensor.label for tensor in broadcast],
    )


def _in_any_round(label: str) -> str:
    """Returns the label of a weight without the prefix that some kinds of rounds add."""
    parts = label.split("/")
    first = next((i for i, part in enumerate(parts) if part in _WEIGHTS), 0)
    return "/".join(parts[first:])


def _server_plan(round_: federated_round.FederatedRound) -> plan_pb2.ServerPlan:
    state, broadcast = round_.state.labels, round_.broadcast.labels
    plain = [""] * len(round_.zero.outputs)
    accesses = [round_.accesses.get(f"{one}_model_weights") for one in ("get", "set")]
    if None in accesses:
        raise CannotPlanError(
            "The process has no get_model_weights and set_model_weights as TensorFlow graphs: give "
            "a learning process."
        )
    get_weights, set_weights = accesses
    finish, finish_specs = round_.finish()
    initialize = round_.initialize_in_graph or round_.initialize
    plan = plan_pb2.ServerPlan(
        initialize=graphs.traced(initialize, [], inputs=[], outputs=state),
        prepare=_part(round_.prepare, state, broadcast),
        zero=_part(round_.zero, [], plain),
        accumulate=_part(round_.accumulate, [""] * len(round_.accumulate.inputs), plain),
        merge=_part(round_.merge, plain * 2, plain),
        get_weights=_access(get_weights),
        # Weights have the labels that `get_weights` gives them.
        set_weights=_access(set_weights),
        finish=graphs.traced(
            finish,
            finish_specs,
            inputs=[""] * len(finish_specs),
            outputs=[*state, *round_.output.labels],
        ),
    )
    for name in ("prepare", "zero", "accumulate", "merge", "finish"):
        _check_noise(name, getattr(plan, name))
    return plan


def _skip_graph(
    server: plan_pb2.ServerPlan, private_round: interface.PrivateRound | None
) -> plan_pb2.Graph:
    """Builds the graph that passes over a round: the aggregator's state moves on, nothing else."""
    state = server.prepare.inputs
    labels = [tensor.label for tensor in state]
    specs = [graphs.spec_of(tensor) for tensor in state]
    if private_round is None:
        return graphs.traced(lambda *tensors: list(tensors), specs, inputs=labels, outputs=labels)
    weights = server.get_weights.outputs
    shapes = [list(w.shape) for w in weights if w.label.startswith(_TRAINABLE)]
    structure = private_round.initial_state(shapes)
    # The state of the sums comes after that of the noise, and has no part in it.
    places = [i for i, label in enumerate(labels) if label.startswith(_AGGREGATOR)]
    places = places[: len(tf.nest.flatten(structure))]

    def skip(*tensors: tf.Tensor) -> list[tf.Tensor]:
        before = tf.nest.pack_sequence_as(structure, [tensors[i] for i in places])
        after = dict(zip(places, tf.nest.flatten(private_round.skip(before, shapes)), strict=True))
        return [after.get(i, tensor) for i, tensor in enumerate(tensors)]

    with secure_calls.graphs_for_others():
        return graphs.traced(skip, specs, inputs=labels, outputs=labels)


def _part(
    graph: graph_function.GraphFunction, inputs: Sequence[str], outputs: Sequence[str]
) -> plan_pb2.Graph:
    return graphs.traced(graph.importer(), graph.input_specs, inputs=inputs, outputs=outputs)


def _access(access: federated_round.Access) -> plan_pb2.Graph:
    labels = [label for argument in access.arguments for label in argument.labels]
    return _part(access.graph, labels, access.result.labels)


def _check_noise(name: str, graph: plan_pb2.Graph) -> None:
    """Refuses a part of the server whose random numbers do not come from a seed of the state."""
    graph_def = tf.compat.v1.GraphDef.FromString(graph.graph_def)
    drawn = large_fills.OPS
    if name in ("finish", "skip") and entropy.is_of_the_system(graph_def):
        drawn |= entropy.OPS
    known = allowed_ops.allowed(allowed_ops.RUNTIME_VERSION) - allowed_ops.DRAWS_ANEW
    unknown = set(verification.operations(graph_def)) - known - drawn
    if unknown:
        raise CannotPlanError(
            f"The server's {name} has the operations {sorted(unknown)}: nobody could check that "
            "their noise is that of a private mechanism. Take an aggregator of tff_dpftrl."
        )


def _check_numbers(tensors: Sequence[plan_pb2.Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype not in tensor_values.DTYPES:
            raise CannotPlanError(
                f"{tensor.label} is of dtype {tensor.dtype}: state, broadcast and updates must be "
                "numbers."
            )


def _secure_sums(round_: federated_round.FederatedRound) -> list[plan_pb2.SecureSum]:
    return [
        plan_pb2.SecureSum(largest_entry=one.largest_entry)
        if one.modulus is None
        else plan_pb2.SecureSum(modulus=one.modulus)
        for one in round_.secure_sums
    ]
