import collections
import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from tff_dpftrl.participation import cohorts

deterministic = hypothesis.settings(deadline=None, derandomize=True)


def rounds_of_clients(sampler):
    """Brute force: the rounds of every client, shape-free."""
    rounds = collections.defaultdict(list)
    for t in range(sampler.num_rounds):
        cohort = sampler.cohort(t).tolist()
        assert len(set(cohort)) == len(cohort)
        assert all(0 <= client < sampler.num_clients for client in cohort)
        for client in cohort:
            rounds[client].append(t)
    return rounds


@st.composite
def min_sep_arguments(draw):
    clients_per_round = draw(st.integers(1, 8))
    min_sep = draw(st.integers(1, 9))
    return {
        "num_clients": clients_per_round * min_sep + draw(st.integers(0, 20)),
        "clients_per_round": clients_per_round,
        "min_sep": min_sep,
        "num_rounds": draw(st.integers(1, 60)),
        "seed": draw(st.integers(0, 2**64)),
    }


@st.composite
def samplers(draw):
    kind = draw(st.sampled_from(["min_sep", "shuffled", "poisson", "lazy poisson"]))
    arguments = draw(min_sep_arguments())
    if kind == "min_sep":
        return lambda: cohorts.MinSepSampler(**arguments)
    del arguments["min_sep"]
    if kind == "shuffled":
        return lambda: cohorts.ShuffledEpochs(**arguments)
    del arguments["clients_per_round"]
    q = draw(st.floats(0, 1, exclude_min=True))
    poisson = cohorts.PoissonSampler if kind == "poisson" else cohorts.LazyPoissonSampler
    return lambda: poisson(sampling_probability=q, **arguments)


@deterministic
@hypothesis.given(samplers())
def test_no_sampler_ever_violates_its_schema(make):
    sampler = make()
    for rounds in rounds_of_clients(sampler).values():
        assert sampler.schema.allows(rounds)


@deterministic
@hypothesis.given(samplers(), st.data())
def test_a_cohort_depends_on_the_round_only_not_on_what_was_asked_before(make, data):
    expected = [make().cohort(t).tolist() for t in range(make().num_rounds)]
    sampler = make()
    for t in data.draw(st.lists(st.sampled_from(range(sampler.num_rounds)), max_size=12)):
        assert sampler.cohort(t).tolist() == expected[t]


@deterministic
@hypothesis.given(min_sep_arguments())
def test_clients_take_part_equally_often_up_to_one_round(arguments):
    sampler = cohorts.MinSepSampler(**arguments)
    rounds = rounds_of_clients(sampler)
    counts = [len(rounds[client]) for client in range(sampler.num_clients)]
    assert sum(counts) == sampler.num_rounds * sampler.clients_per_round
    assert max(counts) - min(counts) <= 1
    assert max(counts) == sampler.schema.max_participations


@deterministic
@hypothesis.given(min_sep_arguments())
def test_changing_a_returned_cohort_changes_nothing(arguments):
    sampler = cohorts.MinSepSampler(**arguments)
    sampler.cohort(0)[:] = -1
    assert (sampler.cohort(0) >= 0).all()


def test_the_largest_feasible_min_sep_is_reached_and_no_more():
    arguments = {"num_clients": 103, "clients_per_round": 10, "num_rounds": 200, "seed": 0}
    assert cohorts.largest_feasible_min_sep(103, 10) == 10
    cohorts.MinSepSampler(min_sep=10, **arguments)
    with pytest.raises(ValueError, match=r"min_sep=11 .* largest feasible min_sep is 10"):
        cohorts.MinSepSampler(min_sep=11, **arguments)


def test_infeasible_means_infeasible():
    # A greedy search decides: the last b - 1 cohorts are disjoint whatever was chosen, so
    # the number of clients that are free in a round is the same for all schedules.
    for n, m, b, rounds in itertools.product(range(1, 9), range(1, 4), range(1, 6), range(1, 7)):
        schedule = []
        for _ in range(rounds):
            resting = set(itertools.chain(*schedule[-(b - 1) :])) if b > 1 else set()
            free = [client for client in range(n) if client not in resting]
            if len(free) < m:
                break
            schedule.append(free[:m])
        arguments = {"num_clients": n, "clients_per_round": m, "min_sep": b, "num_rounds": rounds}
        if len(schedule) == rounds:
            cohorts.MinSepSampler(seed=0, **arguments)
        else:
            with pytest.raises(ValueError):
                cohorts.MinSepSampler(seed=0, **arguments)


def test_without_a_second_participation_any_min_sep_is_feasible():
    sampler = cohorts.MinSepSampler(
        num_clients=20, clients_per_round=5, min_sep=1000, num_rounds=4, seed=0
    )
    assert sampler.schema.max_participations == 1
    assert all(len(rounds) == 1 for rounds in rounds_of_clients(sampler).values())


def test_gboard_es_es_allows_a_stride_of_647():
    # Xu et al. 2023, section 2.2: "upper bounded by 4.21M/6500 ~ 647".
    assert cohorts.largest_feasible_min_sep(4_210_000, 6_500) == 647
    # ... and "report goal is 6500 for [a] population of around 10^6": 153.
    assert cohorts.largest_feasible_min_sep(1_000_000, 6_500) == 153


def test_too_many_participations_are_refused_with_the_smallest_possible_number():
    arguments = {"num_clients": 100, "clients_per_round": 10, "min_sep": 5, "seed": 0}
    assert cohorts.implied_participations(100, 10, 31) == 4
    with pytest.raises(ValueError, match="Raise max_participations to 4 or lower num_rounds to 30"):
        cohorts.MinSepSampler(num_rounds=31, max_participations=3, **arguments)
    sampler = cohorts.MinSepSampler(num_rounds=30, max_participations=3, **arguments)
    assert max(len(rounds) for rounds in rounds_of_clients(sampler).values()) == 3


def test_slack_is_used_to_mix_the_cohorts():
    def pairs_meeting_twice(num_clients):
        sampler = cohorts.MinSepSampler(
            num_clients=num_clients, clients_per_round=10, min_sep=10, num_rounds=20, seed=0
        )
        met = collections.Counter()
        for t in range(20):
            met.update(itertools.combinations(sorted(sampler.cohort(t).tolist()), 2))
        return sum(count > 1 for count in met.values())

    # Without slack the ten cohorts return as they were: 10 * (10 choose 2) pairs.
    assert pairs_meeting_twice(100) == 450
    assert pairs_meeting_twice(200) < 100
    # With a slack of a single client, neighbours in the order change places.
    one_more = cohorts.MinSepSampler(
        num_clients=101, clients_per_round=10, min_sep=10, num_rounds=20, seed=0
    )
    first, second = one_more._order(0).tolist(), one_more._order(1).tolist()
    assert first != second and sorted(first) == sorted(second)
    assert all(abs(first.index(client) - second.index(client)) <= 1 for client in range(101))


def test_shuffled_epochs_visit_everybody_once_an_epoch():
    sampler = cohorts.ShuffledEpochs(num_clients=12, clients_per_round=4, num_rounds=9, seed=5)
    epochs = [np.concatenate([sampler.cohort(3 * e + i) for i in range(3)]) for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(12))
    assert not np.array_equal(epochs[0], epochs[1])


def test_poisson_sampling_is_independent_with_the_given_probability():
    num_clients, q, num_rounds = 2_000, 0.3, 200
    sampler = cohorts.PoissonSampler(
        num_clients=num_clients, sampling_probability=q, num_rounds=num_rounds, seed=11
    )
    taken = np.zeros((num_rounds, num_clients))
    for t in range(num_rounds):
        taken[t, sampler.cohort(t)] = 1.0
    trials = taken.size
    margin = 6 * math.sqrt(q * (1 - q) / trials)
    assert abs(taken.mean() - q) < margin
    assert margin < 0.005  # Power: a probability off by 0.005 + margin would be seen.
    # Neighbouring clients, and one client in neighbouring rounds, are uncorrelated.
    centred = taken - q
    for product in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(product.mean()) < 6 * q * (1 - q) / math.sqrt(product.size)
    # Sizes have the variance of a binomial; its standard error is about var * sqrt(2/rounds).
    variance = num_clients * q * (1 - q)
    assert abs(taken.sum(axis=1).var() - variance) < 6 * variance * math.sqrt(2 / num_rounds)


def test_probability_one_takes_everybody():
    sampler = cohorts.PoissonSampler(num_clients=7, sampling_probability=1.0, num_rounds=1, seed=0)
    assert sampler.cohort(0).tolist() == list(range(7))


def test_lazy_poisson_has_the_same_law():
    # The third and fourth are decided by bits beyond the first byte.
    for q in (0.3, 1e-3, 0.2529296875, 1 - 2**-9):
        sampler = cohorts.LazyPoissonSampler(
            num_clients=50_000, sampling_probability=q, num_rounds=20, seed=5
        )
        sizes = [len(sampler.cohort(t)) for t in range(20)]
        trials = 20 * 50_000
        assert abs(np.sum(sizes) - trials * q) < 5 * math.sqrt(trials * q * (1 - q)), q
        assert stats.binom.cdf(min(sizes), 50_000, q) > 1e-5


def test_lazy_poisson_decides_by_all_bits_of_the_probability(monkeypatch):
    def decided(q, leading, rest):
        """The cohort of two clients; `rest` is the second word where it is asked for."""

        class Fake:
            def __init__(self, label):
                self._label = label

            def digest(self, size):
                if self._label.endswith(b"/undecided"):
                    return rest.to_bytes(8, "little") * (size // 8)
                return bytes([leading] * size)

        monkeypatch.setattr(cohorts.hashlib, "shake_256", Fake)
        sampler = cohorts.LazyPoissonSampler(
            num_clients=2, sampling_probability=q, num_rounds=1, seed=0
        )
        return sampler.cohort(0).tolist()

    q = 77 / 256 + 2**-30
    assert decided(q, 76, 2**64 - 1) == [0, 1]
    assert decided(q, 77, 2**42 - 1) == [0, 1]
    assert decided(q, 77, 2**42) == []
    assert decided(q, 78, 0) == []
    assert decided(1.0, 255, 2**64 - 1) == [0, 1]
    assert decided(1 - 2**-53, 255, 2**64 - 2**19 - 1) == [0, 1]
    assert decided(1 - 2**-53, 255, 2**64 - 2**19) == []


def test_cohorts_stay_the_same_in_later_versions():
    """Resuming a run after an upgrade must not change its cohorts; own values."""
    sampler = cohorts.MinSepSampler(
        num_clients=10, clients_per_round=3, min_sep=2, num_rounds=9, seed=1
    )
    assert [sampler.cohort(t).tolist() for t in (0, 1, 8)] == [[3, 4, 1], [9, 0, 8], [5, 8, 9]]
    poisson = cohorts.PoissonSampler(num_clients=10, sampling_probability=0.5, num_rounds=3, seed=1)
    assert poisson.cohort(2).tolist() == [0, 3, 5, 6, 9]
    lazy = cohorts.LazyPoissonSampler(
        num_clients=10, sampling_probability=0.5, num_rounds=3, seed=1
    )
    assert lazy.cohort(2).tolist() == [1, 3, 4, 6]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_clients", 0),
        ("clients_per_round", 0),
        ("clients_per_round", 101),
        ("clients_per_round", 2.5),
        ("min_sep", 0),
        ("num_rounds", -1),
        ("max_participations", 0),
        ("seed", -1),
        ("seed", "x"),
    ],
)
def test_bad_arguments_are_named(name, value):
    arguments = {
        "num_clients": 100,
        "clients_per_round": 10,
        "min_sep": 3,
        "num_rounds": 20,
        "max_participations": 4,
        "seed": 0,
    }
    with pytest.raises(ValueError, match=name):
        cohorts.MinSepSampler(**{**arguments, name: value})


@pytest.mark.parametrize("q", [0.0, -0.1, 1.1, math.nan])
def test_bad_probabilities_are_refused(q):
    with pytest.raises(ValueError, match="sampling_probability"):
        cohorts.PoissonSampler(num_clients=5, sampling_probability=q, num_rounds=3, seed=0)


@pytest.mark.parametrize("t", [-1, 20, 1.5])
def test_rounds_that_do_not_exist_are_refused(t):
    sampler = cohorts.ShuffledEpochs(num_clients=9, clients_per_round=3, num_rounds=20, seed=0)
    with pytest.raises(ValueError, match="round_index"):
        sampler.cohort(t)
