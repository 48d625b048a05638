"""Sending state with fewer copies changes no value."""

from __future__ import annotations

import collections
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.execution import state_transfer, tff_private


@pytest.fixture
def installed():
    assert state_transfer.install_fast_state_transfer()
    yield
    state_transfer.uninstall_fast_state_transfer()


def _example():
    rng = np.random.default_rng(0)
    state = collections.OrderedDict(
        big=rng.normal(size=(40, 50)).astype(np.float32),
        nested=[
            (np.int64(3), np.asarray([1, 2], np.int64)),
            collections.OrderedDict(),
            rng.integers(100, size=2000),
        ],
        half=rng.normal(size=3000).astype(tf.bfloat16.as_numpy_dtype),
        flags=rng.normal(size=5000) > 0,
        text=b"word",
    )
    state_type = tff.to_type(
        collections.OrderedDict(
            big=(np.float32, [40, 50]),
            nested=[(np.int64, (np.int64, [2])), collections.OrderedDict(), (np.int64, [2000])],
            half=tff.TensorType(tf.bfloat16.as_numpy_dtype, [3000]),
            flags=(np.bool_, [5000]),
            text=np.str_,
        )
    )
    return state, state_type


@pytest.mark.parametrize("placement", [None, tff.SERVER, tff.CLIENTS])
def test_message_is_the_one_tff_builds(placement):
    value, value_type = _example()
    if placement is tff.SERVER:
        value_type = tff.FederatedType(value_type, placement)
    elif placement is tff.CLIENTS:
        value, value_type = [value, value], tff.FederatedType(value_type, placement)
    message = tff_private.executor_pb2.Value()
    state_transfer._fill(message, value, value_type)
    assert message == tff_private.value_serialization.serialize_value(value, value_type)[0]


def test_values_survive_the_round_trip(installed):
    value, value_type = _example()

    @tff.federated_computation(
        tff.FederatedType(value_type, tff.SERVER), tff.FederatedType(np.int32, tff.CLIENTS)
    )
    def identity(state, clients):
        return state, tff.federated_sum(clients)

    returned, total = identity(value, [1, 2, 4])
    assert total == 7
    tf.nest.map_structure(np.testing.assert_array_equal, returned, value)


def test_wrong_length_is_refused():
    with pytest.raises(TypeError, match="3 elements"):
        state_transfer._fill(
            tff_private.executor_pb2.Value(), [1, 2, 3], tff.to_type([np.int32, np.int32])
        )


def test_clients_without_a_list_are_refused():
    with pytest.raises(TypeError, match="must be a list"):
        state_transfer._fill(
            tff_private.executor_pb2.Value(), np.int32(1), tff.FederatedType(np.int32, tff.CLIENTS)
        )


def test_other_releases_of_tff_are_left_alone(monkeypatch):
    before = tff_private.remote_executor.RemoteExecutor.create_value
    monkeypatch.setattr(tff, "__version__", "0.88.0")
    assert not state_transfer.install_fast_state_transfer()
    assert tff_private.remote_executor.RemoteExecutor.create_value is before


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
