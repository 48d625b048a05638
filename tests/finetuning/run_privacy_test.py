"""Tests of the plan of a run by sampling: what the books are told is what the plan says."""

import json
import math

import pytest

from tff_dpftrl.accounting import facts, mixture_of_gaussians
from tff_dpftrl.finetuning import example_sampling, run_privacy
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.participation import observed
from tff_dpftrl.training import startup

_USERS = example_sampling.of_sizes([3, 8, 20] * 200)


def _made(seed=None, sampling="example", **options):
    noise = {"target_epsilon": 3.0} if not options else options
    plan = plan_lib.make_plan(
        _USERS, sampling=sampling, group_size=4, expected_units=64, num_steps=50, **noise
    )
    return plan.of_run(clip_norm=0.25, deterministic_seed=seed)


@pytest.mark.parametrize("sampling", ["example", "user"])
def test_a_resumed_run_has_the_same_plan(sampling):
    made = _made(sampling=sampling)
    kept = json.loads(json.dumps(made.derived()))
    assert plan_lib.resumed(kept, deterministic_seed=None) == made
    assert made.num_rounds == 50 and made.clients_per_round == 64 and made.clip_norm == 0.25
    assert made.needs_secret_cohorts and made.declared.max_participations == 50


def test_epsilon_is_that_of_the_plan_and_none_where_there_is_none():
    made = _made()
    drawn = made.participation.cyclic
    pair = mixture_of_gaussians.els(made.noise_multiplier, drawn.sampling_probability, 4)
    assert [made.epsilon_after(t) for t in (0, 10, 50)] == [
        mixture_of_gaussians.epsilon(pair, num_steps=t, delta=made.delta) if t else 0.0
        for t in (0, 10, 50)
    ]
    assert made.epsilon_after(10) < made.epsilon_after(50) <= 3.0
    for without in (_made(seed=3), _made(noise_multiplier=0.0)):
        assert without.epsilon_after(50) is None and not without.has_guarantee
    expected = made.noise_multiplier / 64 * math.sqrt(10_000 / 50)
    assert made.noise_to_signal(10_000) == pytest.approx(expected, rel=1e-12)


def test_noise_that_fine_tuning_gained_under_is_not_warned_of():
    # The noisiest runs that were measured, by sampling: 32 users in each of 60 steps.
    users = example_sampling.of_sizes([28] * 8602)

    def warnings(noise_multiplier):
        plan = plan_lib.make_plan(
            users,
            sampling="user",
            group_size=2,
            expected_units=32,
            num_steps=60,
            noise_multiplier=noise_multiplier,
        )
        made = plan.of_run(clip_norm=1.0, deterministic_seed=None)
        lines = startup.describe_plan(made, 361_124, unit="step", swamped=run_privacy.SWAMPED)
        assert any(line.startswith("Noise to signal: ") for line in lines)
        return [line for line in lines if line.startswith("Hint: the recorded runs")]

    assert not warnings(0.7975) and len(warnings(0.9)) == 1


def test_the_statement_charges_what_was_run_or_all():
    made = _made()
    seen = observed.ObservedParticipation(num_rounds=10, min_sep=1, max_participations=10)
    told = facts.Facts({"optimizer": "adam"}, vocabulary_source="x")
    part = made.statement(seen, told, charge_all_rounds=False)
    whole = made.statement(seen, told, charge_all_rounds=True)
    assert part.epsilon == made.epsilon_after(10) < whole.epsilon == made.epsilon_after(50)
    assert made.epsilon_of(seen) == part.epsilon
    for statement, charged in ((part, 10), (whole, 50)):
        assert statement.parameters["num_steps"] == 10
        assert statement.parameters["num_steps_charged"] == charged
        assert statement.parameters["clip_norm"] == 0.25
