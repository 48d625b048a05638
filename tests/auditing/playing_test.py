import collections
import sys

import numpy as np
import pytest

pytest.importorskip("tensorflow_federated", reason="audits aggregators of TFF")

import tensorflow_federated as tff

from tff_dpftrl.auditing import playing, tff_aggregators

_TYPE = tff.to_type(
    collections.OrderedDict(b=tff.TensorType(np.float32, [2]), a=tff.TensorType(np.float64, [1, 2]))
)


def _player(process, client_weight=1.0):
    return playing.Player(tff_aggregators.of_process(process), client_weight)


def test_clients_and_results_are_flat_vectors_in_the_order_of_the_tensors():
    player = _player(tff.aggregators.SumFactory().create(_TYPE))
    assert player.sizes == [2, 2] and player.is_compiled
    assert player.significant_bits == [24, 24]
    clients = [np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 0.0, 0.0, 0.5])]
    played = player.next(player.initialize(), [player.client(client) for client in clients])
    np.testing.assert_array_equal(played.released, [11.0, 2.0, 3.0, 4.5])


def test_numbers_that_are_measured_have_names_of_their_own():
    measured = {"sum": {"norm": np.float32(2.5), "by_tensor": np.array([1, 2])}, "text": "none"}
    assert playing._numbers(measured) == {"norm": 2.5, "by_tensor[0]": 1.0, "by_tensor[1]": 2.0}
    assert playing._numbers(()) == {}


def test_a_weight_is_the_last_number_of_a_client():
    factory = tff.aggregators.MeanFactory()
    player = _player(factory.create(_TYPE, tff.TensorType(np.float32)))
    clients = [player.client(np.ones(4), 3.0), player.client(np.full(4, 5.0), 1.0)]
    played = player.next(player.initialize(), clients)
    np.testing.assert_array_equal(played.released, [2.0] * 4)
    np.testing.assert_array_equal(player.zeroed(), np.zeros(5))


def test_clients_weigh_what_the_player_is_told():
    process = tff.aggregators.MeanFactory().create(_TYPE, tff.TensorType(np.int32))
    player = _player(process, client_weight=3.0)
    clients = [player.client(np.ones(4)), player.client(np.full(4, 5.0), 1.0)]
    played = player.next(player.initialize(), clients)
    np.testing.assert_array_equal(played.released, [2.0] * 4)


@pytest.mark.parametrize("dtype, largest", [(np.float16, 65504.0), (np.float64, 2.0**128)])
def test_the_largest_value_is_one_of_all_floats_that_a_client_goes_through(dtype, largest):
    value_type = tff.to_type([tff.TensorType(np.float32, [2]), tff.TensorType(dtype, [1])])
    player = _player(tff.aggregators.SumFactory().create(value_type))
    assert player.largest_value == pytest.approx(largest)
    client = player.client(np.full(3, player.largest_value))
    released = player.next(player.initialize(), [client]).released
    np.testing.assert_array_equal(released, [player.largest_value] * 3)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
