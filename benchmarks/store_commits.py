"""What committing a round to a store takes, as a ratio to a file of the same bytes, synced.

    python benchmarks/store_commits.py STORE [STORE ...] [--megabytes 10.8] [--rounds 30]

A STORE is a folder for SQLite, or the URL of an empty PostgreSQL database. Model and state have
the given size each. Median seconds of `commit`, of reading the last commit, and of `renew`, each
beside those of writing a file of the same bytes and its `fsync`, in the same round.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tff_dpftrl.runtime.store import sql


def _seconds(action: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
    start = time.perf_counter()
    action(*args, **kwargs)
    return time.perf_counter() - start


def _write(path: pathlib.Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stores", nargs="+", metavar="STORE")
    parser.add_argument("--megabytes", type=float, default=10.8, help="Of model, and of state.")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    size = int(args.megabytes * 1e6)
    for place in args.stores:
        commits, reads, renewals, files = [], [], [], []
        with sql.SqlStore(place) as store, tempfile.TemporaryDirectory(dir=".") as folder:
            epoch = store.acquire("benchmark", "a", now=0.0, duration=1e9).epoch
            store.add_task("benchmark", "task", model=b"", state=b"")
            for t in range(args.rounds):
                model, state = os.urandom(size), os.urandom(size)
                files.append(_seconds(_write, pathlib.Path(folder, "file"), model + state))
                round_ = {"round_index": t, "epoch": epoch, "model": model, "state": state}
                commit = round_ | {"metrics": {"loss": 1.0}, "now": float(t)}
                commits.append(_seconds(store.commit, "benchmark", "task", **commit))
                reads.append(_seconds(store.last_commit, "benchmark", "task"))
                kept = {"now": float(t), "duration": 1e9}
                renewals.append(_seconds(store.renew, "benchmark", "a", epoch, **kept))
        file = statistics.median(files)
        kind = "PostgreSQL" if "://" in place else "SQLite"
        print(f"{kind}, model and state of {args.megabytes:g} MB each, {args.rounds} rounds:")
        for name, seconds in (
            ("commit", commits),
            ("read", reads),
            ("renew", renewals),
        ):
            middle = statistics.median(seconds)
            print(f"  {name:8} {middle * 1e3:8.1f} ms   {middle / file:6.2f} × the file")
        print(f"  {'file':8} {file * 1e3:8.1f} ms")


if __name__ == "__main__":
    main()
