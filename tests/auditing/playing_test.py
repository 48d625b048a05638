import numpy as np
import pytest

from tests.auditing import planted_bugs
from tff_dpftrl.auditing import playing
from tff_dpftrl.private_round import aggregation


def test_clients_and_results_are_flat_vectors_in_the_order_of_the_tensors():
    player = playing.Player(playing.of_aggregation(aggregation.PlainMean(), [[2], [1, 2]]))
    assert player.sizes == [2, 2] and player.is_compiled and not player.is_weighted
    assert player.significant_bits == [24, 24]
    clients = [np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 0.0, 0.0, 0.5])]
    played = player.next(player.initialize(), [player.client(client) for client in clients])
    np.testing.assert_array_equal(played.released, [5.5, 1.0, 1.5, 2.25])


@pytest.mark.parametrize("name", ["secure sum", "adaptive, secure sum"])
def test_secure_sums_are_played_and_resumed_from_arrays(name):
    made = playing.of_aggregation(planted_bugs.CORRECT[name].build(), [[100], [12, 13]])
    player = playing.Player(made)
    state = player.initialize()
    clients = [player.client(np.full(256, 1e-2)), player.client(np.full(256, np.nan))]
    one, two = (player.next(s, clients) for s in (state, playing.as_arrays(state)))
    np.testing.assert_array_equal(one.released, two.released)
    assert one.measurements["summed_clients"] == 2 and np.all(np.isfinite(one.released))


def test_clients_weigh_what_the_player_is_told():
    made = playing.of_aggregation(planted_bugs.CORRECT["sampled"].build(), [[4]])
    player = playing.Player(made, client_weight=0.25)
    state, update = player.initialize(), np.full(4, 0.1)
    none, quarter, full = (
        player.next(state, clients).released
        for clients in ([], [player.client(update)], [player.client(update, 1.0)])
    )
    np.testing.assert_allclose(4.0 * (quarter - none), full - none, atol=1e-6)


def test_numbers_that_are_measured_have_names_of_their_own():
    measured = {"sum": {"norm": np.float32(2.5), "by_tensor": np.array([1, 2])}, "text": "none"}
    assert playing._numbers(measured) == {"norm": 2.5, "by_tensor[0]": 1.0, "by_tensor[1]": 2.0}
    assert playing._numbers(()) == {}
