"""Builds sdist and wheel, checks them, and runs the wheel's main jobs in fresh environments.

Run it by `make dist`. Each environment is made anew in a temporary folder outside of the clone,
and has the wheel alone: nothing is imported from the clone. A Python that this machine lacks is
named in the table at the end, and fails nothing.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Sequence

import find_python

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_NEWEST, _OLDEST = 14, 10
_WORDS = "a the of to and in is for that with value list name when it returns".split()
_SMALL = ("--vocabulary-size", "200", "--embedding-size", "8")


class JobFailed(Exception):
    """A command of a job failed; the message has the end of what it printed."""


@dataclasses.dataclass(frozen=True)
class Job:
    """The main job of an environment.

    Attributes:
      name: Name in the table.
      pythons: Minor versions of Python 3 that fit, the preferred one first.
      extra: Extra of the wheel; empty for none.
      locked: Whether the hashed lock file is installed first, and the wheel without a resolver.
      commands: Function from a scratch folder to the arguments of `tff-dpftrl`, in turn.
    """

    name: str
    pythons: Sequence[int]
    commands: Callable[[pathlib.Path], list[list[str]]]
    extra: str = ""
    locked: bool = False


def _maths(folder: pathlib.Path) -> list[list[str]]:
    schema = ["--rounds", "200", "--min-sep", "20", "--max-participations", "5"]
    plan = ["--population", "1000000", "--rounds", "200", "--delta", "1e-7"]
    return [
        ["optimize", "--mechanism", "blt", *schema, "--output", str(folder / "blt.json")],
        ["account", "--mechanism", "blt", *schema, "--noise-multiplier", "5", "--delta", "1e-6"],
        ["plan", *plan, "--target-epsilon", "4", "--mechanisms", "tree"],
    ]


def _finetuning(folder: pathlib.Path) -> list[list[str]]:
    data, public, run = (str(folder / name) for name in ("users.csv", "public", "run"))
    return [
        ["pretrain", *_SMALL, "--lstm-size", "8", "--epochs", "1", "--output", public],
        [
            *("finetune", "--initial-weights", public, "--data", data, "--sampling", "user"),
            *("--cohort", "10", "--group-size", "2", "--steps", "2", "--target-epsilon", "8"),
            *("--delta", "1e-5", "--output", run),
        ],
        ["predict", run, "the value of"],
        ["report", run],
    ]


def _training(folder: pathlib.Path) -> list[list[str]]:
    data, run = str(folder / "users.csv"), str(folder / "run")
    return [
        [
            *("train", "--config", "quickstart", "--data", data, "--rounds", "3", *_SMALL),
            *("--lstm-size", "8", "--clients-per-round", "5", "--min-sep", "2", "--output", run),
        ],
        ["report", run, "--html", str(folder / "report.html")],
        ["export", run, "--tflite", "--output", str(folder / "exported")],
        ["predict", run, "the value of"],
        ["audit", "--run", run],
    ]


_JOBS = (
    Job("maths only", tuple(range(_NEWEST, _OLDEST - 1, -1)), _maths),
    Job("fine-tuning", (12,), _finetuning, extra="finetuning"),
    Job("training", (13, 12), _training, extra="finetuning"),
    Job("training, locked", (10, 11), _training, locked=True),
)


def main() -> int:
    """Builds, checks and runs all jobs; returns 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default=str(_ROOT / "dist"), help="Folder of the archives.")
    parser.add_argument("--only", help="Name of the only job to run.")
    parser.add_argument("--seconds", type=float, default=1200.0, help="Time limit of each job.")
    args = parser.parse_args()
    rows, output = [], pathlib.Path(args.output).resolve()
    with tempfile.TemporaryDirectory(prefix="tff_dpftrl_dist_") as name:
        folder = pathlib.Path(name)
        limit = _Limit(args.seconds)
        wheel = _run_row(rows, "build and twine check", "", lambda: _build(folder, output, limit))
        for job in _JOBS:
            if wheel is None or args.only not in (None, job.name):
                continue
            python = find_python.find(job.pythons)
            if python is None:
                versions = ", ".join(f"3.{minor}" for minor in job.pythons)
                rows.append((job.name, versions, "not on this machine", ""))
                continue
            limit = _Limit(args.seconds)
            place = folder / job.name.replace(" ", "_")
            version = _capture([python, "-c", "import sys; print(sys.version.split()[0])"])
            _run_row(
                rows,
                job.name,
                version,
                functools.partial(_run_job, job, python, wheel, place, limit),
            )
    print(f"\n{'environment':24}{'Python':10}{'seconds':>8}  outcome")
    for title, version, outcome, seconds in rows:
        print(f"{title:24}{version:10}{seconds:>8}  {outcome}")
    return int(any(outcome.startswith("FAILED") for *_, outcome, _ in rows))


class _Limit:
    """Time that a job may take."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(self._end - time.monotonic(), 1.0)


def _run_row(rows: list, title: str, version: str, work: Callable):
    """Runs a piece of work, and adds its row to the table; returns None if it failed."""
    begin = time.monotonic()
    print(f"\n== {title} {version}".rstrip(), flush=True)
    result, outcome = None, "ok"
    try:
        result = work()
    except JobFailed as error:
        print(error, file=sys.stderr)
        outcome = f"FAILED: {str(error).splitlines()[0]}"
    rows.append((title, version, outcome, f"{time.monotonic() - begin:.0f}"))
    return result


def _build(folder: pathlib.Path, output: pathlib.Path, limit: _Limit) -> pathlib.Path:
    """Builds the archives from a clean copy of the tracked files, and checks them."""
    bin_folder = _make_environment(sys.executable, folder / "tools")
    tools = ("build", "twine", "readme_renderer[md]")
    _call([bin_folder / "python", "-m", "pip", "install", "--quiet", *tools], limit)
    copy = folder / "copy"
    for name in _capture(["git", "-C", str(_ROOT), "ls-files", "-z"]).split("\0"):
        if name and (_ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_ROOT / name, copy / name)
    built = folder / "built"
    _call([bin_folder / "python", "-m", "build", "--outdir", built, copy], limit)
    archives = sorted(built.iterdir())
    _call([bin_folder / "python", "-m", "twine", "check", "--strict", *archives], limit)
    (wheel,) = built.glob("*.whl")
    _check_contents(wheel, copy)
    output.mkdir(parents=True, exist_ok=True)
    for archive in archives:
        shutil.copy2(archive, output / archive.name)
    print(f"{', '.join(archive.name for archive in archives)} are in {output}")
    return wheel


def _check_contents(wheel: pathlib.Path, copy: pathlib.Path) -> None:
    """Refuses a wheel that lacks a tracked file of the package, or the licence."""
    package = copy / "tff_dpftrl"
    wanted = {
        path.relative_to(copy).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.name != "BUILD"
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    if missing := sorted(wanted - names):
        raise JobFailed(f"the wheel lacks {', '.join(missing)}")
    if not any(re.search(r"\.dist-info/(licenses/)?LICENSE$", name) for name in names):
        raise JobFailed("the wheel lacks the licence")


def _make_environment(python: str, folder: pathlib.Path) -> pathlib.Path:
    """Makes a virtual environment, and returns the folder of its programs."""
    if python == sys.executable:
        venv.create(folder, with_pip=True)
    else:
        _capture([python, "-m", "venv", str(folder)])
    return folder / "bin"


def _run_job(
    job: Job, python: str, wheel: pathlib.Path, place: pathlib.Path, limit: _Limit
) -> bool:
    """Makes a job's environment from the wheel, and runs its commands."""
    scratch = place / "scratch"
    scratch.mkdir(parents=True)
    bin_folder = _make_environment(python, place / "environment")
    install = [bin_folder / "python", "-m", "pip", "install", "--quiet"]
    if job.locked:
        lock = _ROOT / "requirements.lock"
        _call([*install, "--no-deps", "--require-hashes", "-r", lock], limit)
        _call([*install, "--no-deps", wheel], limit)
    else:
        _call([*install, f"{wheel}[{job.extra}]" if job.extra else wheel], limit)
    _write_texts(scratch / "users.csv")
    for arguments in job.commands(scratch):
        _call([bin_folder / "tff-dpftrl", *arguments], limit, cwd=scratch)
    return True


def _write_texts(path: pathlib.Path) -> None:
    """Writes a table of 60 users with ten texts of random words each."""
    drawn = random.Random(0)
    with open(path, "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user", "text"])
        for user in range(60):
            for _ in range(10):
                rows.writerow([f"user {user}", " ".join(drawn.choices(_WORDS, k=12))])


def _call(command: Sequence, limit: _Limit, cwd: pathlib.Path | None = None) -> None:
    """Runs a command without the clone on its path, in the time that is left."""
    shown = (
        " ".join(map(str, command[:1])).rpartition("/")[2] + " " + " ".join(map(str, command[1:]))
    )
    print(f"$ {shown}", flush=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    with subprocess.Popen(
        list(map(str, command)),
        cwd=cwd or tempfile.gettempdir(),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit.left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise JobFailed(f"{shown}: no time is left") from None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        end = "\n".join(printed.splitlines()[-30:])
        raise JobFailed(f"{shown} ended with status {process.returncode}\n{end}")


def _capture(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobFailed(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
