"""Tests of the sums of reports, and of sums that groups of devices have computed securely."""

import contextlib
import copy
import pickle

import numpy as np
import pytest
import tree

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder
from tff_dpftrl.execution import compiled_process
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.plans import allowed_ops, plan_pb2, tensor_values
from tff_dpftrl.runtime.tasks import planned_task, task_state
from tff_dpftrl.secure_sums import group, vectors
from verification import memory_store

_ALL_PHASES = (
    group.Phase.ADVERTISING,
    group.Phase.SHARING,
    group.Phase.MASKING,
    group.Phase.REVEALING,
)


def _folder(process):
    return small_folder.folder_of(
        process,
        terms=small_folder.SECURE_TERMS,
        secure_aggregation=small_tasks.SECURE_AGGREGATION,
    )


@pytest.fixture(scope="module")
def process():
    return small_tasks.SECURE_ONLY_ROUNDS["secagg"]()


@pytest.fixture(scope="module")
def task(process):
    return planned_task.PlannedTask(_folder(process))


@pytest.fixture
def rounds(task):
    return small_folder.Rounds(task, memory_store.MemoryStore())


def _reports(task, commit, num_devices=3):
    device = small_folder.device_of(task)
    return [
        small_folder.secure_report_of(device, commit.model, small_folder.examples(index, index + 1))
        for index in range(num_devices)
    ]


def _plain_sum(task, reports):
    layout = task.served.task.secure_sum.layout
    total = vectors.zeros(layout)
    for report in reports:
        vectors.add(total, report, layout)
    return total


def test_the_settings_are_those_of_plan_and_options(task):
    demanded, rounds = task.served.task.secure_sum, task.served.task.rounds
    assert (demanded.least_devices, demanded.most_devices, demanded.noised_plans) == (2, 8, b"")
    assert rounds.secure_step_timeout == small_folder.CONFIG.sums.secure_step_timeout
    assert (rounds.secure_threshold, demanded.least_neighbours) == (None, None)
    layout = demanded.layout
    assert task.served.largest_report_bytes == vectors.packed_bytes(layout)
    assert [segment.size for segment in layout] == [1, 7, 3, 1, 1, 1, 4]


def test_devices_that_would_send_their_reports_as_they_are_get_no_plan(task):
    assert task.served.plan_for(allowed_ops.SECURE_AGGREGATION_SINCE - 1) is None


def test_no_report_is_taken_but_in_a_sum(task):
    summation = task.served.task.summation
    with pytest.raises(population.UnusableReport, match="summed by their devices"):
        summation.accumulate(summation.zero(), b"anything")


def test_sums_of_groups_are_added_modulo_and_travel(task, rounds):
    summation, reports = task.served.task.summation, _reports(task, rounds.commit, 5)
    sums = [_plain_sum(task, part) for part in (reports[:2], reports[2:])]
    groups = [
        pickle.loads(pickle.dumps(summation.decode_group(vector, num_devices)))
        for vector, num_devices in zip(sums, (2, 3), strict=True)
    ]
    total = summation.merge(summation.merge(summation.zero(), groups[0]), groups[1])
    _, strides, times, *expected = _plain_sum(task, reports)
    for found, wanted in zip(total.sums, expected, strict=True):
        np.testing.assert_array_equal(np.ravel(found), wanted)
    np.testing.assert_array_equal(total.strides, strides)
    np.testing.assert_array_equal(total.times, times)
    assert total.strides.sum() == 5


def test_a_tree_of_merges_has_the_same_sum_to_the_bit(task, rounds):
    summation, reports = task.served.task.summation, _reports(task, rounds.commit, 8)

    def groups():
        for i in range(0, 8, 2):
            yield summation.decode_group(_plain_sum(task, reports[i : i + 2]), 2)

    chain = summation.zero()
    for one in groups():
        chain = summation.merge(chain, one)
    first, second, third, fourth = groups()
    pairs = summation.merge(third, fourth), summation.merge(first, second)
    for found, wanted in zip(summation.merge(*pairs).sums, chain.sums, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_sum_with_a_wrong_count_is_not_decoded(task, rounds):
    vector = _plain_sum(task, _reports(task, rounds.commit, 2))
    with pytest.raises(population.UnusableReport, match="counts 2 devices, and 3 are in it"):
        task.served.task.summation.decode_group(vector, 3)


def test_no_more_devices_are_summed_than_there_is_room_for(task, rounds):
    total = task.served.task.summation.zero()
    with pytest.raises(ValueError, match="of 9 devices: it has room for 8"):
        rounds.step(total, 9)


@pytest.mark.parametrize("lie", [[1, 2], [1, 1, 1], [-1, 1]])
def test_a_device_that_hides_others_in_the_histograms_loses_its_group(task, rounds, lie):
    reports = _reports(task, rounds.commit)
    strides = reports[0][1]
    strides[: len(lie)] = np.array(lie).astype(strides.dtype)
    with pytest.raises(population.UnusableReport, match="are not those of 3 devices"):
        task.served.task.summation.decode_group(_plain_sum(task, reports), 3)


@pytest.mark.slow
def test_an_evaluation_is_summed_securely_too(task, rounds):
    folder = small_folder.folder_of(
        small_tasks.secure_evaluation(),
        terms=small_folder.evaluation_of(small_folder.SECURE_TERMS),
        task="watch",
        kind=plan_pb2.EVALUATION,
        broadcast=task.folder.server.prepare.outputs,
        secure_aggregation=small_tasks.SECURE_AGGREGATION,
    )
    watched = small_folder.Rounds(planned_task.PlannedTask(folder), rounds.store)
    reports = _reports(watched.task, rounds.commit)
    commit = watched.run_groups([(_plain_sum(watched.task, reports), 3)])
    loss = commit.metrics["client_work/eval/current_round_metrics/mse"]
    y = np.concatenate([small_tasks.rows(index, index + 1)[1] for index in range(3)])
    np.testing.assert_allclose(loss, np.mean(y**2), rtol=1e-5)  # The model is zero.


def _leaves(task, commit):
    state = task_state.TaskState.from_bytes(commit.state, task.folder.terms.digest())
    return tensor_values.from_bytes(state.tensors, task.folder.server.prepare.inputs)


def _assert_rounds_are_those_of(task, simulation, num_rounds):
    """Rounds of two groups, of each of which a device drops out, in another phase each time."""
    rounds = small_folder.Rounds(task, memory_store.MemoryStore())
    device = small_folder.device_of(task)
    reference = simulation.initialize()
    for index in range(num_rounds):
        sums, in_sums, reports = [], [], {}
        for number in range(2):
            seeds = [100 * index + 10 * number + place for place in range(4)]
            own = [
                small_folder.secure_report_of(
                    device, rounds.commit.model, small_folder.examples(seed, seed % 10 % 4 + 1)
                )
                for seed in seeds
            ]
            reports |= dict(zip(seeds, copy.deepcopy(own), strict=True))
            phase = _ALL_PHASES[(index + number) % len(_ALL_PHASES)]
            survivors, total = small_folder.run_group(task, own, {phase: {index % 4}})
            assert len(survivors) == (4 if phase is group.Phase.REVEALING else 3)
            in_sums += [seeds[place] for place in survivors]
            sums.append((total, len(survivors)))
        total = _plain_sum(task, [vector for vector, _ in sums])
        for found, wanted in zip(
            total, _plain_sum(task, [reports[seed] for seed in in_sums]), strict=True
        ):
            np.testing.assert_array_equal(found, wanted)
        rounds.run_groups(sums)
        datasets = [small_tasks.dataset(seed, seed % 10 % 4 + 1) for seed in in_sums]
        output = simulation.next(reference, datasets)
        reference = output.state
        for found, expected in zip(
            _leaves(task, rounds.commit), tree.flatten(reference), strict=True
        ):
            np.testing.assert_array_equal(found, np.asarray(expected))
        for path, expected in tree.flatten_with_path(output.metrics):
            assert rounds.commit.metrics["/".join(map(str, path))] == expected.tolist()


def test_rounds_with_drop_outs_are_those_of_the_simulation_integer_for_integer(process, task):
    _assert_rounds_are_those_of(task, compiled_process.CompiledProcess(process), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", small_tasks.SECURE_ONLY_ROUNDS)
def test_ten_rounds_with_drop_outs_are_those_of_tff(name):
    pytest.importorskip("tensorflow_federated", reason="makes tasks of TFF's processes")
    from tests.runtime.plans import tff_tasks
    from tff_dpftrl.execution import compiled_process, contexts

    with contexts.compiled_only():
        process = tff_tasks.SECURE_ONLY_PROCESSES[name]()
        task = planned_task.PlannedTask(_folder(process))
        # TFF's worker rounds the last bit of an update otherwise, which draws all roundings anew.
        compiled = compiled_process.compile_process(process)
    with contextlib.closing(compiled):
        _assert_rounds_are_those_of(task, compiled, 10)
