"""Kills runs of `tff-dpftrl train` and `finetune` with SIGKILL, and resumes them to the end.

    python benchmarks/kill_training.py [--kills 100] [--seed 0] [--kinds blt,tree,...]

Every kill comes at a seeded moment: just before the n-th write that makes something durable (a
statement of SQL, an fsync, a renaming, a removal), or after a drawn amount of processor time,
which may be while the process starts. A run may be killed several times. After each kill, the
ledger must hold what it held before, and nothing may be published that it has not committed; at
the end, all files must be those of a run that nobody disturbed, bit for bit. The runs of the
kind "secret" have noise that nobody can repeat, and are held to the former only.

TensorFlow is imported once, and each process is a fork: a start takes no seconds then.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import pathlib
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

_WORDS = [a + b for a in "bdfgk" for b in ("ao", "ee", "iu", "oo", "ua", "ya")]
_SMALL = "--vocabulary-size 30 --sequence-length 6 --embedding-size 4".split()
_TRAIN = [*_SMALL, *"--lstm-size 5 --batch-size 4 --rounds 5 --clients-per-round 4".split()]
_TRAIN += "--min-sep 3 --clip-norm 1 --noise-multiplier 0.5 --eval-every 2".split()
_TRAIN += "--client-learning-rate 0.5 --server-learning-rate 0.5".split()
_KNOWN_SEED = ["--deterministic-noise-seed", "7"]
_FINETUNE = "--sampling user --group-size 2 --cohort 8 --steps 5 --warmup-steps 1".split()
_FINETUNE += "--learning-rate 0.01 --clip-norm 1 --noise-multiplier 0.7 --eval-every 2".split()
_BLT = ["--mechanism", "blt", "--buffers", "2"]
_KINDS = {
    "blt": ["train", *_TRAIN, *_BLT, *_KNOWN_SEED],
    "tree": ["train", *_TRAIN, "--mechanism", "tree", *_KNOWN_SEED],
    "restarts": ["train", *_TRAIN, "--mechanism", "tree", "--adaptive-clipping", *_KNOWN_SEED]
    + "--restart-warmup 2 --restart-every 2 --restart-optimizer --clipped-count-stddev 1".split(),
    "finetune": ["finetune", *_FINETUNE, *_KNOWN_SEED],
    "secret": ["train", *_TRAIN, *_BLT],
}
# They hold times, or keys. The ledger and the metrics are compared by their rows, checkpoints by
# their names, which are fingerprints of all tensors.
_NOT_COMPARED = {
    "private/metrics.csv",
    "private/tensorboard",
    "private/ledger.sqlite",
    "private/ledger.sqlite.key",
}


def _write_corpus(folder: pathlib.Path) -> None:
    rng = random.Random(1)
    # Public text must not be that of the users: its words come in another order.
    for name, user_name, num_users, stride in (
        ("users.jsonl", "user", 60, 7),
        ("public.jsonl", "author", 40, 11),
    ):
        with open(folder / name, "w") as file:
            for user in range(num_users):
                start = rng.randrange(30)
                texts = [
                    " ".join(_WORDS[(start + i * stride) % 30] for i in range(rng.randint(3, 12)))
                    for _ in range(rng.randint(2, 6))
                ]
                file.write(json.dumps({"user_id": f"{user_name}{user}", "examples": texts}) + "\n")
    (folder / "words.txt").write_text("\n".join(_WORDS))


def _arguments(kind: str, folder: pathlib.Path, output: pathlib.Path) -> list[str]:
    given = [*_KINDS[kind], "--data", str(folder / "users.jsonl"), "--output", str(output)]
    if given[0] == "finetune":
        return [*given, "--initial-weights", str(folder / "pretrained")]
    return [*given, "--vocabulary", str(folder / "words.txt")]


class _Strike:
    """Counts what a process makes durable, and kills it before a given one."""

    def __init__(self, at: int | None):
        self.at = at
        self.count = 0
        self._statement = ""

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        for name in ("fsync", "replace", "rename", "unlink", "mkdir"):
            setattr(os, name, self._counted(getattr(os, name)))
        connect = sqlite3.connect

        def traced(*args, **kwargs):
            connection = connect(*args, **kwargs)
            connection.set_trace_callback(self._trace)
            return connection

        sqlite3.connect = traced

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args, **kwargs):
            self()
            return function(*args, **kwargs)

        return counted

    def _trace(self, statement: str) -> None:
        if statement[:20] != self._statement:  # Rows of one table count once.
            self._statement = statement[:20]
            self()


class _Process:
    """A command in a fork of this process."""

    def __init__(self, arguments: list[str], log: pathlib.Path, *, kill_at: int | None = None):
        self._report = log.with_suffix(".count")
        self._report.unlink(missing_ok=True)
        self.pid = os.fork()
        if not self.pid:
            self._run(arguments, log, kill_at)

    def _run(self, arguments: list[str], log: pathlib.Path, kill_at: int | None) -> None:
        status = 1
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            strike = _Strike(kill_at)
            strike.install()
            from tff_dpftrl.cli import main

            status = main.main(arguments)
            self._report.write_text(str(strike.count))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def wait(self, cpu_seconds: float | None = None) -> int:
        """Waits for its end, or kills it after an amount of processor time; its exit code."""
        while cpu_seconds is not None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if _cpu_seconds(self.pid) >= cpu_seconds:
                os.kill(self.pid, signal.SIGKILL)
                break
            time.sleep(0.002)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def count(self) -> int:
        """What it has made durable, if it has ended by itself."""
        return int(self._report.read_text())


def _cpu_seconds(pid: int) -> float:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _ledger(output: pathlib.Path) -> dict[str, dict[int, tuple]]:
    """Rounds begun and committed, of a copy: to look at a ledger may roll it back."""
    path = output / "private" / "ledger.sqlite"
    if not path.exists():
        return {"rounds": {}, "commits": {}}
    with tempfile.TemporaryDirectory() as name:
        for file in path.parent.glob("ledger.sqlite*"):
            shutil.copy(file, name)
        with contextlib.closing(sqlite3.connect(pathlib.Path(name, path.name))) as connection:
            return {
                table: {row[0]: row[1:] for row in connection.execute(f"SELECT * FROM {table}")}
                for table in ("rounds", "commits")
            }


def _rows(output: pathlib.Path) -> list[dict[str, str]]:
    """What `metrics.csv` says of each round, but how long it took."""
    path = output / "private" / "metrics.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def _check_after_kill(output: pathlib.Path, before: dict[str, dict[int, tuple]]) -> dict:
    """Checks that nothing was replaced, nor published too early; returns the ledger."""
    from tff_dpftrl.runs import manifest

    now = _ledger(output)
    if not manifest.exists(output):  # No run had begun: it may begin anew.
        assert not now["commits"] and not _rows(output)
        return {"rounds": {}, "commits": {}}
    for table in now:
        for key, row in before[table].items():
            assert now[table][key] == row, f"{table} {key} was {row} and is {now[table].get(key)}"
    published = [int(row["round"]) for row in _rows(output)]
    assert published == list(range(1, len(published) + 1)), published
    assert len(published) <= len(now["commits"]), "published before it was committed"
    if (output / "best_model.npz").exists():
        assert now["commits"]
    return now


def _files(output: pathlib.Path) -> dict[str, bytes]:
    from tff_dpftrl.accounting import privacy_statement
    from tff_dpftrl.runs import statement_subject

    # A statement says when it was written, and has digests with the key of its run.
    stated = json.loads((output / "privacy_statement.json").read_text()).get("subject", {})
    names = (statement_subject.DATE, *statement_subject.KEYED, privacy_statement.DIGEST)
    own = [stated[name] for name in names if name in stated]
    own.append(output.name)  # In a command of its README.
    found = {}
    for path in sorted(output.rglob("*")):
        name = str(path.relative_to(output))
        if name.endswith("-journal"):  # A ledger that was only read since: empty, or it were gone.
            continue
        if path.is_file() and not {name, name.rpartition("/")[0]} & _NOT_COMPARED:
            found[name] = b"" if path.parent.name == "checkpoints" else path.read_bytes()
            for value in own:
                found[name] = found[name].replace(value.encode(), b"")
    return found


def _check_same(output: pathlib.Path, expected: pathlib.Path) -> None:
    """Checks that two runs left the same, bit for bit."""
    ours, theirs = _files(output), _files(expected)
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    differing = [name for name in ours if ours[name] != theirs[name]]
    assert not differing, f"other bytes in {differing}"
    assert _rows(output) == _rows(expected)
    of_ours, of_theirs = _ledger(output), _ledger(expected)
    assert of_ours["commits"] == of_theirs["commits"]
    # The hash of a cohort is of pseudonyms, whose key is each run's own.
    assert {t: row[:2] for t, row in of_ours["rounds"].items()} == {
        t: row[:2] for t, row in of_theirs["rounds"].items()
    }


class _Campaign:
    """Kills and their count."""

    def __init__(self, folder: pathlib.Path, rng: random.Random):
        self._folder = folder
        self._rng = rng
        self.kills: dict[tuple[str, str], int] = {}
        self._known: dict[str, tuple[int, float]] = {}

    def undisturbed(self, kind: str) -> None:
        """Runs a kind to its end."""
        output = self._folder / f"{kind}_undisturbed"
        process = _Process(_arguments(kind, self._folder, output), self._log)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise AssertionError(self._log.read_text())
        self._known[kind] = process.count, usage.ru_utime + usage.ru_stime

    @property
    def _log(self) -> pathlib.Path:
        return self._folder / "log"

    def disturbed(self, kind: str, most_kills: int) -> int:
        """Runs a kind to its end, and kills it now and then; returns how often."""
        output = self._folder / f"{kind}_killed"
        writes, cpu_seconds = self._known[kind]
        kills, ledger = 0, {"rounds": {}, "commits": {}}
        from tff_dpftrl.runs import manifest

        while True:
            arguments = _arguments(kind, self._folder, output)
            if manifest.exists(output):
                arguments = [arguments[0], "--resume", "--output", str(output)]
            kill_at = seconds = None
            if kills < most_kills:
                if self._rng.random() < 0.5:
                    kill_at = self._rng.randint(1, writes)
                else:
                    seconds = self._rng.uniform(0.0, cpu_seconds)
            process = _Process(arguments, self._log, kill_at=kill_at)
            status = process.wait(seconds)
            if status == 0:
                break
            if status != -signal.SIGKILL:
                raise AssertionError(f"exit status {status}:\n{self._log.read_text()}")
            kills += 1
            how = "before a write" if kill_at else "after processor time"
            self.kills[kind, how] = self.kills.get((kind, how), 0) + 1
            ledger = _check_after_kill(output, ledger)
        ledger = _check_after_kill(output, ledger)
        assert not [path for path in output.rglob("*") if path.name.endswith(".unfinished")]
        if kind != "secret":
            _check_same(output, self._folder / f"{kind}_undisturbed")
        assert len(ledger["commits"]) == len(ledger["rounds"]) == 5
        shutil.rmtree(output)
        return kills


def main() -> None:
    """Runs the campaign, and prints what was killed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(_KINDS))
    parser.add_argument("--kills-a-run", type=int, default=8, help="At most.")
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import matplotlib.pyplot  # noqa: F401

    from tff_dpftrl.finetuning import run as _finetuning  # noqa: F401
    from tff_dpftrl.training import pretraining as _pretraining  # noqa: F401
    from tff_dpftrl.training import run as _run  # noqa: F401

    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="kill_training_") as name:
        folder = pathlib.Path(name)
        _write_corpus(folder)
        campaign = _Campaign(folder, rng)
        if "finetune" in args.kinds:
            pretrain = ["pretrain", *_SMALL, "--model", "transformer", "--layers", "1"]
            pretrain += ["--heads", "1", "--feed-forward-size", "5", "--epochs", "1"]
            pretrain += ["--vocabulary", str(folder / "words.txt")]
            pretrain += ["--data", str(folder / "public.jsonl")]
            process = _Process([*pretrain, "--output", str(folder / "pretrained")], folder / "log")
            if process.wait():
                raise AssertionError((folder / "log").read_text())
        kills = runs = 0
        for kind in args.kinds:
            campaign.undisturbed(kind)
        while kills < args.kills:
            kind = args.kinds[runs % len(args.kinds)]
            kills += campaign.disturbed(kind, min(args.kills_a_run, args.kills - kills))
            runs += 1
            print(f"{kills} kills, {runs} runs: the last, {kind}, ended like one undisturbed.")
            sys.stdout.flush()
    print(f"seed {args.seed}: {kills} kills in {runs} runs, each resumed to the same bits:")
    for (kind, how), count in sorted(campaign.kills.items()):
        print(f"  {kind:10} {how:22} {count:4}")


if __name__ == "__main__":
    main()
