"""Tests of `tff-dpftrl sweep`, most of them with runs that only pretend."""

import contextlib
import csv
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.cli import toy_corpus
from tests.finetuning import toy_finetuning
from tests.reports import listed_files
from tests.sweeps import fake_train
from tff_dpftrl import packages
from tff_dpftrl.accounting import selection as selection_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.auditing.recount import run_folder
from tff_dpftrl.cli import config_flags, main
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import plots, population_check, running, selection, selection_plan
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import warm_start

_FAKE = (sys.executable, "-I", "-S", fake_train.__file__)
_ROUNDS = 4
_DATA = {"/users.jsonl": "digest"}
_OVER = ["--over", "noise_multiplier=1,2", "--over", "seed=0:2"]


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """Runs the command with pretended runs in a folder; returns the status."""
    monkeypatch.setattr(packages, "is_missing", lambda module: False)
    monkeypatch.setattr(running, "PROGRAM", _FAKE)
    monkeypatch.setattr(running, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(population_check, "check", lambda cells: dict(_DATA))
    monkeypatch.setattr(plots, "write", lambda output, results: None)
    # For the processes of cells, where the package is not installed.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path)))
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        flags = ["--rounds", str(_ROUNDS), "--delta", "1e-7", "--output", "out"]
        return main.main(["sweep", *flags, *arguments])

    return run


def _starts(output=pathlib.Path("out")):
    """What was done with each cell, in the order of its processes."""
    return {
        path.parent.name: path.read_text().split() for path in sorted(output.glob("cells/*/starts"))
    }


def _rows(name):
    with open(pathlib.Path("out", name), newline="") as file:
        return list(csv.DictReader(file))


def test_all_cells_run_and_are_averaged(sweep, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "write", lambda output, results: drawn.append(results))
    assert sweep(*_OVER, "--jobs", "2") == 0
    finished = [[result.state for result in results].count("finished") for results in drawn]
    assert len(finished) == 4 + 1  # After every cell, and at the end.
    assert finished[0] <= 2 and finished[-1] == 4  # Two may end at a time.
    assert _starts() == {
        f"noise_multiplier={z},seed={seed}": ["begin"] for z in (1, 2) for seed in (0, 1)
    }
    assert [float(row["eval_top1_in_vocab"]) for row in _rows("summary.csv")] == pytest.approx(
        [0.255, 0.205]
    )
    assert {row["state"] for row in _rows("cells.csv")} == {"finished"}
    said = capsys.readouterr()
    assert "| 2 | 8 | 1e-07 | 1 | 3 ± 0 | 25.50% ± 0.50 | 25.50% ± 0.50 |" in said.out
    assert "100%" in said.err and "4/4 cells done" in said.err
    assert "noise_multiplier=2, seed=1: top-1 21.00%, loss 3 after 4 rounds" in said.err
    log = pathlib.Path("out/cells/noise_multiplier=1,seed=0/sweep.log").read_text()
    assert "--delta=1e-07 --noise-multiplier=1.0" in log


def test_the_same_command_again_runs_nothing_and_more_values_run_those(sweep, capsys):
    assert sweep(*_OVER) == 0
    assert sweep(*_OVER) == 0
    assert set(map(tuple, _starts().values())) == {("begin",)}
    assert sweep("--over", "noise_multiplier=1,2,seed=0:3", "--over", "clip_norm=1") == 2
    assert "holds another sweep (axes:" in capsys.readouterr().err
    assert sweep("--over", "noise_multiplier=1,2,seed=0:3") == 0
    assert len(_starts()) == 6 and set(map(tuple, _starts().values())) == {("begin",)}
    assert [row["cells"] for row in _rows("summary.csv")] == ["3", "3"]


def test_a_cell_that_fails_does_not_stop_the_others_and_is_tried_again(sweep, capsys):
    over = ["--over", "eval_sequences=2,4000", "--noise-multiplier", "1"]
    assert sweep(*over) == 1
    said = capsys.readouterr()
    assert "eval_sequences=2: failed: tff-dpftrl train: Training diverged." in said.err
    assert "(out/cells/eval_sequences=2/sweep.log):\n  tff-dpftrl train: Training" in said.err
    assert "1 of 2 cells are not finished, 1 of them failed." in said.out
    assert "Training diverged." in pathlib.Path("out/summary.md").read_text()
    assert sweep(*over) == 0
    assert _starts() == {"eval_sequences=2": ["begin", "resume"], "eval_sequences=4000": ["begin"]}
    assert "Failed" not in pathlib.Path("out/summary.md").read_text()


def test_a_table_that_was_replaced_is_refused_before_the_cells_that_are_left(
    sweep, capsys, monkeypatch
):
    assert sweep("--over", "noise_multiplier=1") == 0
    changed = {"/users.jsonl": "another digest"}
    monkeypatch.setattr(population_check, "check", lambda cells: changed if cells else {})
    assert sweep("--over", "noise_multiplier=1,2") == 2 and len(_starts()) == 1
    assert "planned with other data: /users.jsonl has changed since" in capsys.readouterr().err
    assert sweep("--over", "noise_multiplier=1") == 0  # Nothing is left to be run.


def test_a_file_and_flags_are_overruled_by_cells(sweep):
    pathlib.Path("run.toml").write_text('mechanism = "tree"\ntarget_epsilon = 8.0\nclip_norm = 2.0')
    over = ["--over", "mechanism=blt,none", "--over", "noise_multiplier=0.5"]
    assert sweep("run.toml", *over, "--clip-norm", "3") == 0
    configs = {
        path.parent.name: json.loads(path.read_text())["config"]
        for path in pathlib.Path("out/cells").glob("*/config.json")
    }
    blt = configs["mechanism=blt,noise_multiplier=0.5"]
    assert (blt["clip_norm"], blt["noise_multiplier"]) == (3.0, 0.5)
    assert not {"target_epsilon", "noise_multiplier"} & set(configs["mechanism=none"])


def test_fine_tuning_is_swept_by_the_same_means(sweep, capsys, monkeypatch):
    monkeypatch.setattr(warm_start, "find", lambda folder: None)
    pathlib.Path("run.toml").write_text("num_steps = 4\ncohort_size = 3")
    command = ["sweep", "run.toml", "--finetune", "--initial-weights", "weights", "--output", "out"]
    command += ["--over", "group_size=1,2,noise_multiplier=1,2", "--over", "seed=0:2"]
    command += ["--sampling", "user"]  # Which `train` does not have.
    assert main.main([*command, "--ray-workers", "2"]) == 2
    assert "for the clients of train, and finetune has none" in capsys.readouterr().err
    assert main.main(command) == 0
    said = capsys.readouterr()
    assert "| 1 | 2 | 4 | 0.001 | 2 | 3 ± 0 | 20.50% ± 0.50 | 20.50% ± 0.50 |" in said.out
    assert "seed=1: top-1 26.00%, loss 3 after 4 steps" in said.err
    assert "choosing among runs by their" in pathlib.Path("out/summary.md").read_text()
    cell = pathlib.Path("out/cells/group_size=2,noise_multiplier=1,seed=1")
    assert " finetune --initial-weights=" in (cell / "sweep.log").read_text()
    assert main.main(command) == 0  # Finished cells are known by their options.
    assert set(map(tuple, _starts().values())) == {("begin",)} and len(_starts()) == 8
    assert main.main([*command[:2], *command[3:]]) == 2
    assert "run.toml names num_steps, an option of finetune" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--over", "noise_multiplier=x"], "noise_multiplier needs a number"),
        (
            ["--over", "noise_multiplier=1,-1"],
            "The cell noise_multiplier=-1: noise_mult",
        ),
        (["--over", "seed=0:2"], "The cell seed=0: algorithm 'dp-ftrl' needs either"),
        (["nowhere.toml", *_OVER], "nowhere.toml"),
        ([*_OVER, "--group-size", "2"], "names group_size, an option of finetune"),
        (["--finetune", *_OVER], "names num_rounds, an option of train"),
        ([*_OVER, "--sampling", "user"], "sampling must be one of cyclic, bins"),
        ([*_OVER, "--bands", "auto"], "bands must be of type int, got 'auto'"),
        ([*_OVER, "--jobs", "0"], "--jobs must be at least 1"),
        ([*_OVER, "--initial-weights", "nowhere"], "noise_multiplier=1, seed=0: initial_weights"),
        ([*_OVER, "--model", "own"], "seed=0: model 'own' is a custom model"),
        ([*_OVER, "--ray-workers", "0"], "ray_workers"),
    ],
)
def test_mistakes_are_found_before_any_work(sweep, capsys, arguments, message):
    assert sweep(*arguments) == 2
    assert message in capsys.readouterr().err
    assert not pathlib.Path("out").exists()


_SELECT = [
    "--over", "clip_norm=1,2", "--noise-multiplier", "1", "--select", "public.jsonl",
]  # fmt: skip


@pytest.fixture
def chooses(monkeypatch):
    """Plans and releases without text and models; returns the folders that were released."""
    released = []
    planned = selection_plan.Planned(5.0, 4.0, 1e-8, [None, None], [], digests=_DATA)
    monkeypatch.setattr(selection_plan, "plan", lambda cells, num_runs, text: planned)

    def release(output, chosen, cells):
        (output / "winner").mkdir(exist_ok=True)
        released.append(len(chosen.drawn))

    monkeypatch.setattr(selection, "release", release)
    return released


def test_a_choice_is_made_once_and_shows_nothing_but_the_winner(
    sweep, chooses, capsys, monkeypatch
):
    monkeypatch.setattr(selection_lib.NumRuns, "draw", lambda self: 3)
    assert sweep(*_SELECT, "--jobs", "2") == 0
    said = capsys.readouterr()
    assert "The choice has ε = 5 at δ = 1e-07." in said.err
    assert "top-1" not in said.err + said.out and "winner" in said.out
    for tells_how_many in ("cells done", "%|", "run=", "12"):  # Three runs of four rounds.
        assert tells_how_many not in said.err + said.out
    out = pathlib.Path("out")
    assert {path.name for path in out.iterdir()} == {".sweep.lock", "private", "winner"}
    starts = _starts(out / "private")
    assert [name.split(",")[0] for name in starts] == ["run=0", "run=1", "run=2"]
    configs = [json.loads(path.read_text()) for path in out.glob("private/cells/*/config.json")]
    assert {config["config"]["delta"] for config in configs} == {1e-8}
    monkeypatch.setattr(selection_lib.NumRuns, "draw", lambda self: pytest.fail("drawn again"))
    assert sweep(*_SELECT) == 0 and chooses == [3, 3] and _starts(out / "private") == starts
    assert sweep(*_SELECT[:4]) == 2
    assert "holds a sweep with --select, whose runs stay secret" in capsys.readouterr().err
    assert sweep("--over", "clip_norm=1,2,3", *_SELECT[2:]) == 2
    assert "Values cannot be added: the runs have been drawn." in capsys.readouterr().err


def test_nothing_is_released_before_all_runs_have_ended(sweep, chooses, capsys, monkeypatch):
    monkeypatch.setattr(selection_lib.NumRuns, "draw", lambda self: 2)
    flags = [*_SELECT, "--eval-sequences", "2"]
    assert sweep(*flags) == 1 and not chooses
    assert "Nothing is released. The same command again" in capsys.readouterr().err
    monkeypatch.setitem(_DATA, "/users.jsonl", "a smaller table")
    assert sweep(*flags) == 2 and not chooses
    assert "planned with other data: /users.jsonl has changed since" in capsys.readouterr().err
    monkeypatch.setitem(_DATA, "/users.jsonl", "digest")
    assert sweep(*flags) == 0 and chooses == [2]
    assert set(map(tuple, _starts(pathlib.Path("out/private")).values())) == {("begin", "resume")}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([*_SELECT[:4], "--select-runs", "3"], "--select-runs is for --select TEXT"),
        (
            [*_SELECT, "--select-runs", "1"],
            "(--select-runs) must be a finite number, above 1, got 1",
        ),
        ([*_SELECT, "--select-largest", "4"], "is below the expected one, 10"),
        ([*_SELECT, "--stop-at-accuracy", "0.2"], "held-out users would decide"),
    ],
)
def test_what_a_choice_cannot_have_is_refused(sweep, chooses, capsys, arguments, message):
    assert sweep(*arguments) == 2 and not chooses
    assert message in capsys.readouterr().err and not pathlib.Path("out").exists()


def test_a_plain_sweep_cannot_become_a_choice(sweep, chooses, capsys):
    assert sweep(*_SELECT[:4]) == 0
    assert sweep(*_SELECT) == 2 and not chooses
    assert "holds a sweep without --select, all of whose runs were seen" in capsys.readouterr().err


def test_without_an_axis_there_is_no_sweep(sweep, capsys):
    with pytest.raises(SystemExit):
        sweep()
    assert "--over" in capsys.readouterr().err


def test_flags_of_a_cell_are_read_as_its_config():
    axes = {"min_sep": (None, 7), "lower_case": (False,), "tie_embeddings": (True, None)}
    axes |= {"noise_multiplier": (0.1234567890123, 1e-7), "data": ("/a file, with = and %.jsonl",)}
    parser = main._build_parser()
    for cell in cells_lib.grid({"mechanism": "tree", "model": "gboard-cifg"}, axes):
        args = parser.parse_args(["train", *running.flags(cell.config), "--output", "x"])
        assert config_lib.TrainingConfig.of(**config_flags.given_options(args)) == cell.config


_PRETENDING = f"""
import sys
from tff_dpftrl import packages
from tff_dpftrl.cli import main
from tff_dpftrl.sweeps import plots, population_check, running, selection, selection_plan

packages.is_missing = lambda module: False
plots.write = lambda output, results: None
running.PROGRAM = {_FAKE!r}
population_check.check = lambda cells: {{}}
status = main.main()
assert "tensorflow" not in sys.modules
sys.exit(status)
"""


def _start(folder, *arguments):
    command = ["sweep", "--rounds", str(_ROUNDS), "--output", "out", "--noise-multiplier", "1"]
    return subprocess.Popen(
        [sys.executable, "-c", _PRETENDING, *command, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


_HANGING = ["--over", "eval_sequences=4000,3", "--over", "seed=0:2", "--jobs", "4"]


def _pids_of_hanging(output, number):
    """Waits until so many cells hang after their first round, and the others have finished."""
    while True:
        pids = [int(path.read_text()) for path in output.glob("cells/*/pid")]
        finished = list(output.glob("cells/*/cell.json"))
        if len(pids) == number and len(finished) == 4 - number:
            return pids
        time.sleep(0.01)


def _wait_for_end(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            while pathlib.Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z":
                time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl and /proc")
@pytest.mark.parametrize(
    "signum", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_signal_ends_all_and_the_same_command_goes_on(tmp_path, signum):
    output = tmp_path / "out"
    child = _start(tmp_path, *_HANGING)
    pids = _pids_of_hanging(output, 2)
    child.send_signal(signum)
    said, errors = child.communicate()
    with contextlib.suppress(FileNotFoundError):
        _wait_for_end(pids)
    if signum == signal.SIGINT:
        assert child.returncode == 130
        assert "Of 4 cells: 2 finished, 2 begun. Every committed round is kept" in errors
        assert "Go on with the same command" in errors and "Traceback" not in errors
    child = _start(tmp_path, *_HANGING)
    said, errors = child.communicate()
    assert child.returncode == 0, errors
    assert "4/4 cells done" in errors and "25.50% ± 0.50" in said
    assert _starts(output) == {
        f"eval_sequences={kind},seed={seed}": ["begin", *resumed]
        for kind, resumed in ((4000, []), (3, ["resume"]))
        for seed in (0, 1)
    }


@pytest.mark.slow
def test_a_sweep_of_real_runs_survives_a_kill(tmp_path):
    toy_corpus.write(tmp_path, lengths=(4, 6, 9))
    small = (
        "--data users.jsonl --vocabulary words.txt --vocabulary-size 10 --embedding-size 4 "
        "--lstm-size 5 --sequence-length 6 --batch-size 4 --clients-per-round 3 --rounds 30 "
        "--eval-every 10 --min-sep 2 --mechanism tree --delta 1e-3"
    ).split()
    command = [sys.executable, "-m", "tff_dpftrl.cli.main", "sweep", *small, *_OVER]
    command += ["--jobs", "2", "--output", "out"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    options = {"cwd": tmp_path, "env": environment, "text": True}
    output = tmp_path / "out"
    with open(tmp_path / "first.log", "w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, **options)
        while not list(output.glob("cells/*/metrics.csv")):
            assert child.poll() is None, (tmp_path / "first.log").read_text()
            time.sleep(0.1)
        child.kill()
        child.wait()
    begun = {path.parent.name for path in output.glob("cells/*/config.json")}
    assert begun and not list(output.glob("cells/*/model.npz"))
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, done.stderr
    assert "4/4 cells done" in done.stderr
    logs = {path.parent.name: path.read_text() for path in output.glob("cells/*/sweep.log")}
    assert {name for name, log in logs.items() if "--resume" in log} == begun
    for path in output.glob("cells/*/metrics.csv"):
        with open(path, newline="") as file:
            assert [row["round"] for row in csv.DictReader(file)] == [str(t + 1) for t in range(30)]
    assert len(list(output.glob("cells/*/model.npz"))) == 4
    for folder in (output, *output.glob("cells/*")):
        listed_files.check(folder)


@pytest.mark.slow
def test_a_choice_among_real_runs_survives_a_kill(tmp_path):
    toy_corpus.write(tmp_path, lengths=(4, 6, 9))
    words = (tmp_path / "words.txt").read_text().split()
    texts = [{"user_id": f"p{i}", "examples": [" ".join(words[i::2])]} for i in range(5)]
    (tmp_path / "public.jsonl").write_text("\n".join(map(json.dumps, texts)))
    small = (
        "--data users.jsonl --vocabulary words.txt --vocabulary-size 10 --embedding-size 4 "
        "--lstm-size 5 --sequence-length 6 --batch-size 4 --clients-per-round 3 --rounds 20 "
        "--eval-every 10 --min-sep 2 --mechanism tree --delta 1e-3 --target-epsilon 8"
    ).split()
    command = [sys.executable, "-m", "tff_dpftrl.cli.main", "sweep", *small, "--output", "out"]
    command += ["--over", "server_learning_rate=0.1,1", "--jobs", "2"]
    command += ["--select", "public.jsonl", "--select-runs", "2", "--select-largest", "3"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    options = {"cwd": tmp_path, "env": environment, "text": True}
    output = tmp_path / "out"
    with open(tmp_path / "first.log", "w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, **options)
        while not list(output.glob("private/cells/*/metrics.csv")):
            assert child.poll() is None, (tmp_path / "first.log").read_text()
            time.sleep(0.1)
        child.kill()
        child.wait()
    drawn = (output / "private" / "selection.json").read_text()
    assert not (output / "winner").exists()
    users = (tmp_path / "users.jsonl").read_text()
    (tmp_path / "users.jsonl").write_text("\n".join(users.splitlines()[:-3]))
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 2 and "planned with other data" in done.stderr
    (tmp_path / "users.jsonl").write_text(users)
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, done.stderr
    assert (output / "private" / "selection.json").read_text() == drawn
    stated = json.loads((output / "winner" / "privacy_statement.json").read_text())
    assert 8 * (1 - 1e-6) < stated["epsilon"] <= 8 and stated["delta"] == 1e-3
    assert stated["parameters"]["epsilon_of_one_run"] < 8
    runs = list(output.glob("private/cells/*/model.npz"))
    assert len(runs) == len(json.loads(drawn)["drawn"])
    winner = (output / "winner" / "model.npz").read_bytes()
    assert [run.read_bytes() for run in runs].count(winner) == 1
    listed_files.check(output / "winner")
    report = run_folder.recount_run(output)
    assert not report.is_violated, report.findings
    for run in runs:
        assert sentences.ONE_OF_A_CHOICE in (run.parent / "README.md").read_text()
        assert sentences.ONE_OF_A_CHOICE in (run.parent / "privacy_statement.md").read_text()
    for path in (output / "winner").glob("*[!g]"):  # Of the picture there is no text.
        assert sentences.ONE_OF_A_CHOICE.encode() not in path.read_bytes()
    less = json.loads(drawn)
    less["plan"]["epsilon"] -= 0.5  # As if the ratio of the choice cost less than it does.
    (output / "private" / "selection.json").write_text(json.dumps(less))
    wrong = {
        one.test for one in run_folder.recount_run(output).findings if one.outcome == "violated"
    }
    assert wrong == {
        "runs: of this choice, on the same users",
        "what each run promises",
        "statement: ε of the choice",
    }


@pytest.mark.slow
def test_a_sweep_of_real_fine_tuning_survives_a_kill(tmp_path):
    toy_finetuning.write(tmp_path)
    small = (
        "--finetune --data users.jsonl --proxy-data public.jsonl --initial-weights pretrained "
        "--sampling user --cohort 8 --steps 30 --clip-norm 1 --eval-every 10 --delta 1e-3"
    ).split()
    command = [sys.executable, "-m", "tff_dpftrl.cli.main", "sweep", *small, "--output", "out"]
    command += ["--over", "group_size=1,2", "--over", "target_epsilon=4,20"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    options = {"cwd": tmp_path, "env": environment, "text": True}
    output = tmp_path / "out"
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options
    )
    while len(list(output.glob("cells/*/metrics.csv"))) < 2:
        assert child.poll() is None
        time.sleep(0.1)
    child.kill()
    child.wait()
    begun = {path.parent.name for path in output.glob("cells/*/config.json")}
    begun -= {path.parent.name for path in output.glob("cells/*/cell.json")}
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, done.stderr
    assert "4/4 cells done" in done.stderr and "bits per character" in done.stdout
    logs = {path.parent.name: path.read_text() for path in output.glob("cells/*/sweep.log")}
    assert {name for name, log in logs.items() if "--resume" in log} == begun != set()
    with open(output / "cells.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [math.ceil(float(row["epsilon"])) for row in rows] == [4, 20, 4, 20]
    assert {row["rounds_done"] for row in rows} == {"30"}


@pytest.mark.slow
def test_a_cell_after_others_in_a_process_is_the_run_that_train_makes(tmp_path):
    toy_corpus.write(tmp_path, lengths=(4, 6, 9))
    small = (
        "--data users.jsonl --vocabulary words.txt --vocabulary-size 10 --embedding-size 4 "
        "--lstm-size 5 --sequence-length 6 --batch-size 4 --clients-per-round 3 --rounds 4 "
        "--eval-every 2 --mechanism none"
    ).split()
    program = [sys.executable, "-m", "tff_dpftrl.cli.main"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    options = {"cwd": tmp_path, "env": environment, "check": True}
    subprocess.run(
        [
            *program,
            "sweep",
            *small,
            "--over",
            "seed=0:2",
            "--over",
            "clip_norm=1",
            "--output",
            "out",
        ],
        **options,
    )
    subprocess.run(
        [*program, "train", *small, "--seed", "1", "--clip-norm", "1", "--output", "alone"],
        **options,
    )
    (cell,) = tmp_path.glob("out/cells/*seed=1*")
    with np.load(cell / "model.npz") as there, np.load(tmp_path / "alone" / "model.npz") as here:
        assert there.files == here.files
        for key in here.files:
            np.testing.assert_array_equal(there[key], here[key])
