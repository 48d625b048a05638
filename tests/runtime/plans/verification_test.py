"""What a device refuses to load, whoever signed it."""

import re

import pytest
import tensorflow as tf

from tests.runtime.plans import plain_plans, secure_plans
from tff_dpftrl.runtime.plans import allowed_ops, plan_pb2, signing, verification


def _refused(plan, message, **options):
    with pytest.raises(signing.PlanRefusedError, match=message):
        verification.check_device_plan(plan, **options)


def _changed(change):
    """A plan whose graph was changed."""
    plan = plain_plans.plan()
    graph_def = tf.compat.v1.GraphDef.FromString(plan.graph.graph_def)
    change(graph_def)
    plan.graph.graph_def = graph_def.SerializeToString()
    plan.ops[:] = verification.operations(graph_def)
    return plan


def test_a_plan_of_allowed_operations_is_taken_by_runtimes_of_its_version():
    plan = plain_plans.plan(least_runtime_version=2)
    verification.check_device_plan(plan, runtime_version=2)
    _refused(plan, "needs runtime version 2, this is 1", runtime_version=1)


def _secure(**fields):
    """A plan whose reports are summed securely."""

    def count(examples, scale):
        return [tf.cast(scale, tf.int32), tf.size(examples)[None]]

    values = {
        "secure_sums": [plan_pb2.SecureSum(modulus=11), plan_pb2.SecureSum(largest_entry=100)],
        "participation": secure_plans.PARTICIPATION,
        "secure_aggregation": secure_plans.wanted(),
        "least_runtime_version": allowed_ops.SECURE_AGGREGATION_SINCE,
    }
    return plain_plans.plan(count, **(values | fields))


def test_a_plan_with_secure_aggregation_is_taken():
    verification.check_device_plan(_secure())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"secure_sums": [plan_pb2.SecureSum(modulus=11)]}, "seen as they are: sum"),
        ({"secure_aggregation": secure_plans.wanted(threat_model=3)}, "threat_model is 3"),
        ({"secure_aggregation": secure_plans.wanted(least_devices=1)}, "must be 2 at least"),
        ({"participation": plan_pb2.Participation()}, "stride_edges must increase"),
        ({"least_runtime_version": 1}, "would send reports as they are"),
        # 1 and 4 + 3 entries of 32 bits, one of 4 bits, and one of 14.
        (
            {"limits": plan_pb2.Limits(memory_bytes=1_000_000, seconds=60.0, upload_bytes=34)},
            "masked vector has 35 bytes, more than its limit of 34",
        ),
    ],
)
def test_a_plan_whose_secure_aggregation_hides_nothing_is_refused(fields, message):
    _refused(_secure(**fields), message)


def _read_file(examples, scale):
    return [scale, tf.strings.length(tf.io.read_file("/etc/hostname"))]


def _read_file_in_a_branch(examples, scale):
    count = tf.cond(scale > 0, lambda: tf.strings.length(tf.io.read_file("x")), lambda: 0)
    return [scale, count]


def _read_file_of_datasets(examples, scale):
    lines = tf.data.TextLineDataset("x")
    return [scale, lines.reduce(0, lambda count, line: count + 1)]


def _python(examples, scale):
    return [tf.ensure_shape(tf.numpy_function(lambda x: x, [scale], tf.float32), []), 0]


def _python_for_each_example(examples, scale):
    def number(example):
        return tf.ensure_shape(tf.py_function(len, [example], tf.int32), [])

    numbers = tf.data.Dataset.from_tensor_slices(examples).map(number)
    return [scale, numbers.reduce(0, lambda total, one: total + one)]


def _print(examples, scale):
    tf.print(examples, output_stream="file:///tmp/out")
    return [scale, 0]


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (_read_file, "ReadFile"),
        (_read_file_in_a_branch, "ReadFile"),
        (_read_file_of_datasets, "TextLineDataset"),
        (_python, "PyFunc"),
        (_python_for_each_example, "EagerPyFunc"),
        (_print, "PrintV2"),
    ],
)
def test_forbidden_operations_are_found_wherever_they_are(function, op):
    _refused(plain_plans.plan(function), rf"forbidden operations: \[.*'{op}'")


def _with_functions(*names_and_ops):
    def change(graph_def):
        for name, op in names_and_ops:
            function = graph_def.library.function.add()
            function.signature.name = name
            function.node_def.add(name="n", op=op)

    return change


def _with_a_call(graph_def):
    node = graph_def.node.add(name="call", op="PartitionedCall")
    node.attr["f"].func.name = "elsewhere"


def _on_another_device(graph_def):
    graph_def.node[-1].device = "/job:worker/task:0"


def _with_a_huge_constant(graph_def):
    value = graph_def.node.add(name="huge", op="Const").attr["value"].tensor
    value.dtype = tf.float32.as_datatype_enum
    value.tensor_shape.dim.add(size=1_000_000_000)
    value.float_val.append(1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_functions(("AddV2", "NoOp")), "function with an operation's name: AddV2"),
        (_with_functions(("f", "g"), ("g", "f")), re.escape("for ever: ['f', 'g']")),
        (_with_functions(("f", "NoOp"), ("f", "ReadFile")), "two functions of one name"),
        (_with_a_call, re.escape("does not have: ['elsewhere']")),
        (_on_another_device, "on '/job:worker/task:0'"),
        (_with_a_huge_constant, "constants need 8.* bytes, more than its limit of memory"),
    ],
)
def test_graphs_of_unsafe_functions_devices_and_constants_are_refused(change, message):
    _refused(_changed(change), message)


@pytest.mark.parametrize("name", ["memory_bytes", "seconds", "upload_bytes"])
@pytest.mark.parametrize("value", [0, 10_000_000_000])
def test_limits_must_be_given_and_within_the_devices(name, value):
    plan = plain_plans.plan()
    setattr(plan.limits, name, value)
    _refused(plan, f"limits.{name} is")


def test_an_update_that_is_too_large_is_refused_before_it_is_computed():
    plan = plain_plans.plan(lambda examples, scale: [tf.zeros([1000]), 0])
    _refused(plan, "update has 4004 bytes, more than its limit of 1000")


@pytest.mark.parametrize(
    ("label", "edges", "message"),
    [
        ("count", [0.0, 0.0], "grid of seconds is unusable: edges must be"),
        ("count", [0.0, 1.0], "no int32 output of 2 counts for the seconds"),
        ("sum", [0.0, 1.0], "no int32 output of 2 counts"),
        ("", [0.0, 1.0], "no int32 output of 2 counts"),
    ],
)
def test_seconds_need_an_output_of_their_grid(label, edges, message):
    seconds = plan_pb2.Histogram(label=label, edges=edges)
    _refused(plain_plans.plan(seconds=seconds), message)


def test_operations_inputs_and_outputs_must_be_those_declared():
    _refused(plain_plans.plan(), "this device takes 3", ceiling=verification.Ceiling(num_nodes=3))
    plan = plain_plans.plan()
    plan.ops.remove("ParseExampleV2")
    _refused(plan, r"other operations than it has: \['ParseExampleV2'\]")
    plan = plain_plans.plan()
    plan.graph.inputs[0].label = "files"
    _refused(plan, "first inputs must be")
    plan = plain_plans.plan(seed_policy=plan_pb2.DEVICE_DRAWS)
    _refused(plan, "first inputs must be .*'seed', 'int64'")
    plan = plain_plans.plan()
    plan.graph.outputs[0].name = "missing:0"
    _refused(plan, "no Identity 'missing:0'")


def test_what_cannot_be_read_is_refused():
    plan = plain_plans.plan()
    plan.graph.graph_def = b"\xff"
    _refused(plan, "graph cannot be read")
    with pytest.raises(signing.PlanRefusedError, match="cannot be read as a SignedPlan"):
        verification.read_device_plan(b"\xff", [])
    with pytest.raises(signing.PlanRefusedError, match="has 9 bytes; this device takes 8"):
        verification.read_device_plan(b"123456789", [], ceiling=verification.Ceiling(plan_bytes=8))
