"""Checks that a device makes before it loads anything of a plan.

The signature says who vouches for the plan. These checks hold whoever that is: nothing in the
graph, functions in its library included, reaches out of the computation, and the plan asks for
no more than the device is willing to give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import tensorflow as tf
from cryptography.hazmat.primitives.asymmetric import ed25519
from google.protobuf import message

from tff_dpftrl import validation
from tff_dpftrl.execution import graph_function
from tff_dpftrl.models import metric_grid
from tff_dpftrl.runtime.plans import (
    allowed_ops,
    approvals,
    plan_pb2,
    rounded_updates,
    secure_report,
    signing,
    tensor_values,
)
from tff_dpftrl.secure_sums import vectors

EXAMPLES = "examples"
"""Label of the input that takes serialized examples."""
SEED = "seed"
"""Label of the input that takes the seed of the examples' order."""


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """Upper limits of what a device gives to any task."""

    plan_bytes: int = 32_000_000  # Size of a signed plan, in bytes.
    num_nodes: int = 200_000  # Number of operations of a plan's graph, with all functions.
    memory_bytes: int = 2_000_000_000  # Peak memory that a plan may declare, in bytes.
    seconds: float = 600.0  # Duration that a plan may declare, in seconds.
    upload_bytes: int = 64_000_000  # Size of an update, in bytes.


DEFAULT_CEILING = Ceiling()
_SHOWN = 10  # Largest number of names in a message.


def read_device_plan(
    content: bytes,
    keys: Iterable[ed25519.Ed25519PublicKey],
    reviewers: approvals.Reviewers | None = None,
    *,
    ceiling: Ceiling = DEFAULT_CEILING,
    runtime_version: int = allowed_ops.RUNTIME_VERSION,
) -> plan_pb2.DevicePlan:
    """Reads a device plan, and refuses one that must not be run here."""
    if len(content) > ceiling.plan_bytes:
        raise signing.PlanRefusedError(
            f"The plan has {len(content)} bytes; this device takes {ceiling.plan_bytes}."
        )
    try:
        signed = plan_pb2.SignedPlan.FromString(content)
    except message.DecodeError:
        raise signing.PlanRefusedError("The plan cannot be read as a SignedPlan.") from None
    plan = signing.verified(signed, plan_pb2.DevicePlan, keys)
    if reviewers is not None:
        reviewers.check(signed, plan.task)
    check_device_plan(plan, ceiling=ceiling, runtime_version=runtime_version)
    return plan


def check_device_plan(
    plan: plan_pb2.DevicePlan,
    *,
    ceiling: Ceiling = DEFAULT_CEILING,
    runtime_version: int = allowed_ops.RUNTIME_VERSION,
) -> None:
    """Refuses a plan that must not be run on a device, whoever signed it."""
    if plan.least_runtime_version > runtime_version:
        raise signing.PlanRefusedError(
            f"The plan needs runtime version {plan.least_runtime_version}, this is "
            f"{runtime_version}."
        )
    _check_limits(plan.limits, ceiling)
    if secure_report.is_asked_for(plan):
        _check_secure_aggregation(plan)
    try:
        rounded_updates.check_places(plan.rounded, plan.graph.outputs, len(plan.secure_sums))
    except ValueError as error:
        raise signing.PlanRefusedError(f"The plan cannot be met: {error}") from None
    try:
        graph_def = tf.compat.v1.GraphDef.FromString(plan.graph.graph_def)
    except message.DecodeError:
        raise signing.PlanRefusedError("The plan's graph cannot be read.") from None
    _check_operations(graph_def, plan.ops, runtime_version, ceiling)
    _check_constants(graph_def, plan.limits.memory_bytes)
    _check_tensors(plan, graph_def)


def operations(graph_def: tf.compat.v1.GraphDef) -> list[str]:
    """Returns the names of all operations of a graph and its functions, sorted."""
    functions = {function.signature.name for function in graph_def.library.function}
    return sorted({node.op for node in graph_function.nodes_of(graph_def)} - functions)


def _check_limits(limits: plan_pb2.Limits, ceiling: Ceiling) -> None:
    for name in ("memory_bytes", "seconds", "upload_bytes"):
        wanted, given = getattr(limits, name), getattr(ceiling, name)
        if not 0 < wanted <= given:
            raise signing.PlanRefusedError(
                f"The plan's limits.{name} is {wanted:g}; this device gives {given:g}, and a plan "
                "must say what it needs."
            )


def _check_secure_aggregation(plan: plan_pb2.DevicePlan) -> None:
    """Refuses a plan that sends a part of the update outside of the devices' secure sum."""
    if plan.least_runtime_version < allowed_ops.SECURE_AGGREGATION_SINCE:
        raise signing.PlanRefusedError(
            f"The plan asks for secure aggregation, and for runtime version "
            f"{plan.least_runtime_version}, which would send reports as they are: it must need "
            f"{allowed_ops.SECURE_AGGREGATION_SINCE} at least."
        )
    try:
        layout = secure_report.parameters_of(plan).layout
    except ValueError as error:
        raise signing.PlanRefusedError(str(error)) from None
    num_bytes = vectors.packed_bytes(layout)
    if num_bytes > plan.limits.upload_bytes:
        raise signing.PlanRefusedError(
            f"The plan's masked vector has {num_bytes} bytes, more than its limit of "
            f"{plan.limits.upload_bytes}."
        )


def _check_operations(
    graph_def: tf.compat.v1.GraphDef,
    declared: Iterable[str],
    runtime_version: int,
    ceiling: Ceiling,
) -> None:
    num_nodes = sum(1 for _ in graph_function.nodes_of(graph_def))
    if num_nodes > ceiling.num_nodes:
        raise signing.PlanRefusedError(
            f"The plan's graph has {num_nodes} operations; this device takes {ceiling.num_nodes}."
        )
    _check_functions(graph_def)
    actual = operations(graph_def)
    forbidden = sorted(set(actual) - allowed_ops.allowed(runtime_version))
    if forbidden:
        raise signing.PlanRefusedError(f"The plan has forbidden operations: {_some(forbidden)}.")
    if actual != list(declared):
        raise signing.PlanRefusedError(
            f"The plan declares other operations than it has: {_some({*actual} ^ {*declared})}."
        )
    for node in graph_function.nodes_of(graph_def):
        if node.device:
            raise signing.PlanRefusedError(f"The plan places {node.name!r} on {node.device!r}.")


def _check_functions(graph_def: tf.compat.v1.GraphDef) -> None:
    """Refuses functions that are missing, call each other in a circle, or hide an operation."""
    library = graph_def.library
    if library.gradient or library.registered_gradients:
        raise signing.PlanRefusedError("The plan's graph defines gradients, which none needs.")
    functions = {function.signature.name: function for function in library.function}
    if len(functions) != len(library.function):
        raise signing.PlanRefusedError("The plan has two functions of one name.")
    called: dict[str, set[str]] = {}
    for name, nodes in [("", graph_def.node), *((n, f.node_def) for n, f in functions.items())]:
        # A function of the name of an operation would hide it, or be hidden by it.
        if hasattr(tf.raw_ops, name or "-"):
            raise signing.PlanRefusedError(
                f"The plan has a function with an operation's name: {name}."
            )
        named = {call.name for node in nodes for call in graph_function.called_by(node)}
        if named - functions.keys():
            raise signing.PlanRefusedError(
                f"The plan calls functions it does not have: {_some(named - functions.keys())}."
            )
        called[name] = named | ({node.op for node in nodes} & functions.keys())
    while called:
        done = {name for name, callees in called.items() if not callees & called.keys()}
        if not done:
            raise signing.PlanRefusedError(
                f"The plan's functions call each other for ever: {_some(filter(None, called))}."
            )
        called = {name: callees for name, callees in called.items() if name not in done}


def _some(names: Iterable[str]) -> str:
    """Returns a few of the names, for messages: a plan may have very many."""
    names = sorted(names)
    shown = [name[:100] for name in names[:_SHOWN]]
    return f"{shown}" + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _check_constants(graph_def: tf.compat.v1.GraphDef, memory_bytes: int) -> None:
    """Refuses constants that fill a large shape with one number."""
    num_bytes = 0
    for node in graph_function.nodes_of(graph_def):
        if node.op == "Const":
            value = node.attr["value"].tensor
            sizes = (max(dim.size, 1) for dim in value.tensor_shape.dim)
            num_bytes += 8 * tensor_values.num_entries(sizes)
    if num_bytes > memory_bytes:
        raise signing.PlanRefusedError(
            f"The plan's constants need {num_bytes} bytes, more than its limit of memory, "
            f"{memory_bytes}."
        )


def _check_tensors(plan: plan_pb2.DevicePlan, graph_def: tf.compat.v1.GraphDef) -> None:
    inputs, outputs = plan.graph.inputs, plan.graph.outputs
    wanted = [(EXAMPLES, "string", [-1])]
    if plan.seed_policy == plan_pb2.DEVICE_DRAWS:
        wanted.append((SEED, "int64", [2]))
    first = [(t.label, t.dtype, list(t.shape)) for t in inputs[: len(wanted)]]
    if first != wanted:
        raise signing.PlanRefusedError(f"The plan's first inputs must be {wanted}, got {first}.")
    for tensor in [*inputs[len(wanted) :], *outputs]:
        if tensor.dtype not in tensor_values.DTYPES:
            raise signing.PlanRefusedError(f"The plan has a tensor of dtype {tensor.dtype!r}.")
        if len(tensor.shape) > tensor_values.MOST_DIMENSIONS:
            raise signing.PlanRefusedError(f"The plan has {len(tensor.shape)} sizes of a tensor.")
    if len(plan.secure_sums) > len(outputs):
        raise signing.PlanRefusedError("The plan has more secure sums than outputs.")
    nodes = {node.name: node.op for node in graph_def.node}
    for tensors, op in ((inputs, "Placeholder"), (outputs, "Identity")):
        for tensor in tensors:
            if nodes.get(tensor.name.partition(":")[0]) != op:
                raise signing.PlanRefusedError(f"The plan has no {op} {tensor.name!r}.")
    _check_seconds(plan)
    least = sum(
        tensor_values.num_entries(max(size, 0) for size in tensor.shape)
        * tf.dtypes.as_dtype(tensor.dtype).size
        for tensor in outputs
    )
    if least > plan.limits.upload_bytes:
        raise signing.PlanRefusedError(
            f"The plan's update has {least} bytes, more than its limit of "
            f"{plan.limits.upload_bytes}."
        )


def _check_seconds(plan: plan_pb2.DevicePlan) -> None:
    """Refuses a histogram of seconds that is no output of its size."""
    if not plan.HasField("seconds"):
        return
    try:
        grid = metric_grid.MetricGrid(tuple(plan.seconds.edges))
    except validation.UsageError as error:
        raise signing.PlanRefusedError(f"The plan's grid of seconds is unusable: {error}") from None
    found = [t for t in plan.graph.outputs if t.label == plan.seconds.label]
    if [(t.dtype, list(t.shape)) for t in found] != [("int32", [grid.size])]:
        raise signing.PlanRefusedError(
            f"The plan has no int32 output of {grid.size} counts for the seconds of the work."
        )
