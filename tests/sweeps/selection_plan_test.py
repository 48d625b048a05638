"""Tests of tff_dpftrl.sweeps.selection_plan."""

import functools

import pytest

from tff_dpftrl import validation
from tff_dpftrl.accounting import gaussian, selection
from tff_dpftrl.runs import manifest
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import selection_plan

_RUNS = selection.NumRuns(4, 20)
_USERS = 50


@functools.cache
def _plan(asked):
    return asked.plan(_USERS, num_parameters=1)


def _planned(**axes):
    options = {"clients_per_round": 5, "num_rounds": 20, "delta": 1e-4}
    cells = cells_lib.grid(options, {name: tuple(values) for name, values in axes.items()})
    configs = [cell.config for cell in cells]
    return configs, selection_plan.planned(configs, _RUNS, lambda config: _plan(config.request()))


def _epsilon(config, delta, at):
    spent = _plan(config.changed(delta=at).request())
    return spent.at_delta(delta).epsilon_after(spent.num_rounds)


def test_runs_of_one_target_keep_both_promises_and_waste_little():
    configs, (found, _, _) = _planned(
        mechanism=["tree"], clip_norm=[0.1, 1.0], min_sep=[5, 10], target_epsilon=[3.0]
    )
    assert 3.0 * (1 - 1e-6) < found.epsilon <= 3.0
    wanted = selection.targets(3.0, 1e-4, _RUNS)
    assert found.run_delta == wanted.tail[1]
    assert found.run_targets == [wanted.tail[0]] * 4  # The noise of each is another one.
    for config, target in zip(configs, found.run_targets, strict=True):
        run = config.changed(target_epsilon=target)
        assert wanted.are_met_by(lambda d, run=run: _epsilon(run, d, found.run_delta))
    deltas = [delta for _, delta in found.profile]
    assert all(1e-4 < delta < 1 for delta in deltas) and len(deltas) == 5
    assert max(epsilon for epsilon, _ in found.profile) < found.epsilon


def test_the_cost_of_each_part_is_that_of_the_plan_at_the_delta_of_the_choice():
    (config,), (found, _, _) = _planned(
        mechanism=["tree"], min_sep=[5], vocabulary=["dp"], target_epsilon=[3.0]
    )
    run = config.changed(target_epsilon=found.run_targets[0], delta=found.run_delta)
    plan = _plan(run.request())
    ((weights, words),) = found.run_costs
    assert weights["rho_zcdp"] == plan.rounds.mu**2 / 2
    assert weights["epsilon_alone"] == gaussian.epsilon(plan.rounds.mu, 1e-4)
    assert words["name"] == "vocabulary" and words["rho_zcdp"] == plan.others[0].rho_zcdp


def test_sampled_runs_get_a_target_with_which_they_keep_both():
    (config,), (found, _, _) = _planned(algorithm=["dp-fedavg"], target_epsilon=[2.0])
    assert found.epsilon <= 2.0
    wanted = selection.targets(2.0, 1e-4, _RUNS)
    run = config.changed(target_epsilon=found.run_targets[0])
    assert wanted.are_met_by(lambda d: _epsilon(run, d, found.run_delta))
    assert wanted.tail[0] / 2 < found.run_targets[0] <= wanted.tail[0]


def test_a_given_noise_is_accounted_for_by_the_worst_cell():
    _, (found, _, _) = _planned(mechanism=["identity"], noise_multiplier=[2.0, 4.0], min_sep=[20])
    assert found.run_targets == [None, None]
    # Everybody takes part once, so that μ = 1/2.
    worst = selection.account([lambda delta: gaussian.epsilon(0.5, delta)], _RUNS, 1e-4)
    assert found.epsilon == pytest.approx(worst.epsilon, rel=1e-4)


@pytest.mark.parametrize("noise, is_refused", [(2.0, False), (1.9, True)])
def test_a_run_of_less_noise_than_planned_is_found_by_its_manifest(tmp_path, noise, is_refused):
    (config,), (found, _, _) = _planned(mechanism=["tree"], min_sep=[5], noise_multiplier=[2.0])
    ratio = (found.epsilon - found.run_epsilon) / 2.0
    promises = [
        (found.run_epsilon * selection_plan.SLACK, found.run_delta),
        (ratio * selection_plan.SLACK, _RUNS.delta_of_ratio(ratio)),
    ]
    record = tmp_path / "private" / "selection.json"
    folder = record.parent / "cells" / "run=0"
    (folder / "private").mkdir(parents=True)
    record.write_text("{}")
    config = config.changed(noise_multiplier=noise, delta=found.run_delta)
    facts = {"training_users": _USERS, "num_parameters": 1}
    known = manifest.Manifest(config.to_dict(), _plan(config.request()).derived(), facts, {})
    known.bound_to_choice(folder).keep(folder)
    answer = selection_plan._check_runs("training", [str(folder)], promises)
    assert bool(answer) == is_refused
    assert not is_refused or "costs more than the choice was planned for" in answer["error"]
    record.write_text("{ }")
    answer = selection_plan._check_runs("training", [str(folder)], promises)
    assert "do not belong together" in answer["error"]


def test_the_first_cell_that_cannot_be_run_is_named():
    _, (found, index, why) = _planned(
        mechanism=["identity"], noise_multiplier=[2.0], clients_per_round=[5, 60]
    )
    assert found is None and index == 1 and "exceeds the 50 training users" in why


def test_an_error_of_the_process_is_one_of_the_cell(monkeypatch):
    cells = cells_lib.grid({"noise_multiplier": 1.0}, {"clip_norm": (1.0, 2.0)})
    for index, message in ((1, "The cell clip_norm=2: no"), (None, "^no")):
        answer = {"cell": index, "error": "no"}
        monkeypatch.setattr(selection_plan, "ask", lambda module, request, a=answer: a)
        with pytest.raises(validation.UsageError, match=message):
            selection_plan.plan(cells, _RUNS, "public.jsonl")
