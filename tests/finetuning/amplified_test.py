"""Correlated noise with secret samples: bands, noise, batches, and what one band and a pass are."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re

import numpy as np
import pytest

from tff_dpftrl import validation
from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.accounting import gaussian, mixture_of_gaussians, statement_text
from tff_dpftrl.finetuning import (
    amplified,
    example_sampling,
    group_size,
    passes,
    run_privacy,
    ways,
)
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.mechanisms import workload
from tff_dpftrl.participation import observed
from tff_dpftrl.participation import schema as schema_lib

_USERS = example_sampling.of_sizes([3, 10] * 400)
_RUN = {"units_per_step": 40, "num_steps": 60, "delta": 1e-5, "group_size": 4}


def _asked(**changes):
    noise = {} if "noise_multiplier" in changes else {"target_epsilon": 4.0}
    return amplified.Amplified(**{"sampling": "cyclic", **_RUN, **noise, **changes})


def _planned(users=_USERS, **changes):
    asked = _asked(**changes)
    return asked.with_bands(users).asked(users, clip_norm=1.0).plan(len(users), 1)


def _ways(users, epsilon, **run):
    """The noise of ULS and of passes, and the curve of cyclic sampling."""
    size, units = run["group_size"], run["units_per_step"]
    rest = {"num_steps": run["num_steps"], "delta": run["delta"], "target_epsilon": epsilon}
    sampled = plan_lib.make_plan(
        users, sampling="user", group_size=size, expected_units=units, **rest
    )
    turns = passes.Passes(users_per_step=units, group_size=size, **rest)
    by_passes = run_privacy.noise_of_average(turns.asked(clip_norm=1.0).plan(len(users), 1))
    curve = amplified.curve(_asked(**run, target_epsilon=epsilon), users)
    return sampled.noise_of_average, by_passes, curve


@pytest.mark.parametrize("epsilon", [0.5, pytest.param(20.0, marks=pytest.mark.slow)])
def test_the_chosen_bands_have_no_more_noise_than_sampling_and_than_passes(epsilon):
    by_sampling, by_passes, curve = _ways(_USERS, epsilon, **_RUN)
    noise = [one.noise_of_average for one in curve]
    # Powers of two, and the bands of one turn fewer: 60 / 4 and 60 / 3.
    assert {one.asked.bands for one in curve} >= {1, 2, 4, 8, 15, 16, 20}
    # One band is ULS, and 20 bands in 20 groups of 40 users are passes, of another strategy.
    assert noise[0] == pytest.approx(by_sampling, rel=1e-3)
    assert (
        curve[-1].plan.participation.cyclic.sampling_probability == 1.0
        and amplified.name_of(curve[-1]) == "20 bands, a pass"
    )
    chosen = _asked(target_epsilon=epsilon).with_bands(_USERS).bands
    least = min(noise)
    assert curve[noise.index(least)].asked.bands == chosen
    assert least <= by_sampling * (1 + 1e-3) and least <= by_passes
    for one in curve:
        assert epsilon * 0.99 < one.plan.epsilon <= epsilon


@pytest.mark.slow
def test_noise_is_that_of_the_first_measurement():
    # Design page: n = 500, 1,600 users, 64 a step, δ = 1e-5, ε = 8: ratios to DP-SGD's noise.
    run = {"units_per_step": 64, "num_steps": 500, "delta": 1e-5, "group_size": 1}
    by_sampling, _, curve = _ways(example_sampling.of_sizes([1] * 1600), 8.0, **run)
    ratios = {one.asked.bands: one.noise_of_average / by_sampling for one in curve}
    measured = {2: 0.87, 4: 0.80, 8: 0.77, 16: 0.79, 25: 0.80}
    assert {bands: round(ratios[bands], 2) for bands in measured} == measured


def test_correlated_noise_of_the_identity_is_independent_noise():
    plan = _planned(bands=1, noise_multiplier=3.0)
    assert run_privacy.noise_of_average(plan) == pytest.approx(3.0 / 40)
    # Brute force: draws of the noise's prefix sums.
    plan = _planned(bands=4, noise_multiplier=3.0)
    matrix = plan.strategy.noise_matrix(60)
    steps = 3.0 * matrix @ np.random.default_rng(1).standard_normal((60, 40_000))
    sums = np.cumsum(steps, axis=0)
    independent = math.sqrt(np.mean(np.arange(1, 61)))
    # 40,000 draws of 60 dependent sums: a mean square within a percent or two.
    drawn = math.sqrt(np.mean(sums**2)) / independent / 40
    assert run_privacy.noise_of_average(plan) == pytest.approx(drawn, rel=0.02)
    ratio = math.sqrt(np.mean(steps**2)) / 40 / drawn
    assert run_privacy.noise_of_step(plan) == pytest.approx(ratio, rel=0.02)


def test_the_learning_rate_of_adam_is_for_the_noise_of_a_step():
    assert run_privacy.noise_of_step(_planned(bands=1, noise_multiplier=3.0)) == 1.0
    assert run_privacy.rate_hint(_planned(bands=1, noise_multiplier=3.0)) is None
    plan = _planned(bands=16, noise_multiplier=3.0)
    said = f"One step has {run_privacy.noise_of_step(plan):.1f} times the noise"
    assert run_privacy.rate_hint(plan).startswith(said)
    assert run_privacy.noise_of_step(plan) > 2.0


@pytest.mark.parametrize("unit", ["user", "example"])
def test_one_band_has_the_batches_of_independent_noise(unit):
    plan = _planned(bands=1, sampled_unit=unit)
    kind = {"user": example_sampling.UserSampling, "example": example_sampling.ExampleSampling}
    same = kind[unit](
        _USERS,
        group_size=4,
        sampling_probability=plan.participation.cyclic.sampling_probability,
        num_steps=60,
        seed=9,
    )
    batches = passes.batches_of(plan, _USERS, 4, 9)
    for step in (0, 7, 59):
        one, other = batches(step), same.batch(step)
        for name in ("unit_users", "examples", "row_splits"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_examples_of_a_pool_come_at_their_users_turns_only():
    users, groups = example_sampling.of_sizes([2, 9, 30] * 100), 4
    plan = _planned(users, bands=groups, sampled_unit="example")
    assert (
        plan.participation.pool.size == 100 * (2 + 4 + 4) and plan.participation.pool.of_client == 4
    )
    assert plan.clients_per_round == pytest.approx(40)
    batches, steps = passes.batches_of(plan, users, 4, 5), collections.defaultdict(set)
    pool = collections.defaultdict(set)
    sizes = []
    for step in range(60):
        batch = batches(step)
        sizes.append(batch.num_units)
        assert batch.num_units == batch.num_rows
        for user, example in zip(batch.unit_users, batch.examples, strict=True):
            steps[user].add(step % groups)
            pool[user].add(example)
    assert all(len(turns) == 1 for turns in steps.values())
    assert max(map(len, pool.values())) == 4
    # 15 turns with probability .16: who misses them all is one example in 14, and 1,000 are in the
    # pool. Six standard deviations of the sum of 60 sizes around 40.
    assert abs(sum(sizes) - 60 * 40) < 6 * math.sqrt(15 * 1000 * 0.16 * 0.84) + 60 * 10
    assert len(set(sizes)) > 5
    # Group sizes vary, too: 300 users in four groups.
    assert len(steps) > 280


def test_examples_cost_a_mixture_at_each_turn():
    pair = mixture_of_gaussians.els(2.0, 0.04, 4)
    plan = _planned(
        example_sampling.of_sizes([8] * 250), sampled_unit="example", bands=1, noise_multiplier=2.0
    )
    assert plan.epsilon_after(60) == pytest.approx(
        mixture_of_gaussians.epsilon(pair, num_steps=60, delta=1e-5)
    )
    # All of the pool at each turn: a user's four examples are four times one, in 3 turns.
    plan = _planned(
        example_sampling.of_sizes([8] * 200),
        sampled_unit="example",
        bands=20,
        noise_multiplier=30.0,
    )
    assert plan.participation.cyclic.sampling_probability == 1.0
    norm = np.linalg.norm(plan.strategy.strategy_matrix(60), axis=0).max()
    expected = gaussian.epsilon(4 * norm * math.sqrt(3) / 30.0, 1e-5)
    assert expected <= plan.epsilon_after(60) <= expected * 1.001


def test_epsilon_grows_turn_by_turn():
    plan = _planned(bands=4)
    after = [plan.epsilon_after(step) for step in range(61)]
    assert after[0] == 0.0 and after == sorted(after) and 3.9 < after[60] <= 4.0
    # A turn of the first group is charged when it begins; the columns of C only grow by it.
    assert after[4] == pytest.approx(after[1], rel=0.5) and after[5] > after[4]


def test_a_plan_goes_on_from_what_it_recorded():
    for changes in (
        {"bands": 4},
        {"bands": 3, "sampled_unit": "example"},
        {"sampling": "bins", "noise_multiplier": 9.0, "mechanism": "bisr"},
    ):
        plan = _planned(**changes)
        derived = json.loads(json.dumps({**plan.derived(), "clip_norm": 1.0}))
        again = amplified.resumed(derived, len(_USERS), deterministic_seed=None)
        assert again.with_noise(strategy=plan.strategy) == plan
        assert again.epsilon_after(60) == plan.epsilon_after(60)
    rule = workload.UpdateRule(momentum=0.9).workload(60)
    of_models = _asked(bands=4).asked(_USERS, clip_norm=1.0, workload=rule).plan(len(_USERS), 1)
    derived = of_models.derived() | {"clip_norm": 1.0}
    again = amplified.resumed(derived, len(_USERS), deterministic_seed=None, workload=rule)
    assert again.describe() == of_models.describe()


def test_everybody_of_a_bin_comes_at_each_of_its_turns():
    asked = _asked(sampling="bins", noise_multiplier=9.0, mechanism="bandtoep", bands=8)
    planned = ways.Way(_planned(**dataclasses.asdict(asked)), 4, asked)
    plan = planned.plan
    assert not asked.chooses_bands and plan.participation.sampling.num_bins == 20
    batches = passes.batches_of(plan, _USERS, 4, 3)
    for step in (0, 1, 19):
        first, again = batches(step), batches(step + 40)
        np.testing.assert_array_equal(first.unit_users, again.unit_users)
        # Sizes of bins are binomial: six standard deviations around 40 of 800.
        assert abs(first.num_units - 40) < 6 * math.sqrt(800 * 0.05 * 0.95)
    assert planned.expected_gradients(_USERS) == pytest.approx(40 * 3.5)
    # A bin has three turns: never with probability (1 − 4/10)³, for 10 examples.
    used = (3 + 10 * (1 - 0.6**3)) / 13
    assert planned.share_of_examples_used(_USERS) == pytest.approx(used)
    schema = schema_lib.MinSep.as_many_as_fit(60, 20)
    known = gaussian.epsilon(plan.strategy.sensitivity(schema).value / 9.0, 1e-5)
    assert 0.0 < plan.epsilon_after(1) <= plan.epsilon_after(60) < known


@pytest.mark.parametrize("unit", [pytest.param("user", marks=pytest.mark.slow), "example"])
def test_a_statement_says_who_drew_what(unit):
    plan = _planned(bands=4, sampled_unit=unit)
    seen = observed.ObservedParticipation(60, 4, 15, {15: 800})
    stated = plan.statement(seen, facts_lib.Facts(), charge_all_rounds=True)
    assert stated.has_guarantee and 3.9 < stated.epsilon <= 4.0
    text = statement_text.markdown(stated)
    assert "one of 4 groups, once, at random" in text and "Their seed stays secret" in text
    assert "One party, which holds the data of every user, draws the samples" in text
    assert ("At most 4 examples of each user were put into a pool" in text) == (unit == "example")
    assert ("Binomial" in text) == (unit == "example")
    assert plan.declared == schema_lib.MinSep(60, 4, 15)


def test_choices_have_all_splits_and_the_best_is_the_least():
    norms = group_size.GradientNorms((1, 2), (1.0, 0.8))
    plans = amplified.choices(
        _USERS, compute_budget=64, num_steps=60, target_epsilon=8.0, delta=1e-5
    )
    sizes = {(one.asked.group_size, one.asked.units_per_step) for one in plans}
    assert sizes == {(1, 64), (2, 32)}
    curve = amplified.least_by_bands(plans, norms)
    # A point for each power of two up to the next one, and one for passes.
    names = map(amplified.name_of, curve)
    found = [
        one.asked.bands.bit_length()
        for name, one in zip(names, curve, strict=True)
        if "a pass" not in name
    ]
    assert found == [1, 2, 3, 4, 5]
    least = amplified.best(plans, norms)
    assert least.relative_noise(norms) == min(one.relative_noise(norms) for one in curve)
    for one in plans[:3]:
        half = sum(min(size, one.asked.group_size) for size in (3, 10)) / 2
        assert one.expected_gradients(_USERS) == pytest.approx(one.asked.units_per_step * half)


def test_choices_leave_out_cohorts_that_fill_more_bins_than_there_are_steps():
    options = {"sampling": "bins", "target_epsilon": 8.0, "delta": 1e-5}
    num_steps = len(_USERS) // 64
    plans = amplified.choices(_USERS, compute_budget=64, num_steps=num_steps, **options)
    assert [(one.asked.group_size, one.asked.units_per_step) for one in plans] == [(1, 64)]
    with pytest.raises(ValueError, match="only 2 rounds") as error:
        amplified.choices(_USERS, compute_budget=64, num_steps=2, **options)
    cohort = int(re.search(r"clients_per_round to (\d+)", str(error.value))[1])
    assert len(_USERS) // cohort <= 2 < len(_USERS) // (cohort - 1)


def test_the_share_of_examples_used_is_that_of_batches():
    users = example_sampling.of_sizes([1, 6, 20] * 40)
    for unit in ("user", "example"):
        asked = _asked(bands=3, units_per_step=12, num_steps=10, sampled_unit=unit)
        planned = ways.Way(asked.asked(users, clip_norm=1.0).plan(len(users), 1), 4, asked)
        used = []
        for seed in range(60):
            batches, seen = passes.batches_of(planned.plan, users, 4, seed), set()
            for step in range(10):
                batch = batches(step)
                seen |= set(zip(batch.row_users.tolist(), batch.examples.tolist(), strict=True))
            used.append(len(seen) / users.num_examples.sum())
        error = np.std(used) / math.sqrt(len(used))
        assert abs(np.mean(used) - planned.share_of_examples_used(users)) < 5 * error < 0.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": "dice"}, "sampling must be one of cyclic, bins"),
        ({"units_per_step": 0}, "units_per_step"),
        ({"bands": 0}, "bands"),
        ({"target_epsilon": 4.0, "noise_multiplier": 1.0}, "exactly one of"),
        ({"noise_multiplier": 1.0}, "give bands, or target_epsilon"),
        ({"sampled_unit": "word"}, "'user' or 'example'"),
        ({"sampled_unit": "example", "sampling": "bins"}, "is for sampling 'cyclic'"),
        ({"bands": 8, "min_sep": 4}, "min_sep=4 groups are fewer than the 8 bands"),
        ({"bands": 21}, "bands=21 .* lower bands to 20, or take 38 in a step"),
        ({"min_sep": 21}, "min_sep=21 .* lower min_sep to 20"),
        ({"min_sep": 21}, "min_sep=21 .* lower min_sep to 20"),
        ({"units_per_step": 900}, "more than the 800 users"),
        ({"mechanism": "tree"}, "needs a banded matrix"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_work(changes, message):
    with pytest.raises(validation.UsageError, match=message):
        _planned(**changes)
