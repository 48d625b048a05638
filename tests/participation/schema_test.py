import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tff_dpftrl.participation import schema

deterministic = hypothesis.settings(deadline=None, derandomize=True)

small_schemas = st.builds(
    schema.MinSep,
    num_rounds=st.integers(1, 9),
    min_sep=st.integers(1, 12),
    max_participations=st.integers(1, 5),
)


def test_a_gap_is_one_less_than_a_stride():
    # Gboard Table 1, es-ES: MinS 526 is a gap, so two participations are 527 rounds apart.
    from_gap = schema.MinSep.from_gap(1900, 526, 3)
    assert from_gap == schema.MinSep(num_rounds=1900, min_sep=527, max_participations=3)
    assert from_gap.min_sep_gap == 526
    assert not from_gap.allows([0, 526])
    assert from_gap.allows([0, 527])


def test_gap_zero_allows_consecutive_rounds():
    assert schema.MinSep.from_gap(4, 0, 4).allows([0, 1, 2, 3])


@deterministic
@hypothesis.given(small_schemas)
def test_patterns_are_exactly_the_allowed_sets(declared):
    everything = itertools.chain.from_iterable(
        itertools.combinations(range(declared.num_rounds), size)
        for size in range(1, declared.num_rounds + 1)
    )
    assert sorted(declared.patterns()) == sorted(p for p in everything if declared.allows(p))


@deterministic
@hypothesis.given(small_schemas)
def test_effective_participations_is_the_longest_pattern(declared):
    assert declared.effective_participations == max(len(p) for p in declared.patterns())


@deterministic
@hypothesis.given(small_schemas, st.lists(st.integers(-1, 10), max_size=5))
def test_allows_is_the_definition(declared, rounds):
    expected = (
        len(rounds) <= declared.max_participations
        and all(t in range(declared.num_rounds) for t in rounds)
        and all(abs(i - j) >= declared.min_sep for i, j in itertools.combinations(rounds, 2))
    )
    assert declared.allows(rounds) == expected


@pytest.mark.parametrize("name", ["num_rounds", "min_sep", "max_participations"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "4", None, 2**53 + 1])
def test_bad_arguments_are_named(name, value):
    arguments = {"num_rounds": 5, "min_sep": 2, "max_participations": 2, name: value}
    with pytest.raises(ValueError, match=name):
        schema.MinSep(**arguments)


def test_the_largest_exact_number_is_allowed():
    assert schema.MinSep(2**53, 1, 1).num_rounds == 2**53


def test_numpy_integers_become_ints():
    declared = schema.MinSep(np.int64(5), np.int32(2), np.uint8(2))
    assert declared == schema.MinSep(5, 2, 2)
    assert type(declared.min_sep) is int


@pytest.mark.parametrize("num_rounds, min_sep, most", [(10, 3, 4), (9, 3, 3), (5, 7, 1), (4, 1, 4)])
def test_as_many_participations_as_fit(num_rounds, min_sep, most):
    made = schema.MinSep.as_many_as_fit(num_rounds, min_sep)
    assert made == schema.MinSep(num_rounds, min_sep, most)
    assert max(map(len, made.patterns())) == most
    with pytest.raises(ValueError, match="min_sep must be at least 1"):
        schema.MinSep.as_many_as_fit(num_rounds, 0)


def test_unrestricted_allows_every_set_of_rounds():
    unrestricted = schema.MinSep.unrestricted(3)
    assert len(list(unrestricted.patterns())) == 2**3 - 1
    assert not unrestricted.allows([3])
