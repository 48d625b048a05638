"""Rounds of devices that sum securely over gRPC and TLS, and drop out at every step of it.

Groups' sums are compared integer for integer with the plain sums of what their devices put in.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import random
import time

from tests.runtime.fleet import server_thread
from tests.runtime.plans import small_tasks
from tests.runtime.server import example_service
from tests.runtime.tasks import small_folder
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runtime.actors import events, population
from tff_dpftrl.runtime.device import (
    attester,
    device_runtime,
    eligibility,
    example_store,
    loaded_plans,
    participation_timer,
    secure_upload,
    server_connection,
    session,
)
from tff_dpftrl.runtime.plans import secure_report, tensor_values
from tff_dpftrl.runtime.server import server
from tff_dpftrl.runtime.tasks import planned_task, summations, task_state
from tff_dpftrl.secure_sums import vectors
from verification import memory_store

_NUM_DEVICES = 8  # A round, in two groups.
_NUM_STEPS = 4
_DROP_OUTS = 0.25
_TERMS = dataclasses.replace(
    small_folder.SECURE_TERMS,
    schema=schema_lib.MinSep(num_rounds=10, min_sep=2, max_participations=5),
)


class Numbers(example_store.ExampleStore):
    """The examples that the simulation has, in its order."""

    def __init__(self, seed, count):
        self._examples = small_tasks.examples(seed, count)

    def select(self, collection, *, max_examples, recorded_since=None):
        assert collection == "numbers"
        return self._examples[:max_examples]


class _Upload(secure_upload.SecureUpload):
    """Notes what a device puts into the sum of its group, and goes away before a step."""

    leaves_before = _NUM_STEPS
    device = None
    put_in = None

    def run(self, stream, update, participation, keep_going, *, seconds):
        vector = secure_report.vector_of(self._plan, update, participation)
        if self.leaves_before > 2:  # Its masked vector is in the sum, if its group has one.
            self.put_in[self._session].append((self.device, vector))
        return super().run(stream, update, participation, keep_going, seconds=seconds)

    def send(self, stream, step, message):
        if step == self.leaves_before:
            raise session.Interrupted("The device went away.")
        super().send(stream, step, message)


@dataclasses.dataclass(frozen=True)
class _Device(device_runtime.DeviceRuntime):
    uploads: dict = dataclasses.field(default_factory=dict)

    def steps(self, population_):
        steps = super().steps(population_)
        steps.secure_upload = type("Upload", (_Upload,), self.uploads)
        return steps


class _Noted(summations.SecureSummation):
    """Keeps the sums of groups as they were decrypted."""

    sums = None

    def decode_group(self, vector, num_devices):
        self.sums.append((vector, num_devices))
        return super().decode_group(vector, num_devices)


def _make_server(folder, run):
    rounds = population.RoundSettings(
        goal_count=_NUM_DEVICES, over_selection=1.0, least_fraction=0.25, selection_timeout=60.0,
        reporting_timeout=60.0, exchange_timeout=30.0, devices_per_aggregator=_NUM_DEVICES // 2,
    )  # fmt: skip
    member = dataclasses.replace(run.task.served.task, rounds=rounds)
    member.summation.__class__ = _Noted
    member.summation.sums = run.sums
    return server.Server.of(
        population.Population(
            "tests", (member,), heartbeat_seconds=0.2, silence_seconds=30, lease_seconds=60
        ),
        {"small": dataclasses.replace(run.task.served, task=member)},
        run.store,
        endpoint=example_service.endpoint(folder),
        observer=run.notes,
        pace=lambda now, randomness: (1.0,),
    )


def _run_round(connection, plans, cohort, drawn, put_in):
    """Runs a round's devices; returns how their sessions ended."""

    def take_part(seed, count):
        leaves = drawn.randrange(_NUM_STEPS) if drawn.random() < _DROP_OUTS else _NUM_STEPS
        return _Device(
            connection,
            plans,
            Numbers(seed, count),
            participation_timer.MemoryTimer(time.time),
            attester.NoAttester(),
            eligibility.SettableEligibility(),
            uploads={"leaves_before": leaves, "device": (seed, count), "put_in": put_in},
        )

    devices = [take_part(*one) for one in cohort]
    with concurrent.futures.ThreadPoolExecutor(len(devices)) as threads:
        return list(threads.map(lambda own: own.run_session("tests").result, devices))


def _plain_sum(layout, summands):
    total = vectors.zeros(layout)
    for _, vector in summands:
        vectors.add(total, vector, layout)
    return total


def _as_lists(vector):
    return [segment.tolist() for segment in vector]


class Rounds:
    """Rounds of a task, over the wire and, if there is a process, in the simulation beside it."""

    def __init__(self, task, compiled=None):
        self.task, self._compiled = task, compiled
        self.store, self.notes = memory_store.MemoryStore(), example_service.Notes()
        self.sums = []
        self.seen = collections.Counter()
        self.reference = None if compiled is None else compiled.initialize()
        self._layout = task.served.task.secure_sum.layout
        self._plans = loaded_plans.LoadedPlans(small_tasks.KEYS, max_running=2)
        self._drawn = random.Random(5)
        self._cohorts = 0
        task.add_to(self.store)

    def run(self, folder, num_rounds):
        with server_thread.running(lambda: _make_server(folder, self)) as address:
            roots = (folder / "server.pem").read_bytes()
            connection = server_connection.ServerConnection(address, roots)
            while self._rounds_done() < num_rounds:
                self._run_attempt(connection)
            connection.close()

    def _rounds_done(self):
        return self.store.last_commit("tests", "small").rounds_done

    def _run_attempt(self, connection):
        self._cohorts += 1
        cohort = [(100 * self._cohorts + i, i % 6) for i in range(_NUM_DEVICES)]
        put_in = collections.defaultdict(list)
        self.sums.clear()
        released, lost = self._heard()
        results = _run_round(connection, self._plans, cohort, self._drawn, put_in)
        until(lambda: self._heard() != (released, lost))
        self.seen.update(result.report.shape for result in results)
        self.seen.update(result.reason for result in results)
        if self._heard()[0] > released:
            self._check(put_in)

    def _heard(self):
        """The numbers of released and of lost rounds of which the Coordinator has heard."""
        return tuple(len(self.notes.of(kind)) for kind in (events.RoundReleased, events.RoundLost))

    def _check(self, put_in):
        """Every sum is that of one group, of all who have sent their masked vectors in it."""
        groups = {
            str(_as_lists(_plain_sum(self._layout, summands))): [one for one, _ in summands]
            for summands in put_in.values()
        }
        summed = []
        for vector, num_devices in self.sums:
            devices = groups.pop(str(_as_lists(vector)))
            assert len(devices) == num_devices
            summed += devices
        row = self.store.history("tests", "small")[-1]
        assert row["devices/reports"] == len(summed)
        self.seen["summed groups"] += row["devices/summed_groups"]
        if self._compiled is not None:
            data = [small_tasks.dataset(*one) for one in summed]
            self.reference = self._compiled.next(self.reference, data).state

    def state(self):
        commit = self.store.last_commit("tests", "small")
        state = task_state.TaskState.from_bytes(commit.state, self.task.folder.terms.digest())
        return tensor_values.from_bytes(state.tensors, self.task.folder.server.prepare.inputs)


def task_of(process):
    """The task of a process that sums securely only."""
    return planned_task.PlannedTask(
        small_folder.folder_of(
            process, terms=_TERMS, secure_aggregation=small_tasks.SECURE_AGGREGATION
        )
    )


def until(is_so):
    for _ in range(6000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it has not happened in time")
