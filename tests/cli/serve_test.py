"""Tests of `tff-dpftrl serve`: what is wrong is named, and Ctrl-C ends it in order."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from tests import small_disk
from tests.runtime.plans import small_tasks
from tests.runtime.store import postgresql
from tests.runtime.tasks import number_devices, small_folder
from tff_dpftrl import validation
from tff_dpftrl.cli import main, serve
from tff_dpftrl.runtime import core_files, server_bundle, signing_keys, tls
from tff_dpftrl.runtime.plans import plan_pb2
from tff_dpftrl.runtime.server import server_folder
from tff_dpftrl.runtime.store import sql
from tff_dpftrl.runtime.tasks import planned_task, task_folder

disk = small_disk.disk
server = postgresql.server


@pytest.fixture(scope="module", name="task")
def _task(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "small"
    small_folder.write(path, small_tasks.ROUNDS["blt"]())
    return path


def _arguments(task, folder, *more):
    return [
        *("serve", "--population", "tests", "--task", str(task)),
        *("--store", str(folder / "store"), *more),
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--population", "others"), "There is no --task for the population 'others': add one"),
        (("--population", "tests"), "--population has a name twice (the populations 'tests' and"),
        (("--shares", "0.5"), "--shares divide a server among several populations"),
        (("--population", "b", "--shares", "0.6", "0.6"), "--shares are 1.2 together, and may be"),
        (("--population", "b", "--shares", "0.6", "-1"), "--shares must be"),
        (("--population", "b", "--shares", "0.6"), "--shares has 1 values for 2 populations: give"),
        (("--population-size", "1", "2"), "--population-size has 2 values for 1 populations"),
        (("--population-size", "0"), "--population-size must be"),
        (("--address", "8443"), "--address must be HOST:PORT, like 127.0.0.1:8443"),
        (("--status-address", "localhost:port"), "--status-address must be HOST:PORT"),
        (("--status-address", "0.0.0.0:0"), "is for other machines: say who may read the page"),
        (("--status-open", "--status-token", "a"), "--status-token and --status-open exclude"),
        (("--status-names", "http://a/"), "--status-names: 'http://a/' is no name of a server"),
        (("--certificate", "a.pem"), "--certificate and --private-key must both be given"),
        (("--no-attestation", "--attestation-keys", "a"), "exclude each other"),
        (
            ("--attestation-roots", "a", "--attestation-keys", "b"),
            "--attestation-keys and --attestation-roots exclude each other",
        ),
        (("--attestation-revoked", "a"), "needs --attestation-roots: give the roots, too"),
        (("--attestation-roots", "nothing.pem"), "nothing.pem cannot be read: No such file"),
        (("--round-seconds", "0"), "--round-seconds must be"),
        (("--availability", ",".join("1" * 23)), "--availability has 23 numbers, from 1 to 1: giv"),
        (("--availability", "-1 " + "1 " * 23), "--availability has 24 numbers, from -1 to 1: gi"),
        (("--availability", "0," * 24), "--availability has 24 numbers, from 0 to 0: give 24"),
        (("--availability", "nan " * 24), "none negative or infinite, and not all zero"),
        (("--availability", "0.123456789," * 23), "--availability has 23 numbers, from 0.123457"),
        (("--availability", "nothing.txt"), "--availability 'nothing.txt' is no file"),
        (("--sessions-per-address", "0"), "--sessions-per-address must be"),
        (("--sessions-per-connection", "-1"), "--sessions-per-connection must be"),
        (("--most-over-selection", "0.5"), "--most-over-selection must be"),
        (("--secure-aggregation",), "reports of 'small' would be summed in the clear. Make"),
        (("--store", "postgresql://nobody@nowhere/x"), "with --server-folder"),
        (("--approvals", "2"), "--approvals 2: name the list of --reviewers, too"),
        (("--reviewers", "nothing.pem"), "There are no reviewers at nothing.pem"),
        (("--plan-keys", "nothing.pub"), "There is no public key at nothing.pub"),
        (("--task", "nothing"), "There is no task in nothing"),
        (("--selectors", "2"), "--selectors is of --engine ray: name it, too"),
        (("--detach",), "--detach is of --engine ray: name it, too"),
        (("--engine", "ray", "--workers", "0"), "--workers must be"),
        (("--engine", "ray", "--detach"), "--detach needs --ray-address"),
        (("--engine", "ray", "--stop"), "--stop needs --ray-address"),
        (
            ("--engine", "ray", "--ray-address", "auto", "--detach", "--until-done"),
            "--detach and --until-done exclude each other",
        ),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_made(task, tmp_path, capsys, changed, message):
    assert main.main([*_arguments(task, tmp_path), *changed]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("tff-dpftrl serve: ") and message in line
    assert not (tmp_path / "store").exists()


def test_a_task_of_a_population_that_is_not_served_is_named(task, tmp_path, capsys):
    arguments = _arguments(task, tmp_path)
    arguments[arguments.index("tests")] = "others"
    assert main.main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "for the population 'tests', not 'others': add --population tests, or leave" in line
    assert not (tmp_path / "store").exists()


def test_a_missing_ray_is_named_with_the_remedy(task, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main.main([*_arguments(task, tmp_path), "--engine", "ray"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs ray, which is not installed: pip install 'tff_dpftrl[distributed]'" in line
    assert not (tmp_path / "store").exists()


def test_a_cluster_that_is_not_there_is_named(task, tmp_path, capsys):
    pytest.importorskip("ray", reason="Ray is not installed: run `make test-distributed`.")
    arguments = _arguments(task, tmp_path, "--engine", "ray", "--ray-address")
    assert main.main([*arguments, "127.0.0.1:1"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "No Ray cluster answers at '127.0.0.1:1'" in line and "'ray start'" in line
    assert not (tmp_path / "store/server/endpoint.json").exists()
    assert main.main([*arguments, "127.0.0.1:1", "--stop"]) == 1
    assert "No Ray cluster answers" in capsys.readouterr().err
    assert main.main([*arguments, "nowhere"]) == 2
    assert "address of Ray must be 'host:port' or 'auto'" in capsys.readouterr().err


@pytest.fixture(scope="module", name="secure_plans")
def _secure_plans():
    asked = plan_pb2.SecureAggregation()
    asked.CopyFrom(small_tasks.SECURE_AGGREGATION)
    asked.threat_model = plan_pb2.SecureAggregation.ACTIVE_SERVER
    process = small_tasks.SECURE_ONLY_ROUNDS["secagg"]()
    return small_folder.plans(process, secure_aggregation=asked)


def test_devices_of_an_active_server_need_attestation(secure_plans, tmp_path, capsys):
    stated = dataclasses.replace(
        small_folder.SECURE_TERMS.secure_aggregation, threat_model="active-server"
    )
    terms = dataclasses.replace(small_folder.TERMS, secure_aggregation=stated)
    small_folder.write_plans(tmp_path / "secure", secure_plans, terms=terms)
    arguments = _arguments(tmp_path / "secure", tmp_path, "--secure-aggregation")
    assert main.main([*arguments, "--attestation-roots", "roots.pem"]) == 2
    assert "would show each other their certificates" in capsys.readouterr().err
    assert main.main([*arguments, "--no-attestation"]) == 2
    said = capsys.readouterr().err
    assert "summed securely, against an active server, 2 devices or more" in said
    assert "devices of 'small' know each other by their attestation tokens" in said
    # A port that cannot be: it would have been served.
    assert main.main([*arguments, "--names", "localhost", "--address", "256.0.0.1:1"]) != 0
    assert "whoever has it can make up devices" in capsys.readouterr().err
    assert main.main([*arguments, "--names", "localhost", "other.example"]) == 2
    assert "names has ['other.example'], and" in capsys.readouterr().err


def test_a_key_that_did_not_sign_the_task_is_not_enough(task, tmp_path, capsys):
    signing_keys.create(tmp_path / "other")
    other = signing_keys.public_path(tmp_path / "other")
    assert main.main(_arguments(task, tmp_path, "--plan-keys", str(other))) == 2
    assert "which is not trusted" in capsys.readouterr().err


def test_a_task_is_served_only_if_enough_reviewers_approved_it(task, tmp_path, capsys):
    copied, keys = tmp_path / "small", {}
    shutil.copytree(task, copied)
    for name in ("Alice", "Bob"):
        keys[name] = signing_keys.create(tmp_path / name)
    reviewers = tmp_path / "reviewers.pem"
    reviewers.write_text(
        "".join(f"{name}\n{(tmp_path / f'{name}.pub').read_text()}" for name in keys)
    )
    # An address that cannot be: it would have been served.
    more = ("--reviewers", str(reviewers), "--address", "256.0.0.1:1")
    arguments = _arguments(copied, tmp_path, *more)
    assert main.main([*arguments, "--approvals", "3"]) == 2
    assert "approvals=3 is more than the 2 reviewers" in capsys.readouterr().err
    task_folder.approve(copied, keys["Bob"])
    assert main.main([*arguments, "--approvals", "2"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "The task 'small' has 1 of the 2 approvals that are required, by Bob; reviewers" in line
    assert f"approve it by tff-dpftrl task approve {copied} --key FILE." in line
    assert not (tmp_path / "store").exists()
    assert main.main(arguments) == 1
    assert "small: approved by Bob." in capsys.readouterr().err


class _Starting:
    """A server that takes its time to start."""

    def __init__(self, error=None):
        self.error = error
        self.is_stopped = False

    async def start(self):
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()

    async def stop(self):
        self.is_stopped = True


def test_who_is_interrupted_while_it_starts_serves_nobody(capsys):
    made = _Starting()
    arguments = argparse.Namespace(detach=False, until_done=False)

    async def interrupted():
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
        await serve._serve(made, None, arguments, [])

    asyncio.run(interrupted())
    assert made.is_stopped
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Ending: ") and last == "Stopped before it served anybody."
    with pytest.raises(OSError, match="cannot be bound"):
        asyncio.run(serve._serve(_Starting(OSError("cannot be bound")), None, arguments, []))


_LISTEN = """
import socket
from tff_dpftrl.cli import main
with main._silenced_libraries("tff-dpftrl serve"):
    import grpc
taken = socket.create_server(("127.0.0.1", 0))
server = grpc.server(None, options=[("grpc.so_reuseport", 0)])
try:
    server.add_insecure_port("127.0.0.1:%d" % taken.getsockname()[1])
except RuntimeError:
    print("cannot listen")
"""


def test_grpc_writes_no_log_beside_our_line():
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_VERBOSITY"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", _LISTEN], capture_output=True, text=True, env=environment
    )
    assert (done.stdout, done.stderr) == ("cannot listen\n", "")


def test_core_files_are_forbidden_before_there_is_a_secret(task, tmp_path, capsys, monkeypatch):
    def forbid():
        raise validation.UsageError("no core files from here on")

    monkeypatch.setattr(core_files, "forbid", forbid)
    assert main.main(_arguments(task, tmp_path)) == 2
    assert "no core files from here on" in capsys.readouterr().err
    assert not (tmp_path / "store" / "store.sqlite").exists()


_SAY_MODULES = """
import os, signal, sys
from tff_dpftrl.cli import main
from tff_dpftrl.runtime import serving

async def load(self):
    print(*sys.modules)
    os.kill(os.getpid(), signal.SIGINT)

serving.Serving.load = load
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_server_that_goes_on_serves_before_it_imports_what_rounds_need(task, tmp_path):
    with sql.SqlStore(tmp_path / "store") as store:
        planned_task.load(task).add_to(store)
    arguments = _arguments(task, tmp_path, "--address", "127.0.0.1:0")
    done = subprocess.run(
        [sys.executable, "-c", _SAY_MODULES, *arguments, "--status-address", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0 and "\nStatus page: http://" in done.stderr, done.stderr
    modules = set(done.stdout.split())
    assert "tff_dpftrl.runtime.server.service" in modules
    late = {"tensorflow", "keras", "jax", "pandas", "pyarrow", "matplotlib", "ray", "dp_accounting"}
    late |= {"scipy.stats", "scipy.signal", "tff_dpftrl.models.language_model"}
    assert not modules & late
    assert len(modules) < 2000  # TensorFlow alone has more.


def test_a_task_without_a_round_that_can_be_computed_stops_the_server(tmp_path, capsys):
    class Served(_Starting):
        address, page_address = "", ""

        async def start(self):
            pass

        async def load(self):
            raise validation.UsageError("The graph cannot be read.")

    made = Served()
    arguments = argparse.Namespace(detach=False, status_token=None, until_done=False)
    with pytest.raises(validation.UsageError, match="cannot be read"):
        asyncio.run(serve._serve(made, server_folder.of(tmp_path), arguments, []))
    assert made.is_stopped


@pytest.mark.slow
def test_an_interruption_gives_the_lease_back(task, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    code = "import sys; from tff_dpftrl.cli import main; sys.exit(main.main(sys.argv[1:]))"
    for _ in range(2):  # The second one need not wait for the lease of the first.
        process = subprocess.Popen(
            [sys.executable, "-c", code, *_arguments(task, tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        lines = []
        for line in process.stderr:
            lines.append(line.strip())
            if line.startswith("Status page:"):
                assert (tmp_path / "store" / "server" / "endpoint.json").exists()
                bundle = server_bundle.read(tmp_path / "store/server/device_bundle.json")
                assert bundle.population == "tests" and bundle.server.startswith("127.0.0.1:")
                assert len(bundle.plan_keys) == len(bundle.issuers) == 1
                assert "BEGIN CERTIFICATE" in bundle.certificate
                process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert lines[-1].startswith("Stopped. What is committed is in the store")
        assert not any("waiting for its lease" in line for line in lines)
        assert not (tmp_path / "store" / "server" / "endpoint.json").exists()


@pytest.mark.parametrize(
    ("address", "names", "expected"),
    [
        ("127.0.0.1:8443", [], "127.0.0.1:8443"),
        ("0.0.0.0:8443", ["a.org", "2001:db8::1"], "a.org:8443,[2001:db8::1]:8443"),
        ("10.0.0.1:8443,10.0.0.2:8444", ["a.org"], "10.0.0.1:8443,10.0.0.2:8444"),
    ],
)
def test_devices_elsewhere_get_an_address_that_they_can_reach(address, names, expected):
    arguments = argparse.Namespace(names=names, certificate=None, private_key=None)
    assert serve._address_for_devices(address, arguments) == expected


def test_devices_elsewhere_get_the_names_of_a_certificate_that_was_given(tmp_path):
    files = tmp_path / "certificate.pem", tmp_path / "key.pem"
    tls.create_self_signed(*files, ["keyboard.example", "*.example"])
    arguments = argparse.Namespace(names=[], certificate=files[0], private_key=files[1])
    expected = "keyboard.example:8443"
    assert serve._address_for_devices("0.0.0.0:8443", arguments) == expected


def _serve(arguments):
    code = "import sys; from tff_dpftrl.cli import main; sys.exit(main.main(sys.argv[1:]))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def _read_until(process, text, said):
    """Reads lines that the process says, up to one that has the text in it."""
    for line in process.stderr:
        said.append(line)
        if text in line:
            return
    raise AssertionError("".join(said))


def _write_served(path):
    """A task whose rounds need three devices, no more and no fewer."""
    config = small_folder.CONFIG.changed(
        over_selection=1.0, least_fraction=1.0, selection_timeout=5.0
    )
    small_folder.write(path, small_tasks.ROUNDS["blt"](), config=config)


def _free_address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.slow
def test_a_store_in_postgresql_is_gone_on_with_after_the_death_of_either_server(
    server, tmp_path_factory, tmp_path
):
    path = tmp_path_factory.mktemp("tasks") / "small"
    _write_served(path)
    url, folder = server.new_database(), server_folder.of(tmp_path / "server")
    arguments = ["serve", "--population", "tests", "--task", str(path), "--store", url]
    arguments += ["--server-folder", str(folder.path), "--address", _free_address(), "--until-done"]
    arguments += ["--round-seconds", "0.5", "--population-size", "24"]
    said = []
    process = _serve(arguments)
    try:
        _read_until(process, "Status page:", said)
        with number_devices.running(folder, count=24):  # Lost attempts count as participation.
            _read_until(process, "round 2 of 6 committed", said)
            process.kill()
            said += process.communicate()[1].splitlines(keepends=True)
            process = _serve(arguments)
            _read_until(process, "round 4 of 6 committed", said)
            server.kill()
            _read_until(process, "The store fails", said)
            server.start()
            said += process.communicate(timeout=120)[1].splitlines(keepends=True)
        assert process.returncode == 0 and said[-1].startswith("All rounds are done. ")
    finally:
        process.kill()
        process.wait()
    with sql.SqlStore(url) as store:
        history = store.history("tests", "small")
        assert [row["round"] for row in history] == list(range(6))
        epochs = [row["epoch"] for row in history]
        assert epochs == sorted(epochs) and epochs[-1] > epochs[0]
    assert "Traceback" not in "".join(said) and server.password not in "".join(said)
    assert "waiting for its lease" not in "".join(said)  # The process that had it is gone.
    kept = [file for file in folder.path.rglob("*") if file.is_file()]
    assert kept and not any(server.password.encode() in file.read_bytes() for file in kept)


@pytest.mark.slow
def test_a_server_on_a_full_disk_commits_the_next_round_when_there_is_room(disk, tmp_path):
    _write_served(tmp_path / "small")
    store, said = disk.folder / "store", []
    folder = server_folder.of(store / "server")
    arguments = _arguments(tmp_path / "small", disk.folder, "--address", _free_address())
    arguments += ["--until-done", "--round-seconds", "0.5", "--population-size", "24"]

    def ended(process):
        lines = process.communicate(timeout=120)[1].splitlines(keepends=True)
        said.extend(lines)
        return process.returncode, lines[-1]

    disk.leave(0)
    status, line = ended(_serve(arguments))
    assert status == 1 and line == (
        "tff-dpftrl serve: [Errno 28] No space left on device: make room on the disk.\n"
    )
    disk.give_back()
    process = _serve(arguments)
    try:
        _read_until(process, "Status page:", said)
        with number_devices.running(folder, count=24):  # Lost attempts count as participation.
            _read_until(process, "round 1 of 6 committed", said)
            disk.leave(0)
            for line in ("abandoned: Cannot write to the store", "The store fails"):
                _read_until(process, line, said)
            disk.give_back()
            _read_until(process, "round 3 of 6 committed", said)
            disk.leave(0)
            _read_until(process, "The store fails", said)
            process.send_signal(signal.SIGINT)
            assert ended(process)[0] == 0
            disk.give_back()
            process = _serve(arguments)
            status, line = ended(process)
            assert status == 0 and line.startswith("All rounds are done. ")
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in "".join(said)
    with sql.SqlStore(store) as found:
        assert [row["round"] for row in found.history("tests", "small")] == list(range(6))
