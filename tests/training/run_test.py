"""Tests of whole training runs: files, statement, refusals, crashes and resumption."""

import csv
import json
import os
import pathlib
import random
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.mechanisms import blt, serialization
from tff_dpftrl.models import export
from tff_dpftrl.participation import ledger, schema
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import run

_WORDS = [a + b for a in "bdfgk" for b in ("ao", "ee", "iu", "oo", "ua", "ya")]
_NUM_ROUNDS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus of 60 users, and a vocabulary file."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(1)
    with open(folder / "users.jsonl", "w") as file:
        for user in range(60):
            start = rng.randrange(30)
            texts = [
                " ".join(_WORDS[(start + i * 7) % 30] for i in range(rng.randint(3, 12)))
                for _ in range(rng.randint(2, 6))
            ]
            file.write(json.dumps({"user_id": f"user{user}", "examples": texts}) + "\n")
    (folder / "words.txt").write_text("\n".join(_WORDS))
    return folder


def _config(corpus, **options):
    return config_lib.TrainingConfig(
        **{
            "data": str(corpus / "users.jsonl"),
            "vocabulary": str(corpus / "words.txt"),
            "vocabulary_size": 30,
            "sequence_length": 6,
            "batch_size": 4,
            "embedding_size": 4,
            "lstm_size": 5,
            "num_rounds": _NUM_ROUNDS,
            "clients_per_round": 5,
            "min_sep": 3,
            "client_learning_rate": 0.5,
            "server_learning_rate": 0.5,
            "clip_norm": 1.0,
            "mechanism": "blt",
            "buffers": 2,
            "noise_multiplier": 0.5,
            "eval_every": 3,
            "deterministic_noise_seed": 7,
        }
        | options
    )


def _weights(output):
    _, weights = export.read(output / "model.npz")
    return weights


def _rows(output):
    with open(output / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["seconds"]
    return rows


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "uninterrupted"
    return output, run.train(_config(corpus), output)


def test_a_run_leaves_everything_in_its_folder(uninterrupted):
    output, _ = uninterrupted
    names = {p.name for p in output.iterdir()}
    assert names == {
        "best_model.npz",
        "config.json",
        "curves.png",
        "metrics.csv",
        "model.npz",
        "privacy_statement.json",
        "privacy_statement.md",
        "private",
        "tensorboard",
    }
    rows = _rows(output)
    assert [int(row["round"]) for row in rows] == list(range(1, _NUM_ROUNDS + 1))
    assert [bool(row["eval_loss"]) for row in rows] == [False, False, True] * 2
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_known_seed_is_not_called_private(uninterrupted):
    _, results = uninterrupted
    assert all(row["epsilon"] is None for row in results.rows)
    assert not results.statement.has_guarantee
    assert "seed given by the user" in results.statement.no_guarantee[0]
    assert "NO guarantee" in results.summary


def test_the_statement_is_of_what_the_ledger_saw(corpus, tmp_path):
    options = {"deterministic_noise_seed": None, "mechanism": "tree", "buffers": None}
    output = tmp_path / "run"
    results = run.train(_config(corpus, **options), output)
    written = statement_lib.PrivacyStatement.from_json(
        (output / "privacy_statement.json").read_text()
    )
    assert written == results.statement and written.has_guarantee
    declared = schema.MinSep(_NUM_ROUNDS, 3, 2)
    with ledger.Ledger.open(output / "private" / "ledger.sqlite", declared) as book:
        observed = book.observed()
    assert written.observed.min_sep == observed.min_sep
    # 60 users of whom about 48 train: five a round, none takes part twice in six rounds.
    assert (written.observed.num_rounds, written.observed.max_participations) == (_NUM_ROUNDS, 1)
    assert written.epsilon <= float(results.rows[-1]["epsilon"])
    assert stat.S_IMODE((output / "private").stat().st_mode) == 0o700


def test_zero_noise_and_huge_clip_norm_is_plain_federated_averaging(corpus, tmp_path):
    noiseless = {"noise_multiplier": 0.0, "clip_norm": 1e6, "num_rounds": 3}
    run.train(_config(corpus, **noiseless), tmp_path / "ours")
    plain = {"mechanism": "none", "noise_multiplier": None, "buffers": None, "num_rounds": 3}
    run.train(_config(corpus, **plain), tmp_path / "plain")
    for ours, theirs in zip(_weights(tmp_path / "ours"), _weights(tmp_path / "plain"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    statement = json.loads((tmp_path / "plain" / "privacy_statement.json").read_text())
    assert statement["epsilon"] is None and statement["no_guarantee"]


def test_a_target_epsilon_is_kept(corpus, tmp_path):
    options = {"noise_multiplier": None, "target_epsilon": 5.0, "deterministic_noise_seed": None}
    results = run.train(_config(corpus, **options, num_rounds=2, min_sep=1), tmp_path / "run")
    assert 0.0 < results.statement.epsilon <= 5.0
    assert float(results.rows[-1]["epsilon"]) <= 5.0


def test_a_run_stops_before_its_budget_is_exceeded(corpus, tmp_path):
    options = {"mechanism": "identity", "buffers": None, "deterministic_noise_seed": None}
    # A user takes part once in every three rounds: epsilon grows at rounds 1 and 4.
    whole = run.train(_config(corpus, **options), tmp_path / "whole")
    spent = [float(row["epsilon"]) for row in whole.rows]
    assert spent[0] == spent[2] < spent[3] == spent[5]
    budget = (spent[2] + spent[3]) / 2
    stopped = run.train(_config(corpus, **options, max_epsilon=budget), tmp_path / "stopped")
    assert len(stopped.rows) == 3 and stopped.statement.epsilon <= budget
    assert run.train(None, tmp_path / "stopped").statement == stopped.statement
    with pytest.raises(ValueError, match="does not pay for one round"):
        run.train(_config(corpus, **options, max_epsilon=spent[0] / 2), tmp_path / "none")


def test_a_run_stops_at_the_accuracy_asked_for_and_keeps_the_best_model(corpus, tmp_path):
    options = {"eval_every": 2, "noise_multiplier": 0.0, "clip_norm": 10.0}
    results = run.train(_config(corpus, **options, stop_at_accuracy=1e-9), tmp_path / "run")
    accuracies = [row["eval_top1_in_vocab"] for row in results.rows]
    evaluated = [a for a in accuracies if a is not None]
    # When it stops depends on the data: all declared rounds are accounted for.
    assert results.statement.accounted.num_rounds == _NUM_ROUNDS
    assert all(a == 0.0 for a in evaluated[:-1])
    assert evaluated[-1] > 0.0 or len(results.rows) == _NUM_ROUNDS


@pytest.mark.parametrize("algorithm", ["dp-fedavg", "dp-fedsgd"])
def test_sampled_algorithms_resume_with_the_same_secret_cohorts(
    corpus, tmp_path, monkeypatch, algorithm
):
    options = {
        "algorithm": algorithm,
        "mechanism": "blt",  # The default, which these algorithms ignore.
        "buffers": None,
        "min_sep": None,
        "noise_multiplier": 2.0,
        "deterministic_noise_seed": None,
        "num_rounds": 3,
    }
    output = tmp_path / "run"

    def crash(*args):
        raise _Crash

    with monkeypatch.context() as patch:
        patch.setattr(run.ledger.Ledger, "commit_round", crash)
        with pytest.raises(_Crash):
            run.train(_config(corpus, **options), output)
    # The round was begun with a cohort: the ledger would refuse another one.
    results = run.train(None, output)
    assert results.statement.mechanism == algorithm
    assert results.statement.epsilon == pytest.approx(float(results.rows[-1]["epsilon"]))
    assert "probability" in results.statement.assumptions[0]
    seed = (output / "private" / "cohort_seed").read_text().strip()
    assert len(seed) > 50  # 256 bits, hexadecimal.
    assert all(row["clients"] is None for row in results.rows)  # Cohorts are secret.
    published = [p for p in output.rglob("*") if p.is_file() and "private" not in p.parts]
    assert all(seed.encode() not in p.read_bytes() for p in published)


@pytest.mark.parametrize("secagg_bits", [None, 16])
def test_adaptive_clipping_restarts_and_is_accounted_in_blocks(corpus, tmp_path, secagg_bits):
    options = {
        "adaptive_clipping": True,
        "clipped_count_stddev": 2.0,
        "restart_warmup": 2,
        "restart_every": 2,
        "mechanism": "tree",
        "buffers": None,
        "deterministic_noise_seed": None,
        "min_sep": 2,
        "secagg_bits": secagg_bits,
    }
    results = run.train(_config(corpus, **options), tmp_path / "run")
    derived = json.loads((tmp_path / "run" / "config.json").read_text())["derived"]
    assert derived["strategy"]["mechanism"] == "restarted"
    assert derived["strategy"]["starts"] == [0, 2, 4]
    # Nobody takes part twice: one block of two rounds, one leaf and its parent.
    assert results.statement.parameters["sensitivity_squared"] == 2.0
    assert run.train(None, tmp_path / "run").statement == results.statement


def test_secure_aggregation_charges_the_inflated_norm(corpus, tmp_path):
    options = {"secagg_bits": 20, "num_rounds": 2, "deterministic_noise_seed": None}
    before = tff.framework.get_context_stack().current
    results = run.train(_config(corpus, **options), tmp_path / "run")
    assert tff.framework.get_context_stack().current is before
    parameters = results.statement.parameters
    assert 1.0 < parameters["secagg_norm_inflation"] < 1.1
    assert parameters["secagg_bits_per_parameter"] <= 20
    assert parameters["secagg_upload_bytes_per_client"] > 0


def test_a_strategy_from_a_file_is_used(corpus, tmp_path):
    strategy = blt.Blt(buf_decay=(0.5,), output_scale=(0.25,))
    serialization.save(tmp_path / "strategy.json", strategy)
    options = {"strategy": str(tmp_path / "strategy.json"), "buffers": None, "num_rounds": 2}
    run.train(_config(corpus, **options), tmp_path / "run")
    derived = json.loads((tmp_path / "run" / "config.json").read_text())["derived"]
    assert derived["strategy"] == strategy.to_dict()


def test_updates_that_are_not_finite_are_dropped_and_reported(corpus, tmp_path, capsys):
    options = {"client_learning_rate": 1e30, "num_rounds": 1, "buffers": None}
    run.train(_config(corpus, **options, mechanism="identity"), tmp_path / "run")
    # Users of one batch only make an update that is huge, but finite: it is clipped.
    assert re.search(r"Round 1: [1-5] of 5 clients had an update that is", capsys.readouterr().err)
    assert all(np.all(np.isfinite(weight)) for weight in _weights(tmp_path / "run"))


class _Crash(BaseException):
    """Stands for the death of the process at a given place."""


_CRASH_SITES = (
    ("begin_round", "before"),
    ("begin_round", "after"),
    ("save", "before"),
    ("save", "after"),
    ("commit_round", "after"),
    ("append", "before"),
)


@pytest.mark.parametrize("site, when", _CRASH_SITES)
def test_a_crash_at_every_boundary_resumes_to_the_same_weights(
    corpus, uninterrupted, tmp_path, monkeypatch, site, when
):
    owner = {
        "begin_round": run.ledger.Ledger,
        "commit_round": run.ledger.Ledger,
        "save": run.checkpoint.CheckpointFolder,
        "append": run.results.MetricsLog,
    }[site]
    original = getattr(owner, site)
    calls = []

    def crashing(self, *args, **kwargs):
        calls.append(args)
        crash = len(calls) == 4
        if crash and when == "before":
            raise _Crash
        result = original(self, *args, **kwargs)
        if crash:
            raise _Crash
        return result

    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(owner, site, crashing)
        with pytest.raises(_Crash):
            run.train(_config(corpus), output)
    results = run.train(None, output)
    expected, expected_results = uninterrupted
    for ours, theirs in zip(_weights(output), _weights(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert _rows(output) == _rows(expected)
    assert results.statement == expected_results.statement


def test_a_crash_before_the_first_round_leaves_a_folder_that_can_be_used(
    corpus, tmp_path, monkeypatch
):
    def crash(*args):
        raise _Crash

    with monkeypatch.context() as patch:
        patch.setattr(run.manifest, "write", crash)
        with pytest.raises(_Crash):
            run.train(_config(corpus, num_rounds=1), tmp_path / "run")
    run.train(_config(corpus, num_rounds=1), tmp_path / "run")


def test_a_rolled_back_checkpoint_is_refused(corpus, tmp_path, monkeypatch):
    output = tmp_path / "run"
    original = run.ledger.Ledger.commit_round

    def stop_after_two(self, round_index, *args):
        original(self, round_index, *args)
        if round_index == 1:
            raise _Crash

    with monkeypatch.context() as patch:
        patch.setattr(run.ledger.Ledger, "commit_round", stop_after_two)
        with pytest.raises(_Crash):
            run.train(_config(corpus), output)
    newest = sorted((output / "private" / "checkpoints").iterdir())[-1]
    newest.unlink()
    with pytest.raises(ValueError, match="that the ledger names as the last one"):
        run.train(None, output)


def test_other_users_are_refused_on_resuming(corpus, tmp_path):
    data = tmp_path / "users.jsonl"
    lines = (corpus / "users.jsonl").read_text().splitlines()
    data.write_text("\n".join(lines))
    run.train(_config(corpus, data=str(data), num_rounds=1), tmp_path / "run")
    data.write_text("\n".join(lines[:-10]))
    with pytest.raises(ValueError, match="training users are no longer those"):
        run.train(None, tmp_path / "run")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"min_sep": 20}, "largest feasible min_sep"),
        ({"clients_per_round": 60}, "lower it to"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"vocabulary": "nowhere.txt"}, "nowhere.txt"),
    ],
)
def test_user_errors_leave_nothing_behind(corpus, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run.train(_config(corpus, **options, num_rounds=40), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_second_run_in_the_folder_and_a_missing_one_are_refused(uninterrupted, tmp_path, corpus):
    output, _ = uninterrupted
    with pytest.raises(ValueError, match="already holds a run: add --resume"):
        run.train(_config(corpus), output)
    with pytest.raises(ValueError, match="no run to resume"):
        run.train(None, tmp_path)


_CHILD = textwrap.dedent("""
    import json, pathlib, sys
    from tff_dpftrl.training import config, run
    options = json.loads(sys.argv[2])
    run.train(options and config.TrainingConfig(**options), pathlib.Path(sys.argv[1]))
""")


def _start(output: pathlib.Path, config: config_lib.TrainingConfig | None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(output), json.dumps(config and config.to_dict())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def _kill_and_resume_until_done(corpus, output, delays):
    """Kills a run after each of the delays (seconds since its first round); returns the kills."""
    kills = 0
    for delay in delays:
        fresh = not (output / "config.json").exists()
        child = _start(output, _config(corpus) if fresh else None)
        while child.poll() is None and not (output / "config.json").exists():
            time.sleep(0.05)
        time.sleep(delay)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            kills += 1
        child.communicate()
        assert child.returncode in (0, -signal.SIGKILL)
    child = _start(output, None)
    _, errors = child.communicate()
    assert child.returncode == 0, errors.decode()
    return kills


def _assert_same_run(output, expected):
    for ours, theirs in zip(_weights(output), _weights(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert _rows(output) == _rows(expected)


def test_a_killed_process_resumes_to_the_same_weights(corpus, uninterrupted, tmp_path):
    output = tmp_path / "run"
    assert _kill_and_resume_until_done(corpus, output, delays=[1.5]) == 1
    _assert_same_run(output, uninterrupted[0])


@pytest.mark.slow
def test_thirty_kills_at_random_moments(corpus, uninterrupted, tmp_path):
    rng = random.Random(3)
    kills = attempts = 0
    while kills < 30:
        output = tmp_path / f"run{attempts}"
        # The first child is killed after its first commit, later ones while they start or run.
        delays = [rng.uniform(0.0, 3.0), *(rng.uniform(1.0, 9.0) for _ in range(5))]
        kills += _kill_and_resume_until_done(corpus, output, delays)
        _assert_same_run(output, uninterrupted[0])
        attempts += 1
        assert attempts <= 20, f"only {kills} of the children were still running when killed"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
