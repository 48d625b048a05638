"""Tests of `tff-dpftrl device`: one device beside a server of its own, in whatever state it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.runtime.device import wire_server
from tests.runtime.plans import plain_plans
from tests.runtime.protocol import certificates
from tff_dpftrl import durable_files
from tff_dpftrl.cli import main
from tff_dpftrl.data import tables
from tff_dpftrl.runtime import server_bundle, signing_keys
from tff_dpftrl.runtime.device import example_store, named_tensors, text_examples
from tff_dpftrl.runtime.fleet import fleet
from tff_dpftrl.runtime.plans import approvals, plan_pb2, signing, tensor_values
from tff_dpftrl.runtime.protocol import attestation, certificate_attestation

_PARTICIPATION = plan_pb2.Participation(min_sep_rounds=2, stride_edges=[1, 2], times_edges=[1, 2])
_SHAPE = "-v[]+^"


@pytest.fixture(name="server", scope="module")
def _server():
    server = wire_server.WireServer(time.time)
    yield server
    server.stop()


@pytest.fixture(name="folder")
def _folder(tmp_path, server):
    (tmp_path / "server.pem").write_bytes(server.root_certificates)
    issuer = signing_keys.create(tmp_path / "issuer.pem")
    server.tokens = attestation.SignedTokens([issuer.public_key()], clock=time.time)
    plan_key = signing_keys.create(tmp_path / "plans.pem")
    store = example_store.SqliteExampleStore.open(tmp_path / "my.sqlite", clock=time.time)
    store.add("numbers", plain_plans.examples(1.0, 2.0))
    store.close()
    _serve(server, plan_key)
    return tmp_path


def _serve(server, key, turn=0.1, approve=None):
    plan = signing.sign(plain_plans.plan(participation=_PARTICIPATION), key)
    if approve is not None:
        server_plan = plan_pb2.SignedPlan(sha256=bytes(32))
        task = plan_pb2.SignedTask(server=server_plan, devices=[plan])
        content = approvals.unapproved(task, "00" * 32)
        content.approvals.append(approvals.approve(content, approve, plan.key))
        plan.approvals.CopyFrom(content)

    def script(served):
        yield from served.check_in()
        yield wire_server.configuration(
            attempt="a",
            task="plain",
            round_index=3,
            plan=plan.SerializeToString(),
            broadcast=tensor_values.to_bytes(plain_plans.SCALE),
        )
        served.receive("report")
        yield wire_server.answer(True, turn)

    server.script = script


def _arguments(folder, server, *more):
    return [
        *("device", "--examples", str(folder / "my.sqlite"), "--population", "tests"),
        *("--server", server.address, "--server-certificate", str(folder / "server.pem")),
        *("--plan-keys", str(folder / "plans.pem.pub")),
        *("--attestation-key", str(folder / "issuer.pem"), *more),
    ]


def test_one_session(folder, server, capsys):
    server.told.clear()
    assert main.main(_arguments(folder, server, "--once")) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"tests  {_SHAPE} completed, ") and out.endswith(" MB; 1 such\n")
    assert err == "Checking in for tests ...\n"
    [told] = server.told
    assert told.shape == _SHAPE and told.versions["tensorflow"]
    # Who took part rests.
    assert main.main(_arguments(folder, server, "--once")) == 0
    assert "the participation timer runs" in capsys.readouterr().out
    assert (folder / "my.sqlite.device/participation.sqlite").stat().st_mode & 0o777 == 0o600


def test_a_device_can_ask_for_approvals(folder, server, capsys):
    alice = signing_keys.create(folder / "alice.key")
    more = ("--once", "--reviewers", str(folder / "alice.key.pub"))
    assert main.main(_arguments(folder, server, *more)) == 1
    out = capsys.readouterr().out
    assert "failed" in out and "Refused: The task 'plain' has 0 of the 1 approvals" in out
    plan_key = signing_keys.load_private(folder / "plans.pem")
    _serve(server, plan_key, approve=alice)
    assert main.main(_arguments(folder, server, *more)) == 0
    assert _SHAPE in capsys.readouterr().out


def test_a_device_can_show_certificates_of_its_platform(folder, server, capsys):
    platform = certificates.Platform()
    platform.write(folder)
    server.tokens = certificate_attestation.CertificateTokens(
        [platform.root], clock=lambda: certificates.NOW
    )
    chain = ("--attestation-chain", str(folder / "chain.pem"))
    more = (*chain, "--attestation-key", str(folder / "device.key"), "--once")
    assert main.main(_arguments(folder, server, *more)) == 0
    assert _SHAPE in capsys.readouterr().out
    without_key = _arguments(folder, server, *chain)
    place = without_key.index("--attestation-key")
    assert main.main(without_key[:place] + without_key[place + 2 :]) == 2
    assert "name the private key of its first certificate" in capsys.readouterr().err
    assert main.main(_arguments(folder, server, *chain)) == 2
    assert "is not that of the key" in capsys.readouterr().err


_BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensorflow_federated":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from tff_dpftrl.cli import main
sys.exit(main.main())
"""


@pytest.mark.slow
def test_a_device_needs_no_tff_and_takes_turns_until_it_is_interrupted(folder, server):
    command = [sys.executable, "-c", _BLOCKED, *_arguments(folder, server, "--start-within", "0")]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"},
    ) as child:
        try:
            first, second = child.stdout.readline(), child.stdout.readline()
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=60)
        finally:
            child.kill()
    assert first.startswith(f"tests  {_SHAPE} completed")
    assert second.startswith("tests  -v!    the participation timer runs")
    assert child.returncode == 130
    assert errors.startswith("Checking in for tests ...\nThe next session of tests is in 0 s.\n")
    assert "tff-dpftrl device: interrupted. " in errors
    assert errors.endswith("my.sqlite.device knows how often this device took part: keep it. The "
                           "same command goes on.\n")  # fmt: skip


def test_one_file_says_all_that_is_public_of_a_server(folder, server, capsys):
    server_bundle.ServerBundle.of(
        "tests",
        server.address,
        folder / "server.pem",
        [signing_keys.load_public(folder / "plans.pem.pub")],
        [folder / "issuer.pem.pub"],
    ).write(folder / "bundle.json")
    arguments = [
        *("device", "--examples", str(folder / "my.sqlite"), "--once"),
        *("--server-bundle", str(folder / "bundle.json")),
        *("--attestation-key", str(folder / "issuer.pem")),
    ]
    assert main.main(arguments) == 0
    assert capsys.readouterr().out.startswith(f"tests  {_SHAPE} completed, ")
    assert main.main([*arguments, "--population", "dogs"]) == 1  # What is given overrules it.
    assert capsys.readouterr().out.startswith("dogs  ")
    assert main.main([*arguments, "--server-folder", "folder"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_a_device_ends_when_nothing_is_left(folder, server, capsys):
    def script(served):
        yield from served.check_in()
        yield wire_server.come_back(30.0, finished=True)

    server.script = script
    assert main.main(_arguments(folder, server, "--start-within", "0")) == 0
    out, err = capsys.readouterr()
    assert out.startswith("tests  -#     finished, ")
    assert err.endswith("tests: all rounds of all tasks are done: nothing is left.\n")


def test_one_of_several_addresses_will_do(folder, server, capsys):
    several = f"127.0.0.1:1,{server.address}"
    assert main.main(_arguments(folder, server, "--once", "--server", several)) == 0
    assert capsys.readouterr().out.startswith(f"tests  {_SHAPE} completed, ")


def test_a_session_that_fails_is_one_line(folder, server, capsys):
    _serve(server, ed25519.Ed25519PrivateKey.generate())
    assert main.main(_arguments(folder, server, "--once")) == 1
    out, err = capsys.readouterr()
    assert out.startswith("tests  -*     failed, ") and out.count("\n") == 1
    assert "Refused: The plan is signed with the key" in out
    assert err.count("\n") == 1


def test_a_second_process_of_the_device_leaves_it_alone(folder, server, capsys):
    (folder / "my.sqlite.device").mkdir()
    server.script = None
    with durable_files.locked(folder / "my.sqlite.device/lock") as is_ours:
        assert is_ours
        assert main.main(_arguments(folder, server, "--once")) == 1
    [line] = capsys.readouterr().err.split("\n")[1:-1]
    assert line.startswith("tff-dpftrl device: another process of this device has a session")


def test_a_damaged_timer_is_refused_before_the_server_is_asked(folder, server, capsys):
    (folder / "my.sqlite.device").mkdir()
    (folder / "my.sqlite.device/participation.sqlite").write_bytes(b"damaged" * 1000)
    server.script = None
    assert main.main(_arguments(folder, server, "--once")) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "participation.sqlite is not a participation timer" in line


def test_texts_are_added_to_the_store(tmp_path, capsys):
    path = tmp_path / "new.sqlite"
    (tmp_path / "texts.txt").write_text("the first\n\nthe second\n", encoding="utf-8-sig")
    command = ["device", "--examples", str(path), "--add", str(tmp_path / "texts.txt")]
    assert main.main(command) == 0
    assert capsys.readouterr().out == f"2 texts were added; {path} has 2 in 'text'\n"
    (tmp_path / "users.jsonl").write_text(
        '{"user_id": "a", "examples": ["one", "two", "three"]}\n{"user_id": "b", "examples": []}\n'
    )
    command[-1] = str(tmp_path / "users.jsonl")
    assert main.main([*command, "--user", "a", "--collection", "other"]) == 0
    store = example_store.SqliteExampleStore.open(path, clock=time.time)
    assert store.counts() == {"other": 3, "text": 2}
    expected = [text_examples.encode_text(text) for text in ("the second", "the first")]
    assert store.select("text", max_examples=2) == expected
    store.close()
    assert main.main([*command, "--user", "c"]) == 2
    assert "user_id 'c' is not a user" in capsys.readouterr().err
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        rows = [{"user": user, "text": split} for user in ("a", f"of {split}")]
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command[-1] = str(tmp_path / "data")
    assert main.main([*command, "--user", "of test"]) == 2
    assert main.main([*command, "--user", "of test", "--split", "test"]) == 0
    assert "1 texts were added" in capsys.readouterr().out
    command[-1] = str(tmp_path / "texts.txt")
    (tmp_path / "texts.txt").write_text("the first\nthe second", encoding="utf-16-le")
    assert main.main(command) == 2
    assert "has NUL characters, as UTF-16 has" in capsys.readouterr().err


def test_examples_of_named_tensors_are_added_if_they_fit_the_task(tmp_path, capsys):
    path, features = tmp_path / "store", tmp_path / "examples.json"
    described = {"window": named_tensors.Feature("float", (2,))}
    features.write_bytes(named_tensors.to_json(described))
    np.savez(tmp_path / "windows.npz", window=np.ones([3, 2], np.float32))
    (tmp_path / "more.jsonl").write_text('{"window": [1, 2.5]}\n', encoding="utf-8-sig")
    (tmp_path / "other.jsonl").write_text('{"window": [1, 2]}\n{"window": [1]}\n')
    command = ["device", "--examples", str(path), "--features", str(features), "--add"]
    for name, message in (("windows.npz", "3 examples were"), ("more.jsonl", "1 examples were")):
        assert main.main([*command, str(tmp_path / name)]) == 0
        assert message in capsys.readouterr().out
    assert main.main([*command, str(tmp_path / "other.jsonl")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "example 2: 'window' has the shape [1], and the task takes [2]" in line
    assert main.main([*command, str(tmp_path / "more.jsonl"), "--user", "a"]) == 2
    assert "--features is for examples of one device" in capsys.readouterr().err
    assert main.main(command[:-1]) == 2
    assert "--features says what the examples to add must hold" in capsys.readouterr().err
    store = example_store.SqliteExampleStore.open(path, clock=time.time)
    assert store.select("text", max_examples=1) == [
        named_tensors.encode({"window": [1, 2.5]}, described)
    ]
    assert store.counts() == {"text": 4}
    store.close()


def test_texts_of_a_table_are_added_and_fleets_read_one(tmp_path, capsys):
    table = tmp_path / "t.csv"
    rows = [f"user{i},{word}" for i in range(20) for word in ("one", "two")]
    table.write_text("\n".join(["who,body", *rows]))
    path, columns = tmp_path / "store", ("--user-column", "who")
    command = ["device", "--examples", str(path), "--add", str(table), "--user", "user3"]
    assert main.main([*command, *columns]) == 0
    assert "2 texts were added" in capsys.readouterr().out
    assert main.main(command) == 2
    assert "name it (user_column)" in capsys.readouterr().err
    assert main.main(command[:-2]) == 2
    assert "is a table of several users: give --user" in capsys.readouterr().err
    made = fleet.Fleet(None, "p", str(table), 3, table=tables.TableOptions(user_column="who"))
    assert 10 < len(made.corpus()) < 20


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        ("--population", (), "--population must be given"),
        ("--server", (), "--server must be given"),
        ("--server-certificate", (), "--server-certificate must be given"),
        ("--plan-keys", (), "--plan-keys must be given"),
        ("--server", ("--server", "nowhere"), "address must be HOST:PORT"),
        ("--plan-keys", ("--plan-keys", "none.pub"), "There is no public key at none.pub"),
        ("--examples", ("--examples", "none.sqlite"), "There is no example store at none.sqlite"),
        (None, ("--max-load", "0"), "--max-load must be"),
        (None, ("--user", "a"), "give --add, too"),
        (None, ("--add", "-"), "start the device without it"),
    ],
)
def test_what_is_missing_or_wrong_is_named(folder, server, capsys, removed, added, message):
    arguments = _arguments(folder, server, "--once")
    if removed is not None:
        place = arguments.index(removed)
        del arguments[place : place + 2]
    assert main.main([*arguments, *added]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tff-dpftrl device: ") and message in line
