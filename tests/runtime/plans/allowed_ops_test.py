"""The list of operations that devices run."""

import re
import sys

import pytest
import tensorflow as tf

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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
