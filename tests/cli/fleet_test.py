"""Tests of `tff-dpftrl fleet`."""

from __future__ import annotations

import json

import pytest

from tests.runtime.fleet import text_service
from tff_dpftrl.cli import main


def _arguments(folder, address, *more):
    return [
        *("fleet", "--server", address, "--server-certificate", str(folder / "server.pem")),
        *("--plan-keys", str(folder / "plans.pem.pub")),
        *("--attestation-key", str(folder / "issuer.pem")),
        *("--population", "tests", "--data", str(text_service.write_corpus(folder))),
        *("--devices", "25", "--start-within", "0.2", "--straggler-seconds", "0.2", *more),
    ]


def test_a_fleet_ends_with_a_table(tmp_path, capsys):
    served = text_service.Served(tmp_path)
    with served.running() as address:
        assert main.main(_arguments(tmp_path, address, "--until-rounds", "2")) == 0
        out, err = capsys.readouterr()
        arguments = _arguments(tmp_path, address, "--until-rounds", "1", "--format", "json")
        assert main.main(arguments) == 0
        counts = json.loads(capsys.readouterr().out)
    head, first, *_ = out.splitlines()
    assert head.split() == ["shape", "sessions", "share", "paper", "what", "happened"]
    assert first.startswith("-v[]+^") and "75%" in first
    assert "reports of" in out and "nothing to do:" in out
    assert "letters round 0" in err
    assert counts["rounds"] >= 1 and counts["shapes"]["-v[]+^"] == counts["reports"] > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--devices", "0"), "num_devices must be"),
        (("--drop-outs", "2"), "drop_outs must be"),
        (("--until-rounds", "0"), "--until-rounds must be"),
        (("--seconds", "0"), "--seconds must be"),
        (("--processes", "0"), "--processes must be"),
        (("--population", ""), "--population must be given"),
        (("--server", "nowhere"), "address must be HOST:PORT"),
        (("--data", "nothing.jsonl"), "nothing.jsonl: cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, capsys, changed, message):
    text_service.Served(tmp_path)
    assert main.main([*_arguments(tmp_path, "127.0.0.1:1"), *changed]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("tff-dpftrl fleet: ") and message in line
