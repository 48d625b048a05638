"""The list of operations that devices run."""

import re

import pytest
import tensorflow as tf

from tff_dpftrl.models import metrics, table
from tff_dpftrl.runtime.plans import allowed_ops

_REACHING_OUT = re.compile(
    "File|Read|Write|Save|Restore|Load|Snapshot|Cache|Print|Log.*Summary|Summary|PyFunc|"
    "Send|Recv|Rpc|Remote|Collective|Tpu|TPU|XRT|Xla|Cudnn|Audit|Debug|Dump|Immutable|Serialize|"
    "FixedLength|TFRecord|TextLine|Generator|Queue|Barrier|Stage|Stack|SharedMutex|Custom|Decode"
)
_KNOWN = {
    "ReadVariableOp",  # Of a variable of the run.
    "DecodeRaw",  # Of bytes that are there.
    "DecodePaddedRaw",
    "UnicodeDecode",
    "UnicodeDecodeWithOffsets",
    "Snapshot",  # A copy of a tensor.
    "TensorListStack",
}


@pytest.mark.parametrize("version", allowed_ops.OPS_SINCE)
def test_all_are_operations_of_tensorflow(version):
    assert [op for op in allowed_ops.OPS_SINCE[version] if not hasattr(tf.raw_ops, op)] == []


def test_none_reaches_out():
    found = {op for op in allowed_ops.allowed(99) if _REACHING_OUT.search(op)}
    assert found == _KNOWN


def test_later_versions_allow_what_earlier_ones_did(monkeypatch):
    since = {1: frozenset({"AddV2"}), 3: frozenset({"Relu"})}
    monkeypatch.setattr(allowed_ops, "OPS_SINCE", since)
    assert [allowed_ops.least_version(ops) for ops in ([], ["AddV2"], ["Relu", "AddV2"])] == [
        1,
        1,
        3,
    ]
    assert allowed_ops.least_version(["ReadFile"]) is None
    assert allowed_ops.allowed(2) == {"AddV2"}


@pytest.mark.parametrize("name", table.MODELS)
def test_gradients_of_the_models_need_no_other(name):
    model = table.build(name, vocabulary_size=9, sequence_length=4)

    @tf.function(autograph=False)
    def gradients(weights, words, targets):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            scores, positions = model.compact_logits(weights, words)
            targets = tf.gather(tf.reshape(targets, [-1]), positions)
            loss = metrics.mean_cross_entropy(scores, targets, pad=0)
        return tape.gradient(loss, weights)

    weights = [tf.TensorSpec(shape) for shape in model.weight_shapes.values()]
    words = tf.TensorSpec([None, 4], tf.int32)
    graph = gradients.get_concrete_function(weights, words, words).graph
    used = {op.type for op in graph.get_operations()}
    for function in graph.as_graph_def().library.function:
        used |= {node.op for node in function.node_def}
    called = {function.signature.name for function in graph.as_graph_def().library.function}
    assert used - called <= allowed_ops.allowed(allowed_ops.RUNTIME_VERSION)
