"""A statement is what devices and store come to, also where servers are killed."""

import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import number_devices, small_folder
from tff_dpftrl.accounting import guarantee
from tff_dpftrl.participation import observed
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.device import (
    attester,
    device_runtime,
    eligibility,
    loaded_plans,
    participation_timer,
    server_connection,
    wire_session,
)
from tff_dpftrl.runtime.protocol import attestation
from tff_dpftrl.runtime.server import server_folder
from tff_dpftrl.runtime.store import sql
from tff_dpftrl.runtime.tasks import planned_task, task_privacy, task_state
from verification.campaign import recount

EDGES = {"stride_edges": (1, 2, 4), "times_edges": (1, 2, 3)}
NUM_DEVICES = 20  # Who was in an attempt that was abandoned may not come again.
NUM_KILLS = 4


def _upload(number, round_index, attempt, is_accepted=True):
    return recount.Upload(number, round_index, attempt, is_accepted)


def _row(round_index, attempt, reports):
    return {"round": round_index, "attempt": attempt, "devices/reports": reports}


def test_participation_is_counted_from_devices_and_rounded_to_the_safe_side():
    uploads = [
        _upload(0, 0, "a"),
        _upload(1, 0, "a", False),  # It is in the sum, and was not told.
        _upload(2, 1, "b"),  # Of an attempt that came to nothing.
        _upload(0, 3, "c"),
        _upload(2, 3, "c"),
    ]
    rows = [_row(0, "a", 2), _row(1, "d", 0), {"round": 2, "attempt": "e"}, _row(3, "c", 2)]
    assert recount.participation(rows, uploads, **EDGES) == observed.Participation(4, 2, 2)
    assert recount.participation(rows[:1], uploads, **EDGES) == observed.Participation(1, None, 1)


@pytest.mark.parametrize(
    "row, upload, what",
    [
        (_row(0, "a", 2), _upload(1, 1, "a"), "another round"),
        (_row(0, "a", 3), _upload(1, 0, "a"), "holds 3 reports"),
        (_row(0, "a", 2), _upload(0, 0, "b"), "twice in one round"),
    ],
)
def test_what_contradicts_the_devices_is_found(row, upload, what):
    with pytest.raises(recount.RecountError, match=what):
        recount.participation([row], [_upload(0, 0, "a"), upload], **EDGES)


class _NotingSession(wire_session.WireSession):
    """A session of a device that keeps a record of its own."""

    def keep(self, number, uploads, models):
        self._number, self._uploads, self._models = number, uploads, models

    def fetch(self, keep_going):
        attempt, model = self._configuration.attempt, self._configuration.broadcast
        work = super().fetch(keep_going)
        self._models.add((work.round_index, model))
        self._upload = _upload(self._number, work.round_index, attempt, False)
        return work

    def upload(self, *args):
        place = len(self._uploads)
        self._uploads.append(self._upload)
        answer = super().upload(*args)
        self._uploads[place] = dataclasses.replace(self._upload, is_accepted=answer.is_accepted)
        return answer


@dataclasses.dataclass(frozen=True)
class _NotingDevice(device_runtime.DeviceRuntime):
    number: int = 0
    uploads: list = dataclasses.field(default_factory=list)
    models: set = dataclasses.field(default_factory=set)

    def steps(self, population):
        made = super().steps(population)
        made.__class__ = _NotingSession
        made.keep(self.number, self.uploads, self.models)
        return made


def _free_port():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def _serve(path, tmp_path, port, log):
    return subprocess.Popen(
        [sys.executable, "-m", "tff_dpftrl.cli.main", "serve", "--population", "tests"]
        + ["--task", str(path), "--store", str(tmp_path / "store"), "--until-done"]
        + ["--address", f"127.0.0.1:{port}", "--status-address", "127.0.0.1:0"]
        + ["--round-seconds", "0.5", "--population-size", "8"],
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def _devices(folder, port, stop, models):
    """Starts devices, which note the models that they get; returns threads and own records."""
    plans = loaded_plans.LoadedPlans(small_tasks.KEYS, max_running=2)
    key = signing_keys.load_private(folder.issuer)
    connection = server_connection.ServerConnection(
        f"127.0.0.1:{port}", folder.certificate.read_bytes()
    )
    records = [[] for _ in range(NUM_DEVICES)]

    def run(number):
        own = _NotingDevice(
            connection,
            plans,
            number_devices.Numbers(number),
            participation_timer.MemoryTimer(time.time),
            attester.IssuingAttester(attestation.TokenIssuer(key, clock=time.time)),
            eligibility.SettableEligibility(),
            generator=random.Random(number),
            number=number,
            uploads=records[number],
            models=models,
        )
        while not stop.is_set():
            own.run_session("tests")
            stop.wait(0.05)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(NUM_DEVICES)]
    for thread in threads:
        thread.start()
    return threads, records, connection


@pytest.mark.slow
def test_the_statement_of_a_task_whose_server_was_killed_is_that_of_a_recount(tmp_path):
    path = tmp_path / "small"
    config = small_folder.CONFIG.changed(over_selection=1.0, least_fraction=1.0)
    aggregation = small_tasks.fixed(0.5, deterministic_seed=None)  # Its noise is new in each call.
    small_folder.write(path, small_tasks.federated_averaging(aggregation), config=config)
    task = planned_task.load(path, small_tasks.KEYS)
    folder = server_folder.of(tmp_path / "store" / "server")
    folder.make(("localhost", "127.0.0.1"))
    port, generator, stop = _free_port(), random.Random(20261122), threading.Event()
    models, shown = set(), []
    with open(tmp_path / "log", "wb") as log, sql.SqlStore(tmp_path / "store") as store:
        task.add_to(store)
        server = _serve(path, tmp_path, port, log)
        threads, records, connection = _devices(folder, port, stop, models)
        try:
            for killed in range(NUM_KILLS):
                while len(store.history("tests", "small")) <= killed:
                    assert server.poll() is None, (tmp_path / "log").read_text()
                    time.sleep(0.02)
                time.sleep(generator.uniform(0.0, 0.4))
                server.send_signal(signal.SIGKILL)
                server.wait()
                shown.append(store.history("tests", "small"))
                server = _serve(path, tmp_path, port, log)
            assert server.wait(300) == 0
        finally:
            server.kill()
            stop.set()
            connection.close()
            for thread in threads:
                thread.join(60)
        rows, commit = store.history("tests", "small"), store.last_commit("tests", "small")

    assert all(rows[: len(before)] == before for before in shown)
    models.add((commit.rounds_done, commit.model))
    assert len(models) == len({round_index for round_index, _ in models})

    terms = task.folder.terms
    edges = task.folder.server.participation
    counted = recount.participation(
        rows,
        [upload for own in records for upload in own],
        stride_edges=tuple(edges.stride_edges),
        times_edges=tuple(edges.times_edges),
    )
    state = task_state.TaskState.from_bytes(commit.state, terms.digest())
    statement = task_privacy.TaskPrivacy(terms).statement(state.observed)
    assert statement.observed == counted
    assert counted.num_rounds == terms.schema.num_rounds == commit.rounds_done
    assert not counted.breaches(terms.schema) and not statement.headline_caveats
    claim = guarantee.dp_ftrl_guarantee(
        terms.strategy,
        noise_multiplier=terms.noise_multiplier,
        schema=terms.schema,
        delta=terms.delta,
        clip_norm=terms.clip_norm,
    )
    assert statement.epsilon == claim.epsilon
    assert len({row["epoch"] for row in rows}) > 1  # Servers were killed between them.
    print(counted, statement.epsilon, [row["epoch"] for row in rows])
