"""The benchmarks of the runtime still run, on small numbers; what they measure is not looked at."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import runpy
import shutil
import sys
import time

import numpy as np
import pytest

from tests.runtime.fleet import text_service
from tff_dpftrl.runtime.plans import tensor_values
from tff_dpftrl.runtime.server import server_folder

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_BENCHMARKS = _ROOT / "benchmarks"
_SCRIPTS = sorted(path.stem for path in _BENCHMARKS.glob("runtime_*.py"))


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """They import each other by their names, and start processes of themselves."""
    monkeypatch.syspath_prepend(str(_BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))


def _run(monkeypatch, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(_BENCHMARKS / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", _SCRIPTS)
def test_explains_itself(name, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        _run(monkeypatch, name, "--help")
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_sessions_run(monkeypatch, capsys):
    _run(monkeypatch, "runtime_sessions", "connections", "--num-devices=8", "--attested")
    printed = capsys.readouterr().out
    assert printed.count("8 over few") == printed.count("8 over their own") == 5
    assert "a new connection: " in printed


def test_the_record_shows_what_planning_prints(monkeypatch, capsys):
    _run(monkeypatch, "runtime_planning")
    printed = capsys.readouterr().out
    page = (_BENCHMARKS / "RUNTIME.md").read_text("utf-8")
    assert printed.strip() in page


def test_planning_takes_costs_and_models_of_one_s_own(monkeypatch, capsys):
    options = ["--devices-per-minute=600", "--models", "1000", "1000:secure"]
    _run(monkeypatch, "runtime_planning", *options, "--cost", "session_ms=1e6")
    printed = capsys.readouterr().out
    assert "| `session_ms` | 1e+06 |" in printed
    # Ten devices a second, a thousand seconds each, of processors that are busy half of the time.
    assert "| Selectors | 20,000 | 20,000 |" in printed


@pytest.mark.parametrize("option", ["--cost=nothing=1", "--models=1000:open"])
def test_planning_refuses_what_it_does_not_know(option, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        _run(monkeypatch, "runtime_planning", option)
    assert option.partition("=")[2].partition("=")[0] in capsys.readouterr().err


def test_soak_finds_a_slope_and_its_error():
    soak = importlib.import_module("runtime_soak")
    seconds = np.arange(0, 3600, 10.0)
    found, error = soak.slope(seconds, 5 + seconds / 3600)
    assert found == pytest.approx(1.0) and error == pytest.approx(0.0, abs=1e-9)
    noise = np.random.default_rng(0).normal(size=len(seconds))
    white, _ = zip(*(soak.slope(seconds, sign * noise) for sign in (1, -1)), strict=True)
    assert white[0] == pytest.approx(-white[1])
    # The textbook's error of independent samples is sigma / sqrt(sum of squared hours): 0.18.
    _, error = soak.slope(seconds, noise)
    assert 0.05 < error < 0.4
    # Samples that go on for twelve are worth a twelfth of so many, and no more.
    _, dependent = soak.slope(seconds, np.repeat(noise[::12], 12))
    assert dependent > 1.5 * error


def test_soak_sees_what_a_process_uses():
    soak = importlib.import_module("runtime_soak")
    before = soak.sample_process(os.getpid())
    with open(os.devnull, "rb"), open(os.devnull, "rb"):
        after = soak.sample_process(os.getpid())
    assert after["fds"] - before["fds"] == 2
    assert after["threads"] == sum(after["thread_names"].values()) >= 1
    assert after["rss_mb"] >= after["anonymous_mb"] > 10
    assert after["cpu_s"] > 0


@pytest.fixture(name="served")
def _served(tmp_path):
    """A server that sums letters without TFF, and a folder with which it is found."""
    served = text_service.Served(tmp_path)
    folder = server_folder.of(tmp_path / "server")
    folder.path.mkdir()
    for source, target in (
        ("server.pem", folder.certificate),
        ("issuer.pem", folder.issuer),
        ("issuer.pem.pub", folder.issuer_public),
    ):
        shutil.copy(tmp_path / source, target)
    update = [np.float32(3), np.int32([2])]
    (tmp_path / "update").write_bytes(tensor_values.to_bytes(update))
    asked = text_service.plan().participation
    (tmp_path / "participation").write_bytes(asked.SerializeToString())
    with served.running() as address:
        folder.write_endpoint(address, "")
        yield served, folder


@pytest.mark.slow
def test_a_fleet_of_soak_fills_rounds_whatever_its_devices_do(served, tmp_path):
    soak = importlib.import_module("runtime_soak")
    server, folder = served
    settings = soak.soak_devices.Settings(
        server_folder=str(folder.path),
        sample=str(tmp_path),
        population=text_service.POPULATION,
        devices=40,
        connections=2,
        seed=0,
        within_s=0.2,
        train_s=0.02,
        usual_wait_s=0.2,
        rates={"drop_outs": 0.2, "stragglers": 0.2, "straggler_s": 0.05, "malicious": 0.3},
    )
    fleet = soak.Fleet(settings, tmp_path / "log")
    try:
        for _ in range(600):
            fleet.check()
            if len(server.store.history(text_service.POPULATION, "letters")) >= 8:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("nothing came of it")
    finally:
        fleet.end()
    counts = {name: soak.counted(fleet.said, name) for name in ("shapes", "refusals", "failures")}
    assert counts["shapes"]["-v[]+^"] >= 8 * 3
    assert any(reason.startswith("unusable") for reason in counts["refusals"])
    assert "wrong attempt" in counts["refusals"]
    assert set(counts["failures"]) <= {"UNAUTHENTICATED: token for another nonce"}
    seconds = [took for said in fleet.said for took in said["latencies"]["report"]]
    assert len(seconds) >= counts["shapes"]["-v[]+^"] and min(seconds) > 0


@pytest.mark.slow
def test_soak_runs_whole(tmp_path, monkeypatch, capsys):
    options = ["--devices=60", "--goal=6", "--minutes=0.3", "--every=1", "--quiet-seconds=1"]
    _run(monkeypatch, "runtime_soak", *options, f"--report={tmp_path}")
    printed = capsys.readouterr().out
    assert (tmp_path / "soak.md").read_text("utf-8").strip() in printed
    figures = json.loads((tmp_path / "soak.json").read_text("utf-8"))
    assert figures["rounds"] >= 1
    assert figures["latency_ms"]["end"]["challenge"]["count"] > 0
    assert len(figures["samples"]) >= 10
