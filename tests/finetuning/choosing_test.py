"""Tests of the choice of sampling, group size, cohort and clip norm."""

import dataclasses

import numpy as np
import pytest

from tff_dpftrl.accounting import facts as facts_lib
from tff_dpftrl.finetuning import choosing, example_sampling, group_size, proxies, run_privacy
from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.mechanisms import workload
from tff_dpftrl.participation import observed
from tff_dpftrl.runs import dp_ftrl_privacy

_USERS = example_sampling.of_sizes(np.tile([4, 16, 16, 60], 250))
# As measured from docstrings to commit messages (a transformer of 0.9M weights).
_NORMS = group_size.GradientNorms((1, 2, 4, 8, 16, 32), (8.756, 6.619, 5.128, 4.019, 3.36, 3.037))


def _options(**options):
    needed = {"initial_weights": "x", "target_epsilon": 4.0, "num_steps": 100}
    return config_lib.FinetuningConfig(**needed | options).part(choosing.SamplingOptions)


def _public(norms=_NORMS):
    return proxies.Proxies(norms, 128, "somebody's public text")


def _choose(options, public=None):
    return choosing.choose(options, _USERS, public or _public(), num_parameters=1000)


def test_what_is_given_is_taken_and_what_it_needs_is_known_beforehand():
    options = _options(sampling="user", group_size=8, cohort_size=50, clip_norm=0.3, delta=1e-6)
    assert not choosing.needs_proxies(options)
    chosen = choosing.choose(options, _USERS, None, num_parameters=1000)
    plan = chosen.privacy.plan
    assert (plan.sampling, plan.group_size, plan.expected_units) == ("user", 8, 50)
    assert chosen.privacy.clip_norm == 0.3 and plan.epsilon <= 4.0 and plan.delta == 1e-6
    assert plan.sampling_probability == 50 / 1000
    assert chosen.facts["clip_norm_source"] == "given" and chosen.not_covered == ()
    assert choosing.needs_proxies(dataclasses.replace(options, clip_norm=None))


@pytest.mark.parametrize(
    "sampling",
    [*(pytest.param(x, marks=pytest.mark.slow) for x in ("user", "cyclic", "example")), "passes"],
)
def test_a_group_size_in_which_the_users_had_a_say_is_not_covered(sampling):
    options = {"sampling": sampling, "compute_budget": 64, "group_size": 4, "delta": 1e-6}
    silent, named = (
        _choose(_options(group_size_looked_at_users=looked, **options)) for looked in (False, True)
    )
    said = "Choice of the group size, 4: given with the training users in view"
    for chosen, times in ((silent, 0), (named, 1)):
        plan = chosen.privacy
        seen = observed.ObservedParticipation(100, 15, 7, {7: 1000})
        facts = facts_lib.Facts(not_covered=chosen.not_covered)
        stated = plan.statement(seen, facts, charge_all_rounds=True).not_covered
        assert sum(line.startswith(said) for line in stated) == times
    with pytest.raises(ValueError, match="group_size_looked_at_users is for a group_size that"):
        _options(sampling="example", compute_budget=64, group_size_looked_at_users=True)


def test_bands_sizes_and_noise_of_turns_are_chosen_together():
    chosen = _choose(_options(sampling="cyclic", compute_budget=64, target_epsilon=8.0))
    assert choosing.needs_proxies(_options(sampling="cyclic", compute_budget=64))
    plan = chosen.privacy
    assert plan.cyclic.num_groups > 1 and 7.9 < plan.epsilon_after(100) <= 8.0
    assert chosen.group_size * plan.clients_per_round == pytest.approx(64)
    assert "1 band" in chosen.reasons[0] and "a step's average" in chosen.reasons[0]
    assert chosen.facts["group_size_source"].startswith("by the least noise")
    assert chosen.caveats == (
        "δ is n^-1.1 for the 24000 examples of all users, a number that is treated as public.",
    )
    # No sampling of users by itself has as little noise for the gradient's size.
    alone = _choose(_options(sampling="user", compute_budget=64, target_epsilon=8.0))
    by_users = alone.privacy.plan.relative_noise(_NORMS)
    assert run_privacy.noise_of_average(plan) * _NORMS(chosen.group_size) < by_users


def test_turns_of_examples_have_the_pool_that_is_asked_for():
    options = _options(
        sampling="cyclic", sampled_unit="example", compute_budget=64, group_size=8, bands=4
    )
    assert choosing.largest_group(options, 1000) == 1
    chosen = _choose(options)
    assert chosen.caveats[0].startswith("The size of the pool, 7000, determines")
    plan = chosen.privacy
    assert plan.pool.size == 250 * (4 + 3 * 8) and plan.cyclic.num_groups == 4
    assert plan.cyclic.sampling_probability == pytest.approx(64 * 4 / 7000)
    assert run_privacy.rows_per_unit(plan, 8) == 1
    with pytest.raises(ValueError, match="cohort_size=1001|exceeds the 1000 users"):
        _choose(_options(sampling="cyclic", group_size=1, cohort_size=1001))


def test_half_of_the_budget_is_the_other_half():
    by_group = _choose(_options(sampling="user", compute_budget=256, group_size=4))
    by_cohort = _choose(_options(sampling="user", compute_budget=256, cohort_size=64))
    assert by_group.privacy.plan.expected_units == 64
    assert by_cohort.group_size == 4
    # Half of L(4) = 5.128, two digits.
    assert by_group.privacy.clip_norm == 2.6
    with pytest.raises(ValueError, match="smaller than a cohort of one user"):
        _choose(_options(sampling="user", compute_budget=3, group_size=4))
    with pytest.raises(ValueError, match="compute_budget / group_size = 2000 exceeds the 1000"):
        _choose(_options(sampling="user", compute_budget=8000, group_size=4))


@pytest.mark.parametrize(
    "given",
    [{"sampling": "user", "group_size": 4}, {"sampling": "passes", "group_size": 4, "delta": 1e-6}],
)
def test_a_step_has_256_gradients_if_nothing_is_said(given):
    silent, said = (_choose(_options(**given | {"compute_budget": b})) for b in (None, 256))
    assert silent.privacy == said.privacy and silent.group_size == said.group_size == 4
    with pytest.raises(ValueError, match="compute_budget=256 is smaller than a cohort of one user"):
        _choose(_options(**given | {"group_size": 300, "clip_norm": 1.0}))


def test_estimate_and_double_decides_for_users():
    options = _options(sampling="user", compute_budget=1024)
    assert choosing.needs_proxies(options)
    assert choosing.largest_group(options, len(_USERS)) == 32
    chosen = _choose(options)
    sigma = plan_lib.noise_multiplier_of_cohort(
        len(_USERS), num_steps=100, target_epsilon=4.0, delta=chosen.privacy.delta
    )
    best = group_size.best_split(_NORMS, sigma, compute_budget=1024, num_users=len(_USERS))
    plan = chosen.privacy.plan
    assert (plan.group_size, plan.expected_units) == (best.group_size, best.cohort_size)
    assert "Estimate-and-Double" in chosen.reasons[0]
    assert plan.group_size_epsilon == 0.0 and not plan.group_size_is_exact
    # It is the cohort that was judged, not what is left of an odd budget.
    odd = _choose(_options(sampling="user", compute_budget=1100)).privacy.plan
    assert (odd.group_size, odd.expected_units) == (plan.group_size, plan.expected_units)
    few = example_sampling.of_sizes([5] * 48)
    small = choosing.choose(_options(sampling="user", compute_budget=60), few, _public(), 10)
    assert small.privacy.plan.expected_units == 32
    with pytest.raises(ValueError, match="begins with 32 users in a step, and there are 10"):
        choosing.largest_group(options, 10)


@pytest.mark.slow
def test_a_declared_number_of_users_is_the_one_that_counts():
    # With so many users the cohort can grow further before the noise of its average falls.
    options = {"sampling": "user", "compute_budget": 1024, "target_epsilon": 1.0, "delta": 1e-6}
    counted = _choose(_options(**options)).privacy.plan
    declared = _choose(_options(**options, declared_units=100_000)).privacy.plan
    assert declared.expected_units > counted.expected_units
    assert declared.sampling_probability == declared.expected_units / 100_000


@pytest.mark.parametrize(
    "sizes, sampling",
    [
        ([4, 16, 16, 60], "user"),
        # With one example a user both are the same, and examples are the simpler ones.
        ([1], "example"),
    ],
)
def test_the_private_median_is_charged_whichever_is_taken(sizes, sampling):
    users = example_sampling.of_sizes(sizes * 1000)
    options = _options(sampling="auto", compute_budget=32, group_size_epsilon=0.5)
    chosen = choosing.choose(options, users, _public(), num_parameters=1000)
    plan = chosen.privacy.plan
    assert plan.sampling == sampling
    assert plan.group_size_epsilon == 0.5 and plan.epsilon <= 4.0
    assert "private median" in plan.group_size_source
    assert "exact size of the pool" in chosen.not_covered[0]


def test_examples_take_the_private_median():
    chosen = _choose(_options(sampling="example", compute_budget=256, group_size_epsilon=1.0))
    plan = chosen.privacy.plan
    assert (plan.sampling, plan.group_size) == ("example", 16)
    assert plan.num_units == 250 * (4 + 16 + 16 + 16)
    assert chosen.privacy.clip_norm == 4.4  # Half of L(1), two digits.
    with pytest.raises(ValueError, match="exceeds the number of examples in the pool"):
        _choose(_options(sampling="example", compute_budget=100_000, group_size=16))


def test_a_drawn_group_size_refuses_nothing_since_that_would_show_the_draw():
    chosen = _choose(_options(sampling="example", compute_budget=100_000, group_size_epsilon=1.0))
    plan = chosen.privacy.plan
    assert (plan.expected_units, plan.num_units) == (1000, 250 * (4 + 16 + 16 + 16))
    assert plan.group_size_epsilon == 1.0
    assert chosen.reasons[0] == (
        "A step expects 1000 examples, one for each user: the pool is below compute_budget."
    )
    alone = _options(sampling="example", compute_budget=256, group_size_epsilon=1.0, clip_norm=1.0)
    users = example_sampling.of_sizes([1] * 20)
    plan = choosing.choose(alone, users, None, num_parameters=10).privacy.plan
    assert plan.expected_units == plan.num_units == 20 and plan.epsilon <= 4.0


def test_the_private_median_has_a_seed_that_nobody_chose(monkeypatch):
    choose, seeds = group_size.private_median_choice, []

    def remember(sizes, *, epsilon, seed):
        seeds.append(seed)
        return choose(sizes, epsilon=epsilon, seed=seed)

    monkeypatch.setattr(group_size, "private_median_choice", remember)
    example = {"sampling": "example", "compute_budget": 256, "clip_norm": 1.0}
    for _ in range(2):
        _choose(_options(**example))
    assert len(set(seeds)) == 2 and min(seeds).bit_length() > 200
    _choose(_options(**example, deterministic_noise_seed=7))
    assert seeds[-1] == 7


def test_passes_sample_nothing_and_correlate_the_noise():
    options = _options(
        sampling="passes", group_size=2, compute_budget=40, clip_norm=1.0, delta=1e-6
    )
    chosen = _choose(options)
    plan = chosen.privacy
    assert isinstance(plan, dp_ftrl_privacy.DpFtrlPlan) and plan.clients_per_round == 20
    assert plan.schema.min_sep == 50 and plan.schema.max_participations == 2
    assert plan.delta == 1e-6 and plan.data_in_one_place
    assert 3.9 < plan.epsilon_after(100) <= 4.0
    assert "everybody once in 50 steps" in chosen.reasons[-1]
    assert chosen.facts["group_size"] == 2


def test_passes_are_optimised_for_the_models_of_the_optimizer():
    given = {"sampling": "passes", "group_size": 4, "delta": 1e-6, "clip_norm": 1.0}
    options = {"optimizer": "momentum", "decay": "cosine", "warmup_steps": 5}
    made = _options(workload="auto", **given, **options)
    rule = workload.UpdateRule(
        momentum=0.9, decay="cosine", warmup_rounds=5, rate_before_momentum=True
    )
    assert made.model_workload == rule.workload(100)
    plan = _choose(made).privacy
    sums = _choose(_options(**given, **options)).privacy
    losses = [one.strategy.max_loss(one.schema, made.model_workload) for one in (plan, sums)]
    assert losses[0] < 0.99 * losses[1]
    sampled = given | {"sampling": "cyclic", "bands": 4, "compute_budget": 64}
    turns, of_sums = (
        _choose(_options(workload=name, **sampled, **options)).privacy
        for name in ("auto", "prefix")
    )
    losses = [one.strategy.rms_error(100, made.model_workload) for one in (turns, of_sums)]
    norms = [np.linalg.norm(one.strategy.coefficients) for one in (turns, of_sums)]
    assert losses[0] * norms[0] < 0.99 * losses[1] * norms[1]
    assert turns.workload == made.model_workload and of_sums.workload is None
    for changes, message in (
        ({"sampling": "user", "cohort_size": 9}, "workload has no meaning with"),
        ({"mechanism": "tree"}, "workload 'auto' is for the mechanism blt or .* not for tree"),
    ):
        with pytest.raises(ValueError, match=message):
            _options(workload="auto", **given | changes)
