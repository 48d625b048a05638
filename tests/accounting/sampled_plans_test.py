"""Plans with secret sampling, against calibration and a noise computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tff_dpftrl.accounting import amplified_banded, cyclic_optimize, dp_fedavg, sampled_plans

_RUN = {"population": 800, "num_rounds": 60, "target_epsilon": 4.0, "delta": 1e-5}


def test_poisson_is_dp_sgd():
    (plan,) = sampled_plans.make_plans("poisson", report_goals=(40, 4000), **_RUN)
    sampled = dp_fedavg.DpFedAvg(0.05, plan.noise_multiplier, 60)
    assert plan.epsilon == sampled.epsilon(1e-5)
    assert 4.0 * (1 - 3e-3) <= plan.epsilon <= 4.0
    # Noise of the t-th prefix sum of averages is z √t / 40.
    rms = math.sqrt(np.mean(np.arange(1, 61)))
    assert plan.noise_in_sum == pytest.approx(plan.noise_multiplier * rms / 40)


@pytest.mark.slow
def test_cyclic_plans_have_one_row_for_each_number_of_bands_that_fits():
    plans = sampled_plans.make_plans("cyclic", report_goals=(40, 200), **_RUN)
    tried = {(plan.report_goal, plan.sampling.num_groups) for plan in plans}
    assert tried >= {(40, 1), (40, 2), (40, 4), (40, 8), (40, 15), (40, 20), (200, 1), (200, 2)}
    assert (200, 4) in tried
    for plan in plans[:3]:
        groups = plan.sampling.num_groups
        assert plan.sampling.sampling_probability == pytest.approx(0.05 * groups)
        again = amplified_banded.AmplifiedBanded.from_strategy(
            plan.strategy,
            noise_multiplier=plan.noise_multiplier,
            num_rounds=60,
            num_groups=groups,
            sampling_probability=plan.sampling.sampling_probability,
        )
        assert plan.epsilon == again.epsilon(1e-5)
        assert 4.0 * (1 - 3e-3) <= plan.epsilon <= 4.0
    # One band is DP-SGD, and the best is never worse.
    (dp_sgd,) = sampled_plans.make_plans("poisson", report_goals=(40,), **_RUN)
    assert plans[0].strategy == dp_sgd.strategy
    assert plans[0].noise_multiplier == pytest.approx(dp_sgd.noise_multiplier, rel=1e-3)
    best = sampled_plans.least_noise(plans)
    assert [plan.report_goal for plan in best] == [40, 200]
    assert best[0].noise_in_sum == min(
        plan.noise_in_sum for plan in plans if plan.report_goal == 40
    )
    assert best[0].noise_in_sum < 0.99 * dp_sgd.noise_in_sum
    assert best[0].to_dict()["sampling_groups"] == best[0].sampling.num_groups
    choice = cyclic_optimize.best_cyclic(60, 800, 40, 4.0, 1e-5)
    assert best[0].noise_multiplier == choice.best.noise_multiplier


def test_bins_are_as_many_as_give_the_clients_of_a_round():
    run = {**_RUN, "num_rounds": 12, "population": 160}
    (plan,) = sampled_plans.make_plans("bins", report_goals=(40,), **run)
    assert plan.sampling.num_bins == 4 and plan.strategy.mechanism == "blt"
    assert 4.0 * (1 - 3e-3) <= plan.epsilon <= 4.0


def test_rounds_of_b_min_sep_expect_as_many_clients():
    run = {**_RUN, "num_rounds": 40}
    plans = sampled_plans.make_plans("b-min-sep", report_goals=(200,), **run)
    assert len(plans) == 3
    for plan in plans:
        assert 4.0 * (1 - 3e-3) <= plan.epsilon <= 4.0
        # A client who has come waits for min_sep - 1 rounds: shares of the stationary state.
        q, b = plan.sampling.sampling_probability, plan.sampling.min_sep
        assert q / (1 + (b - 1) * q) == pytest.approx(0.25)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"report_goals": (801,)}, "at most population=800, got 801"),
        ({"delta": 1.0}, "delta"),
        ({"target_epsilon": 0.0}, "target_epsilon"),
    ],
)
def test_bad_input(wrong, message):
    with pytest.raises(ValueError, match=message):
        sampled_plans.make_plans("poisson", **{"report_goals": (40,), **_RUN, **wrong})
