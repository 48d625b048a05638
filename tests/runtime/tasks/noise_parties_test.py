"""Tasks whose noise a noise party adds: the server's part, and rounds over the wire."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import types

import numpy as np
import pytest

from tests.runtime.fleet import server_thread
from tests.runtime.server import example_service
from tests.runtime.tasks import noised_folder, number_devices, small_folder
from tff_dpftrl import validation
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.actors import events, population
from tff_dpftrl.runtime.device import server_connection, session
from tff_dpftrl.runtime.noise_party import ledger as ledger_lib
from tff_dpftrl.runtime.noise_party import party as party_lib
from tff_dpftrl.runtime.noise_party import promise as promise_lib
from tff_dpftrl.runtime.noise_party import rows as rows_lib
from tff_dpftrl.runtime.plans import allowed_ops, predicates, secure_report, tensor_values
from tff_dpftrl.runtime.server import server
from tff_dpftrl.runtime.tasks import planned_task
from verification import memory_store

_PARTY = noised_folder.PARTY
_SEED = np.array([noised_folder.SEED, 0])


def _added(layout, parts):
    """Adds vectors modulo the moduli of a layout."""
    return [
        (sum(each.astype(np.int64) for each in column) % segment.modulus).astype(segment.dtype)
        for segment, column in zip(layout, zip(*parts, strict=True), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, True])
def test_with_a_common_seed_the_model_is_that_of_the_servers_noise(tmp_path, adaptive):
    """Up to the grid: rounds, a skipped one among them, with the same updates of devices."""
    by_party, by_server = (
        planned_task.PlannedTask(noised_folder.write(tmp_path / name, *parties, adaptive=adaptive))
        for name, parties in (("party", [_PARTY]), ("server", []))
    )
    rounds = [
        small_folder.Rounds(task, memory_store.MemoryStore()) for task in (by_party, by_server)
    ]
    assert not by_party.folder.repeats_noise and by_server.folder.repeats_noise
    promise = promise_lib.Promise(by_party.folder, _PARTY)
    drawing = promise.noise
    first = drawing.initial_state(_SEED)
    device, layout = small_folder.device_of(by_party), promise.parameters.layout
    step = promise.encoding.granularity(1.0) / 3  # Of the grid, in the model.
    largest = 0.0
    for index in range(4):
        model = rounds[0].commit.model
        if index == 1:
            for one in rounds:
                last = one.commit
                one.add(one.task.served.task.server_step.skip(last.model, last.state))
            continue
        vectors = [
            small_folder.secure_report_of(device, model, stored)
            for stored in small_folder.cohort(index)
        ]
        seed = promise.attempt(model).round_seed
        before = drawing.before_round(first, index, lambda _: _SEED)
        drawn, count, _ = drawing.draw(before, _SEED)
        noise = promise.vector(*drawing.encode(drawn, count, seed))
        rounds[0].run_groups([(_added(layout, [*vectors, noise]), 3)])
        rounds[1].run_groups([(_added(layout, vectors), 3)])
        models = [tensor_values.from_bytes(one.commit.model, device.broadcast) for one in rounds]
        for tensor, mine, servers in zip(device.broadcast, *models, strict=True):
            if tensor.label.endswith(("/active", "/estimate", "/excess")):
                # In each of three rounds the count of three devices is rounded to halves.
                assert mine == pytest.approx(servers, rel=0.2, abs=3 * 0.25 / 3)
            else:
                largest = max(largest, np.abs(np.subtract(mine, servers, dtype=float)).max())
    assert 0 < largest < (2.0 if adaptive else 1.0) * 4 * step
    assert rounds[0].commit.rounds_done == 4


def test_the_servers_part_has_no_noise_and_says_who_adds_it(tmp_path):
    made = noised_folder.write(tmp_path / "task", _PARTY)
    task = planned_task.PlannedTask(made)
    work = task._step._work
    state = work.initialize(made.initialize())
    after, _ = work.finish(state, work.zero())
    for name, weight in work.weights(state).items():  # Nothing is added to the sum of nobody.
        np.testing.assert_array_equal(work.weights(after)[name], weight)
    assert made.server.party_noise.vector.endswith("/vector")
    assert made.devices[0].least_runtime_version == allowed_ops.NOISE_PARTIES_SINCE
    assert task.served.task.noise_parties == (_PARTY,)
    noised = [bound for bound in made.server.report_bounds if bound.noised]
    assert [list(made.server.update[b.tensors[0]].shape) for b in noised] == [[4]]


def test_plans_of_two_makings_have_no_masks_in_common():
    one, other = (noised_folder.plans(_PARTY, **changes) for changes in ({}, {"shuffle": True}))
    made = [
        secure_report.parameters_of(plan)
        for plans in (one, other)
        for plan in (plans.server, *plans.devices)
    ]
    digests = [parameters.noised_plans for parameters in made]
    assert digests[0] == digests[1] != digests[2] == digests[3]
    assert [len(digest) for digest in digests] == [32] * 4


@pytest.mark.slow
def test_its_plans_pass_their_tests(tmp_path):
    made = noised_folder.plans(_PARTY)
    proxies = [small_folder.examples(seed) for seed in range(2)]
    options = predicates.Predicates(num_rounds=2, loss="")
    assert predicates.check_task(made.server, made.devices, proxies, options)


def _changed(made, **changes):
    server_plan = type(made.server)()
    server_plan.CopyFrom(made.server)
    if changes.get("noise") is False:
        server_plan.ClearField("party_noise")
    if "keys" in changes:
        del server_plan.secure_aggregation.noise_parties[:]
        server_plan.secure_aggregation.noise_parties.extend(changes["keys"])
    return dataclasses.replace(made, server=server_plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise": False}, "names 1 noise parties, and its server adds the noise"),
        ({"keys": []}, "names other noise parties than its terms"),
        ({"keys": [_PARTY, bytes(32)]}, "names other noise parties than its terms"),
        ({"keys": [_PARTY, _PARTY]}, "names other noise parties than its terms"),
    ],
)
def test_plans_whose_noise_nobody_adds_are_refused(tmp_path, changes, message):
    made = _changed(noised_folder.write(tmp_path / "task", _PARTY), **changes)
    with pytest.raises(validation.UsageError, match=message) as caught:
        planned_task.PlannedTask(made)
    assert "\n" not in str(caught.value)


def test_statement_and_terms_say_whom_the_noise_protects_from(tmp_path):
    made = noised_folder.write(tmp_path / "task", _PARTY)
    task = planned_task.PlannedTask(made)
    rounds = small_folder.Rounds(task, memory_store.MemoryStore())
    device = small_folder.device_of(task)
    promise = promise_lib.Promise(made, _PARTY)
    vectors = [
        small_folder.secure_report_of(device, rounds.commit.model, stored)
        for stored in small_folder.cohort(0)
    ]
    rounds.run_groups([(_added(promise.parameters.layout, vectors), 3)])
    statement = task._privacy.statement(task.observed(rounds.commit))
    assert (
        "protects from everybody but the devices and the noise party, which can subtract it from "
        "what is released; from the server, too, unless it colludes with the noise party."
        in statement.from_whom
    )
    assert "The server is not among these" not in statement.from_whom
    assert "giving the noise of a round once" in statement.setting
    assert statement.parameters["noise_parties"] == 1
    assert made.terms.secure_aggregation.noise_parties == (_PARTY.hex(),)
    assert json.loads(made.terms.to_bytes())["secure_aggregation"]["noise_parties"]


@pytest.mark.slow
def test_rounds_over_the_wire_have_the_noise_of_a_party_that_comes_and_goes(tmp_path):
    made = noised_folder.write(tmp_path / "task", _PARTY, selection_timeout=1.0)
    task, store, notes = planned_task.PlannedTask(made), memory_store.MemoryStore(), None
    task.add_to(store)
    notes = example_service.Notes()
    endpoint = example_service.endpoint(tmp_path)
    signing_keys.create(tmp_path / "issuer.pem")
    settings = {
        "population": population.Population(
            "tests",
            (task.served.task,),
            heartbeat_seconds=0.2,
            silence_seconds=30.0,
            lease_seconds=60.0,
        ),
        "tasks": {task.name: task.served},
        "store": store,
        "endpoint": endpoint,
        "pace": lambda now, randomness: (0.2, 1.0),
        "observer": notes,
        "randomness": random.Random(1),
    }
    stop = threading.Event()

    def run_party():
        """Has sessions, each of another process: nothing but the ledger is kept."""
        while not stop.is_set():
            ledger = ledger_lib.Ledger.open(
                tmp_path / "party.ledger", made.name, made.terms.digest()
            )
            promise = promise_lib.Promise(made, _PARTY)
            connection = server_connection.ServerConnection(
                address, (tmp_path / "server.pem").read_bytes()
            )
            party = party_lib.Party(
                connection,
                promise,
                ledger,
                rows_lib.Rows(promise.noise, ledger),
                noised_folder.KEY,
            )
            try:
                party.run_session()
            except session.StepFailed:  # The server is away, or the attempt is.
                stop.wait(0.2)
            finally:
                ledger.close()
                connection.close()

    with server_thread.running(lambda: server.Server.of(**settings)) as address:
        folder = types.SimpleNamespace(
            address=lambda: address,
            certificate=tmp_path / "server.pem",
            issuer=tmp_path / "issuer.pem",
        )
        thread = threading.Thread(target=run_party)
        with number_devices.running(folder, count=10):
            for _ in range(600):
                if notes.of(events.PartyAway):
                    break
                stop.wait(0.1)
            assert not store.history("tests", task.name)
            thread.start()
            for _ in range(1200):
                if len(example_service.released(store, task.name, "tests")) >= 2:
                    break
                stop.wait(0.1)
            stop.set()
            thread.join(60)
    released = example_service.released(store, task.name, "tests")
    assert len(released) >= 2
    ledger = ledger_lib.Ledger.open(tmp_path / "party.ledger", made.name, made.terms.digest())
    given = [each.row for each in ledger.given()]
    ledger.close()
    assert given == sorted(set(given)) and {row["round"] for row in released} <= set(given)
