"""Tests of when a run ends, and what is said then."""

import dataclasses

import pytest

from tff_dpftrl.runs import privacy, stopping

_ASKED = privacy.DpFtrl(
    mechanism="identity",
    noise_multiplier=5.0,
    num_rounds=10,
    clients_per_round=5,
    clip_norm=0.5,
    delta=1e-6,
    min_sep=2,
)
_PLAN = _ASKED.plan(40, 100)


def _reason(rounds_done, rows=(), **options):
    schedule = stopping.Schedule("round", eval_every=10, **options)
    return schedule.reason_to_end(_PLAN, rows, rounds_done)


def test_all_rounds_are_a_reason():
    assert _reason(9) is None
    assert _reason(10) == "All 10 rounds are done."


def test_a_budget_is_a_reason_with_its_numbers():
    # A user takes part in every second round.
    budget = (_PLAN.epsilon_after(4) + _PLAN.epsilon_after(5)) / 2
    assert _reason(3, max_epsilon=budget) is None
    reason = _reason(4, max_epsilon=budget)
    assert reason.startswith("Stopped after 4 of 10 rounds: the next one would bring ε to")
    assert f"max_epsilon={budget:g}" in reason


def test_the_best_accuracy_is_a_reason():
    rows = [{stopping.ACCURACY: 0.25}, {stopping.ACCURACY: None}, {stopping.ACCURACY: 0.2}]
    assert stopping.best_accuracy(rows) == 0.25 and stopping.best_accuracy(rows[1:2]) is None
    assert _reason(3, rows, stop_at_accuracy=0.26) is None
    reason = _reason(3, rows, stop_at_accuracy=0.25)
    assert "reached 25.00%" in reason and "stop_at_accuracy is 25.00%" in reason
    assert _reason(3, stop_at_accuracy=0.25) is None


def test_a_budget_that_does_not_pay_for_a_round_is_refused():
    cost = _PLAN.epsilon_after(1)
    stopping.Schedule("round", 10, max_epsilon=cost).check_budget(_PLAN)
    too_little = stopping.Schedule("step", 10, max_epsilon=cost / 2)
    with pytest.raises(ValueError, match="does not pay for one step, which costs .*: raise it or"):
        too_little.check_budget(_PLAN)
    with pytest.raises(ValueError, match="does not pay for one step: raise it\\."):
        too_little.check_budget(_PLAN, show_cost=False)


def test_a_budget_that_pays_for_one_round_and_no_more_is_taken():
    plan = dataclasses.replace(_ASKED, min_sep=1).plan(40, 100)
    assert plan.epsilon_after(2) > plan.epsilon_after(1)
    stopping.Schedule("round", 10, max_epsilon=plan.epsilon_after(1)).check_budget(plan)
