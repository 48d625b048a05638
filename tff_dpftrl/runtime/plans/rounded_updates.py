"""Updates as integers of 16 bits: a quarter of the bytes, and no update gets longer.

A tensor x of d entries becomes integers q, the entries of 32767 x / max|x| rounded to the nearest
one, and one scale s. The reader takes s q for x.

**Guarantee.** Rounding may lengthen a vector. Therefore the scale is not max|x| / 32767, but the
smaller of that and ‖x‖ / ‖q‖, times 1 - 2e-7: so ‖s q‖ ≤ ‖x‖ for each tensor. An update that was
clipped to C has the norm C at most when it is read, whether the norm was that of a tensor or of all
of them together: the sensitivity is that of the clip norm, and no noise is added for rounding. It
is a function of the update, without randomness of its own. A device that rounds in another way
gains nothing: the server checks the norm of what it has read (`report_bounds`), as it does for
updates that are sent as they are.

*Proof.* With u = x / max|x|, computed in float64, the scale is (max|x| / 32767) min(1, 32767 ‖u‖ /
‖q‖)(1 - 2e-7). The largest entry of u is 1 in size, so that nothing over- or underflows. ‖u‖ and
‖q‖ have relative errors of at most (d + 2) 2⁻⁵⁴ each, and u, the products and the entries of s q of
a few 2⁻⁵³ more (2⁻²⁴ for float32): less than 2e-7 in all for d ≤ 10⁹. A tensor whose largest entry
is below 1e-290 (1e-30 for float32) is sent as zero.

**Error.** An entry moves by s / 2 at most, by max|x| / 65534; with independent errors a tensor
moves by √d max|x| / 113,500. Entries below max|x| / 65534 are lost. Over the n devices of a round
that is n C / 65534 at most in one entry of the sum, whose noise has the standard deviation z C. The
scale shrinks by d / (24 · 32767²), 5e-5 for 1.35M entries, if errors are independent and one entry
is nearly all of the norm; by √d / 65534 (1.8 %) at most, if all are rounded up by half a step.

Needs NumPy, and no TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tff_dpftrl import array_files, validation
from tff_dpftrl.runtime.plans import plan_pb2, tensor_values

_DTYPE = "int16"
_LARGEST = 32767
_MARGIN = 2e-7
# Smallest largest entry of a tensor, so that no scale is rounded to few bits.
_SMALLEST = {"float32": 1e-30, "float64": 1e-290}
_ENTRIES_AT_ONCE = 1 << 15  # As float64 they stay in a processor's cache.


class ScalesError(validation.UsageError):
    """Raised for scales of an update that do not fit the plan, or are no scales."""


def places_in(
    bounds: Sequence[plan_pb2.ReportBound], tensors: Sequence[plan_pb2.Tensor]
) -> list[int]:
    """Finds the tensors that may be rounded: those in the clear with a bound on the norm only."""
    return sorted(
        place
        for bound in bounds
        if bound.HasField("norm") and not bound.HasField("entries")
        for place in bound.tensors
        if tensors[place].dtype in ("float32", "float64")
    )


def check_places(
    rounded: Sequence[int], tensors: Sequence[plan_pb2.Tensor], num_secure: int
) -> None:
    """Refuses places that do not increase, or are not of numbers in the clear.

    The last `num_secure` tensors are summed securely.
    """
    num_clear = len(tensors) - num_secure
    is_increasing = all(one < other for one, other in zip(rounded, rounded[1:], strict=False))
    if not is_increasing or any(
        place >= num_clear or tensors[place].dtype not in ("float32", "float64")
        for place in rounded
    ):
        raise validation.UsageError(
            f"rounded names the tensors {list(rounded)[:20]}: they must increase, and be "
            f"floating-point numbers among the first {num_clear}, which are in the clear."
        )


def rounded(
    update: Sequence[np.ndarray], places: Sequence[int]
) -> tuple[list[np.ndarray], list[float]]:
    """Rounds tensors of an update to int16, in places of float32 or float64.

    Returns the update and a scale for each place: NaN if the tensor has an entry that is not
    finite, which the server refuses.
    """
    made, scales = list(update), []
    for place in places:
        made[place], scale = _rounded(update[place])
        scales.append(scale)
    return made, scales


def _rounded(tensor: np.ndarray) -> tuple[np.ndarray, float]:
    flat = tensor.reshape(-1)
    integers = np.zeros(flat.shape, _DTYPE)
    largest = float(max(flat.max(initial=0.0), -flat.min(initial=0.0)))
    if not math.isfinite(largest):
        return integers.reshape(tensor.shape), math.nan
    if largest < _SMALLEST[tensor.dtype.name]:
        return integers.reshape(tensor.shape), 0.0
    squared = squared_rounded = 0.0
    for begin in range(0, len(flat), _ENTRIES_AT_ONCE):
        unit = flat[begin : begin + _ENTRIES_AT_ONCE].astype(np.float64)
        unit /= largest
        squared += float(unit @ unit)
        unit *= _LARGEST
        np.rint(unit, out=unit)
        squared_rounded += float(unit @ unit)
        integers[begin : begin + _ENTRIES_AT_ONCE] = unit
    longer = math.sqrt(squared_rounded) / (_LARGEST * math.sqrt(squared))
    return integers.reshape(tensor.shape), largest / _LARGEST / max(1.0, longer) * (1 - _MARGIN)


def read(
    content: bytes | bytearray | memoryview,
    scales: Sequence[float],
    plan: plan_pb2.ServerPlan,
) -> list[np.ndarray]:
    """Reads the update of an untrusted report; it has no scales if none of it is rounded."""
    if not scales:
        return tensor_values.from_bytes(content, plan.update, "update")
    if len(scales) != len(plan.rounded):
        raise ScalesError(
            f"update has {len(scales)} scales, and the plan rounds {len(plan.rounded)} tensors."
        )
    for place, scale in zip(plan.rounded, scales, strict=True):
        if not 0 <= scale < math.inf:
            raise ScalesError(
                f"update, {plan.update[place].label}, is not finite: its scale is {scale:g}, which "
                "must be a number from 0."
            )
    arrays = tensor_values.from_bytes(content, as_sent(plan), "update")
    for place, scale in zip(plan.rounded, scales, strict=True):
        arrays[place] = _scaled(arrays[place], scale, plan.update[place].dtype)
    return arrays


def as_sent(plan: plan_pb2.ServerPlan) -> list[plan_pb2.Tensor]:
    """Returns the tensors of a report as a device sends them that rounds."""
    tensors = list(plan.update)
    for place in plan.rounded:
        tensor = tensors[place]
        tensors[place] = plan_pb2.Tensor(label=tensor.label, dtype=_DTYPE, shape=tensor.shape)
    return tensors


def _scaled(integers: np.ndarray, scale: float, dtype: str) -> np.ndarray:
    """Multiplies integers by a scale, part by part, in the order in which the sum reads them."""
    made = array_files.aligned(integers.shape, np.dtype(dtype))
    flat, result = integers.reshape(-1), made.reshape(-1)
    with np.errstate(over="ignore"):  # Infinity is refused afterwards.
        for begin in range(0, len(flat), _ENTRIES_AT_ONCE):
            part = result[begin : begin + _ENTRIES_AT_ONCE]
            part[:] = flat[begin : begin + _ENTRIES_AT_ONCE]
            part *= scale
    return made
