"""Secure sums of compiled processes are the bits of TFF's test context, and never wrap around."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tree

from tests.execution import small_processes
from tff_dpftrl import aggregators
from tff_dpftrl.discretization import grid
from tff_dpftrl.execution import compiled_process, contexts
from tff_dpftrl.mechanisms import blt

_FLOATS = tff.TensorType(np.float32, [14])
_INTEGERS = tff.TensorType(np.int32, [4])
_BLT = blt.Blt((0.99, 0.8), (0.05, 0.2))
_COMMON = {
    "noise_multiplier": 0.5,
    "clients_per_round": 5,
    "encoding": grid.for_bits(14, 5, 16),
    "deterministic_seed": 3,
}


@pytest.fixture(autouse=True)
def _secure_sums_in_the_clear():
    with contexts.secure_sum_simulation():
        yield


def _secagg():
    return aggregators.build_secagg_dp_ftrl_aggregator(_BLT, clip_norm=2.0, **_COMMON)


def _secagg_adaptive():
    return aggregators.build_secagg_dp_ftrl_aggregator(
        _BLT,
        clip_norm=aggregators.AdaptiveClipping(
            initial_clip_norm=1.0, clipped_count_stddev=1.0, only_estimates=True
        ),
        **_COMMON,
    )


_FACTORIES = {
    "secagg": (_secagg, _FLOATS),
    "secagg adaptive": (_secagg_adaptive, _FLOATS),
    "tff": (lambda: tff.learning.secure_aggregator(weighted=False), _FLOATS),
    "tff of floats": (lambda: tff.aggregators.SecureSumFactory(2.0, -2.0), _FLOATS),
    "tff of integers": (lambda: tff.aggregators.SecureSumFactory(1000, -1000), _INTEGERS),
}


def _process(aggregation):
    value_type = aggregation.next.type_signature.parameter[1]

    @tff.federated_computation()
    def initialize():
        return aggregation.initialize()

    @tff.federated_computation(aggregation.initialize.type_signature.result, value_type)
    def next_fn(state, values):
        output = aggregation.next(state, values)
        return output.state, tff.federated_zip((output.result, output.measurements))

    return tff.templates.IterativeProcess(initialize, next_fn)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "secagg" else [pytest.mark.slow]) for n in _FACTORIES]
)
def test_sums_and_decoded_updates_are_tffs(name):
    build, value_type = _FACTORIES[name]
    process = _process(build().create(value_type))
    compiled = compiled_process.compile_process(process)
    rng = np.random.default_rng(5)
    state = reference = process.initialize()
    for _ in range(3):
        values = [
            (700 * rng.normal(size=value_type.shape)).astype(value_type.dtype.type)
            if value_type is _INTEGERS
            else rng.normal(size=value_type.shape).astype(np.float32)
            for _ in range(5)
        ]
        reference, expected = process.next(reference, values)
        state, actual = compiled.next(state, values)
        # What follows the sum is computed in float32, with noise: only the last bits differ.
        for one, other in zip(tree.flatten(actual), tree.flatten(expected), strict=True):
            if np.asarray(other).dtype.kind == "f" and name.startswith("secagg"):
                np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
            else:
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("modulus", [2**30, 2**31 - 1, 1_000_003])
def test_modular_sums_of_many_clients_do_not_wrap_around(modulus):
    """Where 32 bits are too few, TFF's own sum of a modulus that is no power of two is wrong."""

    def round_fn(state, values):
        return state, tff.backends.mapreduce.federated_secure_modular_sum(values, modulus)

    compiled = compiled_process.compile_process(small_processes.build_from(round_fn, _INTEGERS))
    value = np.array([modulus - 1, modulus // 2 + 1, modulus - 12345, 7], np.int32)
    actual = compiled.next(0.0, 1000 * [value])[1]
    np.testing.assert_array_equal(actual, 1000 * value.astype(np.int64) % modulus)
    assert actual.dtype == np.int32


@pytest.mark.slow
def test_moduli_belong_to_their_tensors():
    value_type = tff.to_type(collections.OrderedDict(a=np.int32, b=(np.int32, _INTEGERS)))

    def round_fn(state, values):
        modular_sum = tff.backends.mapreduce.federated_secure_modular_sum
        return state, modular_sum(values, collections.OrderedDict(a=10, b=(100, 7)))

    process = small_processes.build_from(round_fn, value_type)
    value = collections.OrderedDict(a=9, b=(99, np.array([1, 2, 3, 6], np.int32)))
    expected = process.next(0.0, [value] * 3)[1]
    actual = compiled_process.compile_process(process).next(0.0, [value] * 3)[1]
    tree.assert_same_structure(actual, expected)
    assert (actual["a"], actual["b"][0], actual["b"][1].tolist()) == (7, 97, [3, 6, 2, 4])
    tree.map_structure(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("limit", [pytest.param("bits", marks=pytest.mark.slow), "largest input"])
def test_a_client_that_sends_too_much_is_refused(limit):
    def round_fn(state, values):
        if limit == "bits":
            return state, tff.federated_secure_sum_bitwidth(values, 3)
        return state, tff.federated_secure_sum(values, 7)

    process = small_processes.build_from(round_fn)
    compiled = compiled_process.compile_process(process)
    assert compiled.next(0.0, [7, 7])[1] == process.next(0.0, [7, 7])[1] == 14
    with pytest.raises(tf.errors.InvalidArgumentError, match="larger than maximum specified"):
        compiled.next(0.0, [7, 8])
