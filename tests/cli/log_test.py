"""Tests of `tff-dpftrl log`: a log is made, goes on, and is verified."""

from __future__ import annotations

import json

import pytest

from tests.reports import made_up
from tff_dpftrl.accounting import statement_text
from tff_dpftrl.cli import main


def _log(*arguments):
    return main.main(["log", *map(str, arguments)])


@pytest.fixture
def statement(tmp_path):
    """Returns the statement of a run, alone in the run's folder."""
    file = tmp_path / "run" / "privacy_statement.json"
    file.parent.mkdir()
    file.write_text(statement_text.to_json(made_up.stated()))
    return file


@pytest.fixture
def log(statement, tmp_path):
    """Returns the folder of a log, of the key log.key, with the statement."""
    path = tmp_path / "log"
    name = ("--name", "example.org/x")
    assert _log("append", path, statement.parent, "--key", tmp_path / "log.key", *name) == 0
    return path


def test_a_log_goes_on_from_a_kept_checkpoint(log, statement, tmp_path, capsys):
    key, public = ("--key", tmp_path / "log.key"), ("--public-key", tmp_path / "log.key.pub")
    kept = tmp_path / "kept"
    kept.write_text((log / "checkpoint").read_text("utf-8"), encoding="utf-8-sig")
    assert _log("append", log, statement.parent, *key) == 0
    assert "0 entered, 1 known" in capsys.readouterr().out
    statement.write_text(statement_text.to_json(made_up.stated(delta=1e-6)))
    assert _log("append", log, statement.parent, *key) == 0
    assert _log("verify", log, *public, "--earlier", kept, "--has", statement) == 0
    printed = capsys.readouterr().out
    assert "example.org/x holds: 2 entries. It goes on from" in printed and "Keep" not in printed
    assert _log("verify", log, *public, "--format", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["size"], shown["files_missing"]) == (2, [])

    (log / "entries.jsonl").write_text("")
    assert _log("verify", log, *public) == 2
    assert "one was changed or removed" in capsys.readouterr().err


def test_one_file_is_verified_by_its_proof(log, statement, tmp_path, capsys):
    public = ("--public-key", tmp_path / "log.key.pub")
    proof = tmp_path / "proof"
    assert _log("prove", log, statement, *public, "--output", proof) == 0
    assert _log("prove", log, statement, *public) == 0
    assert proof.read_text() in capsys.readouterr().out
    assert _log("verify", "--proof", proof, "--has", statement, *public) == 0
    assert "is in the log as a statement of run" in capsys.readouterr().out
    statement.write_text("{}")
    assert _log("verify", "--proof", proof, "--has", statement, *public) == 2
    assert _log("prove", log, statement, *public) == 2
    assert _log("verify", log, "--has", statement, *public) == 2
    assert "The log has no entry of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("verify", "--proof", "p"), "is of one file: name it with --has"),
        (("verify", "nowhere"), "There is no log in nowhere"),
        (("verify", "log", "--earlier", "nowhere"), "nowhere cannot be read"),
        (("verify", "log", "--earlier", "picture"), "picture is neither a checkpoint nor a proof"),
        (("verify", "--has", "picture", "--proof", "picture"), "neither a checkpoint nor a proof"),
    ],
)
def test_mistakes_are_one_line(log, tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "picture").write_bytes(b"\x89PNG")
    assert _log(*arguments, "--public-key", "log.key.pub") == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "one of the arguments LOG --proof is required"),
        (("log", "--proof", "p"), "--proof: not allowed with argument LOG"),
    ],
)
def test_a_log_or_a_proof_is_verified(capsys, arguments, says):
    with pytest.raises(SystemExit, match="2"):
        _log("verify", *arguments, "--public-key", "log.key.pub")
    assert says in capsys.readouterr().err


def test_a_name_cannot_steer_the_terminal(statement, tmp_path, capsys):
    folder = statement.parent.rename(tmp_path / "\x1b[2Jrun")
    key = tmp_path / "log.key"
    assert _log("append", tmp_path / "log", folder, "--key", key, "--name", "n") == 0
    capsys.readouterr()
    assert _log("verify", tmp_path / "log", "--public-key", f"{key}.pub") == 0
    out = capsys.readouterr().out
    assert "�[2Jrun" in out and "\x1b" not in out


def test_no_key_is_made_for_a_log_that_is_not_begun(statement, tmp_path, capsys):
    key = tmp_path / "log.key"
    for name in ((), ("--name", "a b")):
        assert _log("append", tmp_path / "log", statement.parent, "--key", key, *name) == 2
    assert not key.exists()
