"""Graphs against brute force, bounds against enumeration, simulation and published parameters."""

import collections
import itertools
import math

import numpy as np
import pytest

from tff_dpftrl.secure_sums import neighbours


def _components(graph, removed=()):
    """Number of connected parts of what is left of a graph."""
    left = set(range(len(graph))) - set(removed)
    parts = 0
    while left:
        parts += 1
        reached = [left.pop()]
        while reached:
            beside = left & set(graph[reached.pop()])
            left -= beside
            reached.extend(beside)
    return parts


@pytest.mark.parametrize(
    ("num_devices", "num_neighbours"),
    [(2, 1), (3, 2), (9, 2), (9, 4), (9, 8), (10, 3), (10, 4), (10, 9), (200, 24)],
)
def test_each_has_k_neighbours_who_know_it(num_devices, num_neighbours):
    graph = neighbours.random_neighbours(num_devices, num_neighbours)
    assert len(graph) == num_devices
    for device, around in enumerate(graph):
        assert len(set(around)) == num_neighbours and device not in around
        assert list(around) == sorted(around)
        assert all(device in graph[other] for other in around)
    assert _components(graph) == 1


@pytest.mark.parametrize(("num_devices", "num_neighbours"), [(8, 3), (9, 4), (10, 5)])
def test_no_fewer_than_k_devices_cut_the_graph(num_devices, num_neighbours):
    graph = neighbours.random_neighbours(num_devices, num_neighbours)

    def worst(removed):
        return max(
            _components(graph, gone) for gone in itertools.combinations(range(num_devices), removed)
        )

    assert worst(num_neighbours - 1) == 1
    assert worst(num_neighbours) == 2


def test_graph_lies_on_a_ring_in_the_given_order():
    graph = neighbours.random_neighbours(6, 2, order=[3, 0, 5, 1, 4, 2])
    assert graph == [(3, 5), (4, 5), (3, 4), (0, 2), (1, 2), (0, 1)]


def test_graphs_are_drawn_anew_and_everybody_is_as_likely_a_neighbour():
    draws, other_devices, num_neighbours = 4000, 7, 2
    times = collections.Counter()
    for _ in range(draws):
        times.update(neighbours.random_neighbours(8, num_neighbours)[0])
    share = num_neighbours / other_devices
    # Six standard deviations for each of seven devices: fails once in 7e7 runs.
    margin = 6 * math.sqrt(draws * share * (1 - share))
    assert all(abs(times[device] - draws * share) < margin for device in range(1, 8))


def _enumerated(neighbourhood, corrupt, dropped):
    """Expected failures, and probabilities, over all choices of who is corrupt and who drops out.

    A random ring with these on given places is as likely as a given ring with these anywhere.
    """
    n, k, t = neighbourhood.num_devices, neighbourhood.num_neighbours, neighbourhood.threshold
    graph = neighbours.random_neighbours(n, k, order=range(n))
    expected, probability = collections.Counter(), collections.Counter()

    def count(event, failures, cases):
        expected[event] += failures / cases
        probability[event] += bool(failures) / cases

    for gone in itertools.combinations(range(n), dropped):
        left = set(range(n)) - set(gone)
        lost = sum(len(left & {device, *graph[device]}) < t for device in range(n))
        count("too_few_shares", lost, math.comb(n, dropped))
    for bad in itertools.combinations(range(n), corrupt):
        exposed = sum(
            len(set(bad) & set(graph[device])) >= t for device in set(range(n)) - set(bad)
        )
        count("exposed_secrets", exposed, math.comb(n, corrupt))
    for removed in itertools.combinations(range(n), corrupt + dropped):
        count("disconnected", _components(graph, removed) - 1, math.comb(n, corrupt + dropped))
    return expected, probability


@pytest.mark.parametrize(
    ("num_devices", "num_neighbours", "threshold", "corrupt", "dropped"),
    [
        (9, 4, 3, 2, 2),
        (10, 4, 4, 4, 3),
        (11, 6, 5, 5, 1),
        (10, 5, 4, 4, 3),
        (12, 2, 2, 1, 4),
        (8, 7, 5, 4, 3),
        (8, 7, 5, 5, 2),
    ],
)
def test_bounds_are_what_enumeration_finds(
    num_devices, num_neighbours, threshold, corrupt, dropped
):
    neighbourhood = neighbours.Neighbourhood(num_devices, num_neighbours, threshold)
    bounds = neighbours.failure_probabilities(
        neighbourhood, corrupt / num_devices, dropped / num_devices
    )
    expected, probability = _enumerated(neighbourhood, corrupt, dropped)
    for event in ("too_few_shares", "exposed_secrets"):
        # A union bound is the expected number of failures.
        assert 2 ** getattr(bounds, event) == pytest.approx(min(1, expected[event]), rel=1e-9)
    assert 2**bounds.disconnected >= probability["disconnected"] * (1 - 1e-9)
    assert (bounds.disconnected == -math.inf) == (probability["disconnected"] == 0)


def test_bound_of_a_cut_is_exact_where_only_two_gaps_fit():
    # 4 removed of 12, k = 4: only two pairs of neighbours on the ring can cut it.
    bounds = neighbours.failure_probabilities(neighbours.Neighbourhood(12, 4, 3), 2 / 12, 2 / 12)
    _, probability = _enumerated(neighbours.Neighbourhood(12, 4, 3), 2, 2)
    assert 2**bounds.disconnected == pytest.approx(probability["disconnected"], rel=1e-9)


def test_bounds_hold_in_a_simulation():
    neighbourhood, corrupt, dropped = neighbours.Neighbourhood(200, 16, 9), 40, 40
    bounds = neighbours.failure_probabilities(neighbourhood, 0.2, 0.2)
    rng = np.random.default_rng(15)
    draws, lost, exposed = 3000, [], []
    ring = np.array(neighbours.random_neighbours(200, 16, order=range(200)))
    for _ in range(draws):
        roles = rng.permutation(200)
        bad, gone = roles < corrupt, roles >= 200 - dropped
        lost.append((16 + ~gone * 1 - gone[ring].sum(1) < 9).sum())
        exposed.append((bad[ring].sum(1)[~bad] >= 9).sum())
    for failures, bound in ((lost, bounds.too_few_shares), (exposed, bounds.exposed_secrets)):
        # The mean is the bound, within six of its standard errors; 20 or more failures were seen.
        error = np.std(failures) / math.sqrt(draws)
        assert sum(failures) >= 20
        assert abs(np.mean(failures) - 2**bound) < 6 * error
        assert np.mean(np.array(failures) > 0) <= 2**bound + 6 * error


# Degree and threshold (out of the neighbours' shares) for 40 bits of security and 20 of
# correctness, honest but curious, from the tests of Google's federated-compute (file
# fcp/secagg/server/graph_parameter_finder_test.cc), whose authors are the paper's.
_PUBLISHED = [
    (1000, 0.45, 0.45, 822, 417),
    (1000, 0.33, 0.33, 286, 150),
    (10_000, 0.33, 0.33, 422, 221),
    (1_000_000, 0.33, 0.33, 518, 270),
    (100, 0.05, 0.33, 28, 6),
    (1000, 0.05, 0.33, 72, 24),
    (10_000, 0.05, 0.33, 86, 29),
    (1000, 0.33, 0.05, 78, 60),
    (1_000_000, 0.33, 0.05, 110, 83),
    (100, 0.05, 0.05, 12, 6),
    (10_000, 0.05, 0.05, 34, 20),
    (1000, 0.33, 0, 38, 36),
    (10_000, 0, 0.33, 42, 2),
]


@pytest.mark.parametrize(("num_devices", "corrupt", "dropped", "degree", "threshold"), _PUBLISHED)
def test_agrees_with_published_parameters(num_devices, corrupt, dropped, degree, threshold):
    published = neighbours.failure_probabilities(
        neighbours.Neighbourhood(num_devices, degree, threshold), corrupt, dropped
    )
    assert published.insecure <= -40
    assert published.too_few_shares <= -20
    chosen = neighbours.choose(num_devices, corrupt, dropped, threshold_fraction=0)
    # They round quantiles outwards and halve the probability between two events.
    assert degree * 0.95 - 2 <= chosen.num_neighbours <= degree
    assert chosen.threshold <= threshold


@pytest.mark.parametrize(
    ("num_devices", "corrupt", "dropped"),
    [(60, 0.1, 0.1), (400, 0.2, 0.1), (1000, 0.1, 0.3), (4000, 0.2, 0.2)],
)
def test_choice_is_the_smallest_that_will_do(num_devices, corrupt, dropped):
    chosen = neighbours.choose(num_devices, corrupt, dropped)

    def will_do(num_neighbours, threshold):
        bounds = neighbours.failure_probabilities(
            neighbours.Neighbourhood(num_devices, num_neighbours, threshold), corrupt, dropped
        )
        return bounds.insecure <= -40 and bounds.too_few_shares <= -20

    def least(num_neighbours):
        return (num_neighbours + 1) // 2 + 1

    assert not chosen.complete and chosen.threshold >= least(chosen.num_neighbours)
    assert will_do(chosen.num_neighbours, chosen.threshold)
    assert chosen.threshold == least(chosen.num_neighbours) or not will_do(
        chosen.num_neighbours, chosen.threshold - 1
    )
    fewer = chosen.num_neighbours - 2
    assert not any(will_do(fewer, t) for t in range(least(fewer), fewer + 2))


@pytest.mark.parametrize(("num_neighbours", "threshold"), [(4, 2), (4, 3), (4, 5), (998, 667)])
def test_threshold_is_the_least_above_its_fraction(num_neighbours, threshold):
    neighbourhood = neighbours.Neighbourhood(1000, num_neighbours, threshold)
    shares = num_neighbours + 1
    assert math.floor(neighbourhood.threshold_fraction * shares) + 1 == threshold
    assert 0 <= neighbourhood.threshold_fraction < 1


def test_small_groups_are_complete():
    assert neighbours.choose(2, 0, 0) == neighbours.Neighbourhood(2, 1, 2)
    assert neighbours.choose(5, 0.2, 0.4) == neighbours.Neighbourhood(5, 4, 3)
    assert neighbours.choose(5, 0.2, 0.4).complete


def test_fractions_are_not_rounded_down_by_binary_fractions():
    # 0.29 · 100 is 28.999999999999996.
    complete = neighbours.Neighbourhood(100, 99, 71)
    assert neighbours.failure_probabilities(complete, 0, 0.29).too_few_shares == -math.inf
    assert neighbours.failure_probabilities(complete, 0, 0.3).too_few_shares == 0
    assert (
        neighbours.failure_probabilities(
            neighbours.Neighbourhood(100, 99, 29), 0.29, 0
        ).exposed_secrets
        == 0
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: neighbours.choose(10, 0.2, 0.6), "corrupt_fraction=0.2"),
        (lambda: neighbours.choose(10, 0.5, 0.5), "no honest survivor of 10"),
        (lambda: neighbours.choose(10, 1.0, 0), "corrupt_fraction must be .* below 1"),
        (lambda: neighbours.choose(1, 0, 0), "num_devices must be at least 2"),
        (lambda: neighbours.random_neighbours(9, 3), "both odd"),
        (lambda: neighbours.random_neighbours(9, 9), "must be below num_devices=9"),
        (lambda: neighbours.random_neighbours(3, 2, order=[0, 1, 1]), "permutation of 0 to 2"),
        (lambda: neighbours.Neighbourhood(9, 4, 6), "at most num_neighbours"),
        (lambda: neighbours.Neighbourhood(9, 4, 1), "threshold must be at least 2"),
    ],
)
def test_impossible_wishes_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
