"""Plans: σ, ε and what statements say of them."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from tff_dpftrl.accounting import display, facts, mixture_of_gaussians, statement, statement_text
from tff_dpftrl.finetuning import example_sampling, group_size, plan

_USERS = example_sampling.of_sizes([16] * 256)


def _plan(sampling=plan.USER, **kwargs):
    values = {"group_size": 4, "expected_units": 16, "num_steps": 256}
    if "noise_multiplier" not in kwargs:
        values |= {"target_epsilon": 1.0, "delta": 1e-6}
    return plan.make_plan(kwargs.pop("users", _USERS), sampling=sampling, **values | kwargs)


@pytest.mark.parametrize(
    "sampling, group, units, sigma",
    [
        ("example", 16, 64, 17.040),
        ("user", 1, 64, 17.004),
        ("user", 4, 16, 4.395),
        ("user", 16, 4, 1.377),
    ],
)
def test_noise_of_the_papers_mean_estimation(sampling, group, units, sigma):
    found = _plan(sampling, group_size=group, expected_units=units)
    assert found.noise_multiplier == pytest.approx(sigma, abs=5e-4 + 1e-4 * sigma)
    assert found.noise_of_average == found.noise_multiplier / units
    assert 0.999 < found.epsilon <= 1.0


def test_epsilon_is_that_of_the_accounting():
    example = _plan("example", noise_multiplier=2.0, expected_units=64, delta=1e-6)
    pair = mixture_of_gaussians.els(2.0, 64 / 1024, 4)
    assert example.num_units == 1024
    assert example.epsilon == mixture_of_gaussians.epsilon(pair, num_steps=256, delta=1e-6)
    user = _plan("user", noise_multiplier=2.0, delta=1e-6)
    pair = mixture_of_gaussians.uls(2.0, 16 / 256)
    assert user.epsilon == mixture_of_gaussians.epsilon(pair, num_steps=256, delta=1e-6)
    assert user.epsilon_after(0) == 0.0 < user.epsilon_after(100) < user.epsilon


def test_with_one_example_a_user_both_ways_cost_the_same():
    ones = example_sampling.of_sizes([1] * 300)
    example, user = (_plan(s, users=ones, group_size=1) for s in ("example", "user"))
    assert example.noise_multiplier == user.noise_multiplier
    assert example.epsilon == user.epsilon


def test_delta_is_the_papers_by_default():
    found = _plan(noise_multiplier=1.0)
    assert found.delta == 4096**-1.1 and found.num_examples == 4096
    assert plan.default_delta(135_818_730) == pytest.approx(1.13e-9, rel=0.01)  # Stack Overflow.


def test_batches_are_those_of_the_plan():
    sizes = example_sampling.of_sizes([1, 5, 40] * 50)
    for sampling, units in (("example", 50 + 200 + 200), ("user", 150)):
        found = _plan(sampling, users=sizes, expected_units=30)
        assert found.num_units == units
        batches = found.contributions(sizes, seed=2**200)
        assert batches.sampling_probability == pytest.approx(30 / units)
        assert batches.expected_gradients == pytest.approx(found.expected_gradients(sizes))
        drawn = [batches.batch(step).num_units for step in range(256)]
        # Never the number that was sampled: the denominator is a constant.
        assert min(drawn) < 30 < max(drawn) and found.expected_units == 30
        assert np.mean(drawn) == pytest.approx(30, abs=6 * math.sqrt(30 / 256))


def test_other_users_than_those_that_were_counted_are_refused():
    for sampling, unit in (("example", "1020 examples"), ("user", "255 users")):
        found = _plan(sampling)
        with pytest.raises(ValueError, match=f"users have {unit}, but the plan was made for"):
            found.contributions(example_sampling.of_sizes([16] * 255), seed=1)
        declared = _plan(sampling, declared_units=2000)
        assert declared.sampling_probability == 16 / 2000
        batches = declared.contributions(example_sampling.of_sizes([16] * 255), seed=1)
        assert batches.sampling_probability == 16 / 2000


def test_share_of_examples_used_is_what_batches_use():
    users = example_sampling.of_sizes([2, 9, 30] * 20)
    for sampling, units in (("example", 6), ("user", 3)):
        found = _plan(sampling, users=users, expected_units=units, num_steps=20)
        shares = []
        for seed in range(12):
            batches = found.contributions(users, seed=seed)
            used = set()
            for step in range(20):
                batch = batches.batch(step)
                used.update(zip(batch.row_users.tolist(), batch.examples.tolist(), strict=True))
            shares.append(len(used) / users.num_examples.sum())
        assert np.mean(shares) == pytest.approx(found.share_of_examples_used(users), rel=0.04)
    everything = _plan("user", users=users, expected_units=60, group_size=30)
    assert everything.share_of_examples_used(users) == 1.0


def test_choosing_the_group_size_is_composed():
    choice = group_size.private_median_choice(_USERS.num_examples, epsilon=0.1, seed=5)
    found = _plan(group_size=choice)
    assert found.group_size == choice.group_size and found.group_size_epsilon == 0.1
    alone = _plan(group_size=choice.group_size, target_epsilon=0.9)
    assert found.noise_multiplier == alone.noise_multiplier
    assert alone.epsilon + 0.1 == pytest.approx(found.epsilon) and found.epsilon <= 1.0
    assert "ε = 0.1 for the choice" in found.statement().accounting
    with pytest.raises(ValueError, match="target_epsilon=0.1 is not above 0.1"):
        _plan(group_size=choice, target_epsilon=0.1)


def test_more_users_in_the_accounting_are_a_what_if_and_never_the_guarantee():
    found = _plan(users_scale=10, delta=None)
    hypothetical = found.what_if()
    assert hypothetical.epsilon <= 1.0 < 5.0 < found.epsilon
    assert (hypothetical.num_users, hypothetical.delta) == (2560, 40960**-1.1)
    assert found.delta == 4096**-1.1
    said = found.statement()
    assert said.epsilon == found.epsilon
    assert any("not a guarantee" in caveat for caveat in said.headline_caveats)
    assert "not a guarantee" in "".join(found.describe())
    assert _plan().what_if() is None


@pytest.mark.parametrize("sampling", [pytest.param("example", marks=pytest.mark.slow), "user"])
def test_the_statement_says_what_holds(sampling):
    found = _plan(sampling, delta=None)
    told = facts.Facts({"clip_norm": 0.5}, hyperparameter_tuning="on public users")
    said = found.statement(told)
    assert statement.PrivacyStatement.from_json(statement_text.to_json(said)) == said
    assert said.epsilon == found.epsilon and said.unit_of_privacy == "user"
    text = statement_text.markdown(said)
    assert "client" not in text  # There are none.
    assert "stay secret" in text and "with all data in one place" in text
    chance = display.round_up(found.sampling_probability, 6)
    assert f"probability {chance}, " in text and f"- sampling_probability: {chance}\n" in text
    assert "was counted on the data" in text and "n^-1.1" in text
    assert said.parameters["denominator"] == 16 and said.parameters["clip_norm"] == 0.5
    assert ("Theorem 3" in said.accounting) == (sampling == "example")
    declared = _plan(sampling, declared_units=2000).statement()
    assert not any("counted on the data" in caveat for caveat in declared.caveats)
    part = found.statement(steps_done=10)
    assert part.epsilon < said.epsilon and part.parameters["num_steps_charged"] == 10


@pytest.mark.parametrize("sampling", ["example", "user"])
def test_what_people_read_is_short_and_its_nouns_agree(sampling):
    users = example_sampling.of_sizes([2] * 300)
    found = _plan(sampling, users=users, group_size=1, expected_units=7)
    said = found.statement(
        facts.Facts({"user": "one author"}, vocabulary_source="a book", vocabulary_is_public=True)
    )
    text = statement_text.markdown(said)
    assert "at most 1 example " in text.lower() and "1 examples" not in text
    assert "at most 1 example " in "".join(found.describe())
    # Never less than what holds, which the document for programs has.
    assert "- sampling_probability: 0.0233334\n" in text and 7 / 300 < 0.0233334
    assert f'"sampling_probability": {7 / 300!r}' in statement_text.to_json(said)
    assert "- Unit of privacy: one user, here one author.\n" in text
    assert "The vocabulary is of public text: a book." in said.assumptions
    assert "vocabulary" not in "".join(said.not_covered)
    private = found.statement(facts.Facts(vocabulary_source="the users"))
    assert "Choice of the vocabulary: the users." in private.not_covered
    assert not any("public text" in line for line in private.assumptions)


def test_an_exact_median_is_said_not_to_be_covered():
    found = _plan(group_size=group_size.median_choice(_USERS.num_examples))
    assert found.group_size == 16
    text = "".join(found.statement().not_covered)
    assert "Choice of the group size, 16" in text and "median, 16" in text
    assert "Choice of the group size" not in "".join(_plan().statement().not_covered)


def test_without_noise_there_is_no_guarantee():
    found = _plan(noise_multiplier=0.0)
    assert found.epsilon == math.inf
    assert not found.statement().has_guarantee
    assert "no finite ε" in "".join(found.describe())
    assert not _plan().statement(seed_is_known=True).has_guarantee


def test_a_plan_is_plain_values():
    found = _plan(group_size=group_size.median_choice(_USERS.num_examples))
    assert plan.Plan(**json.loads(json.dumps(dataclasses.asdict(found)))) == found


def test_choices_are_all_ways_to_spend_a_budget():
    found = plan.choices(_USERS, compute_budget=128, num_steps=50, target_epsilon=4.0, delta=1e-6)
    assert [(one.sampling, one.group_size, one.expected_units) for one in found] == [
        *(("example", g, 128) for g in (4, 8, 16, 32, 64)),
        *(("user", g, m) for g, m in ((1, 128), (2, 64), (4, 32))),
    ]
    assert all(3.99 < one.epsilon <= 4.0 for one in found)
    flat = group_size.GradientNorms((1, 64), (10.0, 10.0))
    assert found[0].relative_noise(flat) == pytest.approx(10 * found[0].noise_of_average)
    falling = group_size.GradientNorms((1, 4), (10.0, 5.0))
    assert found[-1].relative_noise(falling) == pytest.approx(5 * found[-1].noise_of_average)
    assert found[3].relative_noise(falling) == pytest.approx(10 * found[3].noise_of_average)


def test_pools_that_are_too_small_are_left_out():
    few = example_sampling.of_sizes([1, 3, 6] * 20)
    found = plan.choices(few, compute_budget=128, num_steps=5, target_epsilon=4.0)
    assert {(one.sampling, one.group_size) for one in found} == {
        ("example", 4),
        ("example", 8),
        ("user", 4),
    }


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"sampling": "device"}, "sampling must be 'example' or 'user', got 'device'"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"expected_units": 0}, "expected_units .* above 0, got 0"),
        ({"expected_units": 257}, "expected_units=257 exceeds the 256 users"),
        (
            {"sampling": "example", "expected_units": 2000},
            "expected_units=2000 exceeds the number of examples .* raise group_size",
        ),
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"target_epsilon": 0.0}, "target_epsilon .* above 0, got 0.0"),
        ({"target_epsilon": 1e-12, "delta": 1e-30}, "target_epsilon=1e-12 is out of reach"),
        ({"target_epsilon": None}, "exactly one of target_epsilon=None"),
        ({"noise_multiplier": 1.0, "target_epsilon": 1.0}, "exactly one of target_epsilon=1.0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier .* got -1.0"),
        ({"delta": 1.0}, "delta .* below 1, got 1.0"),
        ({"declared_units": 0}, "declared_units must be at least 1, got 0"),
        ({"users_scale": 0.5}, "users_scale .* at least 1, got 0.5"),
        ({"users_scale": 2.0, "noise_multiplier": 1.0}, "users_scale=2 needs a target_epsilon"),
        (
            {"users": example_sampling.of_sizes([1]), "expected_units": 1, "delta": None},
            "num_examples",
        ),
    ],
)
def test_bad_input_is_one_clear_line(kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        _plan(**kwargs)
    assert "\n" not in str(error.value)


def test_a_budget_smaller_than_a_cohort_is_refused():
    with pytest.raises(ValueError, match="compute_budget=16 is smaller than the smallest cohort"):
        plan.choices(_USERS, compute_budget=16, num_steps=5, target_epsilon=4.0)
    with pytest.raises(ValueError, match="cohort_size=257 exceeds num_users=256"):
        plan.noise_multiplier_of_cohort(256, num_steps=5, target_epsilon=1.0, delta=1e-6)(257)
    with pytest.raises(ValueError, match="num_steps=257 exceeds those planned, 256"):
        _plan().epsilon_after(257)
