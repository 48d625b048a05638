"""The size of a device's report in bytes: the limit that a server sets for a plan."""

from __future__ import annotations

import numpy as np

from tff_dpftrl.runtime.plans import plan_pb2, secure_report, tensor_values
from tff_dpftrl.secure_sums import vectors

_OVERHEAD_BYTES = 4096  # Room for a report's tensor names, shapes, and its attempt's name.


def largest_report_bytes(server: plan_pb2.ServerPlan) -> int:
    """Computes the size of the largest report that a device may send: masked, if summed securely.

    A server refuses larger ones (`runtime.server.service`). A device refuses plans with larger ones
    than its own limit allows (`verification.Ceiling.upload_bytes`).
    """
    if secure_report.is_asked_for(server):
        return vectors.packed_bytes(secure_report.parameters_of(server).layout)
    update = [
        np.zeros([max(size, 0) for size in tensor.shape], tensor.dtype) for tensor in server.update
    ]
    buckets = sum(shape[0] for shape in secure_report.buckets_of(server.participation).shapes)
    return len(tensor_values.to_bytes(update)) + 10 * buckets + _OVERHEAD_BYTES
