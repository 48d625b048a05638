"""Plans meet their target, the Pareto set is one, and what-ifs are honest."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from tff_dpftrl import pictures
from tff_dpftrl.accounting import guarantee, planner, planner_plots, planner_request
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import tree, workload
from tff_dpftrl.participation import schema as schema_lib

_REQUEST = planner_request.Request(
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
    assert len(plans) == 3 * len(planner.default_mechanisms(1))
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


def test_noise_of_models_is_that_of_the_workload():
    made = workload.UpdateRule(momentum=0.9, decay="cosine").workload(40)
    small = dataclasses.replace(
        _REQUEST, population=3000, num_rounds=40, report_goals=(300,), workload=made
    )
    names = ("blt", "bandtoep", "tree")
    for plan in planner.make_plans(small, names):
        noise = made.matrix() @ plan.strategy.noise_matrix(40)
        rms = math.sqrt(np.mean(np.sum(noise**2, axis=1)))
        scale = plan.guarantee.noise_multiplier / 300
        assert plan.noise_in_sum == pytest.approx(rms * scale, rel=1e-6)
    optimum = planner.make_plans(small, ("bandtoep",))[0].strategy
    (sums,) = planner.make_plans(dataclasses.replace(small, workload=None), ("bandtoep",))
    schema = sums.guarantee.schema
    assert optimum.rms_loss(schema, made) < 0.99 * sums.strategy.rms_loss(schema, made)
    assert planner.production_noise_in_sum(40, made) > 0


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
    # The rest is beaten by memory-less inverse-banded noise or by BLT; bandtoep has less noise
    # than BLT for hundreds of model copies.
    assert {plan.mechanism for plan in front} == {"bandtoep", "bifr", "blt"}
    assert planner.recommend(plans, None).memory_copies <= 8
    only = [plan for plan in plans if plan.mechanism == "bandtoep"]
    assert planner.recommend(only, None) in only


def test_recommendation_for_someone_who_knows_only_the_population():
    request = planner_request.Request(4_000_000, 2000, 1e-10, target_epsilon=5.0)
    plan = planner.recommend(planner.make_plans(request), planner.production_noise_in_sum(2000))
    assert plan.mechanism == "blt"
    assert plan.report_goal == 5000
    assert plan.guarantee.schema == schema_lib.MinSep(2000, 800, 3)
    assert plan.guarantee.epsilon <= 5.0
    assert plan.noise_in_sum <= planner.production_noise_in_sum(2000)


def test_without_a_quiet_plan_clients_are_weighed_against_noise():
    """200,000 devices cannot reach production noise: the most clients are not the answer."""
    request = planner_request.Request(200_000, 2000, 1e-10, target_epsilon=5.0)
    plans = planner.make_plans(request, ["blt", "bifr"])
    assert min(plan.noise_in_sum for plan in plans) > planner.production_noise_in_sum(2000)
    best = planner.recommend(plans, planner.production_noise_in_sum(2000))
    assert (best.mechanism, best.report_goal) == ("blt", 1000)
    for plan in plans:  # More clients lower the noise by less than a fifth for each doubling.
        if plan.report_goal > best.report_goal:
            doublings = math.log2(plan.report_goal / best.report_goal)
            assert plan.noise_in_sum > best.noise_in_sum * 0.8**doublings
        if plan.report_goal < best.report_goal:
            doublings = math.log2(best.report_goal / plan.report_goal)
            assert best.noise_in_sum < plan.noise_in_sum * 0.8**doublings


def test_with_a_noise_to_keep_clients_are_weighed_against_privacy():
    production = planner.production_noise_in_sum(2000)
    request = planner_request.Request(200_000, 2000, 1e-10, target_noise=production)
    best = planner.recommend(planner.make_plans(request, ["blt", "bifr"]), None)
    # At equal noise, mu falls with the clients as the noise does at equal mu.
    assert (best.mechanism, best.report_goal) == ("blt", 1000)


@pytest.mark.parametrize("least", [1, 2, 7, 616])
def test_fewer_participations_than_the_population_implies_are_refused(least):
    # 2000 rounds of 6500 out of `population`: on average, hence for some device, `least`.
    population = -(-2000 * 6500 // least)
    enough = dataclasses.replace(
        _REQUEST, population=population, report_goals=(6500,), max_participations=least
    )
    assert enough.schema(6500).max_participations == least
    assert planner.make_plans(enough, ["identity"])
    if least > 1:
        too_few = dataclasses.replace(enough, max_participations=least - 1)
        with pytest.raises(ValueError, match=f"max_participations={least - 1} .* give {least} or"):
            too_few.schema(6500)
        with pytest.raises(ValueError, match=f"give {least} or more"):
            planner.make_plans(too_few, ["identity"])


def test_report_goals_that_cannot_be_kept_up_are_left_out_with_a_reason():
    request = dataclasses.replace(_REQUEST, max_participations=2)
    feasible, left_out = request.schemas()
    assert list(feasible) == [500, 3000]
    assert list(left_out) == [6500, 9_000_000]
    assert "max_participations=2" in left_out[6500]
    assert "population=4000000" in left_out[9_000_000]
    with pytest.raises(ValueError, match="population=10: give .* Of 500, .* at most population=10"):
        planner.make_plans(dataclasses.replace(_REQUEST, population=10))


def test_only_what_can_be_run_is_planned():
    with pytest.raises(ValueError, match="'tree-full' cannot be run"):
        planner.make_plans(_REQUEST, ["tree-full"])
    with pytest.raises(ValueError, match="mechanism must be one of blt"):
        planner.make_plans(_REQUEST, ["magic"])


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


@pytest.mark.pictures
def test_plot_of_plans(tmp_path, plans):
    path = tmp_path / "plans.png"
    planner_plots.save_plans(path, plans, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="Cannot write"):
        planner_plots.save_plans(tmp_path / "missing" / "plans.png", plans, "title")


def test_the_plot_of_plans_has_small_letters(tmp_path, plans, monkeypatch):
    sizes = []

    def write(path, figure, **_):
        (axes,) = figure.axes
        sizes.extend([axes.xaxis.label.get_size(), axes.get_yticklabels()[0].get_size()])

    monkeypatch.setattr(pictures, "write", write)
    planner_plots.save_plans(tmp_path / "plans.png", plans, "title")
    assert sizes == [9, 9]


def test_tree_reference():
    expected = tree.Tree(2000).rms_error(2000) * 7 / 6500
    assert planner.production_noise_in_sum(2000) == expected


def test_impossible_requests():
    with pytest.raises(ValueError, match="no report goal"):
        planner.make_plans(dataclasses.replace(_REQUEST, min_sep=10**6))
