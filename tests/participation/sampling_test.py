import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from tff_dpftrl import validation
from tff_dpftrl.participation import cohorts, sampling

ALL = {
    "cyclic": sampling.CyclicPoisson(13, 3, 0.4),
    "one group": sampling.CyclicPoisson(13, 1, 0.3),
    "bins": sampling.BallsInBins(13, 4),
    "b-min-sep": sampling.MinSepPoisson(13, 3, 0.4),
}
each = pytest.mark.parametrize("described", ALL.values(), ids=ALL.keys())


def table_of(described, num_clients, seed=7):
    """Who is in which round, bool, shape [rounds, clients]."""
    sampler = described.sampler(num_clients, seed)
    taken = np.zeros((described.num_rounds, num_clients), bool)
    for t in range(described.num_rounds):
        cohort = sampler.cohort(t)
        assert cohort.dtype == np.int64
        assert (np.diff(cohort) > 0).all()
        taken[t, cohort] = True
    return taken


def law(described):
    """Brute force: the probability of each set of rounds of one client, in any order."""
    rounds = described.num_rounds
    patterns = {}

    def add(pattern, probability):
        key = tuple(pattern)
        patterns[key] = patterns.get(key, 0.0) + probability

    if isinstance(described, sampling.CyclicPoisson):
        q, groups = described.sampling_probability, described.num_groups
        for group in range(groups):
            turns = range(group, rounds, groups)
            for chosen in itertools.product([0, 1], repeat=len(turns)):
                row = [0] * rounds
                for turn, came in zip(turns, chosen, strict=True):
                    row[turn] = came
                add(row, q ** sum(chosen) * (1 - q) ** (len(turns) - sum(chosen)) / groups)
    elif isinstance(described, sampling.BallsInBins):
        for one in range(described.num_bins):
            add([int(t % described.num_bins == one) for t in range(rounds)], 1 / described.num_bins)
    elif isinstance(described, sampling.MinSepPoisson):
        q, b = described.sampling_probability, described.min_sep
        share = q / (1 + (b - 1) * q)
        # State: rounds that the client still has to wait.
        start = [1 - (b - 1) * share] + [share] * (b - 1)

        def go_on(row, wait, probability):
            if len(row) == rounds:
                add(row, probability)
            elif wait:
                go_on([*row, 0], wait - 1, probability)
            else:
                go_on([*row, 0], 0, probability * (1 - q))
                go_on([*row, 1], b - 1, probability * q)

        for wait, probability in enumerate(start):
            go_on([], wait, probability)
    return patterns


@each
def test_the_rounds_of_a_client_have_the_law_that_is_described(described):
    described = dataclasses.replace(described, num_rounds=6)
    expected = law(described)
    assert math.isclose(sum(expected.values()), 1.0)
    num_clients = 20_000
    rows = table_of(described, num_clients).T.astype(int)
    counts = dict.fromkeys(expected, 0)
    for row in map(tuple, rows.tolist()):
        counts[row] += 1  # A pattern that cannot be is a KeyError.
    common = [one for one in expected if expected[one] * num_clients >= 5]
    rest = sum(expected.values()) - sum(expected[one] for one in common)
    observed = [counts[one] for one in common]
    wanted = [expected[one] * num_clients for one in common]
    if rest * num_clients >= 5:
        observed.append(num_clients - sum(observed))
        wanted.append(rest * num_clients)
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    # Fails by chance once in 10^6 seeds; a probability of a common pattern that is off by a
    # tenth of it is seen in about every seed.
    assert stats.chi2.sf(statistic, max(1, len(wanted) - 1)) > 1e-6


@each
def test_every_round_expects_the_same_share_from_the_first_on(described):
    num_clients = 40_000
    sizes = table_of(described, num_clients).sum(axis=1)
    share = described.share_per_round
    # Six standard deviations, at most 600 of 40,000: a start without those who wait would have
    # 16,000 in b-min-sep's first round, not 8,889.
    margin = 6 * math.sqrt(num_clients * share * (1 - share))
    assert (np.abs(sizes - num_clients * share) < margin).all()


@each
def test_clients_are_drawn_independently_of_each_other(described):
    large = table_of(described, 20_000)
    # Who is in a round has no correlation with whether a neighbour is, within six standard
    # deviations of a mean of products of independent variables.
    centred = large - large.mean(axis=1, keepdims=True)
    products = (centred[:, 1:] * centred[:, :-1]).mean(axis=1)
    variance = centred.var(axis=1)
    assert (np.abs(products) < 6 * variance / math.sqrt(large.shape[1])).all()


@each
def test_no_client_breaks_the_schema(described):
    schema = described.schema
    assert schema == described.sampler(40, 3).schema
    for rounds in table_of(described, 40).T:
        assert schema.allows(np.flatnonzero(rounds).tolist())


@each
def test_a_cohort_depends_on_seed_and_round_alone(described):
    expected = table_of(described, 30)
    sampler = described.sampler(30, 7)
    for t in (12, 3, 3, 11, 0, 12, 4):
        cohort = sampler.cohort(t)
        assert cohort.tolist() == np.flatnonzero(expected[t]).tolist()
        cohort[:] = -1  # Nobody else's.
    assert (table_of(described, 30, seed=8) != expected).any()
    for wrong in (-1, 13, 0.5):
        with pytest.raises(validation.UsageError, match="round_index"):
            sampler.cohort(wrong)


@each
def test_descriptions_survive_json(described):
    assert sampling.Sampling.from_dict(described.to_dict()) == described
    assert described.sentence("user", "step").endswith(".")


@pytest.mark.parametrize(
    "described",
    [sampling.CyclicPoisson(12, 1, 1 / 30), sampling.MinSepPoisson(12, 3, 1 / 30)],
    ids=lambda one: one.kind,
)
def test_a_probability_is_rounded_up(described):
    assert "with probability 0.0333334, " in described.sentence()


def test_one_group_is_poisson_sampling_and_certainty_balls_in_bins():
    lazy = cohorts.LazyPoissonSampler(
        num_clients=900, sampling_probability=0.3, num_rounds=13, seed=7
    )
    one = sampling.CyclicPoisson(13, 1, 0.3).sampler(900, 7)
    assert all(one.cohort(t).tolist() == lazy.cohort(t).tolist() for t in range(13))
    taken = table_of(sampling.CyclicPoisson(13, 4, 1.0), 900)
    assert (taken == table_of(sampling.BallsInBins(13, 4), 900)).all()
    assert (taken[:4].sum(axis=0) == 1).all()
    assert (taken[4:] == taken[:-4]).all()


def test_cohorts_may_be_empty():
    for described in (
        sampling.CyclicPoisson(20, 5, 0.1),
        sampling.BallsInBins(20, 5),
        sampling.MinSepPoisson(20, 5, 0.1),
    ):
        assert any(not len(described.sampler(2, 1).cohort(t)) for t in range(20))


def test_cohorts_stay_the_same_in_later_versions():
    """Resuming a run after an upgrade must not change its cohorts; own values."""
    found = {name: one.sampler(24, 1).cohort(7).tolist() for name, one in ALL.items()}
    assert found == {
        "cyclic": [15, 18],
        "one group": [0, 1, 7, 12, 15, 20, 22],
        "bins": [8, 17, 19, 22],
        "b-min-sep": [0, 12, 15, 17, 18, 20],
    }


def test_samplings_of_expected_cohorts():
    cyclic = sampling.CyclicPoisson.for_cohorts(100, 4, num_clients=800, clients_per_round=50)
    assert cyclic.sampling_probability == 0.25
    spread = sampling.MinSepPoisson.for_cohorts(100, 4, num_clients=800, clients_per_round=50)
    assert math.isclose(spread.share_per_round, 1 / 16)
    full = sampling.MinSepPoisson.for_cohorts(100, 16, num_clients=800, clients_per_round=50)
    assert full.sampling_probability == 1.0
    with pytest.raises(validation.UsageError, match="at most 16 groups work, or 47 clients"):
        sampling.CyclicPoisson.for_cohorts(100, 17, num_clients=800, clients_per_round=50)
    with pytest.raises(validation.UsageError, match="empties the pool.* at most 16 works, or 47"):
        sampling.MinSepPoisson.for_cohorts(100, 17, num_clients=800, clients_per_round=50)
    with pytest.raises(validation.UsageError, match="clients_per_round=900 exceeds"):
        sampling.CyclicPoisson.for_cohorts(100, 1, num_clients=800, clients_per_round=900)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: sampling.CyclicPoisson(10, 0, 0.5), "num_groups"),
        (lambda: sampling.CyclicPoisson(10, 2, 1.5), "sampling_probability"),
        (lambda: sampling.BallsInBins(10, 0), "num_bins"),
        (lambda: sampling.MinSepPoisson(0, 2, 0.5), "num_rounds"),
        (lambda: sampling.MinSepPoisson(10, 2, math.nan), "sampling_probability"),
        (lambda: sampling.Sampling.from_dict({"kind": "dice"}), "dice"),
        (lambda: sampling.Sampling.from_dict({"kind": "bins", "num_rounds": 3}), "num_bins"),
        (lambda: sampling.BallsInBins(10, 2).sampler(0, 1), "num_clients"),
        (lambda: sampling.BallsInBins(10, 2).sampler(5, -1), "seed"),
    ],
)
def test_bad_arguments_are_named(make, named):
    with pytest.raises(validation.UsageError, match=named):
        make()
