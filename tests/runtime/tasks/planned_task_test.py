"""Tasks as a server has them: sums, steps and commits."""

import dataclasses
import pickle

import numpy as np
import pytest
import tree

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder
from tff_dpftrl.execution import compiled_process
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.actors import population as population_lib
from tff_dpftrl.runtime.plans import plan_pb2, rounded_updates, server_work, tensor_values
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.tasks import (
    planned_task,
    summations,
    task_privacy,
    task_report,
    task_state,
)
from verification import memory_store

_PROCESS = small_tasks.ROUNDS["blt"]


@pytest.fixture(scope="module")
def task():
    return planned_task.PlannedTask(small_folder.folder_of(_PROCESS()))


@pytest.fixture(scope="module")
def device(task):
    return small_folder.device_of(task)


@pytest.fixture
def rounds(task):
    return small_folder.Rounds(task, memory_store.MemoryStore())


def _reports(device, rounds, **participation):
    model, examples = rounds.commit.model, small_folder.cohort(rounds.commit.rounds_done)
    return [small_folder.report(device, model, own, **participation) for own in examples]


def _weights(task, commit):
    state = task_state.TaskState.from_bytes(commit.state, task.folder.terms.digest())
    return tensor_values.from_bytes(state.tensors, task.folder.server.prepare.inputs)


@pytest.fixture(name="rounding", scope="module")
def _rounding(task):
    """The sums of the same task, if its plan let devices round."""
    server = plan_pb2.ServerPlan()
    server.CopyFrom(task.folder.server)
    server.rounded.extend(rounded_updates.places_in(server.report_bounds, server.update))
    return summations.PlanSummation(server_work.ServerWork(server), 3)


def _rounded(report, plan, times=1.0):
    """The report as a device sends it that rounds, and its update as the server reads it."""
    update = tensor_values.from_bytes(report.update, plan.update)
    sent, scales = rounded_updates.rounded(update, plan.rounded)
    made = wire_pb2.Report()
    made.CopyFrom(report)
    made.update, made.scales[:] = tensor_values.to_bytes(sent), [times * s for s in scales]
    return made, rounded_updates.read(made.update, made.scales, plan)


def test_rounded_reports_are_added_as_they_are_read(device, rounds, rounding):
    plan = rounding._work.plan
    report, exact = _reports(device, rounds)[0], tensor_values.from_bytes
    sent, read = _rounded(report, plan)
    for whole in (False, True):  # A device of the older protocol does not round.
        total = rounding.accumulate(rounding.zero(), report if whole else sent)
        expected = exact(report.update, plan.update) if whole else read
        for mine, wanted in zip(total.sums, expected, strict=True):
            np.testing.assert_array_equal(mine, wanted)
    assert len(plan.rounded) > 0
    for place in plan.rounded:
        unrounded = exact(report.update, plan.update)[place]
        assert 0 < np.linalg.norm(read[place]) <= np.linalg.norm(unrounded)


def test_a_rounded_report_that_is_longer_than_the_clip_norm_is_refused(device, rounds, rounding):
    total = rounding.zero()
    longer, _ = _rounded(_reports(device, rounds)[0], rounding._work.plan, times=1e4)
    with pytest.raises(population_lib.UnusableReport, match="not clipped to the norm"):
        rounding.accumulate(total, longer)
    longer.scales[0] = np.nan
    with pytest.raises(population_lib.UnusableReport, match="is not finite: its scale is nan"):
        rounding.accumulate(total, longer)
    assert not any(np.any(tensor) for tensor in total.sums)


def test_rounds_go_on_from_what_was_committed(task, device, rounds):
    models = {rounds.commit.model}
    for stride, times in ((None, 1), (None, 1), (2, 2)):
        commit = rounds.run(_reports(device, rounds, stride=stride, times=times))
        models.add(commit.model)
        assert commit == rounds.store.last_commit("tests", "small")
    assert len(models) == 4
    observed = task.observed(commit)
    assert (observed.num_rounds, observed.min_sep, observed.max_participations) == (3, 2, 2)
    found = commit.metrics
    assert found["client_work/train/mse"] > 0
    assert found["participation/min_sep"] == 2
    assert found["privacy/epsilon"] == task.privacy(commit).epsilon > 0
    assert rounds.store.history("tests", "small")[2]["privacy/delta"] == 1e-5


def test_a_skipped_round_is_counted_and_charged(task, device, rounds):
    step, before = task.served.task.server_step, rounds.run(_reports(device, rounds))
    skipped = step.skip(before.model, before.state)
    assert skipped.model == before.model
    assert skipped.metrics[population_lib.SKIPPED] is True
    commit = dataclasses.replace(before, rounds_done=2, state=skipped.state)
    seen = task.observed(commit)
    assert (seen.num_rounds, seen.skipped_rounds, seen.max_participations) == (2, 1, 1)
    assert task.privacy(commit).epsilon == skipped.metrics["privacy/epsilon"]
    statement = task_privacy.TaskPrivacy(task.folder.terms).statement(seen)
    assert statement.parameters["num_rounds_skipped"] == 1
    assert statement.parameters["num_rounds_done"] == 2
    with pytest.raises(ValueError, match="has released no round"):
        first = participation_histograms.ObservedRounds().with_skipped_round()
        task_privacy.TaskPrivacy(task.folder.terms).statement(first)


def test_a_step_that_is_repeated_gives_equal_bytes(task, device, rounds):
    step, summation = task.served.task.server_step, task.served.task.summation
    reports = _reports(device, rounds)
    total = summation.zero()
    for report in reports:
        total = summation.accumulate(total, report)
    travelled = pickle.loads(pickle.dumps(total))  # A step empties the total that it is given.
    first = step.apply(total, 3, rounds.commit.model, rounds.commit.state)
    again = planned_task.PlannedTask(task.folder).served.task.server_step
    assert again.apply(travelled, 3, rounds.commit.model, rounds.commit.state) == first
    assert first.model != rounds.commit.model


@pytest.mark.slow  # `building_test` draws seeds of the same plan.
def test_the_seed_of_the_noise_is_drawn_anew_for_every_store():
    # The process of these tests has a seed for debugging; the process of `fresh` has none.
    process = small_tasks.federated_averaging(small_tasks.fixed(0.5, deterministic_seed=None))
    fresh = planned_task.PlannedTask(small_folder.folder_of(process))
    commits = [fresh.add_to(memory_store.MemoryStore()) for _ in range(2)]
    assert commits[0].state != commits[1].state
    assert commits[0].model == commits[1].model


def test_merged_sums_are_those_of_all_reports(task, device, rounds):
    summation = task.served.task.summation
    one, two, three = _reports(device, rounds)
    total = summation.accumulate(summation.accumulate(summation.zero(), one), two)
    total = summation.merge(summation.zero(), summation.merge(total, summation.zero()))
    total = summation.merge(total, summation.accumulate(summation.zero(), three))
    together = summation.zero()
    for report in (one, two, three):
        together = summation.accumulate(together, report)
    for found, expected in zip(total.sums, together.sums, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert total.strides.tolist() == together.strides.tolist() == [3, 0, 0, 0, 0, 0, 0]
    assert total.times.tolist() == together.times.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"update": b"\xff"}, "update cannot be read"),
        ({"update": b""}, "update must have"),
        ({"strides": [2, 0, 0, 0, 0, 0, 0], "times": [2, 0, 0]}, "one-hot"),
        ({"strides": [], "times": [1, 0, 0]}, "strides must be integers of shape"),
        ({"strides": [1, 0, 0, 0, 0, 0, 0], "times": [0, 1, 0]}, "contradict"),
        ({"strides": [0, 1, 0, 0, 0, 0, 0], "times": [0, 1, 0]}, "not rested"),
    ],
)
def test_unusable_reports_change_nothing(task, device, rounds, change, message):
    summation = task.served.task.summation
    good, *_ = _reports(device, rounds)
    total = summation.accumulate(summation.zero(), good)
    before = pickle.dumps(total)
    bad = type(good)()
    bad.CopyFrom(good)
    for name, value in change.items():
        bad.ClearField(name)
        bad.MergeFrom(type(good)(**{name: value}))
    with pytest.raises(population_lib.UnusableReport, match=message):
        summation.accumulate(total, bad)
    assert pickle.dumps(total) == before


def test_an_update_that_is_not_finite_is_unusable(task, device, rounds):
    good, *_ = _reports(device, rounds)
    update = tensor_values.from_bytes(good.update, task.folder.server.update)
    spoilt = [array.copy() for array in update]
    next(array for array in spoilt if array.dtype.kind == "f" and array.ndim)[...] = np.nan
    good.update = tensor_values.to_bytes(spoilt)
    summation = task.served.task.summation
    with pytest.raises(population_lib.UnusableReport, match="not finite"):
        summation.accumulate(summation.zero(), good)


@pytest.mark.parametrize("size", [1.001, 1e15, 1e300])
def test_an_update_that_is_not_clipped_is_unusable(task, device, rounds, size):
    good, *_ = _reports(device, rounds)
    update = tensor_values.from_bytes(good.update, task.folder.server.update)
    summed = next(i for i, array in enumerate(update) if array.dtype == np.float64)
    update[summed] = np.eye(*update[summed].shape) * size
    good.update = tensor_values.to_bytes(update)
    summation = task.served.task.summation
    with pytest.raises(population_lib.UnusableReport, match="not clipped to the norm 1"):
        summation.accumulate(summation.zero(), good)


def test_where_the_clip_norm_is_learned_the_bound_is_that_of_the_round():
    process = small_tasks.ROUNDS["adaptive"]()
    learned = planned_task.PlannedTask(small_folder.folder_of(process))
    rounds = small_folder.Rounds(learned, memory_store.MemoryStore())
    report = _reports(small_folder.device_of(learned), rounds)[0]
    update = tensor_values.from_bytes(report.update, learned.folder.server.update)
    (first, *_) = learned.folder.server.report_bounds[0].tensors
    broadcast = learned.folder.server.prepare.outputs
    model = tensor_values.from_bytes(rounds.commit.model, broadcast)
    active = [tensor.label for tensor in broadcast].index("aggregator/seen/active")
    for clip_norm in (1e-6, 0.5, 7.0, 1e18):
        model[active] = np.float32(clip_norm)
        summation = learned.served.task.summation.for_round(tensor_values.to_bytes(model))
        for size, is_usable in ((1.0, True), (1.001, False)):
            for place in learned.folder.server.report_bounds[0].tensors:
                update[place] = np.zeros_like(update[place])
            update[first] = np.zeros_like(update[first])
            update[first].flat[0] = size * float(np.float32(clip_norm))
            report.update = tensor_values.to_bytes(update)
            if is_usable:
                summation.accumulate(summation.zero(), report)
                continue
            with pytest.raises(population_lib.UnusableReport, match="not clipped to the norm"):
                summation.accumulate(summation.zero(), report)


def test_a_plan_of_an_older_version_has_no_bounds_and_is_refused():
    folder = small_folder.folder_of(_PROCESS())
    del folder.server.report_bounds[:]
    with pytest.raises(ValueError, match=r"does not bound every tensor.*Make the task anew"):
        planned_task.PlannedTask(folder)


def test_histograms_of_nobody_make_the_round_unknown(task, device, rounds):
    rounds.run(_reports(device, rounds))
    commit = rounds.run(_reports(device, rounds), num_reports=4)
    observed = task.observed(commit)
    assert observed == participation_histograms.ObservedRounds(2, None, 1, unknown_rounds=1)
    assert commit.metrics["participation/unknown_rounds"] == 1


def test_the_largest_report_fits(task, device, rounds):
    reports = _reports(device, rounds)
    sizes = [report.ByteSize() for report in reports]
    assert max(sizes) <= task.served.largest_report_bytes < max(sizes) + 10_000


def test_each_version_of_devices_gets_its_plan(task):
    assert task.served.plan_for(1) == task.folder.signed.devices[0].SerializeToString()
    assert task.served.plan_for(7) == task.served.plan_for(1)
    assert task.served.plan_for(0) is None


def test_settings_are_those_of_the_task(task):
    served = task.served.task
    assert (served.name, served.num_rounds, served.model_of) == ("small", 6, None)
    assert (served.rounds.goal_count, served.rounds.wanted) == (3, 4)


def test_a_store_that_was_begun_with_other_plans_is_refused(task, rounds):
    other = planned_task.PlannedTask(small_folder.folder_of(small_tasks.ROUNDS["adaptive"]()))
    with pytest.raises(task_state.StateError, match="give the new one another"):
        other.add_to(rounds.store)
    generous = dataclasses.replace(task.folder.terms, max_epsilon=1e6)
    changed = planned_task.PlannedTask(dataclasses.replace(task.folder, terms=generous))
    with pytest.raises(task_state.StateError, match="other terms or plans"):
        changed.add_to(rounds.store)
    assert task.add_to(rounds.store) == rounds.commit
    with pytest.raises(task_state.StateError, match="not that of a task"):
        task.observed(dataclasses.replace(rounds.commit, state=b"other"))


def test_an_evaluation_shows_metrics_of_the_model_of_another_task(task, rounds, tmp_path):
    terms = small_folder.evaluation_of(small_folder.TERMS)
    folder = small_folder.folder_of(
        small_tasks.evaluation(),
        terms=terms,
        task="watch",
        kind=plan_pb2.EVALUATION,
        broadcast=task.folder.server.prepare.outputs,
    )
    evaluation = planned_task.PlannedTask(folder)
    assert evaluation.served.task.model_of == "small" and not folder.repeats_noise
    watched = small_folder.Rounds(evaluation, rounds.store)
    assert watched.commit.model == b""
    device = small_folder.device_of(evaluation)
    before = _weights(evaluation, watched.commit)
    losses = []
    for index in range(2):
        reports = [
            small_folder.report(device, rounds.commit.model, small_folder.examples(index, 5))
        ]
        commit = watched.run(reports)
        assert commit.model == b""
        assert small_folder.same(_weights(evaluation, commit), before)
        assert not any("total_rounds" in label for label in commit.metrics)
        losses.append(commit.metrics["client_work/eval/current_round_metrics/mse"])
    assert losses[0] > 0 and losses[0] != losses[1]
    assert evaluation.privacy(commit).epsilon is None
    assert evaluation.refusal(commit) is None
    # Plans of earlier versions and of other models have no cache.
    summary = task_report.write(folder, rounds.store, tmp_path).summary
    assert "2 rounds evaluated small" in summary and "cache" not in summary


def test_a_budget_ends_the_task_before_it_is_exceeded(task):
    unlimited = task_privacy.TaskPrivacy(small_folder.TERMS)
    seen = participation_histograms.ObservedRounds(2, 2, 2)
    budget = 1.001 * unlimited.so_far(seen).epsilon
    terms = dataclasses.replace(small_folder.TERMS, max_epsilon=budget)
    limited = planned_task.PlannedTask(small_folder.folder_of(_PROCESS(), terms=terms))
    device = small_folder.device_of(limited)
    rounds = small_folder.Rounds(limited, memory_store.MemoryStore())
    while not limited.served.task.is_over(rounds.commit):
        times = rounds.commit.rounds_done + 1
        stride = None if times == 1 else 2
        rounds.run(_reports(device, rounds, stride=stride, times=times))
    assert rounds.commit.rounds_done == 2
    assert limited.privacy(rounds.commit).epsilon <= budget
    assert "round 3 would bring ε to" in limited.refusal(rounds.commit)


def _assert_ten_rounds_are_those_of(name, process, simulation):
    num_rounds = 8 if name == "tree" else 10  # As many as its tree has.
    schema = dataclasses.replace(small_folder.SCHEMA, num_rounds=10)
    terms = dataclasses.replace(
        small_folder.TERMS, schema=schema, adaptive_clipping=name == "adaptive"
    )
    task = planned_task.PlannedTask(small_folder.folder_of(process, terms=terms))
    device = small_folder.device_of(task)
    rounds = small_folder.Rounds(task, memory_store.MemoryStore())
    reference = simulation.initialize()
    for index in range(num_rounds):
        rounds.run(_reports(device, rounds))
        datasets = [small_tasks.dataset(10 * index + device, device) for device in (1, 0, 5)]
        reference = simulation.next(reference, datasets).state
        for found, expected in zip(
            _weights(task, rounds.commit), tree.flatten(reference), strict=True
        ):
            np.testing.assert_allclose(found, np.asarray(expected), rtol=0, atol=1e-6)


@pytest.mark.slow  # By default, `wire_parity_test` compares rounds over the wire.
@pytest.mark.parametrize("name", ["blt", "tree", "adaptive"])
def test_ten_rounds_are_those_of_the_simulation(name):
    process = small_tasks.ROUNDS[name]()
    simulation = compiled_process.CompiledProcess(process)
    _assert_ten_rounds_are_those_of(name, process, simulation)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blt", "tree", "adaptive"])
def test_ten_rounds_are_those_of_tff(name):
    pytest.importorskip("tensorflow_federated", reason="makes tasks of TFF's processes")
    from tests.runtime.plans import tff_tasks
    from tff_dpftrl.execution import contexts

    with contexts.local():
        process = tff_tasks.PROCESSES[name]()
        _assert_ten_rounds_are_those_of(name, process, process)
