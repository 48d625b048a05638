"""Secure sums as TFF's processes; `private_round/secure_sums_test.py` tests their arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.aggregators import nested_update
from tff_dpftrl import execution
from tff_dpftrl.aggregators import secagg_sum
from tff_dpftrl.discretization import grid
from tff_dpftrl.private_round import secure_sums

_CLIP_NORM = 2.0
_ENCODING = grid.for_bits(nested_update.DIM, 5, 16)


@pytest.fixture(scope="module", autouse=True)
def _secure_sums_in_the_clear():
    with execution.secure_sum_simulation():
        yield


@pytest.fixture(scope="module")
def sum_process():
    return secagg_sum.SecAggSumFactory(_ENCODING, _CLIP_NORM, rotation_seed=5).create(
        nested_update.TYPE
    )


def test_a_process_sums_what_the_native_sum_does(sum_process):
    updates = [nested_update.update(i) for i in range(4)]
    first = sum_process.next(sum_process.initialize(), updates)
    second = sum_process.next(first.state, updates)
    native = secure_sums.VectorSum(_ENCODING, _CLIP_NORM, rotation_seed=5)
    round_seed, state = native.start_round(native.start_round(native.initial_state())[1])
    sent = [native.encode(list(map(tf.constant, tf.nest.flatten(u))), round_seed) for u in updates]
    total = {
        name: tf.constant(sum(np.int64(one[name]) for one in sent) % modulus, tf.int32)
        for name, modulus in native.moduli.items()
    }
    tensors, count = native.decode(total, round_seed, [[7], [], [3, 2]])
    for own, expected in zip(tf.nest.flatten(second.result), tensors, strict=True):
        np.testing.assert_array_equal(own, tf.cast(expected, tf.float32))
    assert second.measurements["summed_clients"] == count == 4
    assert second.state.round_index == state.round_index == 2
    np.testing.assert_array_equal(second.state.rotation_seed, state.rotation_seed)
    assert second.result["b"][1][0].shape == (3, 2)


@pytest.mark.slow
def test_dtypes_come_back():
    value_type = tff.to_type([tff.TensorType(np.float32, [10]), tff.TensorType(np.float16, [4])])
    process = secagg_sum.SecAggSumFactory(_ENCODING, _CLIP_NORM).create(value_type)
    value = [np.full(10, 0.1, np.float32), np.full(4, 0.2, np.float16)]
    result = process.next(process.initialize(), [value]).result
    assert [tensor.dtype for tensor in result] == [np.float32, np.float16]
    np.testing.assert_allclose(result[1], 0.2, atol=0.01)


def test_half_bits_are_summed_exactly():
    process = secagg_sum.SecAggHalfBitFactory().create(tff.TensorType(np.float32))
    state = process.initialize()
    for bits in ([], [0.5, -0.5, 0.0, 0.5, 0.5]):
        assert process.next(state, [np.float32(bit) for bit in bits]).result == sum(bits)
    tff.test.assert_not_contains_unsecure_aggregation(process.next)


def test_bad_arguments():
    with pytest.raises(ValueError, match="dim=13"):
        secagg_sum.SecAggSumFactory(_ENCODING, 1.0).create(tff.TensorType(np.float32, [13]))
    with pytest.raises(ValueError, match="floats"):
        secagg_sum.SecAggSumFactory(_ENCODING, 1.0).create(tff.TensorType(np.int32, [14]))
    with pytest.raises(ValueError, match="float32 scalar"):
        secagg_sum.SecAggHalfBitFactory().create(tff.TensorType(np.float32, [1]))
