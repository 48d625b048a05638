"""Plans meet their target, the Pareto set is one, and what-ifs are honest."""

from __future__ import annotations

import dataclasses
import math
import sys

import numpy as np
import pytest

from tff_dpftrl.accounting import guarantee, planner, planner_plots
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import tree
from tff_dpftrl.participation import schema as schema_lib

_REQUEST = planner.Request(
    population=4_000_000,
    num_rounds=2000,
    delta=1e-10,
    target_epsilon=5.0,
    report_goals=(500, 3000, 6500, 9_000_000),
)


@pytest.fixture(scope="module")
def plans():
    return planner.make_plans(_REQUEST)


def test_every_plan_meets_the_target(plans):
    assert len(plans) == 3 * len(planner.DEFAULT_MECHANISMS)
    for plan in plans:
        again = guarantee.dp_ftrl_guarantee(
            plan.strategy,
            noise_multiplier=plan.guarantee.noise_multiplier,
            schema=plan.guarantee.schema,
            delta=1e-10,
        )
        assert 5.0 * (1 - 1e-8) <= again.epsilon <= 5.0
        assert plan.guarantee.schema.min_sep * plan.report_goal <= _REQUEST.population
        assert plan.guarantee.schema.min_sep == min(2000, 4_000_000 // plan.report_goal)


def test_noise_is_that_of_the_materialised_matrices(plans):
    small = dataclasses.replace(_REQUEST, population=3000, num_rounds=40, report_goals=(300,))
    for plan in planner.make_plans(small):
        noise = plan.strategy.noise_matrix(40)
        prefix = np.cumsum(noise, axis=0)
        scale = plan.guarantee.noise_multiplier / 300
        rms = math.sqrt(np.mean(np.sum(prefix**2, axis=1)))
        assert plan.noise_in_sum == pytest.approx(rms * scale, rel=1e-6)
        per_round = math.sqrt(np.mean(np.sum(noise**2, axis=1)))
        assert plan.noise_per_round == pytest.approx(per_round * scale, rel=1e-6)


def test_pareto_set_by_brute_force(plans):
    def costs(plan):
        return np.array(
            [plan.guarantee.rho_zcdp, plan.noise_in_sum, plan.report_goal, plan.memory_copies]
        )

    front = planner.pareto(plans)
    for plan in plans:
        beaten = any(
            np.all(costs(rival) <= costs(plan) * (1 + 1e-6))
            and np.any(costs(rival) * (1 + 1e-6) < costs(plan))
            for rival in plans
        )
        assert (plan in front) == (not beaten)
    # The rest is beaten by memory-less inverse-banded noise or by BLT.
    assert {plan.mechanism for plan in front} == {"bifr", "blt"}


def test_recommendation_for_someone_who_knows_only_the_population():
    request = planner.Request(4_000_000, 2000, 1e-10, target_epsilon=5.0)
    plan = planner.recommend(planner.make_plans(request), planner.production_noise_in_sum(2000))
    assert plan.mechanism == "blt"
    assert plan.report_goal == 5000
    assert plan.guarantee.schema == schema_lib.MinSep(2000, 800, 3)
    assert plan.guarantee.epsilon <= 5.0
    assert plan.noise_in_sum <= planner.production_noise_in_sum(2000)


def test_without_a_quiet_plan_the_quietest_is_recommended(plans):
    assert planner.recommend(plans, 1e-9) == min(plans, key=lambda plan: plan.noise_in_sum)


def test_target_noise_is_kept():
    production = planner.production_noise_in_sum(2000)
    request = dataclasses.replace(
        _REQUEST, target_epsilon=None, target_noise=production, report_goals=(6500,)
    )
    plans = {plan.mechanism: plan for plan in planner.make_plans(request)}
    for plan in plans.values():
        assert plan.noise_in_sum == pytest.approx(production, rel=1e-12)
    # The reference run itself: the tree has its z = 7, and a BLT is more private.
    assert plans["tree"].guarantee.noise_multiplier == pytest.approx(7.0, rel=1e-12)
    assert plans["blt"].guarantee.epsilon < plans["tree"].guarantee.epsilon


def test_target_rho():
    request = dataclasses.replace(
        _REQUEST, target_epsilon=None, target_rho=0.25, report_goals=(6500,)
    )
    for plan in planner.make_plans(request):
        assert plan.guarantee.rho_zcdp == pytest.approx(0.25, rel=1e-9)


def test_what_if_is_the_guarantee_of_what_happened(plans):
    plan = next(plan for plan in plans if plan.mechanism == "blt" and plan.report_goal == 6500)
    worse = plan.what_if(num_rounds=2500, min_sep=300)
    assert worse.schema == schema_lib.MinSep(2500, 300, 9)
    assert worse.epsilon > plan.guarantee.epsilon
    assert plan.what_if(num_rounds=1000).epsilon < plan.guarantee.epsilon
    assert plan.what_if(min_sep=615).epsilon == plan.guarantee.epsilon
    assert plan.what_if(min_sep=300, max_participations=2).epsilon < worse.epsilon
    runs_out = next(plan for plan in plans if plan.mechanism == "tree")
    with pytest.raises(ValueError, match="num_rounds"):
        runs_out.what_if(num_rounds=5000)


def test_secure_aggregation_adds_noise_and_changes_the_upload():
    plain = dataclasses.replace(_REQUEST, report_goals=(3000,), num_parameters=100_000)
    secure = dataclasses.replace(plain, secagg_inflation=1.01)
    encoding = grid.for_inflation(100_000, 3000, 1.01)
    for one, other in zip(planner.make_plans(plain), planner.make_plans(secure), strict=True):
        assert one.upload_bytes == 400_000
        assert other.upload_bytes == encoding.upload_bytes
        assert other.noise_in_sum == pytest.approx(one.noise_in_sum * encoding.inflation)
        assert other.guarantee == one.guarantee


def test_min_sep_and_participations_can_be_given():
    schema = dataclasses.replace(_REQUEST, min_sep=100, max_participations=3).schema(6500)
    assert schema == schema_lib.MinSep(2000, 100, 3)
    assert dataclasses.replace(_REQUEST, min_sep_fraction=0.5).schema(6500).min_sep == 307
    assert dataclasses.replace(_REQUEST, min_sep=1000).schema(6500) is None


def test_published_populations_bound_the_published_separations():
    # Xu et al. 2023, Table 1: es-ES has 4.21M devices, so MinS is below 4.21M / 6500 = 647.
    assert planner.largest_min_sep(4_210_000, 6500) == 647


def test_timer():
    # es-ES of 2022: 24 hours led to a MinS of 313, about 314 rounds a day.
    assert planner.min_sep_of_timer(24, 314) == 314
    assert planner.min_sep_of_timer(1, 2) == 1


def test_plot_of_plans(tmp_path, plans):
    path = tmp_path / "plans.png"
    planner_plots.save_plans(path, plans, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="Cannot write"):
        planner_plots.save_plans(tmp_path / "missing" / "plans.png", plans, "title")


def test_tree_reference():
    expected = tree.Tree(2000).rms_error(2000) * 7 / 6500
    assert planner.production_noise_in_sum(2000) == expected


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"target_rho": 1.0}, "exactly one"),
        ({"target_epsilon": None}, "exactly one"),
        ({"target_epsilon": None, "target_noise": 0.0}, "target_noise"),
        ({"min_sep_fraction": 0.0}, "min_sep_fraction"),
        ({"population": 0}, "population"),
        ({"num_rounds": 0}, "num_rounds"),
        ({"num_parameters": 0}, "num_parameters"),
    ],
)
def test_errors_name_the_argument(changes, name):
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(_REQUEST, **changes)


def test_impossible_requests():
    with pytest.raises(ValueError, match="no report goal"):
        planner.make_plans(dataclasses.replace(_REQUEST, min_sep=10**6))
    with pytest.raises(ValueError, match="report_goal"):
        planner.largest_min_sep(10, 11)
    with pytest.raises(ValueError, match="timer_hours"):
        planner.min_sep_of_timer(0, 1)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
