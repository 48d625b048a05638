"""Plans of a task whose reports are summed securely, made without TensorFlow."""

from __future__ import annotations

import numpy as np

from tff_dpftrl.runtime.plans import plan_pb2

LEAST, MOST = 2, 100
TENSORS = [
    plan_pb2.Tensor(label="vector", dtype="int32", shape=[4]),
    plan_pb2.Tensor(label="metrics/loss", dtype="int64", shape=[]),
]
RULES = [plan_pb2.SecureSum(modulus=1001), plan_pb2.SecureSum(largest_entry=2**40)]
PARTICIPATION = plan_pb2.Participation(
    min_sep_rounds=2, stride_edges=[1, 2, 4], times_edges=[1, 2, 3]
)
NEVER_BEFORE = (np.int32([1, 0, 0, 0]), np.int32([1, 0, 0]))


def wanted(**fields):
    """Returns the demands of a plan on its secure sums."""
    values = {
        "threat_model": plan_pb2.SecureAggregation.HONEST_BUT_CURIOUS,
        "least_devices": LEAST,
        "most_devices": MOST,
    }
    return plan_pb2.SecureAggregation(**(values | fields))


def device(**fields):
    """Makes a device's plan, whose graph has outputs only."""
    values = {
        "graph": plan_pb2.Graph(outputs=fields.pop("tensors", TENSORS)),
        "secure_sums": RULES,
        "participation": PARTICIPATION,
        "secure_aggregation": wanted(),
    }
    return plan_pb2.DevicePlan(**(values | fields))


def server(**fields):
    """Makes the server's plan that belongs to `device`, without graphs."""
    values = {
        "update": fields.pop("tensors", TENSORS),
        "secure_sums": RULES,
        "participation": PARTICIPATION,
        "secure_aggregation": wanted(),
    }
    return plan_pb2.ServerPlan(**(values | fields))


def update(seed=0):
    """Makes the tensors of a device's update, within their ranges."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1001, 4, np.int32), np.array(rng.integers(0, 2**40, dtype=np.int64))]
