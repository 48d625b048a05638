"""Device plans of a few operations, made without TFF."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tff_dpftrl.runtime.plans import graphs, plan_pb2, verification

LIMITS = plan_pb2.Limits(memory_bytes=1_000_000, seconds=60.0, upload_bytes=1000)


def count_and_scale(examples, scale):
    """An update of two tensors, the second one of which could be summed securely."""
    numbers = tf.io.parse_example(examples, {"x": tf.io.FixedLenFeature([], tf.float32)})["x"]
    return [tf.reduce_sum(numbers) * scale, tf.size(numbers)[None]]


def plan(function=count_and_scale, **fields):
    """Makes a plan of a function of examples and a number that is broadcast."""
    graph = graphs.traced(
        function,
        [tf.TensorSpec([None], tf.string), tf.TensorSpec([], tf.float32)],
        inputs=[verification.EXAMPLES, "scale"],
        outputs=["sum", "count"],
    )
    graph_def = tf.compat.v1.GraphDef.FromString(graph.graph_def)
    values = {
        "population": "tests",
        "task": "plain",
        "kind": plan_pb2.TRAINING,
        "least_runtime_version": 1,
        "graph": graph,
        "secure_sums": [plan_pb2.SecureSum(largest_entry=100)],
        "ops": verification.operations(graph_def),
        "selection": plan_pb2.Selection(collection="numbers", max_examples=5),
        "seed_policy": plan_pb2.NO_SEED,
        "limits": LIMITS,
    }
    return plan_pb2.DevicePlan(**(values | fields))


def examples(*numbers):
    """Returns serialized examples with one number each."""
    return [
        tf.train.Example(
            features=tf.train.Features(
                feature={"x": tf.train.Feature(float_list=tf.train.FloatList(value=[number]))}
            )
        ).SerializeToString()
        for number in numbers
    ]


SCALE = [np.float32(2.0)]
