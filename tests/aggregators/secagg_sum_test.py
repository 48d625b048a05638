"""Secure sums by themselves, against NumPy."""

from __future__ import annotations

import collections
import math
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl import execution
from tff_dpftrl.aggregators import secagg_sum
from tff_dpftrl.discretization import grid
from tff_dpftrl.private_round import discretize, seeds

_TYPE = tff.to_type(
    collections.OrderedDict(
        a=tff.TensorType(np.float32, [7]),
        b=(np.float32, [tff.TensorType(np.float32, [3, 2])]),
    )
)
_DIM = 14
_CLIP_NORM = 2.0
_ENCODING = grid.for_bits(_DIM, 5, 16)


@pytest.fixture(scope="module", autouse=True)
def _secure_sums_in_the_clear():
    with execution.secure_sum_simulation():
        yield


def _update(seed):
    rng = np.random.default_rng(seed)
    return collections.OrderedDict(
        a=rng.normal(size=7).astype(np.float32),
        b=(np.float32(rng.normal()), [rng.normal(size=(3, 2)).astype(np.float32)]),
    )


def _flat(value):
    return np.concatenate([np.ravel(x).astype(np.float64) for x in tf.nest.flatten(value)])


def _clipped(update):
    flat = _flat(update)
    return flat * min(1, _CLIP_NORM / np.linalg.norm(flat))


def _margin(num_clients):
    # Six standard errors of the rounding, and float32's.
    stddev = _ENCODING.rounding_stddev_bound(_CLIP_NORM, num_clients)
    return 6 * stddev + 2e-5 * _CLIP_NORM * num_clients


@pytest.fixture(scope="module")
def sum_process():
    return secagg_sum.SecAggSumFactory(_ENCODING, _CLIP_NORM, rotation_seed=5).create(_TYPE)


@pytest.mark.parametrize(
    "num_clients", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 3)), 5]
)
def test_sum_of_clipped_updates(sum_process, num_clients):
    state = sum_process.initialize()
    updates = [_update(i) for i in range(num_clients)]
    output = sum_process.next(state, updates)
    expected = sum((_clipped(u) for u in updates), np.zeros(_DIM))
    assert np.max(np.abs(_flat(output.result) - expected)) <= (
        _margin(num_clients) if num_clients else 0
    )
    assert output.measurements["summed_clients"] == num_clients
    assert output.state.round_index == 1
    assert output.result["b"][1][0].shape == (3, 2)


def test_more_clients_than_the_modulus_is_sized_for(sum_process):
    with pytest.raises(Exception, match="max_clients"):
        sum_process.next(sum_process.initialize(), [_update(i) for i in range(6)])


def test_a_client_that_is_not_finite_counts_as_zero(sum_process):
    bad = _update(1)
    bad["a"][3] = math.nan
    output = sum_process.next(sum_process.initialize(), [_update(0), bad])
    assert np.max(np.abs(_flat(output.result) - _clipped(_update(0)))) <= _margin(1)


def test_repeated_round_is_the_same_and_the_next_one_is_rotated_anew(sum_process):
    state = sum_process.initialize()
    updates = [_update(i) for i in range(4)]
    first = sum_process.next(state, updates)
    again = sum_process.next(state, updates)
    second = sum_process.next(first.state, updates)
    np.testing.assert_array_equal(_flat(first.result), _flat(again.result))
    assert np.mean(_flat(first.result) == _flat(second.result)) < 0.5
    np.testing.assert_array_equal(first.state.rotation_seed, second.state.rotation_seed)
    # The recorded state says which rotation a round used.
    round_seed = seeds.derive(tf.constant(first.state.rotation_seed), 1)
    encoded = [
        discretize.encode(tf.constant(_flat(u), tf.float32), round_seed, _ENCODING, _CLIP_NORM)
        for u in updates
    ]
    replayed = discretize.decode(
        tf.add_n(encoded), tf.constant(4), round_seed, _ENCODING, _CLIP_NORM
    )
    np.testing.assert_allclose(replayed, _flat(second.result), atol=1e-6)


def test_rotation_seeds_are_fresh():
    process = secagg_sum.SecAggSumFactory(_ENCODING, _CLIP_NORM).create(_TYPE)
    first, second = process.initialize(), process.initialize()
    assert np.all(first.rotation_seed != second.rotation_seed)


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
    for bits in ([], [0.5], [-0.5] * 4, [0.5, -0.5, 0.0, 0.5, 0.5]):
        assert process.next(state, [np.float32(bit) for bit in bits]).result == sum(bits)
    # No client counts for more, whatever it sends.
    for bad, counts_as in ((7.0, 0.5), (-math.inf, -0.5), (math.inf, 0.5), (math.nan, 0.0)):
        assert process.next(state, [np.float32(bad)]).result == counts_as
    tff.test.assert_not_contains_unsecure_aggregation(process.next)


def test_bad_arguments():
    with pytest.raises(ValueError, match="clip_norm"):
        secagg_sum.SecAggSumFactory(_ENCODING, 0.0)
    with pytest.raises(ValueError, match="rotation_seed|seed"):
        secagg_sum.SecAggSumFactory(_ENCODING, 1.0, rotation_seed=-1)
    with pytest.raises(ValueError, match="dim=13"):
        secagg_sum.SecAggSumFactory(_ENCODING, 1.0).create(tff.TensorType(np.float32, [13]))
    with pytest.raises(ValueError, match="floats"):
        secagg_sum.SecAggSumFactory(_ENCODING, 1.0).create(tff.TensorType(np.int32, [14]))
    with pytest.raises(ValueError, match="float32 scalar"):
        secagg_sum.SecAggHalfBitFactory().create(tff.TensorType(np.float32, [1]))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
