import collections
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tff_dpftrl.participation import ledger_rules, observed, schema

deterministic = hypothesis.settings(deadline=None, derandomize=True)

runs = st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=9)


def rounds_of_clients(run):
    rounds = collections.defaultdict(list)
    for t, cohort in enumerate(run):
        for client in cohort:
            rounds[client].append(t)
    return rounds


def observe(run):
    counter = observed.ParticipationCounter(12)
    for cohort in run:
        counter.add(np.array(sorted(cohort), dtype=int))
    return counter.observed


@deterministic
@hypothesis.given(runs)
def test_observed_equals_brute_force(run):
    rounds = rounds_of_clients(run)
    seen = observe(run)
    strides = [j - i for r in rounds.values() for i, j in itertools.combinations(r, 2)]
    assert seen.num_rounds == len(run)
    assert seen.min_sep == min(strides, default=None)
    assert seen.min_sep_gap == min((s - 1 for s in strides), default=None)
    assert seen.max_participations == max(map(len, rounds.values()), default=0)
    assert seen.histogram == dict(collections.Counter(map(len, rounds.values())))


@deterministic
@hypothesis.given(runs)
def test_accounting_for_the_observed_schema_never_understates(run):
    """Sensitivity over the schema is at least that of what every client really did."""
    as_schema = observe(run).as_schema()
    # An arbitrary strategy with non-negative entries; the norm is over indicator vectors.
    strategy = np.tril(1.0 / (1.0 + np.subtract.outer(np.arange(9), np.arange(9)).clip(0)))
    strategy = strategy[: len(run), : len(run)]

    def norm(pattern):
        return np.linalg.norm(strategy[:, list(pattern)].sum(axis=1))

    claimed = max(norm(pattern) for pattern in as_schema.patterns())
    for rounds in rounds_of_clients(run).values():
        assert as_schema.allows(rounds)
        assert norm(rounds) <= claimed + 1e-12


@deterministic
@hypothesis.given(runs, st.integers(1, 10), st.integers(1, 6), st.integers(1, 5))
def test_breaches_are_found_exactly_when_somebody_broke_the_schema(run, num_rounds, sep, most):
    declared = schema.MinSep(num_rounds, sep, most)
    broken = len(run) > num_rounds or not all(
        schema.MinSep(len(run), sep, most).allows(rounds)
        for rounds in rounds_of_clients(run).values()
    )
    assert bool(observe(run).breaches(declared)) == broken


def test_breaches_say_what_is_wrong():
    seen = observe([{1}, {2}, {1}, {1}])
    assert [str(breach) for breach in seen.breaches(schema.MinSep(3, 2, 2))] == [
        "4 rounds exceed num_rounds=3",
        "a stride of 1 rounds is below min_sep=2",
        "3 participations of one client exceed max_participations=2",
    ]
    assert seen.breaches(schema.MinSep(4, 2, 3)) == (schema.Breach("min_sep", 2, 1),)


def test_nobody_twice_is_one_participation():
    assert observe([{1}, {2}, {3}]).as_schema() == schema.MinSep(3, 3, 1)


def test_nothing_happened_yet():
    nothing = observed.ObservedParticipation()
    assert nothing.min_sep is None
    assert nothing.max_participations == 0
    with pytest.raises(ValueError, match="num_rounds=0"):
        nothing.as_schema()
    assert not nothing.breaches(schema.MinSep(1, 1, 1))


@deterministic
@hypothesis.given(runs)
def test_a_declared_schema_is_enforced_round_by_round(run):
    declared = schema.MinSep(num_rounds=8, min_sep=2, max_participations=2)
    counter = observed.ParticipationCounter(12, declared=declared)
    for t, cohort in enumerate(run):
        so_far = observe([*run[:t], cohort])
        if so_far.breaches(declared):
            before = counter.observed
            with pytest.raises(ledger_rules.SchemaRefusal):
                counter.add(np.array(sorted(cohort), dtype=int))
            assert counter.observed == before
            return
        counter.add(np.array(sorted(cohort), dtype=int))
        assert counter.observed == so_far


def test_a_client_twice_in_one_round_is_refused():
    with pytest.raises(ValueError, match="names a client twice"):
        observed.ParticipationCounter(3).add(np.array([1, 1]))
