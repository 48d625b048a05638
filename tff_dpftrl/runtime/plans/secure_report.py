"""A report as one vector of integers, for plans whose reports are summed securely.

All that such a device reports goes through one secure sum: its count of one device, its two
participation histograms, and its whole update. The layout follows from the plan:

    count      one integer, modulo 2³²: a one
    strides    the first participation vector, modulo 2³²
    times      the second participation vector, modulo 2³²
    ...        each tensor of the update in the plan's order, flat, modulo its rule's modulus,
               or, for entries with a largest value, modulo the smallest power of two in which
               the sum of all devices does not wrap around

Needs NumPy, and no TensorFlow: devices and servers start without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.plans import plan_pb2, tensor_values
from tff_dpftrl.secure_sums import parameters as parameters_lib
from tff_dpftrl.secure_sums import vectors

Plan: TypeAlias = plan_pb2.DevicePlan | plan_pb2.ServerPlan

COUNT_MODULUS = 2**32
"""Modulus of the count and the histograms."""
MOST_DEVICES = 2**31
"""Largest number of devices that a plan may ask room for: counts stay far from their modulus."""
LARGEST_MODULUS = 2**62
"""Largest modulus of a tensor: two groups' sums can be added as int64."""

THREAT_MODELS = {
    plan_pb2.SecureAggregation.HONEST_BUT_CURIOUS: parameters_lib.ThreatModel.HONEST_BUT_CURIOUS,
    plan_pb2.SecureAggregation.ACTIVE_SERVER: parameters_lib.ThreatModel.ACTIVE_SERVER,
}
"""Threat models by their values in plans."""
_INTEGERS = frozenset(name for name in tensor_values.DTYPES if "int" in name)
_NUM_FIRST = 3  # Number of segments before those of the update.


class PlanNotSecureError(validation.UsageError):
    """Raised for a plan whose reports cannot be summed securely; the message says why."""


class TotalRefusedError(ValueError):
    """Raised for a group's sum that its devices cannot have made; the message says why."""


class GroupTotal(NamedTuple):
    """The sum of the vectors of a group's devices, taken apart."""

    count: int
    strides: np.ndarray  # Sum of the first participation vectors, int64.
    times: np.ndarray  # Sum of the second participation vectors, int64.
    # Sums of the update's tensors, int64, in the shapes of the plan; modulo their modulus where
    # they have one.
    sums: list[np.ndarray]


def is_asked_for(plan: Plan) -> bool:
    """Returns whether reports of a plan are summed securely."""
    return plan.HasField("secure_aggregation")


def largest_entry(rule: plan_pb2.SecureSum) -> int:
    """Returns the largest integer that a device may put into a secure sum; the smallest is 0."""
    return rule.modulus - 1 if rule.HasField("modulus") else rule.largest_entry


def parameters_of(plan: Plan) -> parameters_lib.Parameters:
    """Reads what a verified plan demands of a secure sum: the same for both plans of a task.

    Refuses a plan whose sums cannot be secure: a tensor of the update would be sent in the clear,
    or has no fixed shape or modulus; the threat model is none that is known; or the numbers of
    devices make no sense.
    """
    if not is_asked_for(plan):
        raise PlanNotSecureError(
            "The plan asks for no secure aggregation: reports are summed as they are."
        )
    asked = plan.secure_aggregation
    if asked.threat_model not in THREAT_MODELS:
        raise PlanNotSecureError(
            f"The plan's secure_aggregation.threat_model is {asked.threat_model}; known are "
            f"{[model.value for model in THREAT_MODELS.values()]}: its maker, or this device, "
            "needs a newer version."
        )
    if asked.least_devices < 2:
        raise PlanNotSecureError(
            f"The plan's secure_aggregation.least_devices is {asked.least_devices}: the sum of one "
            "device is what it sent. It must be 2 at least."
        )
    if not asked.least_devices <= asked.most_devices <= MOST_DEVICES:
        raise PlanNotSecureError(
            f"The plan's secure_aggregation.most_devices is {asked.most_devices}: it must be "
            f"least_devices, {asked.least_devices}, at least, and {MOST_DEVICES} at most."
        )
    layout = (
        vectors.Segment(1, COUNT_MODULUS),
        *(
            vectors.Segment(shape[0], COUNT_MODULUS)
            for shape in buckets_of(plan.participation).shapes
        ),
        *_update_segments(plan),
    )
    threat_model, neighbours = THREAT_MODELS[asked.threat_model], asked.least_neighbours or None
    try:
        return parameters_lib.Parameters(
            layout,
            threat_model,
            asked.least_devices,
            neighbours,
            asked.most_devices,
            tuple(asked.noise_parties),
            asked.noised_plans,
        )
    except ValueError as error:
        raise PlanNotSecureError(f"The plan's secure_aggregation cannot be met: {error}") from None


def buckets_of(
    participation: plan_pb2.Participation,
) -> participation_histograms.ParticipationBuckets:
    """Returns the buckets of the participation histograms that a plan declares."""
    return participation_histograms.ParticipationBuckets(
        tuple(participation.stride_edges), tuple(participation.times_edges)
    )


def vector_of(
    plan: plan_pb2.DevicePlan,
    update: Sequence[np.ndarray],
    participation: tuple[np.ndarray, np.ndarray],
) -> vectors.Vector:
    """Encodes the report of one device as a vector, which shares no memory with `update`.

    `participation` is what `ParticipationBuckets.encode` returned.
    """
    layout = parameters_of(plan).layout
    buckets_of(plan.participation).check_one_hot(*participation)
    tensors = _tensors(plan)
    if len(update) != len(tensors):
        raise validation.UsageError(f"update must have {len(tensors)} tensors, got {len(update)}.")
    for array, tensor, rule in zip(update, tensors, plan.secure_sums, strict=True):
        _check_entries(np.asarray(array), tensor, rule)
    parts = [np.ones(1, np.int64), *participation, *update]
    return [
        np.array(part).reshape(-1).astype(zeros.dtype)
        for part, zeros in zip(parts, vectors.zeros(layout), strict=True)
    ]


def read_total(
    server_plan: plan_pb2.ServerPlan, vector: vectors.Vector, num_devices: int
) -> GroupTotal:
    """Takes the sum of a group's vectors apart, after checking it against the plan.

    `num_devices` is what the protocol knows. The devices' own count and histograms must agree with
    it, or the sum is refused.
    """
    parameters = parameters_of(server_plan)
    most = server_plan.secure_aggregation.most_devices
    try:
        vectors.check(vector, parameters.layout)
    except ValueError as error:
        raise TotalRefusedError(f"The sum is no vector of the plan: {error}") from None
    count = int(vector[0][0])
    if count != num_devices:
        raise TotalRefusedError(
            f"The sum counts {count} devices, and {num_devices} are in it: a device has lied."
        )
    if not parameters.least_devices <= num_devices <= most:
        raise TotalRefusedError(
            f"The sum is of {num_devices} devices: the plan allows {parameters.least_devices} to "
            f"{most}."
        )
    strides, times, *sums = (part.astype(np.int64) for part in vector[1:])
    # Sums modulo 2³² are never negative: with these totals, no bucket has more than all devices.
    if strides.sum() != count or times.sum() != count or strides[0] != times[0]:
        raise TotalRefusedError(
            f"The histograms of participation are not those of {count} devices: a device has lied."
        )
    shapes = [tuple(tensor.shape) for tensor in _tensors(server_plan)]
    return GroupTotal(
        count,
        strides,
        times,
        [part.reshape(shape) for part, shape in zip(sums, shapes, strict=True)],
    )


def _tensors(plan: Plan) -> Sequence[plan_pb2.Tensor]:
    """Returns the tensors of an update."""
    return plan.graph.outputs if isinstance(plan, plan_pb2.DevicePlan) else plan.update


def _update_segments(plan: Plan) -> list[vectors.Segment]:
    tensors = _tensors(plan)
    if len(plan.secure_sums) != len(tensors):
        plain = [tensor.label for tensor in tensors[: len(tensors) - len(plan.secure_sums)]]
        raise PlanNotSecureError(
            f"The plan asks for secure aggregation, and has {len(tensors)} tensors in its update "
            f"with rules for {len(plan.secure_sums)} secure sums. These would be seen as they "
            f"are: {', '.join(plain) or '?'}."
        )
    most = plan.secure_aggregation.most_devices
    return [
        _segment(tensor, rule, most) for tensor, rule in zip(tensors, plan.secure_sums, strict=True)
    ]


def _segment(
    tensor: plan_pb2.Tensor, rule: plan_pb2.SecureSum, most_devices: int
) -> vectors.Segment:
    label, dtype = (" ".join(text.split())[:100] for text in (tensor.label, tensor.dtype))
    if len(tensor.shape) > tensor_values.MOST_DIMENSIONS:
        raise PlanNotSecureError(f"{label} has {len(tensor.shape)} dimensions.")
    if min(tensor.shape, default=1) < 1 or tensor.dtype not in _INTEGERS:
        raise PlanNotSecureError(
            f"{label} is summed securely, and must be integers of a fixed shape, got "
            f"{dtype} of shape {list(tensor.shape)}."
        )
    match rule.WhichOneof("rule"):
        case "modulus":
            modulus = rule.modulus
        case "largest_entry":
            # The smallest power of two above the largest sum.
            modulus = max(2, 1 << (rule.largest_entry * most_devices).bit_length())
        case other:
            raise PlanNotSecureError(f"{label} has the unknown rule {other} for its sum.")
    is_power = modulus & (modulus - 1) == 0
    if not 2 <= modulus <= (LARGEST_MODULUS if is_power else 2**32):
        raise PlanNotSecureError(
            f"{label} needs a sum modulo {modulus} for up to {most_devices} devices: only "
            f"2 to 2**32, and powers of two up to {LARGEST_MODULUS}, can be summed."
        )
    return vectors.Segment(tensor_values.num_entries(tensor.shape), modulus)


def _check_entries(array: np.ndarray, tensor: plan_pb2.Tensor, rule: plan_pb2.SecureSum) -> None:
    if array.dtype.name != tensor.dtype or array.shape != tuple(tensor.shape):
        raise validation.UsageError(
            f"update, {tensor.label}, must be {tensor.dtype} of shape {list(tensor.shape)}, got "
            f"{array.dtype} of shape {list(array.shape)}."
        )
    largest = largest_entry(rule)
    if not 0 <= int(array.min()) <= int(array.max()) <= largest:
        raise validation.UsageError(
            f"update, {tensor.label}, has integers outside [0, {largest}], the range of their "
            "secure sum."
        )
