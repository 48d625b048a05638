"""How long the command takes before it does what it is asked, with goals.

    python benchmarks/startup.py [--repeats 5] [--against CHECKOUT] [--new-cache]

Runs the real command in processes of its own: `--help`, `account` (a tree of 1,900 rounds), and
`train --config quickstart`, which is ended when it says that its first round begins. Prints
the median of the seconds, and of the processor's seconds of all threads and children, which a
busy machine disturbs less. With `--against`, another checkout of this repository takes turns,
and has lines of its own.

The first run of `train` on a machine reads the installed packages, and the first with a vocabulary
splits their text into words; what they keep is used by the others. `--new-cache` leaves out the
second: each run begins with the text of the packages alone.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_ACCOUNT = (
    *("account", "--mechanism", "tree", "--noise-multiplier", "7", "--rounds", "1900"),
    *("--min-sep-gap", "526", "--max-participations", "3", "--delta", "1e-10"),
)
_TRAIN = ("train", "--config", "quickstart", "--rounds", "4", "--output", "run")
_FIRST_ROUND = "0 of 4 rounds done"
_CASES = {
    "--help": (("--help",), None, 0.4),
    "account": (_ACCOUNT, None, 0.4),
    "train, first round begins": (_TRAIN, _FIRST_ROUND, 7.0),
}
"""What is run: title → (arguments, text of the line that ends it, goal in seconds)."""
_TICKS = os.sysconf("SC_CLK_TCK")


def _processor_seconds(group: int) -> float:
    """Returns what the living processes of a group, and children that they waited for, used."""
    ticks = 0
    for process in pathlib.Path("/proc").iterdir():
        try:
            text = (process / "stat").read_text() if process.name.isdigit() else ""
        except OSError:  # It has ended.
            continue
        fields = text.rpartition(")")[2].split()
        if fields and int(fields[2]) == group:
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def _copy_texts(folder: pathlib.Path) -> None:
    """Copies the cached texts of the installed packages, without what was kept beside them."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder.mkdir()
    for path in pathlib.Path(base, "tff_dpftrl").glob("*.jsonl.gz"):
        shutil.copy(path, folder)


def _measure(
    checkout: pathlib.Path, arguments: tuple[str, ...], end: str | None, new_cache: bool
) -> tuple[float, float]:
    """Runs the command up to a line, or to its end; returns seconds and processor's seconds."""
    command = [sys.executable, "-m", "tff_dpftrl.cli.main", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    before = os.times()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/said", "w+") as said:
        if new_cache:
            _copy_texts(pathlib.Path(folder, "tff_dpftrl"))
            environment["XDG_CACHE_HOME"] = folder
        start = time.perf_counter()
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE if end is None else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if end is None else subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        stream = child.stdout if end is None else child.stderr
        assert stream is not None
        if end is None:
            stream.read()
            status = child.wait()
            seconds = time.perf_counter() - start
            now = os.times()
            processor = now.children_user + now.children_system
            processor -= before.children_user + before.children_system
        else:
            for line in stream:
                said.write(line)
                if end in line:
                    break
            seconds = time.perf_counter() - start
            processor = _processor_seconds(child.pid)
            status = child.poll() or 0
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if status:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)} failed in {checkout}:\n{said.read()}")
    return seconds, processor


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=pathlib.Path)
    parser.add_argument("--new-cache", action="store_true")
    parser.add_argument("--only", choices=_CASES)
    args = parser.parse_args()
    checkouts = [_ROOT] + ([args.against.resolve()] if args.against else [])
    print(f"{'':<28}{'seconds':>9}{'processor':>11}{'goal':>7}")
    for title, (arguments, end, goal) in _CASES.items():
        if args.only not in (None, title):
            continue
        found: list[list[tuple[float, float]]] = [[] for _ in checkouts]
        for _ in range(args.repeats):
            for checkout, measured in zip(checkouts, found, strict=True):
                measured.append(_measure(checkout, arguments, end, args.new_cache))
        for checkout, measured in zip(checkouts, found, strict=True):
            seconds, processor = (statistics.median(kind) for kind in zip(*measured, strict=True))
            verdict = f"{goal:>7g}  {'PASS' if seconds <= goal else 'MISS'}"
            where = "" if checkout == _ROOT else f"  {checkout}"
            print(f"{title:<28}{seconds:>9.2f}{processor:>11.2f}{verdict}{where}", flush=True)


if __name__ == "__main__":
    main()
