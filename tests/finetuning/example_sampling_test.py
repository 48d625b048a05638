"""Who contributes what: laws of the samples, bounds, replay, and what a choice depends on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from tff_dpftrl.data import user_text
from tff_dpftrl.finetuning import example_sampling

_SIZES = (1, 2, 3, 5, 8, 13, 40)
_SEED = 2**200 + 7


def _users(sizes=_SIZES):
    return example_sampling.Users(tuple(f"user {i}" for i in range(len(sizes))), np.array(sizes))


def _els(users=None, **kwargs):
    values = {"group_size": 4, "sampling_probability": 0.3, "num_steps": 500, "seed": _SEED}
    return example_sampling.ExampleSampling(users or _users(), **values | kwargs)


def _uls(users=None, **kwargs):
    values = {"group_size": 4, "sampling_probability": 0.3, "num_steps": 500, "seed": _SEED}
    return example_sampling.UserSampling(users or _users(), **values | kwargs)


def _rows(batch):
    return list(zip(batch.row_users.tolist(), batch.examples.tolist(), strict=True))


def _by_user(batch):
    return {user: batch.examples[batch.row_users == user].tolist() for user in batch.unit_users}


def test_the_pool_has_at_most_the_group_size_of_each_user_chosen_once():
    sampling = _els()
    assert sampling.pool_size == 1 + 2 + 3 + 4 * 4 == _users().pool_size(4)
    seen = set().union(*(_rows(sampling.batch(step)) for step in range(sampling.num_steps)))
    # In 500 steps with probability .3 no example of the pool is missed.
    per_user = np.bincount([user for user, _ in seen])
    assert per_user.tolist() == [1, 2, 3, 4, 4, 4, 4]


def test_the_rows_of_a_user_in_a_step_of_els_are_binomial():
    sampling = _els(num_steps=4000)
    counts = np.zeros(5)
    for step in range(sampling.num_steps):
        counts[np.bincount(sampling.batch(step).row_users, minlength=7)[6]] += 1
    expected = stats.binom.pmf(np.arange(5), 4, 0.3) * sampling.num_steps
    assert stats.chisquare(counts, expected).pvalue > 1e-3
    # Power: with p = .33 the test would fail.
    wrong = stats.binom.pmf(np.arange(5), 4, 0.33) * sampling.num_steps
    assert stats.chisquare(counts, wrong).pvalue < 1e-3


@pytest.mark.parametrize("stream", ["pool", "rows"])
def test_every_subset_of_a_users_examples_is_equally_likely(stream):
    subsets = {s: 0 for s in itertools.combinations(range(6), 3)}
    for seed in range(4000):
        found = example_sampling.random_examples(f"{stream}/{seed}", "someone", 6, 3)
        subsets[tuple(found.tolist())] += 1
    assert stats.chisquare(list(subsets.values())).pvalue > 1e-3


def test_every_order_of_a_users_examples_is_equally_likely():
    orders = {s: 0 for s in itertools.permutations(range(4), 3)}
    for seed in range(4000):
        orders[tuple(example_sampling.random_order(str(seed), "someone", 4, 3).tolist())] += 1
    assert stats.chisquare(list(orders.values())).pvalue > 1e-3


def test_choices_for_smaller_groups_are_nested():
    for size in (3, 9, 1000):
        choices = [
            set(example_sampling.random_examples("pool/1", "a", size, group).tolist())
            for group in (1, 2, 4, 8, 16)
        ]
        assert all(a <= b for a, b in itertools.pairwise(choices))
        assert [len(choice) for choice in choices] == [min(size, g) for g in (1, 2, 4, 8, 16)]


def test_users_of_uls_bring_new_rows_in_every_step():
    sampling = _uls(sampling_probability=1.0)
    batches = [sampling.batch(step) for step in range(300)]
    for batch in batches[:3]:
        assert batch.unit_users.tolist() == list(range(7))
        assert np.diff(batch.row_splits).tolist() == [1, 2, 3, 4, 4, 4, 4]
    rows = np.array([batch.examples[batch.row_splits[6] :] for batch in batches])
    assert len({tuple(row) for row in rows.tolist()}) > 290  # Of 91,390 choices.
    counts = np.bincount(rows.ravel(), minlength=40)
    # Each of 40 examples is among the four with probability .1; variances are below binomial.
    assert stats.chisquare(counts).pvalue > 1e-3


def test_the_users_of_uls_are_sampled_independently():
    sampling = _uls(num_steps=3000)
    cohorts = np.zeros((sampling.num_steps, 7))
    for step in range(sampling.num_steps):
        cohorts[step, sampling.batch(step).unit_users] = 1
    assert np.abs(cohorts.mean(axis=0) - 0.3).max() < 6 * np.sqrt(0.21 / 3000)
    correlation = np.corrcoef(cohorts.T) - np.eye(7)
    assert np.abs(correlation).max() < 6 / np.sqrt(3000)


@pytest.mark.parametrize("make", [_els, _uls])
def test_a_step_can_be_asked_for_again_in_any_order(make):
    first, again = make(), make()
    for step in (17, 3, 17, 0, 499):
        a, b = first.batch(step), again.batch(step)
        for field in ("unit_users", "examples", "row_splits"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
    assert any(_rows(first.batch(s)) != _rows(make(seed=_SEED + 1).batch(s)) for s in range(3))


def test_batches_stay_the_same_in_later_versions():
    """Resuming a run after an upgrade must not change its batches; own values."""
    assert _by_user(_els().batch(2)) == {1: [1], 2: [0, 1, 2], 3: [3], 4: [4], 5: [4], 6: [24, 26]}
    assert _by_user(_uls().batch(2)) == {
        2: [0, 1, 2],
        3: [0, 1, 3, 4],
        4: [0, 1, 4, 5],
        5: [0, 6, 7, 8],
    }


def test_a_users_choice_depends_on_no_other_user():
    fewer = example_sampling.Users(("user 6", "user 2"), np.array([40, 3]))
    everybody = _els(sampling_probability=1.0).batch(0)
    two = _els(fewer, sampling_probability=1.0).batch(0)
    np.testing.assert_array_equal(two.examples[:4], everybody.examples[-4:])
    everybody = _uls(sampling_probability=1.0).batch(5)
    two = _uls(fewer, sampling_probability=1.0).batch(5)
    np.testing.assert_array_equal(two.examples[:4], everybody.examples[-4:])


def test_with_one_example_a_user_both_ways_are_the_same():
    ones = _users([1] * 50)
    els, uls = _els(ones, group_size=1), _uls(ones, group_size=1)
    for step in range(20):
        a, b = els.batch(step), uls.batch(step)
        for field in ("unit_users", "examples", "row_splits"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


def test_units_are_examples_or_users():
    els, uls = _els().batch(1), _uls().batch(1)
    assert els.num_units == els.num_rows == els.row_splits[-1]
    assert uls.num_units == len(set(uls.unit_users.tolist())) < uls.num_rows == uls.row_splits[-1]


@pytest.mark.parametrize("make", [_els, _uls])
def test_an_empty_batch_is_a_batch(make):
    sampling = make(sampling_probability=1e-9)
    batch = sampling.batch(0)
    assert (batch.num_units, batch.num_rows, batch.row_splits.tolist()) == (0, 0, [0])
    assert batch.row_users.shape == (0,) and batch.examples.dtype == np.int64


@pytest.mark.parametrize("make, units", [(_els, 22), (_uls, 22)])
def test_expected_gradients(make, units):
    sampling = make(num_steps=2000)
    assert sampling.expected_gradients == pytest.approx(0.3 * units)
    rows = np.mean([sampling.batch(step).num_rows for step in range(2000)])
    assert rows == pytest.approx(sampling.expected_gradients, rel=0.03)


@pytest.mark.parametrize(
    "users, examples",
    [([6, 6, 6, 6, 6], [0, 1, 2, 3, 4]), ([5, 5], [3, 3]), ([0], [1]), ([1, 0], [0, 0])],
    ids=["more than G", "twice", "not there", "out of order"],
)
def test_a_batch_that_breaks_the_bound_is_never_returned(users, examples):
    batch = example_sampling.Batch(np.array(users), np.array(examples), np.arange(len(users) + 1))
    with pytest.raises(RuntimeError, match="group_size=4"):
        _els()._checked(batch)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: _els(group_size=0), "group_size must be at least 1, got 0.*median"),
        (lambda: _uls(group_size=0), "group_size must be at least 1, got 0.*median"),
        (lambda: _uls(group_size=1.5), "group_size must be an integer, got 1.5"),
        (lambda: _els(sampling_probability=0.0), "sampling_probability .* got 0.0"),
        (lambda: _uls(sampling_probability=1.1), "sampling_probability .* got 1.1"),
        (lambda: _uls(num_steps=0), "num_steps must be at least 1, got 0"),
        (lambda: _els(seed=-1), "seed must be at least 0, got -1"),
        (lambda: _uls().batch(500), "beyond the last"),
        (lambda: _users([3, 0, 1]), "got 0 for user 'user 1': leave"),
        (lambda: _users([3, 0, 0]), "'user 1' and 1 more: leave"),
        (lambda: _users([]), "at least one user"),
        (lambda: _users([1.5]), "one integer"),
        (lambda: example_sampling.Users(("a", "b", "a"), np.array([1, 2, 3])), "'a' twice"),
        (lambda: example_sampling.Users(("a", "b"), np.array([1])), "each of 2 ids"),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_examples_of_text_are_what_is_not_blank():
    corpus = user_text.UserText.from_mapping(
        "notes", {"ann": ["a b", " ", "c"], "silent": ["", "\n"], "bob": ["d"]}
    )
    users = example_sampling.of_text(corpus)
    assert users.ids == ("ann", "bob") and users.num_examples.tolist() == [2, 1]
    with pytest.raises(ValueError, match="'notes' has no user to train on"):
        example_sampling.of_text(corpus.select(["silent"]))
