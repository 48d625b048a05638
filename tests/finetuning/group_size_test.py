"""Group sizes: medians, the private one's law and cost, Estimate-and-Double's choices."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from tff_dpftrl.accounting import facts
from tff_dpftrl.finetuning import example_sampling, group_size, plan
from tff_dpftrl.participation import observed

# L(G) of a small transformer on commit messages, 128 users; own measurement, four digits.
_NORMS = group_size.GradientNorms(
    (1, 2, 4, 8, 16, 32, 64, 128), (8.756, 6.619, 5.128, 4.019, 3.360, 3.037, 2.867, 2.821)
)
_USERS = 8602


def _noise(epsilon):
    return plan.noise_multiplier_of_cohort(
        _USERS, num_steps=300, target_epsilon=epsilon, delta=5.1e-7
    )


@pytest.mark.parametrize(
    "epsilon, expected",
    [
        (1, (8, 128)),
        pytest.param(2, (4, 256), marks=pytest.mark.slow),
        pytest.param(4, (2, 512), marks=pytest.mark.slow),
        pytest.param(8, (2, 512), marks=pytest.mark.slow),
        pytest.param(16, (1, 1024), marks=pytest.mark.slow),
    ],
)
def test_estimate_and_double_finds_the_best_of_all_splits(epsilon, expected):
    kwargs = {"compute_budget": 1024, "num_users": _USERS}
    found = group_size.estimate_and_double(_NORMS, _noise(epsilon), **kwargs)
    assert (found.group_size, found.cohort_size) == expected
    best = group_size.best_split(_NORMS, _noise(epsilon), **kwargs)
    assert (best.group_size, best.cohort_size, best.noise) == (*expected, found.noise)
    assert found.noise == pytest.approx(
        _NORMS(expected[0]) * _noise(epsilon)(expected[1]) / expected[1]
    )


def test_the_factors_of_estimate_and_double():
    found = group_size.estimate_and_double(_NORMS, _noise(4), compute_budget=1024)
    # M first, then G.
    path = [(d.group_size, d.cohort_size) for d in found.doublings]
    assert path == [(1, 32), (1, 64), (1, 128), (1, 256), (2, 256)]
    tau = [d.tau_cohort for d in found.doublings]
    assert tau[:4] == pytest.approx([0.562, 0.588, 0.647, 0.763], abs=6e-4)
    assert found.doublings[0].tau_group == pytest.approx(0.756, abs=6e-4)


def test_a_split_becomes_a_choice_that_says_whose_gradients_were_looked_at():
    kwargs = {"compute_budget": 1024, "num_users": _USERS}
    found = group_size.estimate_and_double(_NORMS, _noise(1), **kwargs)
    public = found.choice(norms_of="128 public users", looked_at_users=False)
    assert (public.group_size, public.epsilon, public.looked_at_users) == (8, 0.0, False)
    assert "Estimate-and-Double, with gradient norms of 128 public users" in public.source
    best = group_size.best_split(_NORMS, _noise(1), **kwargs)
    own = best.choice(norms_of="the training users", looked_at_users=True)
    users = example_sampling.of_sizes([16] * _USERS)
    made = plan.make_plan(
        users, sampling="user", group_size=own, expected_units=128, num_steps=5, noise_multiplier=1
    )
    seen = observed.ObservedParticipation(5, 1, 5, {})
    stated = made.statement(seen, facts.Facts(), charge_all_rounds=True)
    (said,) = [text for text in stated.not_covered if "group size" in text]
    assert "gradient norms of the training users" in said and "Estimate" not in said


@pytest.mark.parametrize(
    "epsilon", [1, *(pytest.param(other, marks=pytest.mark.slow) for other in (4, 16))]
)
def test_as_printed_in_the_paper_the_group_is_always_doubled(epsilon):
    found = group_size.estimate_and_double(
        _NORMS, _noise(epsilon), compute_budget=1024, as_printed=True
    )
    assert (found.group_size, found.cohort_size) == (32, 32)
    assert all(d.tau_cohort > 1.0 for d in found.doublings)
    best = group_size.best_split(_NORMS, _noise(epsilon), compute_budget=1024)
    assert found.noise > 1.1 * best.noise


def test_the_cohort_never_exceeds_the_users():
    def noise(cohort):
        assert cohort <= 100
        return 1.0

    found = group_size.estimate_and_double(_NORMS, noise, compute_budget=1024, num_users=100)
    assert (found.group_size, found.cohort_size) == (16, 64)
    assert found.doublings[-1].tau_cohort == math.inf
    assert group_size.splits(1024, num_users=100) == [(16, 64), (32, 32)]


def test_splits_are_all_of_them_once():
    assert group_size.splits(256) == [(1, 256), (2, 128), (4, 64), (8, 32)]
    assert group_size.splits(255, smallest_cohort=1)[-1] == (128, 1)
    assert group_size.splits(32) == [(1, 32)]


@pytest.mark.parametrize(
    "sizes, expected",
    [([183], 128), ([16], 16), ([28], 32), ([13], 16), ([30], 32), ([1, 1, 900], 1), ([3], 2)],
)
def test_the_median_rule_is_that_of_the_paper(sizes, expected):
    found = group_size.median_choice(sizes)
    assert found.group_size == expected
    assert found.looked_at_users and found.epsilon == 0.0


def _sizes(seed, count):
    return np.ceil(np.exp(np.random.default_rng(seed).normal(3.3, 1.3, count))).astype(int)


def test_the_private_median_is_that_of_the_rank():
    sizes = _sizes(0, 2001)
    chances = group_size.median_probabilities(sizes, epsilon=0.05)
    assert sum(chances.values()) == pytest.approx(1.0)
    assert chances[32] > 0.7  # The median is 27, and nearly as many users are above 24 as below.
    assert chances[16] + chances[32] > 0.999
    exact = int(np.median(sizes))
    fine = group_size.median_probabilities(sizes, epsilon=1.0, candidates=range(1, 257))
    assert max(fine, key=fine.get) == exact
    choice = group_size.private_median_choice(sizes, epsilon=0.05, seed=2**190)
    assert (choice.group_size, choice.epsilon, choice.looked_at_users) == (32, 0.05, False)


def test_users_who_all_have_as_many_examples_have_a_median():
    for size, expected in ((27, 32), (24, 16), (25, 32), (1, 1), (10**6, 2**16)):
        chances = group_size.median_probabilities([size] * 2000, epsilon=0.05)
        assert chances[expected] > 0.999


def _outside(sizes, epsilon):
    """Probability of a choice outside the middle half of the sizes, from its definition."""
    powers = [2**i for i in range(17)]
    rounded = [min(powers, key=lambda power: (abs(power - n), power)) for n in sizes]
    weights, is_outside = [], []
    for power in powers:
        below, above = (sum(map(test, rounded)) for test in (power.__gt__, power.__lt__))
        excess = max(0, below - len(sizes) / 2, above - len(sizes) / 2)
        weights.append(math.exp(-epsilon / 2 * excess))
        is_outside.append(max(below, above) > 3 / 4 * len(sizes))
    return np.dot(weights, is_outside) / sum(weights)


def test_how_far_a_private_median_can_be_is_bounded():
    for num_users, epsilon in ((20, 0.05), (40, 1.0), (101, 0.3)):
        bound = group_size.far_median_bound(num_users, epsilon)
        few = num_users // 4 - (num_users % 4 == 0)  # Just less than a quarter.
        worst = [1] * (num_users - few) + [2**16] * few
        found = [_outside(worst, epsilon)]
        found += [_outside(_sizes(seed, num_users), epsilon) for seed in range(5)]
        assert max(found) <= bound
        # The utility of the others is below −N / 4 by 1 at most.
        assert found[0] >= bound * math.exp(-epsilon / 2)
    assert group_size.far_median_bound(2000, 0.05) < 1e-4


def test_users_too_few_for_a_private_median_are_warned_of():
    assert group_size.median_warning(2000, 0.05) is None
    warning = group_size.median_warning(40, 0.05)
    bound = math.ceil(100 * group_size.far_median_bound(40, 0.05))
    assert "group_size_epsilon=0.05 and so few users" in warning and f"up to {bound} %" in warning
    enough = float(re.search(r"a group_size_epsilon from ([\d.]+) on", warning)[1])
    assert group_size.median_warning(40, enough) is None
    assert group_size.median_warning(40, enough - 0.01) is not None
    # 8 / 5 · log 144 = 7.96 would be most of a budget.
    assert group_size.median_warning(5, 0.05).endswith("powers of two. Give group_size.")


@pytest.mark.parametrize("comes_or_goes", [True, False])
def test_one_user_moves_the_private_median_by_epsilon_at_most(comes_or_goes):
    epsilon, worst = 0.8, 0.0
    for seed in range(30):
        sizes = _sizes(seed, int(np.random.default_rng(seed).integers(2, 12)))
        with_all = group_size.median_probabilities(sizes, epsilon=epsilon)
        for user in range(len(sizes)):
            others = np.delete(sizes, user)
            neighbours = [others]
            if not comes_or_goes:  # The statements' neighbours: no user more or less.
                neighbours = [[*others, size] for size in (1, 2**16)]
            for neighbour in neighbours:
                other = group_size.median_probabilities(neighbour, epsilon=epsilon)
                worst = max(worst, *(abs(math.log(with_all[g] / other[g])) for g in with_all))
    # Half the sensitivity, or twice, would be seen.
    most = epsilon / 2.0 if comes_or_goes else epsilon
    assert 0.55 * most < worst <= most * (1 + 1e-9)


def test_the_private_median_is_drawn_by_its_probabilities():
    sizes, candidates = [3, 5, 9, 12], (2, 4, 8, 16)
    chances = group_size.median_probabilities(sizes, epsilon=1.0, candidates=candidates)
    drawn = [
        group_size.private_median_choice(
            sizes, epsilon=1.0, seed=seed, candidates=candidates
        ).group_size
        for seed in range(3000)
    ]
    for candidate, chance in chances.items():
        margin = 5 * math.sqrt(chance * (1 - chance) / 3000)
        assert np.mean(np.array(drawn) == candidate) == pytest.approx(chance, abs=margin)


def test_probes_are_nested_random_users():
    users = example_sampling.of_sizes(_sizes(1, 500))
    chosen, rows = group_size.probe(users, largest_group=64, seed=3)
    assert len(set(chosen.tolist())) == 128 == len(rows)
    assert [len(one) for one in rows] == np.minimum(users.num_examples[chosen], 64).tolist()
    assert all(len(set(one.tolist())) == len(one) for one in rows)
    fewer, shorter = group_size.probe(users, largest_group=8, seed=3)
    np.testing.assert_array_equal(fewer, chosen)
    for long, short in zip(rows, shorter, strict=True):
        np.testing.assert_array_equal(long[:8], short)
    assert group_size.probe(users, largest_group=8, seed=4)[0].tolist() != chosen.tolist()
    assert len(group_size.probe(example_sampling.of_sizes([1, 2]), largest_group=8, seed=4)[0]) == 2


def test_gradient_norms_are_medians_over_users():
    norms = group_size.GradientNorms.of_users((1, 4), np.array([[4.0, 1.0], [8.0, 2.0], [99, 5]]))
    assert norms.norms == (8.0, 2.0)
    assert norms(1) == pytest.approx(8.0) and norms(2) == pytest.approx(4.0)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: group_size.splits(16), "compute_budget=16 is smaller than .* 32 users"),
        (lambda: group_size.splits(64, num_users=20), "smallest_cohort=32 exceeds num_users=20"),
        (lambda: group_size.splits(0), "compute_budget must be at least 1, got 0"),
        (lambda: group_size.Choice(0), "group_size must be at least 1, got 0"),
        (lambda: _NORMS(256), "group_size=256 is not between 1 and 128"),
        (lambda: group_size.GradientNorms((1, 2), (1.0,)), "each of 2 group_sizes"),
        (lambda: group_size.GradientNorms((2, 1), (1.0, 2.0)), "increasing"),
        (lambda: group_size.GradientNorms((1,), (0.0,)), "norms at group size 1 .* got 0.0"),
        (lambda: group_size.GradientNorms.of_users((1,), np.zeros([3, 2])), r"\[users, 1\]"),
        (lambda: group_size.median_choice([4, 0]), "got 0 for user '1'"),
        (
            lambda: group_size.private_median_choice([1], epsilon=0.0, seed=0),
            "epsilon .* above 0, got 0.0",
        ),
        (lambda: group_size.median_probabilities([1], epsilon=1.0, candidates=()), "candidates"),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
