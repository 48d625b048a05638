"""Rounds with devices over gRPC and TLS are those of the simulation: weights within 1e-6."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time

import numpy as np
import pytest
import tree

from tests.runtime.device import secure_rounds
from tests.runtime.fleet import server_thread
from tests.runtime.plans import small_tasks
from tests.runtime.server import example_service
from tests.runtime.tasks import small_folder
from tff_dpftrl.execution import compiled_process
from tff_dpftrl.runtime.actors import events, population
from tff_dpftrl.runtime.device import (
    attester,
    device_runtime,
    eligibility,
    loaded_plans,
    participation_timer,
    server_connection,
)
from tff_dpftrl.runtime.plans import rounded_updates, server_work, tensor_values
from tff_dpftrl.runtime.server import server
from tff_dpftrl.runtime.tasks import planned_task, task_state
from verification import memory_store


def _cohort(round_index):
    """Seed and number of examples of each device."""
    return [(10 * round_index + i, count) for i, count in enumerate((1, 0, 5))]


def _make_server(folder, task, store, notes, max_fan_in=2):
    rounds = population.RoundSettings(
        goal_count=3, over_selection=1.0, least_fraction=1.0, selection_timeout=60.0,
        reporting_timeout=60.0, exchange_timeout=30.0, devices_per_aggregator=1,
        max_fan_in=max_fan_in,
    )  # fmt: skip
    member = dataclasses.replace(task.served.task, rounds=rounds)
    served = dataclasses.replace(task.served, task=member)
    return server.Server.of(
        population.Population(
            "tests", (member,), heartbeat_seconds=0.2, silence_seconds=30, lease_seconds=60
        ),
        {"small": served},
        store,
        endpoint=example_service.endpoint(folder),
        pace=lambda now, randomness: (1.0,),
        observer=notes,
    )


def _run_round(folder, address, cohort, notes):
    """Runs a round of these devices, until the Coordinator has heard of its commit."""
    done = len(notes.of(events.RoundReleased))
    roots = (folder / "server.pem").read_bytes()
    plans = loaded_plans.LoadedPlans(small_tasks.KEYS, max_running=2)
    connection = server_connection.ServerConnection(address, roots)

    def take_part(seed, count):
        own = device_runtime.DeviceRuntime(
            connection,
            plans,
            secure_rounds.Numbers(seed, count),
            participation_timer.MemoryTimer(time.time),
            attester.NoAttester(),
            eligibility.SettableEligibility(),
        )
        return own.run_session("tests").result

    with concurrent.futures.ThreadPoolExecutor(len(cohort)) as threads:
        results = list(threads.map(take_part, *zip(*cohort, strict=True)))
    connection.close()
    assert [result.report.shape for result in results] == ["-v[]+^"] * len(cohort), results
    secure_rounds.until(lambda: len(notes.of(events.RoundReleased)) > done)


@pytest.mark.parametrize(
    ("name", "max_fan_in"),
    [
        ("blt", 2),  # Three Aggregators below a merging one and the Master Aggregator.
        pytest.param("blt", 3, marks=pytest.mark.slow),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("tree", "adaptive")),
    ],
)
def test_rounds_over_the_wire_are_those_of_the_simulation(tmp_path, name, max_fan_in):
    process = small_tasks.ROUNDS[name]()
    terms = dataclasses.replace(small_folder.TERMS, adaptive_clipping=name == "adaptive")
    task = planned_task.PlannedTask(small_folder.folder_of(process, terms=terms))
    store, notes = memory_store.MemoryStore(), example_service.Notes()
    task.add_to(store)
    compiled = compiled_process.CompiledProcess(process)
    reference = compiled.initialize()
    with server_thread.running(
        lambda: _make_server(tmp_path, task, store, notes, max_fan_in)
    ) as address:
        for round_index in range(3):
            cohort = _cohort(round_index)
            _run_round(tmp_path, address, cohort, notes)
            data = [small_tasks.dataset(*one) for one in cohort]
            reference = compiled.next(reference, data).state
    commit = store.last_commit("tests", "small")
    assert commit.rounds_done == 3
    state = task_state.TaskState.from_bytes(commit.state, task.folder.terms.digest())
    found = tensor_values.from_bytes(state.tensors, task.folder.server.prepare.inputs)
    for mine, expected in zip(found, tree.flatten(reference), strict=True):
        np.testing.assert_allclose(mine, np.asarray(expected), rtol=1e-6, atol=1e-6)


def _round_in_process(folder, device, state, cohort, *, rounds):
    """A round without a server, whose updates may be rounded and read again."""
    work, plan = server_work.ServerWork(folder.server), folder.server
    sums = work.zero()
    for seed, count in cohort:
        update = device.run(small_tasks.examples(seed, count), work.broadcast(state))
        if rounds:
            sent, scales = rounded_updates.rounded(update, plan.rounded)
            assert all(sent[place].dtype == np.int16 for place in plan.rounded)
            update = rounded_updates.read(tensor_values.to_bytes(sent), scales, plan)
        sums = work.accumulate(sums, update)
    return work.finish(state, sums)[0]


@pytest.mark.slow  # Plans are built once more.
def test_a_round_of_rounded_updates_is_that_of_a_simulation_that_rounds(tmp_path):
    folder = small_folder.folder_of(small_tasks.ROUNDS["blt"](), rounds_updates=True)
    assert folder.server.rounded == folder.devices[0].rounded != []
    task = planned_task.PlannedTask(folder)
    device, store = small_folder.device_of(task), memory_store.MemoryStore()
    task.add_to(store)

    def committed():
        state = store.last_commit("tests", "small").state
        read = task_state.TaskState.from_bytes(state, folder.terms.digest())
        return tensor_values.from_bytes(read.tensors, folder.server.prepare.inputs)

    before, cohort, notes = committed(), _cohort(0), example_service.Notes()
    with server_thread.running(lambda: _make_server(tmp_path, task, store, notes)) as address:
        _run_round(tmp_path, address, cohort, notes)
    rounded, exact = (
        _round_in_process(folder, device, before, cohort, rounds=rounds) for rounds in (True, False)
    )
    for mine, expected, unrounded in zip(committed(), rounded, exact, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(mine, unrounded, rtol=1e-4, atol=1e-4)
    assert any(np.any(mine != other) for mine, other in zip(rounded, exact, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", small_tasks.SECURE_ONLY_ROUNDS)
def test_ten_secure_rounds_with_drop_outs_are_plain_sums(tmp_path, name):
    process = small_tasks.SECURE_ONLY_ROUNDS[name]()
    compiled = compiled_process.CompiledProcess(process)
    rounds = secure_rounds.Rounds(secure_rounds.task_of(process), compiled)
    rounds.run(tmp_path, 10)
    for mine, expected in zip(rounds.state(), tree.flatten(rounds.reference), strict=True):
        np.testing.assert_allclose(mine, np.asarray(expected), rtol=1e-6, atol=1e-6)
    print(dict(rounds.seen))
    assert rounds.seen["summed groups"] > 10 and rounds.seen["-v[]+!"] > 5
