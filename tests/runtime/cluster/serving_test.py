"""Tests of tff_dpftrl.runtime.cluster.serving, and of `tff-dpftrl serve --engine ray`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from tests.runtime.cluster import ray_nodes
from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder, tiny_task
from tff_dpftrl.runtime import serving as serving_lib
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.fleet import behaviour, fleet, tally
from tff_dpftrl.runtime.plans import measured_run
from tff_dpftrl.runtime.protocol import attestation
from tff_dpftrl.runtime.server import limits, server_folder
from tff_dpftrl.runtime.status import session_table
from tff_dpftrl.runtime.store import sql
from tff_dpftrl.runtime.tasks import making, planned_task, task_report

try:
    import ray

    from tff_dpftrl.runtime.cluster import ray_hosts, serving
except ImportError:
    ray = serving = None

pytestmark = pytest.mark.skipif(
    ray is None, reason="Ray is not installed: run `make test-distributed`."
)

_FILES = serving and serving.Files(
    ["tasks/a"], ["b.pub"], "certificate.pem", "key.pem", ["issuer.pub"]
)


_EPSILON = 'privacy_epsilon{task="toy"}'
_ACCEPTED = 'reports_total{outcome="accepted",task="toy"}'


def _deployment(files=_FILES, address="127.0.0.1:0", store="store", num_selectors=3):
    settings = serving_lib.Settings(address=address, population_size=500.0, round_seconds=2.0)
    settings = dataclasses.replace(
        settings, limits=limits.Limits(sessions_per_address=7), most_over_selection=2.0
    )
    return serving.deployment(
        ("tests",), store, files, settings, num_selectors=num_selectors, num_workers=2
    )


@pytest.mark.slow
def test_hosts_build_what_is_served_from_files_of_their_node(tmp_path):
    small_folder.write(tmp_path / "small", small_tasks.ROUNDS["blt"]())
    signing_keys.create(tmp_path / "issuer")
    issuer = signing_keys.public_path(tmp_path / "issuer")
    files = dataclasses.replace(
        _FILES, tasks=[tmp_path / "small"], plan_keys=[], attestation_keys=[issuer]
    )
    parts = pickle.loads(pickle.dumps(_deployment(files))).build()
    (served,) = parts.populations
    assert served.name == "tests" and list(served.tasks) == ["small"]
    # Hosts that have read other terms are told from this one.
    assert (
        served.tasks["small"].digest == planned_task.load(tmp_path / "small").folder.terms.digest()
    )
    (expected,) = serving_lib.put_together(
        [planned_task.load(tmp_path / "small")],
        serving_lib.Settings(population_size=500.0, round_seconds=2.0, most_over_selection=2.0),
    )
    assert parts.limits.sessions_per_address == 7
    (task,), (known,) = served.population.tasks, expected.population.tasks
    assert task.rest_seconds == known.rest_seconds == 2.0
    assert (task.rounds, task.num_rounds) == (known.rounds, known.num_rounds)
    turns = [one.pace(1000.0, random.Random(0)) for one in (served, expected)]
    assert turns[0] == turns[1]
    assert isinstance(parts.attestation, attestation.SignedTokens)


def test_paths_are_those_of_the_first_command_wherever_hosts_are(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = ("certificate.pem", "key.pem", "tasks/a", "b.pub", "issuer.pub", "store")
    assert _deployment().needed_paths == tuple(str(tmp_path / name) for name in names)
    assert _deployment().options["tasks"] == (str(tmp_path / "tasks/a"),)
    nobody = dataclasses.replace(_FILES, attestation_keys=None)
    assert _deployment(nobody).options["attestation_keys"] is None
    platform = dataclasses.replace(nobody, attestation_roots="roots.pem")
    assert _deployment(platform).options["attestation_roots"] == str(tmp_path / "roots.pem")
    assert str(tmp_path / "roots.pem") in _deployment(platform).needed_paths
    assert _deployment(store="postgresql://host/name").store == "postgresql://host/name"


def test_each_selector_has_a_port_of_its_own():
    assert _deployment().addresses == ("127.0.0.1:0",) * 3
    fixed = _deployment(address="[::]:8443")
    assert fixed.addresses == ("[::]:8443", "[::]:8444", "[::]:8445")
    with pytest.raises(ValueError, match="no room for 3 Selectors"):
        _deployment(address="127.0.0.1:65534")


@pytest.mark.parametrize(
    "store",
    [
        "postgresql://me:geheim@host/name",
        "postgresql://me:ge/heim@host/name",
        "postgresql://me@host/name?password=geheim",
        "postgresql://host/name?user=me&sslpassword=geheim",
    ],
)
def test_passwords_do_not_travel(store):
    with pytest.raises(ValueError, match="pgpass") as caught:
        _deployment(store=store)
    assert "heim" not in str(caught.value)
    assert _deployment(store="postgresql://me@host/name?sslmode=verify-full")


def test_other_settings_make_another_deployment():
    own = _deployment().fingerprint()
    assert _deployment().fingerprint() == own
    assert _deployment(num_selectors=2).fingerprint() != own


# The command.


_CODE = "import sys; from tff_dpftrl.cli import main; sys.exit(main.main(sys.argv[1:]))"


class _Command:
    """`tff-dpftrl serve` in a process of its own, and what it says."""

    def __init__(self, arguments):
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        self.lines = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CODE, "serve", *map(str, arguments)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        self.lines.extend(line.strip() for line in self.process.stderr)

    def wait_for(self, beginning):
        """The rest of a line that it says."""
        _until(lambda: self._find(beginning) is not None or self.process.poll() is not None)
        assert self._find(beginning) is not None, self.lines
        return self._find(beginning)

    def _find(self, beginning):
        found = [line for line in self.lines if line.startswith(beginning)]
        return found[-1].removeprefix(beginning).strip() if found else None

    def end(self):
        """Ctrl-C; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(180)
        finally:
            self.close()

    def close(self):
        self.process.kill()
        self._reader.join()
        self.process.stderr.close()


@contextlib.contextmanager
def _command(arguments):
    command = _Command(arguments)
    try:
        yield command
    finally:
        command.close()


def _until(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.1)


@contextlib.contextmanager
def _fleet(folder, corpora):
    """Devices that come again and again; yields what became of their sessions."""
    devices = fleet.Fleet(
        fleet.ConnectionSettings(
            folder.address(),
            folder.certificate.read_bytes(),
            tuple(signing_keys.raw(signing_keys.load_public(path)) for path in folder.plan_keys),
            signing_keys.load_private(folder.issuer).private_bytes_raw(),
            folder=str(folder.path),
        ),
        "tests",
        str(corpora / "users.jsonl"),
        num_devices=40,
        rates=behaviour.Rates(drop_outs=0.05, stragglers=0.0),
        start_within_s=0.5,
        usual_wait_s=1.0,
    )
    counts, stop = tally.Tally(), threading.Event()
    running = threading.Thread(
        target=fleet.run,
        args=(devices, fleet.Ending(seconds=600.0)),
        kwargs={"stop": stop, "on_session_end": counts.add},
    )
    running.start()
    try:
        yield counts
    finally:
        stop.set()
        running.join()


def _figures(page):
    """Figures of `/metrics`, by name and labels; and the page, which reads what is spent."""
    urllib.request.urlopen(page).read()
    lines = urllib.request.urlopen(f"{page}/metrics").read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("tff_dpftrl_"): float(value) for name, value in pairs}


@pytest.fixture(scope="module", name="corpora")
def _corpora(tmp_path_factory):
    """Texts, and a task of a small language model."""
    folder = tmp_path_factory.mktemp("corpora")
    tiny_task.write_corpora(folder)
    rounds = {"clients_per_round": 6, "num_devices": 40, "min_sep": 2, "num_rounds": 200}
    seconds = {"selection_timeout": 5.0, "reporting_timeout": 20.0, "exchange_timeout": 10.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_run, "measure", lambda *_: measured_run.Cost(0.1, 0.2, 1000))
        config = tiny_task.config(folder, **rounds, **seconds)
        making.make(config, folder / "toy", small_tasks.KEY, progress=lambda line: None)
    return folder


@pytest.fixture(scope="module", name="nodes")
def _nodes():
    with ray_nodes.nodes(config={}) as cluster:
        yield cluster


def _arguments(corpora, place, nodes, *more):
    return [
        *("--engine", "ray", "--ray-address", nodes.address, "--population", "tests"),
        *("--task", corpora / "toy", "--store", place, "--round-seconds", "1"),
        *("--population-size", "40", *more),
    ]


@pytest.mark.slow
def test_the_command_serves_a_fleet_on_two_nodes_whoever_is_killed(nodes, corpora, tmp_path):
    place = tmp_path / "store"
    folder = server_folder.of(place / "server")

    def rounds():
        with sql.SqlStore(place) as store:
            return store.last_commit("tests", "toy").rounds_done

    with _command(_arguments(corpora, place, nodes)) as command:
        page = command.wait_for("Status page:")
        assert len(folder.address().split(",")) == 2
        with _fleet(folder, corpora) as counts:
            _until(lambda: rounds() >= 2)
            with ray_nodes.connected(nodes):
                places = ray_hosts.places("tests")
                assert len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) == 2
                os.kill(places["worker-0"].pid, signal.SIGKILL)
                done = rounds()
                _until(lambda: rounds() >= done + 4)
                _until(lambda: ray_hosts.places("tests").get("worker-0", places["worker-0"])
                       != places["worker-0"])  # fmt: skip
        charged = lambda: f"Charged: {rounds()} committed rounds"  # noqa: E731
        _until(lambda: charged() in urllib.request.urlopen(page).read().decode())
        shown = _figures(page)
        assert shown['rounds_committed_total{task="toy"}'] == rounds()
        assert shown["lease_epoch"] == shown["leaders_total"] == 1
        assert shown[_ACCEPTED] >= counts.shapes["-v[]+^"] > 0
        assert shown["sessions_total"] >= sum(counts.shapes.values())
        assert command.end() == 0
    assert command.lines[-1].startswith("Stopped. What is committed is in the store")
    told = [line for line in command.lines if "of 200 committed" in line]
    assert len(told) == rounds() and "reports" in told[0] and "ε so far" in told[0]
    assert not folder.endpoint.exists()
    task = planned_task.load(corpora / "toy")
    plan = task.folder.terms.server_plan
    assert json.loads(folder.rounds.read_text()) == {"toy": [plan, rounds()]}
    assert session_table.SessionTable.load(folder.sessions).total >= sum(counts.shapes.values())
    with ray_nodes.connected(nodes):
        assert not ray_hosts.names("tests")

    # The same store with the engine of one process.
    lines = []

    async def look():
        with sql.SqlStore(place) as store:
            assert store.lease("tests").owner == ""
            served = serving_lib.Serving(
                [task], store, folder, serving_lib.Settings(), progress=lines.append
            )
            await served.start()
            try:
                while _EPSILON not in (
                    found := await asyncio.to_thread(_figures, served.page_address)
                ):
                    await asyncio.sleep(0.1)
                return found[_EPSILON]
            finally:
                await served.stop()

    assert asyncio.run(asyncio.wait_for(look(), 120)) == shown[_EPSILON]
    assert lines[0] == f"toy: goes on after round {rounds()} of 200."
    with sql.SqlStore(place) as store:
        found = task_report.write(task.folder, store, tmp_path / "report", with_held_out=False)
        history = store.history("tests", "toy")
        last = store.last_commit("tests", "toy")
    assert found.statement.epsilon == task.privacy(last).declared_epsilon
    assert history[-1]["privacy/epsilon"] == shown[_EPSILON]
    assert [row["round"] for row in history] == list(range(rounds()))


@pytest.mark.slow
def test_a_server_that_is_left_running_is_found_again_and_stopped(nodes, corpora, tmp_path):
    place = tmp_path / "store"
    folder = server_folder.of(place / "server")
    arguments = _arguments(corpora, place, nodes, "--selectors", "1", "--workers", "1")
    with _command([*arguments, "--detach"]) as command:
        command.wait_for("Status page:")
        assert command.end() == 0
    assert command.lines[-1].startswith("The server goes on without this command")
    with _fleet(folder, corpora) as counts:
        _until(lambda: len(counts.rounds) >= 3)
    with _command([*arguments, "--round-seconds", "2"]) as command:  # Other settings.
        assert command.process.wait(120) == 1
    assert "run already with other settings" in command.lines[-1]
    assert "serve --stop" in command.lines[-1]
    with _command([*arguments, "--detach"]) as command:
        page = command.wait_for("Status page:")
        shown = _figures(page)
        # What happened meanwhile is told now, but not line by line.
        assert shown['rounds_committed_total{task="toy"}'] >= 3
        assert shown[_ACCEPTED] >= counts.shapes["-v[]+^"]
        assert not [line for line in command.lines if "committed" in line]
        assert command.end() == 0
    assert folder.endpoint.exists()
    with _command([*arguments, "--stop"]) as command:
        assert command.process.wait(120) == 0
    assert command.lines[-1].startswith("Stopped coordinator, selector-0, worker-0.")
    assert not folder.endpoint.exists()
    with sql.SqlStore(place) as store:
        assert store.lease("tests").owner == ""
        # Beside a server that leads, no host is started.
        lease = store.acquire("tests", "another", now=time.time(), duration=600.0)
        renewing = threading.Event()

        def renew():
            with sql.SqlStore(place) as own:
                while not renewing.wait(0.5):
                    own.renew("tests", "another", lease.epoch, now=time.time(), duration=600.0)

        thread = threading.Thread(target=renew)
        thread.start()
        try:
            with _command(arguments) as command:
                assert command.process.wait(180) == 1
        finally:
            renewing.set()
            thread.join()
        assert "two servers for one population are not possible" in command.lines[-1]
    with ray_nodes.connected(nodes):
        assert not ray_hosts.names("tests")
