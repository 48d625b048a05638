"""Tests of `tff-dpftrl noise-party`."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf
from cryptography.hazmat.primitives import serialization

from tests.runtime.device import wire_server
from tests.runtime.noise_party import noisy_task
from tff_dpftrl import durable_files
from tff_dpftrl.cli import main
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.tasks import task_folder


@pytest.fixture(name="folder")
def _folder(tmp_path):
    """The folder of the party that the task of `noisy_task` names."""
    folder = tmp_path / "party"
    assert main.main(["noise-party", "new-key", "--folder", str(folder)]) == 0
    private = noisy_task.KEY.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "key").write_bytes(private)
    (folder / "key.pub").write_bytes(signing_keys.public_pem(noisy_task.KEY.public_key()))
    return folder


@pytest.fixture(name="server")
def _server(tmp_path):
    made = wire_server.WireServer(lambda: 0.0)
    (tmp_path / "server.pem").write_bytes(made.root_certificates)
    yield made
    made.stop()


@pytest.fixture(name="party")
def _party(folder, server, tmp_path, monkeypatch):
    """Runs the command on a task."""
    read = []

    def run(task, *more):
        monkeypatch.setattr(
            task_folder, "read", lambda path, keys: read.append((path, keys)) or task
        )
        tf.config.run_functions_eagerly(True)
        try:
            return main.main(
                [
                    *("noise-party", "--task", "tasks/noisy", "--folder", str(folder)),
                    *("--plan-keys", str(folder / "key.pub"), "--server", server.address),
                    *("--server-certificate", str(tmp_path / "server.pem"), *more),
                ]
            )
        finally:
            tf.config.run_functions_eagerly(False)

    run.read = read
    return run


def test_a_key_is_made_once(tmp_path, capsys):
    command = ["noise-party", "new-key", "--folder", str(tmp_path / "party")]
    assert main.main(command) == 0
    assert "key.pub to who makes the task" in capsys.readouterr().out
    assert (tmp_path / "party").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "party" / "key").stat().st_mode & 0o777 == 0o600
    assert main.main(command) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_party_gives_noise_and_says_what_it_gave(party, folder, server, capsys):
    server.script = noisy_task.Rounds(noisy_task.make(), [{}, {"round_index": 2}])
    assert main.main(["noise-party", "status", "--folder", str(folder)]) == 0
    assert "It has given no noise" in capsys.readouterr().out
    assert party(noisy_task.make()) == 0
    (path, (key,)), *_ = party.read
    assert path == "tasks/noisy" and signing_keys.raw(key) == noisy_task.PARTY
    err = capsys.readouterr().err
    assert "Noise party 03a107bff3ce10be of the task 'noisy': " in err
    assert "Round 0: noise given to the sum of 3 devices." in err
    server.script.requests, server.script.accepts = [{}], False
    assert party(noisy_task.make()) == 0
    assert "The next noise is that of round 3." in capsys.readouterr().err
    assert main.main(["noise-party", "status", "--folder", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "round 3, attempt attempt 4: round abandoned" in said
    status = ["noise-party", "status", "--folder", str(folder), "--format", "json"]
    assert main.main(status) == 0
    shown = json.loads(capsys.readouterr().out)
    (task,), key = shown["tasks"], shown["key"]
    assert key == noisy_task.PARTY.hex()
    counts = {name: task[name] for name in ("given", "summed", "abandoned", "passed_over")}
    assert counts == {"given": 3, "summed": 2, "abandoned": 1, "passed_over": 1}
    assert (task["task"], task["next_round"]) == ("noisy", 4)


def test_a_party_has_one_process(party, folder, capsys):
    with durable_files.locked(folder / "lock"):
        assert party(noisy_task.make()) != 0
    assert "another process is this noise party" in capsys.readouterr().err


def test_a_task_of_another_party_is_refused_before_anything_is_made(party, folder, capsys):
    assert party(noisy_task.make(parties=(noisy_task.OTHER_PARTY,))) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("tff-dpftrl noise-party: The task 'noisy' promises devices the noise of")
    assert not list(folder.glob("*.ledger"))


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "--task and --folder must be given"),
        (["--task", "t"], "--folder must be given"),
        (["--task", "t", "--folder", "nowhere"], "--plan-keys must be given: signing_key.pub"),
        (
            ["--task", "t", "--folder", "nowhere", "--plan-keys", "k", "--most-skipped", "-1"],
            "--most-skipped must be",
        ),
        (
            ["--task", "t", "--folder", "nowhere", "--plan-keys", "k"],
            "There is no private key at nowhere/key",
        ),
        (["status", "--folder", "nowhere"], "There is no public key at nowhere/key.pub"),
    ],
)
def test_what_is_wrong_is_named(capsys, given, message):
    assert main.main(["noise-party", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tff-dpftrl noise-party: ") and message in line
